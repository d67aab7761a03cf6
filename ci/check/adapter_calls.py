"""Which names of FlashInfer each adapter calls, read from the adapters' own source."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...impl.flashinfer_declarations.sources import name_of
from ...impl.registry import SHIPPED

ADAPTERS = Path(__file__).resolve().parents[2] / "impl" / "flashinfer"
PACKAGE = "flashinfer"
LOADERS = ("flashinfer", "require")
"""Functions by which an adapter imports a module of FlashInfer."""


class Place(NamedTuple):
    """A top-level name of a module of adapters: the module's name, and its own."""

    module: str
    name: str


class Module(NamedTuple):
    """A module of adapters: the code that binds each name, and what it imports of the others."""

    bound: Mapping[str, tuple[ast.AST, ...]]
    imported: Mapping[str, Place]


@functools.cache
def calls_of_adapters(folder: Path = ADAPTERS) -> dict[str, frozenset[str]]:
    """Return the names that each shipped adapter to FlashInfer may call, by the adapter's name.

    A name is an attribute of a module that the adapter imports, or a text that its code holds:
    wrappers and published references are looked up by name. What an adapter reaches through other
    functions and constants of the folder counts.
    """
    modules = {file.stem: _module(file) for file in sorted(folder.glob("*.py"))}
    found: dict[str, frozenset[str]] = {}
    for name, place in SHIPPED.items():
        package, _, rest = place.partition(".")
        module, _, attribute = rest.partition(":")
        if package == PACKAGE and module in modules:
            reached = _reached(Place(module, attribute), modules)
            found[name] = frozenset(each for node in reached for each in _called(node))
    return found


def _module(file: Path) -> Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bound: dict[str, list[ast.AST]] = {}
    imported: dict[str, Place] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for each in node.names:
                imported[each.asname or each.name] = Place(node.module, each.name)
        for name, code in _bound(node):
            bound.setdefault(name, []).append(code)
    return Module({name: tuple(nodes) for name, nodes in bound.items()}, imported)


def _bound(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Return the names that a function, a class or an assignment binds, each with its code."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts, strict=False):
                    yield name_of(name), value
            else:
                yield name_of(target), node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield name_of(node.target), node.value


def _reached(start: Place, modules: Mapping[str, Module]) -> list[ast.AST]:
    """Return the code that a name stands for, and that of all names which it uses."""
    found: dict[int, ast.AST] = {}
    left, seen = [start], set[Place]()
    while left:
        place = left.pop()
        module = modules.get(place.module)
        if place in seen or module is None:
            continue
        seen.add(place)
        if place.name in module.imported:
            left.append(module.imported[place.name])
        for code in module.bound.get(place.name, ()):
            found[id(code)] = code
            left += [
                Place(place.module, each.id)
                for each in ast.walk(code)
                if isinstance(each, ast.Name)
            ]
    return list(found.values())


def _called(code: ast.AST) -> Iterator[str]:
    """Return the attributes of FlashInfer's modules that code names, and its texts."""
    loaded = {
        target.id
        for node in ast.walk(code)
        if isinstance(node, ast.Assign) and _is_loaded(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (node.value.isidentifier() and not node.value.islower()) or node.value.startswith(
                "_"
            ):  # a class
                yield node.value
        elif isinstance(node, ast.Attribute):
            of = node.value
            if _is_loaded(of) or (isinstance(of, ast.Name) and of.id in loaded):
                yield node.attr


def _is_loaded(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in LOADERS
