"""Which launch an engine's function chooses for a call, by the condition in its own source.

Releases choose by other conditions, and an adapter that wrote one down would be wrong with the
next release. Nothing of the engine runs: the syntax is evaluated over the values that are given,
and what depends on others is unknown.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from .sources import Names, source_of

UNKNOWN: Final = object()
"""Value of an expression that depends on what is not given."""
COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
COMPUTED: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def why_not(
    module: Names, function: str, flag: str, option: str, values: Mapping[str, Any]
) -> str | None:
    """Return the part of an engine's condition that keeps it from a launch; None if none does.

    Args:
        module: the engine's file.
        function: the function of the module that launches.
        flag: the local name to which the condition is assigned, such as ``use_3d``.
        option: a parameter without which there is no such launch: where no flag is assigned, the
            first ``if`` that reads it chooses the other one.
        values: the values of the function's expressions by their source, and callables by the last
            part of their names.

    Returns:
        The source of the part, or that the condition is not known; empty if there is no such
        condition.
    """
    file = source_of(module)
    condition = _condition(file, function, flag, option) if file else None
    if file is None or condition is None:
        return ""
    asked = _Evaluation(_names(file, function), values)
    found = asked.value(condition)
    if found is UNKNOWN:
        return f"what {function} chooses by depends on more than Kernelproof reads"
    return None if found else asked.reason(condition, wanted=True)


@functools.cache
def _functions(file: Path) -> tuple[ast.Module, dict[str, ast.FunctionDef]]:
    tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    return tree, {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}


@functools.cache
def _condition(file: Path, function: str, flag: str, option: str) -> ast.expr | None:
    named = _names(file, function).get(flag)
    own = _functions(file)[1].get(function)
    if named is not None or own is None:
        return named
    for each in own.body:
        if isinstance(each, ast.If) and option in {
            node.id for node in ast.walk(each.test) if isinstance(node, ast.Name)
        }:
            return ast.UnaryOp(ast.Not(), each.test)
    return None


@functools.cache
def _names(file: Path, function: str) -> dict[str, ast.expr]:
    """Return the first value of each name of a module and of a function; an argument's has none."""
    tree, functions = _functions(file)
    found: dict[str, ast.expr] = {}
    own = functions.get(function)
    for body in (tree.body, own.body if own else []):
        first = dict[str, ast.expr]()
        for each in body:
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            if isinstance(each, ast.Assign) and isinstance(target, ast.Name):
                first.setdefault(target.id, each.value)
        found |= first
    return found


class _Evaluation:
    """Evaluates conditions over given values, where some are not known."""

    def __init__(self, names: Mapping[str, ast.expr], values: Mapping[str, Any]) -> None:
        self._names, self._values = names, values
        self._asked: list[str] = []

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401  any value, or UNKNOWN
        """Return the value of an expression, ``UNKNOWN`` where it depends on what is not given."""
        ask: Mapping[type[ast.expr], Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value,
            ast.Name: lambda node: self._name(node.id),
            ast.Attribute: self._given,
            ast.Subscript: self._given,
            ast.BoolOp: self._both,
            ast.UnaryOp: self._negated,
            ast.Compare: self._compared,
            ast.BinOp: self._computed,
            ast.Call: self._called,
        }
        found = ask.get(type(node))
        return found(node) if found else UNKNOWN

    def reason(self, node: ast.expr, *, wanted: bool) -> str:
        """Return the smallest part of a condition for which it is not as wanted."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inside = self.reason(node.operand, wanted=not wanted)
            is_part = isinstance(node.operand, ast.BoolOp)
            return inside if is_part else ast.unparse(node)
        if isinstance(node, ast.BoolOp):
            # One false part makes an ``and`` false, one true part an ``or`` true.
            decided_by_one = isinstance(node.op, ast.And) is wanted
            for each in node.values if decided_by_one else ():
                found = self.value(each)
                if found is not UNKNOWN and bool(found) is not wanted:
                    return self.reason(each, wanted=wanted)
            return " and ".join(self.reason(each, wanted=wanted) for each in node.values)
        return ast.unparse(node)

    def _name(self, name: str) -> Any:  # noqa: ANN401
        if name in self._values:
            return self._values[name]
        if name not in self._names or name in self._asked:
            return UNKNOWN
        self._asked.append(name)
        found = self.value(self._names[name])
        self._asked.pop()
        return found

    def _given(self, node: ast.Attribute | ast.Subscript) -> Any:  # noqa: ANN401
        return self._values.get(ast.unparse(node), UNKNOWN)

    def _negated(self, node: ast.UnaryOp) -> Any:  # noqa: ANN401
        found = self.value(node.operand) if isinstance(node.op, ast.Not) else UNKNOWN
        return UNKNOWN if found is UNKNOWN else not found

    def _computed(self, node: ast.BinOp) -> Any:  # noqa: ANN401
        left, right = self.value(node.left), self.value(node.right)
        if left is UNKNOWN or right is UNKNOWN or type(node.op) not in COMPUTED:
            return UNKNOWN
        return COMPUTED[type(node.op)](left, right)

    def _both(self, node: ast.BoolOp) -> Any:  # noqa: ANN401
        """Return what ``and`` or ``or`` gives: a part that decides outweighs an unknown one."""
        found = [self.value(each) for each in node.values]
        decides = isinstance(node.op, ast.Or)
        for each in found:
            if each is not UNKNOWN and bool(each) is decides:
                return each
        return UNKNOWN if UNKNOWN in found else found[-1]

    def _compared(self, node: ast.Compare) -> Any:  # noqa: ANN401
        sides = [self.value(each) for each in (node.left, *node.comparators)]
        results: list[bool] = []
        for how, left, right in zip(node.ops, sides, sides[1:], strict=False):
            if left is UNKNOWN or right is UNKNOWN or type(how) not in COMPARED:
                return UNKNOWN
            results.append(COMPARED[type(how)](left, right))
        return all(results)

    def _called(self, node: ast.Call) -> Any:  # noqa: ANN401
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [self.value(each) for each in node.args]
        function = self._values.get(name)
        if not callable(function) or node.keywords or any(each is UNKNOWN for each in given):
            return UNKNOWN
        return function(*given)
