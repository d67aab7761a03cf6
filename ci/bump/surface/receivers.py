"""What the object is whose method an engine calls, as far as its source says it.

Many classes have a method of one name: ``plan`` is one of each of FlashInfer's wrappers, and of
classes of the engine and of other packages. The class of the receiver is followed through what is
assigned to names and attributes, annotations, loops, what functions return, and what callers pass.
A list or a mapping of objects stands for the objects in it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from .engine_modules import (
    COMPREHENSIONS,
    FUNCTIONS,
    SCOPES,
    UNKNOWN,
    WITHOUT_FLASHINFER,
    Answers,
    Bound,
    Engine,
    Module,
    called_name,
    is_flashinfer,
    is_list_of_parts,
    place_of,
    string,
)

OTHER: Final = "other"
"""A class that is known, and that has no method of FlashInfer's."""
Classes = frozenset[str]
"""Dotted names of FlashInfer's classes, ``OTHER``, ``UNKNOWN``; nothing for ``None`` and numbers,
which have no methods."""
NONE: Classes = frozenset()
ANYTHING: Classes = frozenset([UNKNOWN])
ANOTHER: Classes = frozenset([OTHER])
OF_ITS_PARTS = ("list", "tuple", "set", "dict", "sorted", "reversed", "enumerate", "zip", "iter",
                "next", "copy", "deepcopy", "cast", "partial", "defaultdict", "deque")  # fmt: skip
"""Functions that return what they are given, or a container of it."""
TO_A_PART = ("get", "pop", "popleft", "values", "items", "setdefault", "copy", "__getitem__")
"""Methods of containers that return what lies in them."""
ADDED_BY = ("append", "appendleft", "add", "insert", "setdefault", "extend")
"""Methods of containers that put something into them."""
SAYING_NOTHING = ("Any", "object", "Callable", "Self", "TypeVar", "list", "dict", "tuple", "set",
                  "type", "Protocol")  # fmt: skip
"""Annotations that do not name a class."""
BLOCKS = ("body", "orelse", "finalbody")
"""Fields of syntax that hold statements."""
MOST_CLASSES = 20
"""Classes above one another that are followed."""


