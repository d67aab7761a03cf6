"""What Kernelproof's adapters call of a package, and the parameters that a release gives it.

Both are read from Python's source: nothing is imported, so that a release of which only the files
are there is read as well as an installed one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ....impl.registry import BUILT_IN

ADAPTERS = Path(__file__).resolve().parents[3] / "impl"
LONGEST_CHAIN = 20
"""Most imports that a name is followed through."""
_PARSING = threading.Lock()
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Used(NamedTuple):
    """A name of a package that adapters use.

    Attributes:
        names: its dotted names in different releases, such as ``triton.language.dot``.
        is_called: whether an adapter calls it, or launches it, itself.
    """

    names: tuple[str, ...]
    is_called: bool


@functools.cache
def used_of(module: str, adapters: Path = ADAPTERS) -> tuple[Used, ...]:
    """Return what adapters use of a package.

    Args:
        module: that the package is imported by.
        adapters: folder of their source.
    """
    found: dict[tuple[str, ...], bool] = {}
    for file in sorted(adapters.rglob("*.py")):
        if module in file.read_text(encoding="utf-8"):
            for names, is_called in _names_in(_parsed(file), module, _values_of(file)):
                found[names] = found.get(names, False) or is_called
    # Of a.b.c, a.b and a are expressions as well.
    inner = {names[0].rpartition(".")[0] for names in found}
    return tuple(Used(*each) for each in sorted(found.items()) if each[0][0] not in inner)


def _parsed(file: Path) -> ast.Module:
    # Two threads at a time make Python 3.11 raise SystemError: "AST constructor recursion depth
    # mismatch".
    with _PARSING:
        return ast.parse(file.read_text(encoding="utf-8"))


def _values_of(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the texts that an adapter's module has by name, which may be the result of a call."""
    parts = file.with_suffix("").parts[len(ADAPTERS.parent.parts) :]
    dotted = ".".join((__name__.partition(".")[0], *parts))
    if not any(place.startswith(f"{dotted}:") for place in BUILT_IN.values()):
        return {}
    values = ((name, value) for name, value in vars(importlib.import_module(dotted)).items())
    found = {name: (value,) if isinstance(value, str) else value for name, value in values}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    }


