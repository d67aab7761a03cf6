"""What Kernelproof's adapters call of a package, and the parameters that a release gives it.

Both are read from Python's source: nothing is imported, so that a release of which only the files
are there is read as well as an installed one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ....fixtures.suggestions import how_to_install
from ....impl.registry import BUILT_IN
from ...console.errors import UsageRefusedError

try:
    import griffe
except ModuleNotFoundError as error:
    message = f"comparing what releases offer needs griffe: {how_to_install('suite')} brings it"
    raise UsageRefusedError(message) from error

ADAPTERS = Path(__file__).resolve().parents[3] / "impl"
LONGEST_CHAIN = 20
"""Most imports that a name is followed through."""
_PARSING = threading.Lock()
"""Two threads that parse make Python 3.11 raise ``SystemError`` (recursion depth mismatch)."""


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
        module: the module that the package is imported by.
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
    with _PARSING:
        return ast.parse(file.read_text(encoding="utf-8"))


def _visited(
    name: str, file: Path, code: str, parent: griffe.Module | None = None
) -> griffe.Module:
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none, in others' code
        return griffe.visit(name, filepath=file, code=code, parent=parent)


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
    """Modules of a folder, read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, griffe.Module | None] = {}

    def entry(self, dotted: str, hops: int = LONGEST_CHAIN) -> dict[str, Any] | None:
        """Return what a dotted name is; None where there is no such name."""
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            module = self._module(".".join(parts[:count]))
            if module is not None and isinstance(module.filepath, Path):
                return self._inside(module, parts[count:], hops) if hops else None
        return None

    def _inside(self, module: griffe.Module, parts: list[str], hops: int) -> dict[str, Any] | None:
        """Return what is called so in a module."""
        if not parts:
            return {"source": self._place(module, 1)}
        first, *rest = parts
        member = module.members.get(first)
        if member is not None:
            return self._bound(module, member, rest, hops)
        aliases = (each for each in module.members.values() if isinstance(each, griffe.Alias))
        stars = (each.wildcard for each in aliases if each.wildcard)
        tried = (self.entry(".".join([star, *parts]), hops - 1) for star in stars)
        return next(filter(None, tried), None)

    def _bound(
        self,
        module: griffe.Module,
        member: griffe.Object | griffe.Alias,
        rest: list[str],
        hops: int,
    ) -> dict[str, Any]:
        """Return what a module's own name is, or a method of it."""
        line = member.alias_lineno if isinstance(member, griffe.Alias) else member.lineno
        here = {"source": self._place(module, line)}
        if target := _stands_for(member):  # which may be another package's
            return self.entry(".".join([target, *rest]), hops - 1) or here
        called = member.members.get((rest or ["__init__"])[0]) if member.is_class else member
        if not isinstance(called, griffe.Function):
            return here
        offered = _parameters(called)[member.is_class :]
        return {**here, "parameters": [e for e in offered if not e["name"].startswith("_")]}

    def _module(self, dotted: str) -> griffe.Module | None:
        if dotted not in self._modules:
            self._modules[dotted] = self._read(dotted)
        return self._modules[dotted]

    def _read(self, dotted: str) -> griffe.Module | None:
        """Read a module; None if there is none that can be parsed."""
        package, _, name = dotted.rpartition(".")
        parent = self._module(package) if package else None
        place = self._folder.joinpath(*dotted.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        try:
            return _visited(name, file, file.read_text(encoding="utf-8"), parent)
        except (OSError, ValueError, SyntaxError):
            # A folder without code is a package too.
            made = griffe.Module(name, filepath=[place], parent=parent)
            return made if place.is_dir() else None

    def _place(self, module: griffe.Module, line: int | None) -> str:
        return f"{Path(str(module.filepath)).relative_to(self._folder)}:{line}"


def _stands_for(member: griffe.Object | griffe.Alias) -> str:
    """Return the dotted name that an import or an assignment names anew; empty for others."""
    if isinstance(member, griffe.Alias):
        return member.target_path
    value = member.value if isinstance(member, griffe.Attribute) else None
    return value.canonical_path if isinstance(value, griffe.ExprName | griffe.ExprAttribute) else ""


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _parameters(function: griffe.Function) -> list[dict[str, str]]:
    """Return the parameters of a function, as ``flashinfer_declarations`` does."""
    found: list[dict[str, str]] = []
    for each in function.parameters:
        kind = each.kind.name if each.kind else ""
        found.append({"name": each.name, "kind": kind})
        if each.default is not None and not kind.startswith("var_"):  # whose default is "()", "{}"
            found[-1]["default"] = str(each.default)
    return found


def parameters_of(signature: str) -> list[dict[str, str]] | None:
    """Return the parameters of a signature as a report writes it; None if it is none."""
    text = re.sub(r"=<[^<>]*>", "=...", signature)  # a default without a name in Python
    try:
        read = _visited("", Path(), f"def called{text}: ...")
    except SyntaxError:
        return None
    called = read.members.get("called")
    return _parameters(called) if isinstance(called, griffe.Function) else None