class Receivers:
    """The classes of an engine's objects."""

    def __init__(
        self, engine: Engine, naming: Callable[[str], Iterable[tuple[Module, ast.AST]]]
    ) -> None:
        """Ask nothing yet.

        Args:
            engine: the engine whose source is read.
            naming: finds all syntax of the engine that names a word.
        """
        self._engine, self._naming = engine, naming
        self._own = {each.module.partition(".")[0] for each in engine.files}
        self._answers = Answers()
        self._callers: dict[str, list[tuple[Module, ast.AST]]] = {}

    def of(self, module: Module, node: ast.expr, method: str) -> Classes:
        """Return what has the method that an expression names, a second name of it among them."""
        if isinstance(node, ast.Attribute):
            found = self._objects(module, node.value)
        elif isinstance(node, ast.Call) and called_name(node) == "getattr" and node.args:
            found = self._objects(module, node.args[0])
        elif isinstance(node, ast.Name):
            values = [each for each in module.values.get(node.id, ()) if each is not node]
            held = [self.of(module, each, method) for each in values if _is_part(each)]
            found = frozenset().union(*held)
        else:
            found = ANYTHING
        return self._with_method(found, method) or ANYTHING

    # What an expression may be.

    def _objects(self, module: Module, node: ast.expr) -> Classes:
        key = (id(module.file), place_of(node), type(node), ast.dump(node)[:200])
        return self._answers.once(key, lambda: self._of_expression(module, node), ANYTHING)

    def _of_expression(self, module: Module, node: ast.expr) -> Classes:
        ask: Mapping[type[ast.expr], Callable[[Module, Any], Classes]] = {
            ast.Name: self._of_name, ast.Attribute: self._of_attribute, ast.Call: self._of_call,
        }  # fmt: skip
        if type(node) in ask:
            return ask[type(node)](module, node)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.Compare | ast.UnaryOp | ast.Lambda):
            return NONE
        parts = _parts(node)
        return ANYTHING if parts is None else self._all(module, parts)

    def _all(self, module: Module, nodes: Iterable[ast.expr]) -> Classes:
        return frozenset().union(*(self._objects(module, each) for each in nodes))

    def _of_name(self, module: Module, node: ast.Name) -> Classes:
        scope = module.scope(node, node.id)
        function = scope if isinstance(scope, FUNCTIONS) else None
        if function is not None:
            argument = _argument(function, node.id)
            if argument is not None:
                return self._of_argument(module, function, argument)
        latest = _latest(module, node) if function is not None else None
        if latest is not None:
            return self._objects(module, latest) or ANYTHING
        found = self._bound(module, node.id, scope)
        if scope is not None:
            return found or ANYTHING
        for dotted in module.imports.get(node.id, ()):
            found |= self._imported(dotted)
        if node.id in module.defined or (not found and hasattr(builtins, node.id)):
            found |= ANOTHER  # a function, or a class itself
        return found or ANYTHING

    def _imported(self, dotted: str) -> Classes:
        """Return what an imported name is: of an engine's module what that binds it to."""
        base, _, name = dotted.rpartition(".")
        found = NONE
        for file in self._engine.modules(base):
            module = self._engine.module(file)
            if name in module.imports or name in module.defined:
                return ANOTHER if name in module.defined else ANYTHING
            found |= self._bound(module, name, None)
        if found:
            return found
        root = dotted.partition(".")[0]
        is_other = root not in self._own and not is_flashinfer(dotted)
        return ANOTHER if is_other or self._engine.modules(dotted) else ANYTHING

    def _bound(self, module: Module, name: str, scope: ast.AST | None) -> Classes:
        """Return what is bound to a name of a scope, or put into what it holds."""
        found = NONE
        for node, value in _bindings(module).get(name, ()):
            if module.scope(node, name) is not scope:
                continue
            is_annotation = isinstance(module.parents.get(node), ast.AnnAssign)
            if is_annotation and (said := self._annotated(module, _annotation(module, node))):
                found |= said
                continue
            found |= self._objects(module, value) if value is not None else NONE
        return found

    def _of_argument(
        self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef, argument: ast.arg
    ) -> Classes:
        of = _class_around(module, function)
        arguments = [*function.args.posonlyargs, *function.args.args]
        decorators = {called_name_of(each) for each in function.decorator_list}
        if of is not None and arguments[:1] == [argument] and "staticmethod" not in decorators:
            return self._instance(module, of)
        if argument.annotation is not None:
            said = self._annotated(module, argument.annotation)
            if said:
                return said
        number = arguments.index(argument) if argument in arguments else None
        return self._passed(function.name, argument.arg, number, of) or ANYTHING

    def _passed(
        self, function: str, name: str, number: int | None, of: ast.ClassDef | None
    ) -> Classes:
        """Return what callers pass for a parameter without an annotation.

        It is not known where the function is used in another way than by calls of its name.
        """
        found = NONE
        if of is not None and function == "__init__":
            function = of.name
        if function not in self._callers:
            self._callers[function] = list(self._naming(function))
        for module, node in self._callers[function]:
            parent = module.parents.get(node)
            if isinstance(node, ast.ImportFrom) or is_annotation(node, module):
                continue
            if not (isinstance(parent, ast.Call) and parent.func is node):
                if isinstance(parent, ast.ClassDef) and node in parent.bases:
                    continue
                return ANYTHING
            at = None if number is None else number - (1 if of is not None else 0)
            passed = [each.value for each in parent.keywords if each.arg == name]
            is_open = any(isinstance(each, ast.Starred) for each in parent.args)
            is_open = is_open or any(each.arg is None for each in parent.keywords)
            if not passed and at is not None and at < len(parent.args) and not is_open:
                passed = [parent.args[at]]
            if is_open and not passed:
                return ANYTHING
            found |= self._all(module, passed)
        return found

    def _of_attribute(self, module: Module, node: ast.Attribute) -> Classes:
        for origin in self._engine.origins(module, node):
            if not origin.startswith(UNKNOWN) and not is_flashinfer(origin):
                return self._imported(origin)
        found = NONE
        for base in self._objects(module, node.value):
            if base in (UNKNOWN, OTHER) or is_flashinfer(base):
                found |= ANYTHING
            else:
                found |= self._member(base, node.attr)
        return found or ANYTHING

    def _of_call(self, module: Module, node: ast.Call) -> Classes:
        called = called_name(node)
        made = self._made(module, node.func)
        if made:
            return made
        if isinstance(node.func, ast.Attribute):
            if called in TO_A_PART:
                return self._all(module, [node.func.value, *node.args[1:]])
            found = NONE
            for base in self._objects(module, node.func.value):
                found |= self._result(base, called) if base.startswith("@") else ANYTHING
            return found
        if called == "getattr" and len(node.args) > 1 and (name := string(node.args[1])):
            read = ast.copy_location(ast.Attribute(node.args[0], name, ast.Load()), node)
            return self._all(module, [read, *node.args[2:]])
        if called in OF_ITS_PARTS:
            return self._all(module, node.args[-1:] if called == "cast" else node.args)
        return ANYTHING

    def _made(self, module: Module, function: ast.expr) -> Classes:
        """Return what a call makes or returns: of a class an instance."""
        found = NONE
        for of, node in self._definitions(module, function):
            is_class = isinstance(node, ast.ClassDef)
            found |= self._instance(of, node) if is_class else self._returned(of, node)
        for origin in self._engine.origins(module, function) if not found else ():
            name, root = origin.rpartition(".")[2], origin.partition(".")[0]
            if is_flashinfer(origin) and _is_class(name):
                found |= {origin}
            elif origin.startswith(UNKNOWN) or is_flashinfer(origin):
                continue
            elif root in WITHOUT_FLASHINFER or (_is_class(name) and root not in self._own):
                found |= ANOTHER
        return found

    def _definitions(self, module: Module, node: ast.expr) -> list[tuple[Module, ast.AST]]:
        if isinstance(node, ast.Name):
            return self._engine.definitions(module, node)
        found: list[tuple[Module, ast.AST]] = []
        for origin in self._engine.origins(module, node) if isinstance(node, ast.Attribute) else ():
            base, _, name = origin.rpartition(".")
            for file in self._engine.modules(base) if not is_flashinfer(origin) else ():
                of = self._engine.module(file)
                found += [(of, each) for each in of.defined.get(name, ())]
        return found

    def _returned(self, module: Module, function: ast.AST) -> Classes:
        """Return what a function returns: as its annotation says, or its statements."""
        if not isinstance(function, FUNCTIONS):
            return ANYTHING
        if function.returns is not None and (said := self._annotated(module, function.returns)):
            return said
        values = [
            each.value
            for each in module.returns
            if each.value is not None and next(module.scopes(each), None) is function
        ]
        return self._all(module, values) or ANYTHING

    # Annotations.

    def _annotated(self, module: Module, node: ast.expr | None) -> Classes:
        """Return the classes that an annotation names; nothing if it says nothing."""
        if node is None:
            return NONE
        if (text := string(node)) is not None:
            try:
                parsed = ast.parse(text, mode="eval").body
            except SyntaxError:
                return NONE
            for each in ast.walk(parsed):
                module.parents.setdefault(each, module.parents.get(node, node))
            return self._annotated(module, parsed)
        if isinstance(node, ast.BinOp):
            return self._annotated(module, node.left) | self._annotated(module, node.right)
        if isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if called_name_of(node.value) in ("dict", "Dict", "Mapping", "defaultdict"):
                inside = inside[-1:]
            return frozenset().union(*(self._annotated(module, each) for each in inside))
        is_builtin = isinstance(node, ast.Name) and hasattr(builtins, node.id)
        says = isinstance(node, ast.Name | ast.Attribute) and not is_builtin
        return (
            self._made(module, node)
            if says and called_name_of(node) not in SAYING_NOTHING
            else NONE
        )

    # Classes of the engine.

    def _instance(self, module: Module, of: ast.AST) -> Classes:
        line, column = place_of(of) or (0, 0)
        return frozenset([f"@{line}:{column}:{module.file.module}:{module.file.path}"])

    def _class(self, instance: str) -> tuple[Module, ast.ClassDef] | None:
        line, column, dotted, path = instance[1:].split(":", 3)
        for file in self._engine.modules(dotted):
            if file.path != path:
                continue
            module = self._engine.module(file)
            for each in (one for many in module.defined.values() for one in many):
                if isinstance(each, ast.ClassDef) and place_of(each) == (int(line), int(column)):
                    return module, each
        return None

    def _lineage(
        self, instance: str, most: int = MOST_CLASSES
    ) -> Iterator[tuple[Module, ast.ClassDef] | str]:
        """Return a class and those that it inherits from: FlashInfer's and unknown ones by name."""
        found = self._class(instance)
        if found is None or not most:
            yield UNKNOWN
            return
        yield found
        module, of = found
        for base in of.bases:
            above = self._made(module, base.value if isinstance(base, ast.Subscript) else base)
            if not above and called_name_of(base) not in ("object", "ABC", "Protocol", "Generic"):
                yield UNKNOWN
            for each in above:
                if each.startswith("@"):
                    yield from self._lineage(each, most - 1)
                else:
                    yield each

    def _with_method(self, found: Classes, method: str) -> Classes:
        """Return whose method is called on objects: a class of the engine may inherit it."""
        made: set[str] = set()
        for each in found:
            if not each.startswith("@"):
                made.add(each)
                continue
            inherited: set[str] = set()
            for one in self._lineage(each):
                if isinstance(one, str):
                    inherited.add(one)
                elif method in {getattr(e, "name", "") for e in one[1].body}:
                    inherited.add(OTHER)
                    break
            made |= inherited or {OTHER}
        return frozenset(made)

    def has_own(self, module: Module, of: ast.ClassDef, name: str) -> bool:
        """Whether a class has a method or an attribute that is none of FlashInfer's.

        One that it assigns may replace an inherited method, unless it inherits none.
        """
        (instance,) = self._instance(module, of)
        bases = {each for each in self._lineage(instance) if isinstance(each, str)}
        if any(isinstance(each, FUNCTIONS) and each.name == name for each in of.body):
            return not any(map(is_flashinfer, bases))
        assigned = (node for node, _ in _attributes(module).get(name, ()))
        return bases <= ANOTHER and any(_is_of_self(node, module, of) for node in assigned)

    def _member(self, instance: str, name: str) -> Classes:
        """Return what an attribute of an engine's object is."""
        key = (instance, name)
        return self._answers.once(key, lambda: self._attribute_of(instance, name), ANYTHING)

    def _attribute_of(self, instance: str, name: str) -> Classes:
        found = NONE
        for one in self._lineage(instance):
            if isinstance(one, str):
                continue
            module, of = one
            for each in of.body:
                if isinstance(each, ast.AnnAssign) and getattr(each.target, "id", "") == name:
                    found |= self._annotated(module, each.annotation)
                if isinstance(each, FUNCTIONS) and each.name == name:
                    found |= self._returned(module, each)  # a property
            for node, value in _attributes(module).get(name, ()):
                if not _is_of_self(node, module, of):
                    continue
                said = self._annotated(module, _annotation(module, node))
                found |= said or (self._objects(module, value) if value is not None else NONE)
        return found or ANYTHING

    def _result(self, instance: str, method: str) -> Classes:
        for one in self._lineage(instance):
            if isinstance(one, str):
                return ANYTHING
            for each in one[1].body:
                if isinstance(each, FUNCTIONS) and each.name == method:
                    return self._returned(one[0], each)
        return ANYTHING


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_part(node: ast.expr) -> bool:
    is_read = isinstance(node, ast.Call) and called_name(node) == "getattr"
    return is_read or isinstance(node, ast.Attribute)