def _names_in(
    tree: ast.Module, module: str, known: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Return what a source uses of a package: from imports, and of modules that are loaded."""
    strings = {**known}
    for statement in () if known else tree.body:
        for name in _assigned(statement):
            strings[name] = _texts(getattr(statement, "value", None), strings)
    nodes = [*ast.walk(tree)]
    stand_for = {
        name: origins
        for node in nodes
        for name, origins in _bound(node, strings)
        if origins and origins[0].partition(".")[0] == module
    }
    for node in nodes:  # attend = kernels.attend
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            first, rest = _chain(node.value)
            for name in _assigned(node) if first in stand_for else ():
                stand_for[name] = tuple(f"{origin}{rest}" for origin in stand_for[first])
    called = set(map(id, _called_in(nodes)))
    for node in nodes:
        first, rest = _chain(node)
        if first in stand_for:
            yield tuple(f"{origin}{rest}" for origin in stand_for[first]), id(node) in called


def _called_in(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Return the expressions that are called, launched on a grid, or decorate a function."""
    for node in nodes:
        if isinstance(node, ast.Call):
            yield node.func.value if isinstance(node.func, ast.Subscript) else node.func
        yield from getattr(node, "decorator_list", ())


def _texts(node: ast.AST | None, strings: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the text of a constant, or the texts of a tuple of constants."""
    if isinstance(node, ast.Tuple):
        return tuple(text for each in node.elts for text in _texts(each, strings))
    if isinstance(node, ast.Name):
        return strings.get(node.id, ())
    if isinstance(node, ast.JoinedStr):
        parts = [_texts(each, strings) for each in node.values]
        return ("".join(part[0] for part in parts),) if all(parts) else ()
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, strings)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    return ()


def _bound(
    node: ast.AST, strings: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the names that a statement binds to what is imported, or loaded by its dotted name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, (alias.name,)) if alias.asname else (top, (top,))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from ((a.asname or a.name, (f"{node.module}.{a.name}",)) for a in node.names)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, _loaded(node.value, strings)
    elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
        yield node.optional_vars.id, _loaded(node.context_expr, strings)


def _loaded(node: ast.expr, strings: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the module that ``load("a.b")`` or ``load(FILE)`` loads, whatever loads it."""
    return _texts(node.args[0], strings) if isinstance(node, ast.Call) and node.args else ()


def _chain(node: ast.AST) -> tuple[str, str]:
    """Return the name at the left of ``a.b.c``, and the rest with its dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == "self" and parts:  # where a loaded module is kept
        return parts[-1], "".join(f".{part}" for part in parts[-2::-1])
    return (node.id if isinstance(node, ast.Name) else ""), "".join(f".{p}" for p in parts[::-1])


def callables_of(folder: Path, used: Iterable[Used]) -> dict[str, dict[str, Any]]:
    """Return where a release defines what adapters use, and with which parameters.

    Args:
        folder: holds the package.
        used: see ``used_of``.

    Returns:
        By the first of its names, of what is there: ``source``, its file and line, and
        ``parameters`` of what is called, where these can be read: ``name``, ``kind``, ``default``.
        Those whose name begins with an underscore are the package's own.
    """
    sources = _Sources(folder)
    found: dict[str, dict[str, Any]] = {}
    for names, is_called in used:
        entry = next(filter(None, map(sources.entry, names)), None)
        if entry is not None:
            kept = entry if is_called else {"source": entry["source"]}
            found[names[0]] = kept
    return found


class _Sources:
    """Modules of a folder, parsed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def entry(self, dotted: str, hops: int = LONGEST_CHAIN) -> dict[str, Any] | None:
        """Return what a dotted name is; None where there is no such name."""
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self._tree(module) is not None:
                return self._inside(module, parts[count:], hops)
        return None

    def _inside(self, module: str, parts: list[str], hops: int) -> dict[str, Any] | None:
        """Return what is called so in a module."""
        tree = self._tree(module)
        if tree is None or not hops:
            return None
        if not parts:
            return {"source": self._place(module, 1)}
        found = (self._bound_by(node, module, parts, hops - 1) for node in _statements(tree.body))
        return next(filter(None, found), None)

    def _bound_by(
        self, node: ast.stmt, module: str, parts: list[str], hops: int
    ) -> dict[str, Any] | None:
        """Return what a statement binds to a name; None if it binds another."""
        first, *rest = parts
        here = {"source": self._place(module, node.lineno)}
        if isinstance(node, Definition):
            return self._defined(node, rest, here) if node.name == first else None
        if isinstance(node, ast.ImportFrom):
            base = self._absolute(node, module)
            for alias in node.names:
                if alias.name == "*" and (found := self._inside(base, parts, hops)):
                    return found
                if first == (alias.asname or alias.name):  # which may be another package's
                    return self.entry(".".join([base, alias.name, *rest]), hops) or here
        if first in _assigned(node):
            start, more = _chain(getattr(node, "value", None) or node)
            return self._inside(module, [*f"{start}{more}".split("."), *rest], hops) or here
        return None

    def _absolute(self, node: ast.ImportFrom, module: str) -> str:
        """Return the dotted name of the module that a statement imports from."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self._file(module).name == "__init__.py"
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *filter(None, [node.module])])

    def _defined(
        self, node: Definition, rest: list[str], here: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the parameters of a function, a class or its method, if it defines that itself."""
        if not isinstance(node, ast.ClassDef):
            return {**here, "parameters": _parameters(node)}
        wanted = (rest or ["__init__"])[0]
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == wanted:
                return {**here, "parameters": _parameters(each, bound=True)}
        return {**here}

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            try:
                self._trees[module] = _parsed(self._file(module))
            except (OSError, ValueError, SyntaxError):
                self._trees[module] = None
        return self._trees[module]

    def _file(self, module: str) -> Path:
        place = self._folder.joinpath(*module.split("."))
        package = place / "__init__.py"
        return package if place.is_dir() else place.with_suffix(".py")

    def _place(self, module: str, line: int) -> str:
        return f"{self._file(module).relative_to(self._folder)}:{line}"


def _statements(body: list[ast.stmt]) -> Iterator[Any]:
    """Return the statements of a module, those in conditions and handlers too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, Definition):
                yield from _statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False
) -> list[dict[str, str]]:
    """Return the parameters that a caller may give, as ``flashinfer_declarations`` does."""
    args = node.args
    by_position = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(by_position) - len(args.defaults)) + [*args.defaults]
    kinds = ["positional_only"] * len(args.posonlyargs) + ["positional_or_keyword"] * len(args.args)
    found = [*zip(by_position, kinds, defaults, strict=True)][bound:]
    if args.vararg:
        found.append((args.vararg, "var_positional", None))
    found += [
        (arg, "keyword_only", default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append((args.kwarg, "var_keyword", None))
    return [
        {"name": arg.arg, "kind": kind, **({"default": ast.unparse(default)} if default else {})}
        for arg, kind, default in found
        if not arg.arg.startswith("_")
    ]
