"""The faults that a mutant may have: each operator yields edits of a node, or of a block."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from .kernel_source import Edit, Source, called

Edits = tuple[Edit, ...]
"""What one mutant changes."""
SYMBOLS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""The symbol of each operator, and the one that takes its place."""
FUNCTIONS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "sum": "max",
    "exp": "exp2",
    "exp2": "exp",
    "log": "log2",
    "log2": "log",
}
"""Functions of the language that are operators by name, and those that take their place."""
REDUCTIONS = {"argmax", "argmin", "cumprod", "cumsum", "max", "min", "reduce", "sum", "xor_sum"}
"""Functions whose second argument is an axis."""
CASTS = {"cast", "to"}
"""Functions and methods that change a type."""
WRITES = {"atomic_add", "atomic_max", "atomic_min", "store"}
"""Functions that write to memory."""


def operator(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Change an operator: arithmetic, a comparison, a sign, or a function such as the maximum."""
    if isinstance(node, ast.BinOp):
        yield from _symbol(source, node.left, node.right, node.op)
    elif isinstance(node, ast.BoolOp):
        yield from _symbol(source, node.values[0], node.values[1], node.op)
    elif isinstance(node, ast.Compare):
        operands = pairwise([node.left, *node.comparators])
        for (left, right), each in zip(operands, node.ops, strict=True):
            yield from _symbol(source, left, right, each)
    elif isinstance(node, ast.AugAssign):
        yield from _symbol(source, node.target, node.value, node.op)
    elif isinstance(node, ast.UnaryOp):
        sign = "not" if isinstance(node.op, ast.Not) else "-"
        start = source.start(node)
        yield (Edit(start, start + len(sign), ""),)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, end = node.func.attr, source.end(node.func)
        if name in FUNCTIONS and source.of(node.func.value) in {"tl", "tl.math", "libdevice"}:
            yield (Edit(end - len(name), end, FUNCTIONS[name]),)


def _symbol(source: Source, left: ast.expr, right: ast.expr, symbol: ast.AST) -> Iterator[Edits]:
    before, after = SYMBOLS.get(type(symbol), ("", ""))
    edit = source.operator(left, right, before, after) if before else None
    if edit is not None:
        yield (edit,)


def constant(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Change a number by one or to its double, a truth value, or the sign of an infinity."""
    if isinstance(node, ast.Call) and source.is_infinity(node):
        yield (source.replaced(node, 'float("inf")'),)
    elif isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield (source.replaced(node, str(not value)),)
        elif isinstance(value, int):
            yield (source.replaced(node, "0" if value == 1 else str(value + 1)),)
        elif isinstance(value, float):
            yield (source.replaced(node, repr(2 * value) if value else "1.0"),)


def mask(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Take the mask away from a load or a store, or the condition from a ``where``."""
    if not isinstance(node, ast.Call):
        return
    given = _keyword(node, "mask")
    if given is not None:
        default = _keyword(node, "other")  # which goes with a mask only
        away = [each for each in (given, default) if each is not None]
        yield tuple(source.replaced(each, "None") for each in away)
    elif called(node) == "where" and len(node.args) == 3:  # noqa: PLR2004
        yield (source.replaced(node, f"({source.of(node.args[1])})"),)


def conjunct(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Leave out one of the conditions that must hold together."""
    operands: list[ast.expr] = []
    if not isinstance(node, ast.expr):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        operands = [node.left, node.right]
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        operands = node.values[:2] if len(node.values) == 2 else []  # noqa: PLR2004
    if any(isinstance(each, ast.Constant) for each in operands):  # bits of a number
        return
    for each in operands:
        yield (source.replaced(node, f"({source.of(each)})"),)


def cast(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Leave out a cast to another type than int64."""
    if _cast_type(source, node) not in {"", "int64"}:
        yield from _without_cast(source, node)


def int64(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Leave out a cast to int64."""
    if _cast_type(source, node) == "int64":
        yield from _without_cast(source, node)


def _cast_type(source: Source, node: ast.AST) -> str:
    if called(node) not in CASTS or not isinstance(node, ast.Call) or not node.args:
        return ""
    return source.of(node.args[-1]).rpartition(".")[2]


def _without_cast(source: Source, node: ast.AST) -> Iterator[Edits]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    value = node.args[0] if node.func.attr == "cast" else node.func.value
    yield (source.replaced(node, f"({source.of(value)})"),)


def axis(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Reduce along another axis."""
    given = axis_of(node)
    if isinstance(given, ast.Constant) and isinstance(given.value, int):
        yield (source.replaced(given, "0" if given.value == 1 else "1"),)


def axis_of(node: ast.AST) -> ast.expr | None:
    """Return the axis of a reduction; None for any other node."""
    if called(node) not in REDUCTIONS or not isinstance(node, ast.Call):
        return None
    return _keyword(node, "axis") or (node.args[1] if len(node.args) > 1 else None)


def other(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Load another value where the mask is false."""
    given = _keyword(node, "other")
    if given is None:
        return
    is_zero = isinstance(given, ast.Constant) and given.value == 0
    # Where the lane is multiplied by zero, any other number shows nothing.
    nan = 'float("nan")'
    yield (source.replaced(given, ("1" if source.of(given) == "0" else nan) if is_zero else "0"),)


def _keyword(node: ast.AST, name: str) -> ast.expr | None:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return next((each.value for each in keywords if each.arg == name), None)


def strides(source: Source, node: ast.AST) -> Iterator[Edits]:
    """Swap the strides of two terms of a sum: ``a * x + b * y`` becomes ``a * y + b * x``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return
    left = node.left.right if _is_sum(node.left) else node.left  # type: ignore[attr-defined]
    one, two = _stride(left), _stride(node.right)
    if one is not None and two is not None and one.id != two.id:
        yield source.replaced(one, two.id), source.replaced(two, one.id)


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _stride(node: ast.AST) -> ast.Name | None:
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    factor = node.right if is_product else None  # type: ignore[attr-defined]
    return factor if isinstance(factor, ast.Name) else None


def update(source: Source, block: Sequence[ast.stmt]) -> Iterator[Edits]:
    """Leave out a store, or the update of a variable; or let an update forget what was before."""
    for statement in block:
        if isinstance(statement, ast.AugAssign):
            target, value = source.of(statement.target), source.of(statement.value)
            yield (source.replaced(statement, "pass"),)
            yield (source.replaced(statement, f"{target} = {value}"),)
        elif _is_update(statement) or _is_write(statement):
            yield (source.replaced(statement, "pass"),)


def _is_write(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and called(statement.value) in WRITES


def _is_update(statement: ast.stmt) -> bool:
    """Whether a statement is an assignment that reads the variable that it sets."""
    if not isinstance(statement, ast.Assign):
        return False
    target = statement.targets[0]
    return isinstance(target, ast.Name) and any(
        isinstance(each, ast.Name) and each.id == target.id for each in ast.walk(statement.value)
    )


def exits(source: Source, block: Sequence[ast.stmt]) -> Iterator[Edits]:
    """Leave out an early exit, or move it behind the statement that follows and touches memory."""
    for place, statement in enumerate(block):
        if not isinstance(statement, ast.If) or statement.orelse:
            continue
        last = statement.body[-1]
        if not isinstance(last, (ast.Return, ast.Continue, ast.Break)):
            continue
        if len(statement.body) == 1:
            yield (source.replaced(last, "pass"),)
        after = block[place + 1] if place + 1 < len(block) else None
        # Behind one that only computes what the exit does not read, nothing would change.
        if after and not (_only_computes(after, statement) or _same_exit(after, statement)):
            swapped = source.replaced(statement, source.of(after))
            yield swapped, source.replaced(after, source.of(statement))


def _only_computes(statement: ast.stmt, before: ast.stmt) -> bool:
    """Whether a statement sets variables that another does not name, without touching memory."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return False
    calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
    names = {each.id for each in ast.walk(before) if isinstance(each, ast.Name)}
    set_here = {
        each.id
        for each in ast.walk(statement)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return bool(set_here) and not set_here & names and all(map(_computes, calls))


def _same_exit(statement: ast.stmt, before: ast.stmt) -> bool:
    """Whether two statements leave in the same way, and only compute when: in either order."""
    if not isinstance(statement, ast.If) or not isinstance(before, ast.If) or statement.orelse:
        return False
    bodies = [[ast.dump(each) for each in one.body] for one in (statement, before)]
    calls = [
        each
        for one in (statement, before)
        for each in ast.walk(one.test)
        if isinstance(each, ast.Call)
    ]
    return len(bodies[0]) == 1 and bodies[0] == bodies[1] and all(map(_computes, calls))


def _computes(call: ast.Call) -> bool:
    """Whether a call is one of the language's that touches no memory."""
    name, function = called(call), call.func
    if not isinstance(function, ast.Attribute):
        return False
    touches = name in {"load", "store"} or "atomic" in name or "descriptor" in name
    of_language = isinstance(function.value, ast.Name) and function.value.id == "tl"
    return name in CASTS or (of_language and not touches)


OF_NODES: dict[str, Callable[[Source, ast.AST], Iterator[Edits]]] = {
    "operator": operator,
    "constant": constant,
    "mask": mask,
    "conjunct": conjunct,
    "cast": cast,
    "int64": int64,
    "axis": axis,
    "other": other,
    "strides": strides,
}
"""Operators on one expression, by name."""
OF_BLOCKS: dict[str, Callable[[Source, Sequence[ast.stmt]], Iterator[Edits]]] = {
    "update": update,
    "exit": exits,
}
"""Operators on the statements of a block, by name."""
OPERATORS = (*OF_NODES, *OF_BLOCKS)
"""The names of all operators."""


def owned(node: ast.AST) -> ast.expr | None:
    """Return the constant that belongs to another operator than ``constant``."""
    return axis_of(node) or _keyword(node, "other")
