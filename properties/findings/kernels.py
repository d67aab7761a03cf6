"""Which lines of an implementation's Triton kernels the problems of a run ran.

A worker sends the record of each case, see ``impl.gpu.kernel_lines``; here they become one, and are
read beside the source. A statement counts once, by the line that it begins in.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ...impl.gpu.kernel_lines import MOST_VALUES, FileRecord, lines_of
from .coverage import Gap

MOST_NAMED = 3
"""Ranges that a sentence names, the longest ones; it counts the others."""
LEAST_SHARE = 0.5
"""Share of a launched kernel's lines that must run at profile gate."""
LONGEST_CONDITION = 60
"""Characters of a condition in a sentence."""


@dataclass
class FileRun:
    """What ran of one file.

    Attributes:
        ran: bits of lines and of conditions that were false, as in ``FileRecord``.
        launched: the values of the constexprs of each kernel that was launched, by the line of its
            ``def``.
        compiled: most specialisations that one worker had compiled of each kernel, by that line.
    """

    ran: int = 0
    launched: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    compiled: dict[int, int] = field(default_factory=dict)

    def include(self, other: FileRun) -> None:
        """Add what ran elsewhere."""
        self.ran |= other.ran
        for line, constexprs in other.launched.items():
            known = self.launched.setdefault(line, {})
            for name, values in constexprs.items():
                known[name] = list(dict.fromkeys([*known.get(name, ()), *values]))[:MOST_VALUES]
        for line, count in other.compiled.items():
            self.compiled[line] = max(count, self.compiled.get(line, 0))


@dataclass
class KernelRuns:
    """What ran of the kernels of an implementation, by file."""

    files: dict[str, FileRun] = field(default_factory=dict)

    def add(self, told: Mapping[str, FileRecord]) -> None:
        """Add what a worker says of one case."""
        for file, record in told.items():
            launched = {int(line): dict(each) for line, each in record["launched"].items()}
            compiled = {int(line): count for line, count in record["compiled"].items()}
            run = FileRun(int(record["ran"] or "0", 16), launched, compiled)
            self.files.setdefault(file, FileRun()).include(run)

    def include(self, other: KernelRuns) -> None:
        """Add what other problems ran."""
        for file, run in other.files.items():
            self.files.setdefault(file, FileRun()).include(run)

    def functions(self) -> list[Kernel]:
        """Return the functions of all files, in their order there."""
        return [each for file, run in self.files.items() for each in kernels_of(file, run)]


@dataclass(frozen=True)
class Missing:
    """Lines that no problem ran, one block of statements.

    Attributes:
        first, last: the lines of the source.
        under: the condition of the innermost ``if`` around them; empty where there is none.
        statements: how many statements they hold.
        calls: names of the functions that they call.
    """

    first: int
    last: int
    under: str
    statements: int
    calls: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The lines and their condition: "412-430 under USE_TD"."""
        lines = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        condition = self.under
        if len(condition) > LONGEST_CONDITION:
            condition = f"{condition[: LONGEST_CONDITION - 4]} ..."
        return f"{lines} under {condition}" if condition else lines


@dataclass(frozen=True)
class Kernel:
    """A ``@triton.jit`` function of a file of which something was launched.

    Attributes:
        file, function: its file and its name.
        line, last: the line of its ``def``, and its last one.
        role: ``launched``; ``called``, where a launched one names it, or one that it calls;
            ``not launched``.
        lines, run: statements that it has, and those that ran, by the lines that they begin in.
            None of them is known to have run on a GPU.
        never_run: the lines that did not run.
        branches, taken: outcomes of its ``if`` statements, two each, and those that were seen. An
            ``if`` with its body on its own line does not show them, and is not counted.
        constexprs: values that its constexprs took, where it was launched.
        specialisations: number of those compiled on a GPU, of a called function none; None in the
            interpreter.
    """

    file: str
    function: str
    line: int
    last: int
    role: str
    lines: int
    run: int
    never_run: tuple[Missing, ...]
    branches: int
    taken: int
    constexprs: Mapping[str, Sequence[str]]
    specialisations: int | None = None

    @property
    def interpreted(self) -> bool:
        """Whether its lines were seen: only Triton's interpreter shows them."""
        return self.specialisations is None and self.role != "not launched"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Share:
    """Statements of all functions that are launched or called, and those of them that ran."""

    run: int
    lines: int

    @property
    def text(self) -> str:
        """The share in percent, rounded down: 100 % is all of them."""
        return f"{100 * self.run // self.lines} %" if self.lines else ""


