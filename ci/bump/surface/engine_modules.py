"""What the names of an engine's source stand for: FlashInfer's modules and what is in them."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

from .engine_files import FLASHINFER, EngineFile

Origins = frozenset[str]
"""What an expression may be: dotted names of imports, such as ``flashinfer.decode.X``; ``?.X`` for
the attribute ``X`` of an object of which nothing is known. Other values are left out."""
UNKNOWN = "?"
Bound = dict[str, list[tuple[ast.AST, ast.expr | None]]]
"""Nodes that bind a name, by name, and the value that it gets, or that is put into what it holds.
"""
KEPT_SOURCE = 64 << 20
"""Most bytes of source that stay parsed, which takes thirty times as much memory."""
NOTHING: Origins = frozenset()
WITHOUT_FLASHINFER = {"torch", *sys.stdlib_module_names}
"""Packages of which no class inherits from FlashInfer's."""
TORCH_OPS = f"torch.ops.{FLASHINFER}."
FOLLOWED = (ast.Name, ast.Attribute, ast.Call, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Subscript)
"""Expressions that may be a callable itself rather than another value."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef, *COMPREHENSIONS)
"""Syntax with names of its own."""
BINDING = (
    *(ast.Import, ast.ImportFrom, *FUNCTIONS, ast.ClassDef, ast.arg, ast.Name),
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr),
)
"""Syntax that binds names."""
NAMING = (
    *(ast.Import, ast.ImportFrom, ast.ClassDef, ast.Name, ast.Attribute, ast.Call, ast.Constant),
    *(ast.JoinedStr, ast.BinOp, ast.keyword, ast.Assign, ast.AnnAssign),
)
"""Syntax that may name what is asked for."""


def is_flashinfer(origin: str) -> bool:
    """Whether an origin is of FlashInfer, or one of the operators that it registers with torch."""
    return origin.partition(".")[0] == FLASHINFER or origin.startswith(TORCH_OPS)


@dataclass
class Module:
    """A parsed file.

    Attributes:
        file: the file that it was read from.
        tree: its syntax; None where it has none.
        why: the reason why it could not be parsed; else empty.
        imports: dotted names by the name that they are bound to, in any scope of the file: a name
            may have several meanings.
        values: expressions by the name that they are assigned to.
        defined: functions and classes by name.
        bound: names that have other values, too.
        local: what is imported by the scope and the name that it binds; empty for other names.
        outer: names of ``global`` and ``nonlocal`` statements, and others whose scope is not noted.
        returns: statements that return a value.
        stars: modules of ``from ... import *``.
        parents: the parents of each node.
        nodes: the nodes that may name something.
        held: what ``receivers.py`` gathers of names and attributes, once.
    """

    file: EngineFile
    tree: ast.Module | None = None
    why: str = ""
    imports: dict[str, set[str]] = field(default_factory=dict)
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    defined: dict[str, list[ast.AST]] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    local: dict[tuple[ast.AST, str], set[str]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)
    returns: list[ast.Return] = field(default_factory=list)
    stars: list[tuple[str, int]] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    nodes: list[ast.AST] = field(default_factory=list)
    held: tuple[Bound, Bound] | None = None

    @classmethod
    def parse(cls, file: EngineFile) -> Module:
        """Parse a file, without running any of it."""
        made = cls(file)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.tree = ast.parse(file.data or b"")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            made.why = f"is no Python that this interpreter reads ({error})"
            return made
        made._walk(made.tree)
        return made

    def _walk(self, tree: ast.Module) -> None:
        """Note every node's parent, the nodes that may name something, and what names mean."""
        left: list[ast.AST] = [tree]
        while left:
            node = left.pop()
            for name in node._fields:
                value = getattr(node, name, None)
                children = value if isinstance(value, list) else (value,)
                for child in children:
                    if isinstance(child, ast.AST) and name != "ctx":
                        self.parents[child] = node
                        left.append(child)
            if isinstance(node, NAMING):
                self.nodes.append(node)
            if isinstance(node, BINDING):
                self._bind(node)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                self.outer.update(node.names)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                self.outer.add(node.name or "")
            elif isinstance(node, ast.Return) and node.value is not None:
                self.returns.append(node)

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the scopes that a place lies in, the nearest first."""
        below: ast.AST | None = None
        above = self.parents.get(node)
        while above is not None:
            if isinstance(above, ast.Lambda):
                inside = node is above.body
            elif isinstance(above, COMPREHENSIONS):  # the first source is of the scope around it
                inside = node is not above.generators[0] or below is not above.generators[0].iter
            else:  # decorators, defaults and annotations are of the scope around it
                inside = isinstance(above, SCOPES) and isinstance(node, ast.stmt)
            if inside:
                yield above
            below, node, above = node, above, self.parents.get(above)

    def scope(self, node: ast.AST, name: str) -> ast.AST | None:
        """Return the scope whose own name is read at a place; None if that is the module's."""
        if name in self.outer:
            return None
        for i, each in enumerate(self.scopes(node)):
            if (each, name) in self.local and not (i and isinstance(each, ast.ClassDef)):
                # A class's own name may also be read before it is bound.
                return None if isinstance(each, ast.ClassDef) else each
        return None

    def _note_local(self, node: ast.AST, name: str, *imported: str) -> None:
        """Note the scope that a name is bound in."""
        if isinstance(node, ast.arg):
            scopes = [self.parents[self.parents[node]]]
        else:
            is_walrus = isinstance(self.parents.get(node), ast.NamedExpr)
            skipped = COMPREHENSIONS if is_walrus else ()
            scopes = [each for each in self.scopes(node) if not isinstance(each, skipped)]
        for each in scopes[:1]:
            self.local.setdefault((each, name), set()).update(imported)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self.defined.setdefault(node.name, []).append(node)
            self.bound.add(node.name)
            self._note_local(node, node.name)
        elif isinstance(node, ast.arg):
            self.bound.add(node.arg)
            self._note_local(node, node.arg)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                self.bound.add(node.id)
                self._note_local(node, node.id)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                bound = each.asname or each.name.partition(".")[0]
                dotted = each.name if each.asname else bound
                self.imports.setdefault(bound, set()).add(dotted)
                self._note_local(node, bound, dotted)
        else:
            base = self.base_of(node)
            for each in node.names:
                if each.name == "*":
                    self.stars.append((base, node.lineno))
                else:
                    dotted = f"{base}.{each.name}" if base else each.name
                    self.imports.setdefault(each.asname or each.name, set()).add(dotted)
                    self._note_local(node, each.asname or each.name, dotted)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and isinstance(value, FOLLOWED):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=False):
                self._assign(each, part)
        elif is_list_of_parts(target) and isinstance(value, ast.Call):
            for i, each in enumerate(target.elts):
                part = ast.Subscript(value=value, slice=ast.Constant(i))
                self.parents[part] = self.parents[value]
                self._assign(each, part)

    def base_of(self, node: ast.ImportFrom) -> str:
        """Return the module that a ``from`` names, dots resolved."""
        if not node.level:
            return node.module or ""
        parts = self.file.module.split(".")
        kept = parts[: len(parts) - node.level + self.file.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


class Answers:
    """Answers to questions that may ask each other in a circle."""

    def __init__(self) -> None:
        self._known: dict[object, frozenset[str]] = {}
        self._asked: list[object] = []
        self._circle = sys.maxsize

    def once(
        self, key: object, ask: Callable[[], frozenset[str]], unknown: frozenset[str]
    ) -> frozenset[str]:
        """Answer a question once; one that is asked inside of itself adds nothing.

        One that lies too deep is ``unknown``, and not for good: it may be asked again by itself.
        """
        if key in self._known:
            return self._known[key]
        if key in self._asked:
            self._circle = min(self._circle, self._asked.index(key))
            return frozenset()
        place = len(self._asked)
        self._asked.append(key)
        try:
            found = ask()
        except RecursionError:
            return unknown
        finally:
            self._asked.pop()
        if self._circle >= place:  # else the answer lacks what is still being asked
            self._known[key] = found
            self._circle = sys.maxsize
        return found


class Engine:
    """The modules of an engine, parsed where they are asked for, and what their names stand for."""

    def __init__(self, files: Iterable[EngineFile]) -> None:
        """Index the files by the last part of their names."""
        self.files, self.unread = list[EngineFile](), list[EngineFile]()
        for each in files:
            (self.unread if each.data is None else self.files).append(each)
        self._by_last: dict[str, list[EngineFile]] = {}
        for each in self.files:
            self._by_last.setdefault(each.module.rpartition(".")[2], []).append(each)
        self._packages = {each.module for each in self.files if each.is_package}
        self._parsed: dict[int, Module] = {}
        self._kept = 0
        self._answers = Answers()
        self.returning: set[str] = set()
        """Functions that return what is FlashInfer's."""

    def follow_calls_of(self, function: str) -> None:
        """Follow what a function returns from now on: earlier answers lack it."""
        if function not in self.returning:
            self.returning.add(function)
            self._answers = Answers()

    def module(self, file: EngineFile) -> Module:
        """Return a file's module."""
        known = self._parsed.pop(id(file), None)
        if known is None:
            known = Module.parse(file)
            self._kept += len(file.data or b"")
        self._parsed[id(file)] = known  # the latest is the last
        while self._kept > KEPT_SOURCE and len(self._parsed) > 1:
            oldest = self._parsed.pop(next(iter(self._parsed)))
            self._kept -= len(oldest.file.data or b"")
        return known

    def modules(self, dotted: str) -> list[EngineFile]:
        """Return the modules that a dotted name may be: what lies above the PATH is not known."""
        return [
            each
            for each in self._by_last.get(dotted.rpartition(".")[2], ())
            if each.module == dotted
            or dotted.endswith(f".{each.module}")  # the PATH is a part of the package
            or (
                each.module.endswith(f".{dotted}")  # the PATH is a folder around it
                and each.module[: -len(dotted) - 1] not in self._packages
            )
        ]

    def follow(self, dotted: str) -> Origins:
        """Return what an imported name is: FlashInfer's, or what the engine's own module binds."""
        if is_flashinfer(dotted):
            return frozenset([dotted])
        unknown = frozenset([f"{UNKNOWN}.{dotted.rpartition('.')[2]}"])
        return self._answers.once(dotted, lambda: self._followed(dotted), unknown)

    def _followed(self, dotted: str) -> Origins:
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            modules = self.modules(".".join(parts[:end]))
            if not modules:
                continue
            if end == len(parts):
                return frozenset([dotted])
            found: set[str] = set()
            for each in modules:
                found |= self._global_name(each, parts[end])
            for name in parts[end + 1 :]:
                found = {one for each in found or {UNKNOWN} for one in self._attribute(each, name)}
            return frozenset(found)
        return frozenset([dotted])

    def _global_name(self, file: EngineFile, name: str) -> Origins:
        """Return what a name of another module is."""
        unknown = frozenset([f"{UNKNOWN}.{name}"])
        data = file.data or b""
        if not any(text in data for text in (name.encode(), b"import *", b"__getattr__")):
            return unknown  # is not bound there, and need not be parsed
        module = self.module(file)
        if module.tree is None or "__getattr__" in module.defined:
            return self.name(module, name) | unknown
        return self.name(module, name)

    def name(self, module: Module, name: str, at: ast.AST | None = None) -> Origins:
        """Return what a name of a module is: at a place of it, or whatever the scope."""
        scope = module.scope(at, name) if at else None
        key = (id(module.file), name, place_of(scope))  # the module may be parsed again
        unknown = frozenset([f"{UNKNOWN}.{name}"])
        return self._answers.once(key, lambda: self._name(module, name, scope), unknown)

    def _name(self, module: Module, name: str, scope: ast.AST | None) -> Origins:
        found: set[str] = set()
        imports = module.local[scope, name] if scope else module.imports.get(name, ())
        for dotted in imports:
            found |= self.follow(dotted)
        for value in module.values.get(name, ()):
            if scope is None or module.scope(value, name) is scope:
                found |= self.origins(module, value)
        if scope is not None:
            return frozenset(found)
        for base, _ in module.stars:
            found |= self.follow(f"{base}.{name}")
        if not found and name not in module.bound and name not in module.imports:
            found.add(f"{UNKNOWN}.{name}")
        return frozenset(found)

    def origins(self, module: Module, node: ast.expr) -> Origins:
        """Return what an expression may be."""
        found: set[str] = set()
        left = [node]
        while left:  # long chains are no deep ones
            each = left.pop()
            if isinstance(each, ast.IfExp):
                left += [each.body, each.orelse]
            elif isinstance(each, ast.BoolOp):
                left += each.values
            elif isinstance(each, ast.NamedExpr):
                left.append(each.value)
            else:
                found |= self._origins(module, each)
        return frozenset(found)

    def _origins(self, module: Module, node: ast.expr) -> Origins:
        """Return what an expression of one value is."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names:
            return self._attributes(module, node, names)
        if isinstance(node, ast.Name):
            return self.name(module, node.id, node)
        if isinstance(node, ast.Call):
            return self._of_call(module, node)
        if isinstance(node, ast.Subscript):  # sys.modules["flashinfer.decode"]
            text = string(node.slice)
            number = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(node.value, ast.Call) and isinstance(number, int):
                return self._returned(module, node.value, number)
            of_modules = isinstance(node.value, ast.Attribute) and node.value.attr == "modules"
            return self.follow(text) if text and of_modules else NOTHING
        return NOTHING

    def _attributes(self, module: Module, base: ast.expr, names: Iterable[str]) -> Origins:
        found = self.origins(module, base)
        for name in names:
            bases = found or {UNKNOWN}
            found = frozenset(one for each in bases for one in self._attribute(each, name))
        return found

    def _attribute(self, base: str, name: str) -> Origins:
        """Return an attribute of an origin."""
        if base.startswith(UNKNOWN):
            return frozenset([f"{UNKNOWN}.{name}"])
        return self.follow(f"{base}.{name}")

    def _of_call(self, module: Module, node: ast.Call) -> Origins:
        """Return what a call returns, if it imports a module or reads an attribute by its name."""
        called = called_name(node)
        if called in ("import_module", "__import__") and node.args:
            dotted = beginning(node.args[0])
            if dotted.partition(".")[0] == FLASHINFER and string(node.args[0]) is None:
                return frozenset([FLASHINFER])
            return self.follow(dotted) if dotted else NOTHING
        if called == "getattr" and len(node.args) > 1:
            name = string(node.args[1])
            return self._attributes(module, node.args[0], [name]) if name else NOTHING
        if self.is_lazy_import(module, node):
            texts = [text for each in arguments(node) if (text := string(each))]
            bases = [text for text in texts if text.partition(".")[0] == FLASHINFER]
            return frozenset(
                f"{base}.{text}"
                for text in texts
                if text not in bases
                for base in bases or [UNKNOWN]
            )
        return self._returned(module, node, None)

    def _returned(self, module: Module, node: ast.Call, number: int | None) -> Origins:
        """Return what functions of the engine return, or one part of it, where that is followed."""
        found: set[str] = set()
        if called_name(node) not in self.returning:
            return NOTHING
        for other, function in self.definitions(module, node.func):
            key = (id(other.file), place_of(function), number)
            results = partial(self._results, other, function, number)
            found |= self._answers.once(key, results, frozenset([f"{UNKNOWN}."]))
        return frozenset(found) if any(map(is_flashinfer, found)) else NOTHING

    def _results(self, module: Module, function: ast.AST, number: int | None) -> Origins:
        found: set[str] = set()
        for each in module.returns:
            value = each.value
            if next(module.scopes(each), None) is not function or value is None:
                continue
            if number is not None:
                parts = value.elts if is_list_of_parts(value) else []
                value = parts[number] if number < len(parts) else ast.Constant(...)
            found |= self.origins(module, value)
        return frozenset(found)

    def is_lazy_import(self, module: Module, node: ast.Call) -> bool:
        """Whether a function of the engine returns one that calls another as it was called itself.

        What it calls is found by the strings that it was given; ``vllm/utils/flashinfer.py``.
        """
        if not any(string(each) for each in arguments(node)):
            return False
        return any(
            _forwards(each)
            for _, function in self.definitions(module, node.func)
            for each in ast.walk(function)
            if isinstance(each, FUNCTIONS) and each is not function
        )

    def definitions(self, module: Module, node: ast.expr) -> list[tuple[Module, ast.AST]]:
        """Return the engine's functions that a name may be, with their modules."""
        if not isinstance(node, ast.Name):
            return []
        found = [(module, each) for each in module.defined.get(node.id, ())]
        for dotted in module.imports.get(node.id, ()):
            base, _, name = dotted.rpartition(".")
            for other in self.modules(base) if not is_flashinfer(dotted) else ():
                of = self.module(other)
                found += [(of, each) for each in of.defined.get(name, ())]
        return found


def is_list_of_parts(node: ast.AST | None) -> TypeGuard[ast.Tuple]:
    """Whether syntax is a tuple with all its parts in their places."""
    return isinstance(node, ast.Tuple) and not any(isinstance(e, ast.Starred) for e in node.elts)


def place_of(node: ast.AST | None) -> tuple[int, int] | None:
    """Return where syntax stands, which stays the same where a file is parsed again."""
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)) if node else None


