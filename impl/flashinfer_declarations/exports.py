"""What can be imported from a release by name, and what its public callables refuse in words."""

from __future__ import annotations

import ast
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .capabilities import Modules
from .sources import parse, scoped, where
from .surface import PUBLIC, attribute, source_file

EXPORTING = (
    "",
    "activation",
    "attention",
    "autotuner",
    "cascade",
    "cudnn",
    "decode",
    "fused_moe",
    "gemm",
    "mla",
    "norm",
    "page",
    "pod",
    "prefill",
    "quantization",
    "rope",
    "sampling",
    "sparse",
    "tllm_enums",
    "triton.cascade",
    "utils",
    "xqa",
)
"""Modules that serving engines import from; the package itself is the empty name."""
UNKNOWN_PART = "..."
"""Stands for what a message takes from the call."""


def exports(root: Path, modules: Modules) -> dict[str, dict[str, str]]:
    """Return the public names of each module, each a class, function, enum or constant."""
    found = {}
    for name in EXPORTING:
        module = modules.load(f"{root.name}.{name}" if name else root.name)
        if module is not None:
            found[name] = {each: _kind(vars(module)[each]) for each in _public(root, module)}
    return found


def refusals(root: Path, modules: Modules) -> dict[str, list[dict[str, str]]]:
    """Return what the public callables raise and assert: message, condition, place.

    FlashInfer has no list of what a call may not ask for: most of it is said by these.
    """
    found: dict[str, list[dict[str, str]]] = {}
    for name, callables in PUBLIC.items():
        module = modules.load(f"{root.name}.{name}")
        for qualified in callables:
            owner = qualified.partition(".")[0]
            value = attribute(module, owner)
            path = source_file(value) if value is not None else None
            if path is None or f"{name}.{owner}" in found or root not in path.parents:
                continue
            said = list(_refused(root, path, owner))
            if said:
                found[f"{name}.{owner}"] = said
    return found


def _public(root: Path, module: ModuleType) -> Iterator[str]:
    """Return the names that a module offers: its ``__all__``, or what it has of its own package."""
    listed = getattr(module, "__all__", None)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if listed is not None:
            if name in listed:
                yield name
        elif _kind(value) == "constant" or _own(root, value):
            yield name


def _own(root: Path, value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == root.name


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "enum" if issubclass(value, enum.Enum) else "class"
    if callable(value):
        return "function"
    return "constant" if isinstance(value, bool | int | float | str | tuple) else "other"


def _refused(root: Path, path: Path, owner: str) -> Iterator[dict[str, str]]:
    for node in parse(path).body:
        if getattr(node, "name", "") != owner:
            continue
        for scope, inner in scoped(ast.Module(body=[node], type_ignores=[])):
            for conditions, raised in _raised(inner):
                said = _message(raised)
                if said:
                    yield {
                        "scope": scope,
                        "exception": _exception(raised),
                        "message": said,
                        "when": " and ".join(sorted(conditions)),
                        "source": where(root, path, raised.lineno),
                    }


def _raised(node: ast.AST) -> Iterator[tuple[list[str], ast.Raise | ast.Assert]]:
    """Return what a function's own body raises or asserts, with the conditions around each."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from _under(statement, [])


def _under(
    node: ast.AST, conditions: list[str]
) -> Iterator[tuple[list[str], ast.Raise | ast.Assert]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return  # which `scoped` comes to by itself
    if isinstance(node, ast.Raise):
        yield conditions, node
    elif isinstance(node, ast.Assert):
        yield [*conditions, f"not ({ast.unparse(node.test)})"], node
    elif isinstance(node, ast.If):
        for each in node.body:
            yield from _under(each, [*conditions, *_parts(node.test)])
        for each in node.orelse:
            yield from _under(each, [*conditions, f"not ({ast.unparse(node.test)})"])
    else:
        for child in ast.iter_child_nodes(node):
            yield from _under(child, conditions)


def _parts(test: ast.expr) -> list[str]:
    """Take a condition apart, so that nesting it differently makes no difference."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _parts(value)]
    return [ast.unparse(test)]


def _message(node: ast.Raise | ast.Assert) -> str:
    said = node.msg if isinstance(node, ast.Assert) else node.exc
    if isinstance(said, ast.Call):
        said = said.args[0] if said.args else None
    return " ".join(_text(said).split()) if said is not None else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else UNKNOWN_PART
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def _exception(node: ast.Raise | ast.Assert) -> str:
    if isinstance(node, ast.Assert):
        return "AssertionError"
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return ast.unparse(raised) if raised is not None else ""