def share_of(functions: Sequence[Kernel], unset: Collection[str] = ()) -> Share:
    """Return which share of the lines of kernels ran, on an interpreter.

    Args:
        functions: functions of all files.
        unset: names of constexprs that no caller sets: lines under them are left out, and functions
            that nothing else calls.
    """
    seen = [each for each in functions if each.interpreted]
    blocks = [block for each in seen if each.run for block in each.never_run]
    left_out = [each for each in blocks if _is_false(each.under, unset)]
    others = {name for each in blocks if each not in left_out for name in each.calls}
    unused = {name for each in left_out for name in each.calls} - others
    counted = [each for each in seen if each.run or each.function not in unused]
    lines = sum(each.lines for each in counted) - sum(each.statements for each in left_out)
    return Share(sum(each.run for each in counted), lines)


def kernels_text(functions: Sequence[Kernel], unset: Mapping[str, str] | None = None) -> str:
    """Return in a line which share of the kernels ran and which lines did not, or what compiled.

    Args:
        functions: functions of all files.
        unset: constexprs that no caller sets, with the engine's line that shows it.
    """
    unset = unset or {}
    if compiled := [each for each in functions if each.specialisations]:
        named = ", ".join(f"{each.function} {each.specialisations}" for each in compiled)
        return f"specialisations compiled: {named}; which lines ran is not recorded on a GPU"
    share = share_of(functions)
    if not share.lines:
        return ""
    parts = [f"kernel lines {share.text}"]
    if unset:
        parts[0] += f" ({share_of(functions, list(unset)).text} without {', '.join(unset)})"
    if never := never_run_text(functions):
        parts.append(f"never run: {never}")
    return "; ".join(parts)


def never_run_text(functions: Sequence[Kernel]) -> str:
    """Name the longest blocks that did not run, with their functions where there are several."""
    seen = [each for each in functions if each.interpreted]
    missing = [(each, block) for each in seen for block in each.never_run]
    longest = sorted(missing, key=lambda each: -each[1].statements)[:MOST_NAMED]
    named = [
        f"{each.function} {block.text}" if len(seen) > 1 else block.text
        for each, block in missing
        if (each, block) in longest
    ]
    more = [f"{len(missing) - len(named)} more"] if len(missing) > len(named) else []
    return ", ".join([*named, *more])


def kernel_gaps(runs: Iterable[KernelRuns], unset: Collection[str] = ()) -> list[Gap]:
    """Return the launched kernels of which less than ``LEAST_SHARE`` of the lines ran.

    Args:
        runs: what ran, of each law.
        unset: names of constexprs that no caller sets: lines that need them are not asked for.
    """
    together = KernelRuns()
    for each in runs:
        together.include(each)
    return [
        Gap("kernel", each.function, never_run_text([each]), each.run, floor)
        for each in together.functions()
        if each.role == "launched" and each.interpreted
        if each.run < (floor := math.ceil(LEAST_SHARE * share_of([each], unset).lines))
    ]


def kernels_of(file: str, run: FileRun) -> list[Kernel]:
    """Return the ``@triton.jit`` functions of a file; none where it cannot be read."""
    tree = _tree(source_of(file))
    if tree is None:
        return []
    ran = frozenset(lines_of(run.ran))
    functions = {each.lineno: each for each in _jit_functions(tree, run, ran)}
    launched = run.launched.keys() & functions.keys()
    called = {line for line, each in functions.items() if _own_lines(each) & ran} | launched
    # Of several functions of one name those are meant that ran, otherwise the last one.
    meant = {each.name: line for line, each in functions.items()}
    for line in called:
        meant.pop(functions[line].name, None)
    while (
        more := {
            meant[name] for line in called for name in _named_in(functions[line]) if name in meant
        }
        - called
    ):
        called |= more
    return [
        _kernel(
            file,
            each,
            "launched" if line in launched else "called" if line in called else "not launched",
            run,
            ran,
        )
        for line, each in functions.items()
    ]


@functools.lru_cache(maxsize=256)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of code under test
        return None


def source_of(file: str) -> str:
    """Return the text of a kernel's file; empty where it cannot be read any more."""
    path = Path(file)
    try:
        return path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    except (OSError, ValueError):
        return ""


def _jit_functions(
    tree: ast.Module, run: FileRun, ran: frozenset[int]
) -> Iterator[ast.FunctionDef]:
    """Yield the functions with a decorator that names ``jit``, and others that ran.

    A function that makes a kernel is none: what ran of it is the kernel in it.
    """
    for node, jitted in _functions(tree):
        if jitted or node.lineno in run.launched or _own_lines(node) & ran:
            yield node