def _forwards(function: ast.AST) -> bool:
    """Whether all starred calls of a function hand on its ``*args, **kwargs`` and nothing else."""
    if not isinstance(function, FUNCTIONS):
        return False
    args, kwargs = function.args.vararg, function.args.kwarg
    calls = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Call)
        and (
            any(isinstance(one, ast.Starred) for one in each.args)
            or any(one.arg is None for one in each.keywords)
        )
    ]
    return bool(args and kwargs and calls) and all(
        len(each.args) == len(each.keywords) == 1
        and isinstance(each.args[0], ast.Starred)
        and isinstance(each.args[0].value, ast.Name)
        and each.args[0].value.id == (args and args.arg)
        and isinstance(each.keywords[0].value, ast.Name)
        and each.keywords[0].value.id == (kwargs and kwargs.arg)
        for each in calls
    )


def arguments(node: ast.Call) -> Iterator[ast.expr]:
    """Return all values that a call passes."""
    yield from node.args
    yield from (each.value for each in node.keywords)


def called_name(node: ast.Call) -> str:
    """Return the last part of the name that a call calls; empty where it has none."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def string(node: ast.AST) -> str | None:
    """Return a constant string; None for anything else."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def beginning(node: ast.AST) -> str:
    """Return how a string begins: all of a constant; empty where that is not known."""
    while isinstance(node, ast.BinOp):
        node = node.left
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return string(node) or ""