def called_name_of(node: ast.expr) -> str:
    """Return the last part of a name; empty for what has none."""
    if isinstance(node, ast.Call):
        return called_name(node)
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _parts(node: ast.expr) -> list[ast.expr] | None:
    """Return the expressions of which another is one, or holds them; None if they are not seen."""
    ask: Mapping[type[ast.expr], Callable[[Any], list[ast.expr]]] = {
        ast.IfExp: lambda node: [node.body, node.orelse],
        **dict.fromkeys((ast.BoolOp, ast.Dict), lambda node: node.values),
        **dict.fromkeys((ast.List, ast.Tuple, ast.Set), lambda node: node.elts),
        **dict.fromkeys(COMPREHENSIONS, lambda node: [node.elt]),
        **dict.fromkeys(
            (ast.NamedExpr, ast.Subscript, ast.Starred, ast.Await, ast.DictComp),
            lambda node: [node.value],
        ),
        ast.BinOp: lambda node: [node.left, node.right],
    }
    parts = ask.get(type(node))
    return parts(node) if parts else None


def _latest(module: Module, node: ast.Name) -> ast.expr | None:
    """Return what a name was given last, where all ways to a place go through one assignment."""
    below: ast.AST = node
    above = module.parents.get(below)
    while above is not None and not isinstance(below, SCOPES):
        for block in (getattr(above, each, None) for each in BLOCKS):
            if not (isinstance(block, list) and below in block):
                continue
            for each in reversed(block[: block.index(below)]):
                if isinstance(each, ast.Assign) and [_id(one) for one in each.targets] == [node.id]:
                    return each.value
                if _binds(each, node.id):
                    return None
            if isinstance(above, ast.For | ast.While) and _binds(above, node.id):
                return None  # the round before may have bound it
        below, above = above, module.parents.get(above)
    return None


