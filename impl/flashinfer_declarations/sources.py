"""The source files of one FlashInfer release: which hold what, and where in them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

NEEDLES = {
    "requirement": r"backend_requirement",
    "capability": r"supported_compute_capability",
    "majors": r"supported_major_versions=",
    "fixed flags": r"sm\d+[af]?_nvcc_flags",
    "archs": r"_supported_archs",
    "configs": r"def supported\(cls, arch",
    "fused moe": r"def get_cutlass_fused_moe_module",
    "checks": r"get_compute_capability\((?:[^()]|\([^()]*\))*\)\s*\[0\]",
}
"""What a Python file is read for. A release has up to 80 MB of Python, mostly generated kernels,
and parsing it all takes minutes; a search for these takes a second."""
OWN_DATA = "data"
"""The folder of a release that holds C++ and the sources of other projects."""


@functools.cache
def python_files(root: Path) -> Mapping[str, tuple[Path, ...]]:
    """Return the Python files of a package that hold each of ``NEEDLES``."""
    found: dict[str, list[Path]] = {needle: [] for needle in NEEDLES}
    patterns = {needle: re.compile(pattern.encode()) for needle, pattern in NEEDLES.items()}
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] == OWN_DATA:
            continue
        source = path.read_bytes()
        for needle, pattern in patterns.items():
            if pattern.search(source):
                found[needle].append(path)
    return {needle: tuple(paths) for needle, paths in found.items()}


@functools.cache
def parse(path: Path) -> ast.Module:
    """Parse a Python file; an unreadable one is empty."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # Newer syntax than this interpreter's, say, or nesting beyond its parser.
        return ast.Module(body=[], type_ignores=[])


@functools.cache
def read(path: Path) -> str:
    """Read a C++ file; a missing one is empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def where(root: Path, path: Path, line: int) -> str:
    """Name a place as a report does: ``flashinfer/xqa.py:316``."""
    return f"{root.name}/{path.relative_to(root).as_posix()}:{line}"


def module_name(root: Path, path: Path) -> str:
    """Return the name by which a file is imported."""
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def scoped(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Walk a tree; each node comes with the qualified name of the function or class around it.

    A function or class comes with its own name.
    """
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}" if scope else child.name
        yield inner, child
        yield from scoped(child, inner)


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values that a module's top level assigns to plain names."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets: list[ast.expr] = [node.target]
            value = node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            continue
        found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found


def literal(node: ast.expr | None, known: Mapping[str, ast.expr]) -> object:
    """Evaluate a literal, a name of one, or ``list(...)``, ``tuple(...)`` and the like around it.

    None where it is neither.
    """
    if isinstance(node, ast.Name) and node.id in known:
        others = {name: value for name, value in known.items() if name != node.id}
        return literal(known[node.id], others)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("list", "tuple", "set", "frozenset", "sorted")
        and len(node.args) == 1
    ):
        return literal(node.args[0], known)
    if node is None:
        return None
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value


def numbers(node: ast.expr | None, known: Mapping[str, ast.expr]) -> list[int] | None:
    """Evaluate a literal collection of integers, sorted; None where it is none."""
    value = literal(node, known)
    if isinstance(value, list | tuple | set | frozenset) and all(type(n) is int for n in value):
        return sorted(value)
    return None


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, or of the name that is called."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
