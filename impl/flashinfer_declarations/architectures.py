"""What the just-in-time compiler would build for each chip.

Generators of modules pass ``supported_major_versions`` to a filter,
``CompilationContext.get_nvcc_flags_list``, which raises where no requested architecture is left.
The filter itself is asked, for every chip and every list of majors in the sources. Whether nvcc is
new enough is not its business here: CUDA 13.0 is assumed, on every machine.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .capabilities import Modules
from .sources import (
    constants,
    literal,
    module_name,
    name_of,
    numbers,
    parse,
    python_files,
    scoped,
    where,
)

ASSUMED_CUDA = (13, 0)
MAP_SM107 = "map_sm107_to_100f"
MAJORS = "supported_major_versions"
FIXED_FLAGS = re.compile(r"sm\d+[af]?_nvcc_flags")
CAPABILITY = "get_compute_capability"
OPERATORS = {ast.In: "in", ast.NotIn: "not in", ast.Eq: "in", ast.NotEq: "not in"}


def targets(chips: Sequence[int], modules: Modules) -> dict[str, dict[str, object]]:
    """Return nvcc's flags for each chip without a filter, or why there are none."""
    context = _assume_cuda(modules)
    return {str(chip): _flags(context, chip, None) for chip in chips} if context else {}


def jit_filters(root: Path, chips: Sequence[int], modules: Modules) -> list[dict[str, Any]]:
    """List the generators that restrict their architectures, with the chips admitted."""
    context = _assume_cuda(modules)
    found = []
    for path in python_files(root)["majors"]:
        tree = parse(path)
        known = constants(tree)
        for scope, node in scoped(tree):
            options = _options(node)
            if MAJORS not in options or not scope:
                continue
            majors = numbers(options[MAJORS], known)
            mapped = literal(options.get(MAP_SM107), known) is True
            unread = majors is None and literal(options[MAJORS], known) is not None
            entry = {
                "generator": scope,
                "majors": majors,
                "text": ast.unparse(options[MAJORS]),
                MAP_SM107: mapped,
                "chips": None,
                "source": where(root, path, _line(node)),
            }
            if context and not unread and (majors or entry["text"] == "None"):
                admits = {chip: _flags(context, chip, majors, mapped=mapped) for chip in chips}
                entry["chips"] = [chip for chip, each in admits.items() if "flags" in each]
            found.append(entry)
    return found


def fixed_flags(root: Path) -> list[dict[str, str]]:
    """List the generators that compile for one architecture whatever was asked for."""
    found = {}
    for path in python_files(root)["fixed flags"]:
        for scope, node in scoped(parse(path)):
            if isinstance(node, ast.Name) and FIXED_FLAGS.fullmatch(node.id) and scope:
                entry = {"generator": scope, "flags": node.id}
                found[scope, node.id] = {**entry, "source": where(root, path, node.lineno)}
    return list(found.values())


def fused_moe_modules(root: Path) -> dict[str, Any]:
    """Return the module that ``get_cutlass_fused_moe_module`` builds for each chip."""
    for path in python_files(root)["fused moe"]:
        for node in parse(path).body:
            if isinstance(node, ast.FunctionDef) and node.name == "get_cutlass_fused_moe_module":
                built = {chip: name for chips, name in _branches(node) for chip in chips}
                return {"modules": built, "source": where(root, path, node.lineno)}
    return {"modules": {}, "source": ""}


def python_checks(root: Path) -> list[dict[str, Any]]:
    """List comparisons of a device's major capability with constants, such as XQA's."""
    found = []
    for path in python_files(root)["checks"]:
        messages = _messages(parse(path))
        for scope, node in scoped(parse(path)):
            compared = _compared(node)
            if compared and scope:
                found.append(
                    {
                        "module": module_name(root, path).partition(".")[2],
                        "function": scope,
                        "test": compared[0],
                        "majors": compared[1],
                        "message": messages.get(node, ""),
                        "source": where(root, path, _line(node)),
                    }
                )
    return found


def _messages(tree: ast.Module) -> dict[ast.AST, str]:
    """Return for each part of a condition the text that is raised or asserted under it."""
    messages: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        said: list[ast.AST] = []
        if isinstance(node, ast.Assert) and node.msg is not None:
            said = [node.msg]
        elif isinstance(node, ast.If):
            said = [each for each in node.body if isinstance(each, ast.Raise)]
        if isinstance(node, ast.Assert | ast.If) and said:
            text = " ".join(
                part.value
                for each in said
                for part in ast.walk(each)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            messages |= dict.fromkeys(ast.walk(node.test), text)
    return messages


def _assume_cuda(modules: Modules) -> ModuleType | None:
    """Import the filter, with the questions about this machine's nvcc answered."""
    context = modules.load("flashinfer.compilation_context")
    compiler = modules.load("flashinfer.jit.cpp_ext")
    if context is None or compiler is None:
        return None

    def at_least(version: str) -> bool:
        return tuple(int(part) for part in version.split(".")) <= ASSUMED_CUDA

    compiler.__dict__["is_cuda_version_at_least"] = at_least
    if hasattr(context, "_nvcc_supports_sm107"):
        context.__dict__["_nvcc_supports_sm107"] = lambda: False
    return context


def _flags(
    context: ModuleType, chip: int, majors: list[int] | None, *, mapped: bool = False
) -> dict[str, object]:
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = f"{chip // 10}.{chip % 10}"
    options = {MAP_SM107: True} if mapped else {}
    try:
        ask: Callable[..., list[str]] = context.CompilationContext().get_nvcc_flags_list
        flags = ask(supported_major_versions=majors, **options)
    except Exception as error:  # noqa: BLE001  a refusal, in whatever words
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"flags": [flag for flag in flags if flag.startswith("-gencode")]}


def _options(node: ast.AST) -> Mapping[str | None, ast.expr]:
    if not isinstance(node, ast.Call):
        return {}
    return {keyword.arg: keyword.value for keyword in node.keywords}


def _branches(function: ast.FunctionDef) -> Iterator[tuple[list[str], str]]:
    for node in ast.walk(function):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
            continue
        values = literal(node.test.comparators[0], {})
        names = [
            name_of(call)
            for statement in node.body
            for call in ast.walk(statement)
            if isinstance(call, ast.Call) and name_of(call).startswith("gen_")
        ]
        if names and isinstance(values, str | tuple | list | set):
            yield [values] if isinstance(values, str) else [*map(str, values)], names[0]


def _compared(node: ast.AST) -> tuple[str, list[int]] | None:
    """Read ``get_compute_capability(...)[0] in [9, 10]`` and its like."""
    if not (
        isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Subscript)
        and name_of(node.left.value) == CAPABILITY
        and literal(node.left.slice, {}) == 0
        and type(node.ops[0]) in OPERATORS
    ):
        return None
    value = literal(node.comparators[0], {})
    if type(value) is int:
        return OPERATORS[type(node.ops[0])], [value]
    majors = numbers(node.comparators[0], {})
    return None if majors is None else (OPERATORS[type(node.ops[0])], majors)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))