def _id(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _binds(statement: ast.AST, name: str) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
        for each in ast.walk(statement)
    )


def _argument(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> ast.arg | None:
    of = function.args
    all_of = (*of.posonlyargs, *of.args, *of.kwonlyargs)
    return next((each for each in all_of if each.arg == name), None)


def _class_around(module: Module, node: ast.AST) -> ast.ClassDef | None:
    around = next(module.scopes(node), None)
    return around if isinstance(around, ast.ClassDef) else None


def is_annotation(node: ast.AST, module: Module) -> bool:
    """Whether a name is read for its type only."""
    parent = module.parents.get(node)
    while isinstance(parent, ast.expr):
        node, parent = parent, module.parents.get(parent)
        if isinstance(node, ast.Call):
            return False
    return (isinstance(parent, ast.arg | ast.AnnAssign) and parent.annotation is node) or (
        isinstance(parent, FUNCTIONS) and parent.returns is node
    )


def _annotation(module: Module, node: ast.AST) -> ast.expr | None:
    parent = module.parents.get(node)
    is_target = isinstance(parent, ast.AnnAssign) and parent.target is node
    return parent.annotation if is_target and isinstance(parent, ast.AnnAssign) else None


def _is_of_self(node: ast.AST, module: Module, of: ast.ClassDef) -> bool:
    """Whether ``x.name`` is assigned to the object of a class, in one of its methods."""
    base = node.value if isinstance(node, ast.Attribute) else None
    if not isinstance(base, ast.Name):
        return False
    function = module.scope(base, base.id)
    if not isinstance(function, FUNCTIONS) or _class_around(module, function) is not of:
        return False
    first = [*function.args.posonlyargs, *function.args.args][:1]
    return [each.arg for each in first] == [base.id]


def _bindings(module: Module) -> Bound:
    return _gathered(module)[0]


def _attributes(module: Module) -> Bound:
    return _gathered(module)[1]


def _gathered(module: Module) -> tuple[Bound, Bound]:
    """Return what is bound to a module's names, in any scope, and to attributes of objects."""
    if module.held is None:
        names: Bound = {}
        attributes: Bound = {}
        for assigned, value in _assigned(module.tree) if module.tree else ():
            target = assigned
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name):
                names.setdefault(target.id, []).append((target, value))
            elif isinstance(target, ast.Attribute):
                attributes.setdefault(target.attr, []).append((target, value))
        module.held = names, attributes
    return module.held


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Return each target of a tree with its value; of parts of it the part, where that is seen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for each in node.targets:
                yield from _in_parts(each, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield from _in_parts(node.target, _looped(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield from _in_parts(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.Call) and called_name(node) in ADDED_BY and node.args:
            yield getattr(node.func, "value", node.func), node.args[-1]


def _looped(node: ast.expr) -> ast.expr:
    """Return what a loop goes over: of pairs with their places, tuples."""
    if isinstance(node, ast.Call) and called_name(node) == "enumerate" and node.args:
        return ast.copy_location(ast.Tuple([ast.Constant(0), node.args[0]], ast.Load()), node)
    if isinstance(node, ast.Call) and called_name(node) == "zip" and node.args:
        return ast.copy_location(ast.Tuple(list(node.args), ast.Load()), node)
    return node


def _in_parts(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target, value
        return
    same = is_list_of_parts(value) and len(value.elts) == len(target.elts)
    for i, each in enumerate(target.elts):
        part = value.elts[i] if same and isinstance(value, ast.Tuple) else value
        inner = each.value if isinstance(each, ast.Starred) else each
        yield from _in_parts(inner, part)