@functools.lru_cache(maxsize=256)
def _functions(tree: ast.Module) -> Sequence[tuple[ast.FunctionDef, bool]]:
    """Return all functions, and whether a decorator of each names ``jit``."""
    return [
        (node, any("jit" in ast.unparse(each).split("(")[0] for each in node.decorator_list))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]


def _kernel(
    file: str, function: ast.FunctionDef, role: str, run: FileRun, ran: frozenset[int]
) -> Kernel:
    lines = _lines(function)
    conditions = [each for each in _statements(function.body) if _shows_outcomes(each)]
    taken = sum(_taken(each, run.ran, ran) for each in conditions)
    return Kernel(
        file,
        function.name,
        function.lineno,
        function.end_lineno or function.lineno,
        role,
        len(lines),
        len(lines & ran),
        tuple(_missing(function.body, "", ran)) if role != "not launched" else (),
        2 * len(conditions),
        taken,
        run.launched.get(function.lineno, {}),
        run.compiled.get(function.lineno, 0 if run.compiled else None),
    )


def _statements(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the blocks in it; constants are docstrings."""
    for each in block:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            continue
        yield each
        for inner in _inner_blocks(each):
            yield from _statements(inner)


# A gate asks this of the same few files once for each implementation in them.
@functools.lru_cache(maxsize=4096)
def _lines(function: ast.FunctionDef) -> frozenset[int]:
    """Return the lines in which its statements begin."""
    return frozenset(each.lineno for each in _statements(function.body))


@functools.lru_cache(maxsize=4096)
def _own_lines(function: ast.FunctionDef) -> frozenset[int]:
    """Return its lines, without those of functions in it."""
    inner = (each for each in ast.walk(function) if isinstance(each, ast.FunctionDef))
    return _lines(function).difference(*(_lines(each) for each in inner if each is not function))


def _shows_outcomes(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Whether it is an ``if`` with a body on lines of its own: otherwise one mark is for both."""
    return isinstance(statement, ast.If) and statement.body[0].lineno != statement.lineno


def _blocks(statement: ast.stmt, under: str) -> Iterator[tuple[Sequence[ast.stmt], str]]:
    """Yield the blocks of a statement, each with its condition."""
    if isinstance(statement, ast.If):
        yield statement.body, ast.unparse(statement.test)
        yield statement.orelse, _negated(statement.test)
        return
    yield from ((block, under) for block in _inner_blocks(statement))


def _inner_blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for name in ("handlers", "cases"):
        for each in getattr(statement, name, ()):
            yield each.body


def _negated(test: ast.expr) -> str:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    return ast.unparse(ast.UnaryOp(ast.Not(), test))


def _missing(block: Sequence[ast.stmt], under: str, ran: frozenset[int]) -> Iterator[Missing]:
    """Yield the statements that did not run: those of one block that follow each other as one."""
    pending: list[ast.stmt] = []
    counted = [each for each in block if list(_statements([each]))]
    for each in counted:
        if each.lineno not in ran:
            pending.append(each)
            continue
        yield from _joined(pending, under)
        pending = []
        for inner, condition in _blocks(each, under):
            yield from _missing(inner, condition, ran)
    yield from _joined(pending, under)


def _joined(statements: Sequence[ast.stmt], under: str) -> Iterator[Missing]:
    if statements:
        last = statements[-1].end_lineno or statements[-1].lineno
        count = len({each.lineno for each in _statements(statements)})
        calls = {name for each in statements for name in _named_in(each)}
        yield Missing(statements[0].lineno, last, under, count, tuple(sorted(calls)))


def _taken(condition: ast.If, bits: int, ran: frozenset[int]) -> int:
    """Return how many of the two outcomes of an ``if`` were seen."""
    true = condition.body[0].lineno in ran
    if condition.orelse:
        return true + (condition.orelse[0].lineno in ran)
    return true + (bits >> (2 * condition.lineno + 1) & 1)


@functools.lru_cache(maxsize=4096)
def _named_in(function: ast.stmt) -> frozenset[str]:
    calls = (each.func for each in ast.walk(function) if isinstance(each, ast.Call))
    return frozenset(each.id for each in calls if isinstance(each, ast.Name))


def _is_false(condition: str, unset: Collection[str]) -> bool:
    """Whether a condition is false wherever these flags are; what it does not say is not."""
    try:
        return _value(ast.parse(condition, mode="eval").body, unset) is False
    except SyntaxError:  # there is none
        return False


def _value(node: ast.expr, unset: Collection[str]) -> bool | None:
    if isinstance(node, ast.Name) and node.id in unset:
        return False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _value(node.operand, unset)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        ends = isinstance(node.op, ast.Or)  # the value of one operand that decides
        values = {_value(each, unset) for each in node.values}
        return ends if ends in values else None if None in values else not ends
    return None
