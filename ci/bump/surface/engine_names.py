"""Where an engine's source names what is FlashInfer's, and how it calls that."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....properties.verdicts.text import count_of
from .engine_files import FLASHINFER, EngineFile
from .engine_modules import (
    FUNCTIONS,
    UNKNOWN,
    Engine,
    Module,
    arguments,
    beginning,
    called_name,
    is_flashinfer,
    string,
)

IMPORT, CALL, VALUE, NAME, TEXT = "import", "call", "value", "name", "text"
COPY, NUMBER = "copy", "number"
"""How a name is used: imported; called; handed on, to be called in ways that are not seen; asked
for, without a call; written in a string; a class of the engine has it; a number is given for it."""
CHECKS = ("isinstance", "issubclass", "callable", "hasattr")
EXECUTED = ("eval", "exec", "compile")
READERS = ("attrgetter", "methodcaller")
TRIED = (ast.If, ast.While, ast.IfExp, ast.Assert)
NAMED_IN_CALLS = (ast.Name, ast.Attribute, ast.Constant, ast.JoinedStr, ast.BinOp)
DOTTED = re.compile(r"[\w.:/]+")
ALL = "*"
"""Stands for every name of a module."""
LEAST_FIXED = 6
"""Letters of a name that a string made of parts must have, to count as naming what it fits."""


@dataclass(frozen=True)
class Mention:
    """A place that names something.

    Attributes:
        path, line: the place.
        kind: how it is used, see ``IMPORT``.
        origin: dotted name; it begins with ``?`` where the object that it is of is not known.
        how: in words.
        positional: values that a call passes by position, up to a ``*args``.
        starred: whether it passes ``*args``.
        keywords: names that it passes.
        open_keywords: whether it passes ``**kwargs``.
        node, parent: of the syntax; None where there is none.
    """

    path: str
    line: int
    kind: str
    origin: str
    how: str
    positional: int = 0
    starred: bool = False
    keywords: tuple[str, ...] = ()
    open_keywords: bool = False
    node: ast.AST | None = None
    parent: ast.AST | None = None

    @property
    def certain(self) -> bool:
        """Whether it is FlashInfer's beyond doubt."""
        return is_flashinfer(self.origin)

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self.origin.rpartition(".")[2]


