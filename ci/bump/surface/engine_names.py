"""Where an engine's source names what is FlashInfer's, and how it calls that."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    is_list_of_parts,
    place_of,
    string,
)
from .receivers import Classes, Receivers, is_annotation

IMPORT, CALL, VALUE, NAME, TEXT = "import", "call", "value", "name", "text"
COPY, NUMBER = "copy", "number"
"""Kinds of use of a name: imported; called; handed on, to be called in ways that are not seen;
asked for, without a call; written in a string; a class of the engine has it; a number is given for
it."""
CHECKS = ("isinstance", "issubclass", "callable", "hasattr")
HANDED_ON = "handed on: how it is called is not known"
EXECUTED = ("eval", "exec", "compile")
READERS = ("attrgetter", "methodcaller")
TRIED = (ast.If, ast.While, ast.IfExp, ast.Assert)
NAMED_IN_CALLS = (ast.Name, ast.Attribute, ast.Constant, ast.JoinedStr, ast.BinOp)
DOTTED = re.compile(r"[\w.:/]+")
ALL = "*"
"""Name for every name of a module."""
IGNORED = "_"
SECOND_NAMES = {
    "begin_forward": "plan",
    "run_return_lse": "run",
    "single_prefill_with_kv_cache_return_lse": "single_prefill_with_kv_cache",
}
"""Names by which FlashInfer offers a callable once more."""
LEAST_FIXED = 6
"""Letters of a name that a string made of parts must have, to count as naming what it fits."""


@dataclass(frozen=True)
class Mention:
    """A place that names something.

    Attributes:
        path, line: the place.
        kind: how it is used, see ``IMPORT``.
        origin: dotted name; it begins with ``?`` where the object that it is of is not known.
        how: the kind of the mention in words.
        positional: values that a call passes by position, up to a ``*args``.
        starred: whether it passes ``*args``.
        keywords: names that it passes.
        open_keywords: whether it passes ``**kwargs``.
        node, parent: the node of the syntax and its parent; None where there is none.
        receivers: the receivers whose method it is, see ``receivers.py``; None where that was not
            asked.
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
    receivers: Classes | None = None

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
            engine: the engine whose files are searched.
            words: last parts of the names that are asked for.
            ordinary: public names that many objects have: they count beyond doubt only.
            methods: names of methods: a string that has one is no call of it.
            check: called for each file; may raise to end the search.
        """
        self.engine = engine
        self.wanted = frozenset({*words, *ordinary, *methods})
        self.ordinary = frozenset(ordinary) - frozenset({*words, *methods})
        self.methods = frozenset(methods) - frozenset(words)
        self.mentions: list[Mention] = []
        self.unparsed: list[Module] = []
        self._modules: set[str] = set()
        self._stand_for: dict[str, set[str]] = {word: {word} for word in self.wanted} | {
            second: {first} for second, first in SECOND_NAMES.items() if first in self.wanted
        }
        """What a name means: ``moe`` after ``from flashinfer import cutlass_fused_moe as moe``."""
        self.unread = engine.unread
        self.receivers = Receivers(engine, self.naming)
        self._search(check)

    def _search(self, check: Callable[[], None]) -> None:
        """Search files until no other name stands for a wanted one."""
        files: dict[int, EngineFile] = {}
        known: set[str] = set()
        while (
            new := {FLASHINFER, *self._stand_for, *self._modules, *self.engine.returning}
            - self.ordinary
            - known
        ):
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

    def naming(self, word: str) -> Iterator[tuple[Module, ast.AST]]:
        """Return all syntax of the engine that names a word, assignments and strings too."""
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        for file in self.engine.files:
            if not _writes(file.data or b"", [word]):
                continue
            module = self.engine.module(file)
            if module.tree is None:
                yield module, ast.Constant(word)
            for node in module.nodes:
                if isinstance(node, ast.ImportFrom):
                    named = any(word in (each.name, each.asname) for each in node.names)
                elif isinstance(node, ast.Constant):
                    is_text = not isinstance(module.parents.get(node), ast.Expr)
                    named = is_text and bool(pattern.search(string(node) or ""))
                else:
                    named = word in (getattr(node, "id", ""), getattr(node, "attr", ""))
                if named:
                    yield module, node

    def _aliases(self, module: Module) -> None:
        for each in module.returns:
            value, scopes = each.value, [*module.scopes(each)]
            if len(scopes) > 1 or value is None:
                continue
            for part in value.elts if isinstance(value, ast.Tuple) else [value]:
                if any(map(self._is_known, _parts_named(part))) and any(
                    is_flashinfer(origin) for origin in self.engine.origins(module, part)
                ):
                    self.engine.follow_calls_of(getattr(scopes[0], "name", FLASHINFER))
        for name in self._worth_following(module):
            for origin in self.engine.name(module, name):
                last = origin.rpartition(".")[2]
                last = SECOND_NAMES.get(last, last)
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
            if name != IGNORED and any(
                self._is_known(part) for value in values for part in _parts_named(value)
            ):
                yield name

    def _is_known(self, name: str) -> bool:
        is_module = name in self._modules or name.partition(".")[0] == FLASHINFER
        return is_module or name in self._stand_for or name in self.engine.returning

    def meant(self, origin: str) -> Iterator[str]:
        """Return the wanted names that an origin may be."""
        base, _, last = origin.rpartition(".")
        if is_flashinfer(origin):
            first = SECOND_NAMES.get(last, last)
            yield from [f"{base}.{first}"] if first in self.wanted or last == ALL else []
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
            and not self._is_own(node)
        ):
            yield from self._expression(node)

    def _is_own(self, node: ast.Attribute) -> bool:
        """Whether ``self.run`` is of the class around it, which inherits none of it.

        What a class assigns to its attribute is a place of its own.
        """
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            return False
        scopes = (each for each in self.module.scopes(node) if isinstance(each, ast.ClassDef))
        of = next(scopes, None)
        return of is not None and self.names.receivers.has_own(self.module, of, node.attr)

    def _expression(self, node: ast.expr) -> Iterator[Mention]:
        for origin in sorted(self.names.engine.origins(self.module, node)):
            for meant in self.names.meant(origin):
                used = self._of_partial(node, meant)
                yield from used or [self._received(node, self._used(node, meant))]

    def _received(self, node: ast.expr, used: Mention) -> Mention:
        """Add whose method is used, where that is asked of an object."""
        if used.certain or used.name not in self.names.methods:
            return used
        written = string(node.args[1]) if isinstance(node, ast.Call) else None
        method = written or (node.attr if isinstance(node, ast.Attribute) else used.name)
        found = self.names.receivers.of(self.module, node, method)
        return replace(used, receivers=found)

    def _of_partial(self, node: ast.expr, origin: str) -> list[Mention]:
        """Return the calls of a partial, if nothing but one name or method can call it."""
        made = self.parents.get(node)
        if not (isinstance(made, ast.Call) and made.args[:1] == [node]):
            return []
        holder = self.parents.get(made)
        target = holder.targets[0] if isinstance(holder, ast.Assign) else None
        is_partial = self.names.engine.origins(self.module, made.func) == {"functools.partial"}
        if not (is_partial and isinstance(holder, ast.Assign) and len(holder.targets) == 1):
            return []
        uses: list[tuple[Module, ast.AST]] = []
        if isinstance(target, ast.Name):
            scope = self.module.scope(target, target.id)
            uses = [
                (self.module, each)
                for each in self.module.nodes
                if scope and isinstance(each, ast.Name) and each.id == target.id
                if self.module.scope(each, each.id) is scope
            ]
        elif isinstance(target, ast.Attribute) and _replaces_method(target, made):
            origin = f"{UNKNOWN}.{origin.rpartition('.')[2]}"
            uses = [
                (module, each)
                for module, each in self.names.naming(target.attr)
                if not isinstance(each, ast.Name)
            ]
        bound, calls = self._called(node, made, origin), list[Mention]()
        for module, each in uses:
            places = _Places(self.names, module)
            if isinstance(getattr(each, "ctx", None), ast.Store):
                continue
            used = None
            if isinstance(each, ast.Name | ast.Attribute):
                used = places._used(each, origin)
            if used is not None and used.kind == CALL:
                calls.append(_together(bound, used))
            elif not places._is_compared(each):
                return []
        return calls if any(each.path == self.module.file.path for each in calls) else []

    def _is_compared(self, node: ast.AST) -> bool:
        """Whether an expression or its ``func`` is only asked for."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Attribute) and parent.attr == "func":
            node, parent = parent, self.parents.get(parent)
        if isinstance(parent, ast.Compare):
            return not isinstance(node, ast.Constant)
        return isinstance(parent, ast.Call) and called_name(parent) in CHECKS

    def _is_result_followed(self, node: ast.AST) -> bool:
        """Whether all callers of the function that returns this give it names of their own."""
        parent = self.parents.get(node)
        number = len(parent.elts) if is_list_of_parts(parent) else None
        if parent is not None and number is not None:
            parent = self.parents.get(parent)
        scopes = [*self.module.scopes(parent)] if isinstance(parent, ast.Return) else []
        function = scopes[0] if len(scopes) == 1 else None
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return False
        here, calls = (self.module.file, place_of(function)), 0
        for module, each in self.names.naming(function.name):
            if isinstance(each, ast.ImportFrom):
                if any(name.asname for name in each.names):
                    return False
                continue
            if not (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)):
                return False
            meant = self.names.engine.definitions(module, each)
            if here not in [(other.file, place_of(one)) for other, one in meant]:
                if not meant or module.stars:
                    return False
            elif not _Places(self.names, module).names_result(each, number):
                return False
            else:
                calls += 1
        return calls > 0

    def names_result(self, node: ast.Name, number: int | None) -> bool:
        """Whether a function is called and what it returns is given names, or called at once."""
        call = self.parents.get(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            return False
        holder = self.parents.get(call)
        if number is None:
            is_called = isinstance(holder, ast.Call) and holder.func is call
            return is_called or _is_alias(call, holder)
        targets = holder.targets if isinstance(holder, ast.Assign) else [None]
        if not all(is_list_of_parts(each) and len(each.elts) == number for each in targets):
            return False
        parts = [part for each in targets if each for part in ast.iter_child_nodes(each)]
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        return len(names) == number * len(targets) and (
            IGNORED not in names
            or not any(
                isinstance(e, ast.Name) and e.id == IGNORED and isinstance(e.ctx, ast.Load)
                for e in self.module.nodes
            )
        )

    def _used(self, node: ast.expr, origin: str) -> Mention:
        """Return what is done with an expression that names something."""
        path, line = self.module.file.path, node.lineno
        parent = self.parents.get(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            return self._called(node, parent, origin)
        kind, how = self._context(node)
        return Mention(path, line, kind, origin, how, node=node, parent=parent)

    def _called(self, node: ast.expr, call: ast.Call, origin: str) -> Mention:
        starred = [isinstance(each, ast.Starred) for each in call.args]
        known = starred.index(True) if True in starred else len(starred)
        names = tuple(each.arg for each in call.keywords if each.arg is not None)
        made = Mention(
            self.module.file.path,
            node.lineno,
            CALL,
            origin,
            "",
            known,
            any(starred),
            names,
            len(names) < len(call.keywords),
            node,
            call,
        )
        return replace(made, how=_call_in_words(made))

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
        if is_annotation(node, self.module):
            return NAME, "a type"
        followed = self._is_result_followed(node)
        return (NAME, "returned to its callers") if followed else (VALUE, HANDED_ON)

    def _call(self, node: ast.Call) -> Iterator[Mention]:
        called = called_name(node)
        if isinstance(node.func, ast.Call):
            yield from self._expression(node.func)
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
        asked = (
            called == "hasattr" or self._is_only_checked(node) or is_annotation(node, self.module)
        )
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
            yield called_name(node)
            left += [each for each in arguments(node) if isinstance(each, NAMED_IN_CALLS)]
        elif isinstance(node, ast.IfExp):
            left += [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            left += node.values
        elif isinstance(node, ast.NamedExpr):
            left.append(node.value)
        elif isinstance(node, ast.Subscript):
            left += [node.slice, *([node.value] if isinstance(node.value, ast.Call) else [])]
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


def _replaces_method(target: ast.Attribute, made: ast.Call) -> bool:
    """Whether a partial stands for a method of the object that it gets, not for a hook of others.

    ``forward`` is called by torch when the object is.
    """
    own = ast.unparse(made.args[1]) if len(made.args) > 1 else ""
    is_hook = target.attr == "forward" or target.attr.startswith("__")
    return own == ast.unparse(target.value) and not is_hook


def _together(bound: Mention, call: Mention) -> Mention:
    """Return a call of a partial as one of what it stands for."""
    made = replace(
        call,
        positional=bound.positional - 1 + call.positional,  # without the callable
        starred=bound.starred or call.starred,
        keywords=(*bound.keywords, *call.keywords),
        open_keywords=bound.open_keywords or call.open_keywords,
    )
    return replace(made, how=f"{_call_in_words(made)}, as a partial")


def _call_in_words(call: Mention) -> str:
    some = [f"{count_of(call.positional, 'value')} by position"] if call.positional else []
    some += ["*args"] if call.starred else []
    some += ["**kwargs"] if call.open_keywords else []
    return f"called with {' and '.join(some)}" if some else "called by keyword"