class Names:
    """All places in an engine that name one of some words, or what stands for it there."""

    def __init__(
        self,
        engine: Engine,
        words: Collection[str],
        ordinary: Collection[str] = (),
        methods: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Find them.

        Args:
            engine: whose files are searched.
            words: last parts of the names that are asked for.
            ordinary: of public names, which many objects have: they count beyond doubt only.
            methods: of methods: a string that has one is no call of it.
            check: called for each file; may raise to end the search.
        """
        self.engine = engine
        self.wanted = frozenset({*words, *ordinary, *methods})
        self.ordinary = frozenset(ordinary) - frozenset({*words, *methods})
        self.methods = frozenset(methods) - frozenset(words)
        self.mentions: list[Mention] = []
        self.unparsed: list[Module] = []
        self._modules: set[str] = set()
        self._stand_for: dict[str, set[str]] = {word: {word} for word in self.wanted}
        """What a name means: ``moe`` after ``from flashinfer import cutlass_fused_moe as moe``."""
        self.unread = engine.unread
        self._search(check)

    def _search(self, check: Callable[[], None]) -> None:
        """Search files until no other name stands for a wanted one."""
        files: dict[int, EngineFile] = {}
        known: set[str] = set()
        while new := {FLASHINFER, *self._stand_for, *self._modules} - self.ordinary - known:
            known |= new
            for each in self.engine.files:
                check()
                if id(each) not in files and _writes(each.data or b"", new):
                    files[id(each)] = each
            for each in files.values():
                check()
                self._aliases(self.engine.module(each))
        for each in files.values():
            check()
            module = self.engine.module(each)
            if module.tree is None:
                self.unparsed.append(module)
            else:
                self.mentions += _Places(self, module).all()

    def _aliases(self, module: Module) -> None:
        for name in self._worth_following(module):
            for origin in self.engine.name(module, name):
                last = origin.rpartition(".")[2]
                if last in self.wanted and (is_flashinfer(origin) or origin[0] == UNKNOWN):
                    self._stand_for.setdefault(name, set()).add(last)
                elif is_flashinfer(origin):
                    self._modules.add(name)

    def _worth_following(self, module: Module) -> Iterator[str]:
        """Return the names of a module whose origins may be asked for: the others name none."""
        for name, origins in module.imports.items():
            if any(is_flashinfer(o) or self._is_known(o.rpartition(".")[2]) for o in origins):
                yield name
        for name, values in module.values.items():
            if any(self._is_known(part) for value in values for part in _parts_named(value)):
                yield name

    def _is_known(self, name: str) -> bool:
        is_module = name in self._modules or name.partition(".")[0] == FLASHINFER
        return is_module or name in self._stand_for

    def meant(self, origin: str) -> Iterator[str]:
        """Return the wanted names that an origin may be."""
        last = origin.rpartition(".")[2]
        if is_flashinfer(origin):
            yield from [origin] if last in self.wanted or last == ALL else []
        elif origin.startswith(UNKNOWN):
            found = self._stand_for.get(last, set()) - self.ordinary
            yield from (f"{UNKNOWN}.{name}" for name in sorted(found))

    def is_word(self, text: str) -> bool:
        """Whether a name of the source may be one that is asked for."""
        return text in self._stand_for


class _Places:
    """The mentions of one module."""

    def __init__(self, names: Names, module: Module) -> None:
        self.names, self.module = names, module
        self.parents = module.parents

    def all(self) -> Iterator[Mention]:
        """Return all of them."""
        ask: Mapping[type[ast.AST], Callable[[Any], Iterator[Mention]]] = {
            ast.Import: self._import,
            ast.ImportFrom: self._import,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.Constant: self._string,
            ast.JoinedStr: self._made_of_parts,
            ast.BinOp: self._made_of_parts,
            ast.ClassDef: self._class,
            ast.keyword: self._number,
            ast.Assign: self._number,
            ast.AnnAssign: self._number,
        }
        for node in self.module.nodes:
            yield from ask[type(node)](node)

    def _name(self, node: ast.Name) -> Iterator[Mention]:
        if isinstance(node.ctx, ast.Load) and self.names.is_word(node.id):
            yield from self._expression(node)

    def _class(self, node: ast.ClassDef) -> Iterator[Mention]:
        if self.names.is_word(node.name):
            yield self._at(node, COPY, f"{UNKNOWN}.{node.name}", "a class of that name")

    def _number(self, node: ast.keyword | ast.Assign | ast.AnnAssign) -> Iterator[Mention]:
        value = node.value
        if not (isinstance(value, ast.Constant) and isinstance(value.value, int)):
            return
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        named = [node.arg or ""] if isinstance(node, ast.keyword) else []
        named += [each.id for each in targets if isinstance(each, ast.Name)]
        named += [each.attr for each in targets if isinstance(each, ast.Attribute)]
        for name in named:
            if self.names.is_word(name):
                how = f"{name} is the number {value.value}"
                yield self._at(value, NUMBER, f"{UNKNOWN}.{name}", how)

    def _at(self, node: ast.AST, kind: str, origin: str, how: str) -> Mention:
        line = getattr(node, "lineno", 0)
        return Mention(self.module.file.path, line, kind, origin, how, node=node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[Mention]:
        base = self.module.base_of(node) if isinstance(node, ast.ImportFrom) else ""
        for each in node.names:
            if each.name == ALL:
                if is_flashinfer(base):
                    how = f"from {base} import *"
                    yield self._at(node, VALUE, f"{base}.{ALL}", how)
                continue
            dotted = f"{base}.{each.name}" if base else each.name
            for origin in self.names.engine.follow(dotted):
                for meant in self.names.meant(origin):
                    yield self._at(node, IMPORT, meant, "imported")

    def _attribute(self, node: ast.Attribute) -> Iterator[Mention]:
        if node.attr == "__dict__":
            yield from self._computed(node, node.value, "__dict__ of the module")
        elif (
            isinstance(node.ctx, ast.Load)
            and self.names.is_word(node.attr)
            and not self._is_own_method(node)
        ):
            yield from self._expression(node)

    def _is_own_method(self, node: ast.Attribute) -> bool:
        """Whether ``self.run`` is a method of the class around it, which inherits none of it."""
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            return False
        above: ast.AST | None = node
        while above is not None and not isinstance(above, ast.ClassDef):
            above = self.parents.get(above)
        if above is None:
            return False
        engine = self.names.engine
        return any(
            isinstance(e, FUNCTIONS) and e.name == node.attr for e in above.body
        ) and not any(
            is_flashinfer(origin)
            for base in above.bases
            for origin in engine.origins(self.module, base)
        )

    def _expression(self, node: ast.expr) -> Iterator[Mention]:
        for origin in sorted(self.names.engine.origins(self.module, node)):
            for meant in self.names.meant(origin):
                yield self._used(node, meant)

    def _used(self, node: ast.expr, origin: str) -> Mention:
        """Return what is done with an expression that names something."""
        path, line = self.module.file.path, node.lineno
        parent = self.parents.get(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            starred = [isinstance(each, ast.Starred) for each in parent.args]
            known = starred.index(True) if True in starred else len(starred)
            names = tuple(each.arg for each in parent.keywords if each.arg is not None)
            return Mention(
                path,
                line,
                CALL,
                origin,
                _call_in_words(
                    known, starred=any(starred), opened=len(names) < len(parent.keywords)
                ),
                known,
                any(starred),
                names,
                len(names) < len(parent.keywords),
                node,
                parent,
            )
        kind, how = self._context(node)
        return Mention(path, line, kind, origin, how, node=node, parent=parent)

    def _context(self, node: ast.AST) -> tuple[str, str]:
        """Return whether an expression is handed on, or only followed and asked for."""
        parent = self.parents.get(node)
        while isinstance(parent, ast.BoolOp | ast.IfExp | ast.NamedExpr):
            if isinstance(parent, ast.IfExp) and parent.test is node:
                return NAME, "asked for"
            node, parent = parent, self.parents.get(parent)
        call = parent if isinstance(parent, ast.Call) else None
        called = called_name(call) if call else ""
        is_not = isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
        if _is_alias(node, parent):
            return NAME, "given another name"
        item = isinstance(parent, ast.Subscript) and parent.value is node
        read = call and called == "getattr" and call.args[0] is node
        if item or read or isinstance(parent, ast.Attribute):
            return NAME, "a part of it is read"
        if isinstance(parent, (ast.Compare, ast.Expr, *TRIED)) or is_not or called in CHECKS:
            return NAME, "asked for"
        if self._is_annotation(node):
            return NAME, "a type"
        return VALUE, "handed on: how it is called is not known"

    def _is_annotation(self, node: ast.AST) -> bool:
        parent = self.parents.get(node)
        while isinstance(node, ast.expr) and parent is not None:
            if isinstance(parent, (ast.arg, ast.AnnAssign)) and parent.annotation is node:
                return True
            if isinstance(parent, FUNCTIONS) and parent.returns is node:
                return True
            node, parent = parent, self.parents.get(parent)
        return False

    def _call(self, node: ast.Call) -> Iterator[Mention]:
        called = called_name(node)
        if called == "getattr" and len(node.args) > 1:
            if string(node.args[1]) is None:
                yield from self._computed(node, node.args[0], "getattr with a computed name")
            else:
                yield from self._expression(node)
        elif any(
            (string(each) or "") in self.names.wanted for each in arguments(node)
        ) and self.names.engine.is_lazy_import(self.module, node):
            yield from self._expression(node)
        elif called in ("vars", "dir", "getmembers") and node.args:
            yield from self._computed(node, node.args[0], f"{called} of the module")

    def _computed(self, node: ast.expr, base: ast.expr, how: str) -> Iterator[Mention]:
        for origin in self.names.engine.origins(self.module, base):
            if is_flashinfer(origin):
                yield self._at(node, VALUE, f"{origin}.{ALL}", how)

    def _string(self, node: ast.Constant) -> Iterator[Mention]:
        parent, text = self.parents.get(node), node.value
        if not isinstance(text, str):
            return
        if isinstance(parent, (ast.Expr, ast.JoinedStr)):  # a docstring; parts
            return
        if self._is_public_list(parent):
            for origin in self.names.engine.name(self.module, text):
                for meant in self.names.meant(origin):
                    yield self._at(node, IMPORT, meant, "exported again by __all__")
            return
        call = parent if isinstance(parent, ast.Call) else None
        called = called_name(call) if call else ""
        found = list(self._named_by(text, called))
        if not found or (call and self.names.engine.origins(self.module, call)):
            return  # the call is followed as the attribute that it reads
        asked = called == "hasattr" or self._is_only_checked(node) or self._is_annotation(node)
        for origin in found:
            if asked:
                yield self._at(node, NAME, origin, "asked for by a string")
            else:
                yield self._at(node, TEXT, origin, "named in a string")

    def _named_by(self, text: str, called: str) -> Iterator[str]:
        """Return the origins that a string names, as an argument of what is called."""
        names = self.names
        if called not in EXECUTED and not DOTTED.fullmatch(text):
            return
        parts = re.findall(r"\w+", text)
        for i, word in enumerate(parts):
            if word not in names.wanted:
                continue
            if parts[0] == FLASHINFER:
                yield ".".join(parts[: i + 1])
            elif word not in names.ordinary and (
                word not in names.methods or called in (*EXECUTED, *READERS)
            ):
                yield f"{UNKNOWN}.{word}"

    def _is_public_list(self, table: ast.AST | None) -> bool:
        """Whether a string stands in ``__all__``, and so is a name of this module."""
        holder = self.parents.get(table) if isinstance(table, ast.List | ast.Tuple) else None
        targets = holder.targets if isinstance(holder, ast.Assign) else []
        targets = [holder.target] if isinstance(holder, ast.AnnAssign | ast.AugAssign) else targets
        return any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets)

    def _is_only_checked(self, node: ast.Constant) -> bool:
        """Whether a string is of a list that loops hand to ``hasattr`` and to nothing else."""
        row = self.parents.get(node)
        table = self.parents.get(row) if isinstance(row, ast.Tuple) else row
        index = row.elts.index(node) if isinstance(row, ast.Tuple) else None
        if not isinstance(table, ast.List | ast.Tuple | ast.Set):
            return False
        holder = self.parents.get(table)
        around: ast.AST | None = holder
        while around is not None and not isinstance(around, (*FUNCTIONS, ast.Module)):
            around = self.parents.get(around)
        if not isinstance(holder, ast.Assign) or around is None:
            return False
        names = {each.id for each in holder.targets if isinstance(each, ast.Name)}
        inside = list(ast.walk(around))
        read = [
            each
            for each in inside
            if isinstance(each, ast.Name) and each.id in names and isinstance(each.ctx, ast.Load)
        ]
        loops = [each for each in inside if isinstance(each, ast.For) and each.iter in read]
        if not loops or len(read) != len(loops) or len(names) != len(holder.targets):
            return False
        return all(self._hands_to_hasattr(loop, index) for loop in loops)

    def _hands_to_hasattr(self, loop: ast.For, index: int | None) -> bool:
        target: ast.AST | None = loop.target
        if isinstance(target, ast.Tuple) and index is not None:
            target = target.elts[index] if index < len(target.elts) else None
        if not isinstance(target, ast.Name):
            return False
        uses = [
            self.parents.get(node)
            for node in ast.walk(loop)
            if isinstance(node, ast.Name) and node.id == target.id and node is not target
        ]
        return all(isinstance(each, ast.Call) and called_name(each) == "hasattr" for each in uses)

    def _made_of_parts(self, node: ast.JoinedStr | ast.BinOp) -> Iterator[Mention]:
        """Return the names that a string made of parts may become."""
        if isinstance(self.parents.get(node), ast.BinOp):
            return
        if FLASHINFER.encode() not in (self.module.file.data or b""):
            return
        parts = _parts(node)
        fixed = "".join(part for part in parts if part)
        if len(fixed) < LEAST_FIXED or None not in parts or not DOTTED.fullmatch(fixed):
            return
        pattern = "".join(r"[\w.:/]*" if part is None else re.escape(part) for part in parts)
        for word in sorted(self.names.wanted):
            if re.fullmatch(rf"(?:.*[.:/])?(?:{pattern})", word):
                yield self._at(node, TEXT, f"{UNKNOWN}.{word}", "named by a string made of parts")


def _is_alias(value: ast.AST, parent: ast.AST | None) -> bool:
    """Whether a statement gives a value other names, which are followed."""
    if isinstance(parent, ast.Assign):
        return all(isinstance(target, ast.Name) for target in parent.targets)
    if isinstance(parent, ast.AnnAssign):
        return parent.value is value and isinstance(parent.target, ast.Name)
    return False


def _writes(data: bytes, words: Collection[str]) -> bool:
    """Whether a source has one of some words."""
    return any(
        text in data and (word == FLASHINFER or re.search(rb"\b" + text + rb"\b", data))
        for word in words
        for text in [word.encode()]
    )


def _parts_named(value: ast.expr) -> Iterator[str]:
    """Return the names and strings of an expression by which it may be followed."""
    left: list[ast.expr] = [value]
    while left:
        node = left.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            left.append(node.value)
        elif isinstance(node, ast.Call):
            left += [each for each in arguments(node) if isinstance(each, NAMED_IN_CALLS)]
        elif isinstance(node, ast.IfExp):
            left += [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            left += node.values
        elif isinstance(node, ast.NamedExpr):
            left.append(node.value)
        elif isinstance(node, ast.Subscript):
            left.append(node.slice)
        else:
            yield string(node) or beginning(node)


def _parts(node: ast.AST) -> Sequence[str | None]:
    """Return the parts of a string that is made at run time, None for those that are not known."""
    if isinstance(node, ast.JoinedStr):
        return [string(each) for each in node.values]
    found: list[str | None] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        found.insert(0, string(node.right))
        node = node.left
    return [string(node), *found]


def _call_in_words(positional: int, *, starred: bool, opened: bool) -> str:
    some = [f"{count_of(positional, 'value')} by position"] if positional else []
    some += ["*args"] if starred else []
    some += ["**kwargs"] if opened else []
    return f"called with {' and '.join(some)}" if some else "called by keyword"
