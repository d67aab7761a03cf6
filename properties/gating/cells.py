"""The cells of the support table that one implementation can try on a machine, on both sides.

A cell is a simple call with one thing about it changed, and of two things where a rule needs both:
FP8 queries *and* a window. Which side it is on, the rules say; nothing here runs a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...impl import Target
from ...impl.gating import Feature, Rule, RuleBook, decide
from ...impl.gating.decision import refusing
from ...impl.gating.of_problem import feature_of
from ...reference import Problem
from ..space.axes import Probe
from .operations import LENGTHS, ON_CPU, OPERATIONS, Change

SUPPORTED, REFUSED = "supported", "refused"


@dataclass(frozen=True)
class Cell:
    """One call on one side of the table.

    Attributes:
        title: what is special about it.
        problem: the call.
        feature: the question that it asks of the rules.
        side: ``SUPPORTED`` or ``REFUSED``.
        rules: ids of all rules that refuse it, or of the one that allows it.
        called: what may become of it, of ``rules.CALLED``.
        number: its place among the cells of its implementation.
    """

    title: str
    problem: Problem
    feature: Feature
    side: str
    rules: tuple[str, ...]
    called: tuple[str, ...]
    number: int = 0


def cells_of(
    operation: str,
    backend: str,
    target: Target,
    book: RuleBook,
    probe: Probe,
    *,
    decodes: bool = False,
    ruled_as: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Return the cells that an implementation can express.

    Args:
        operation, backend, decodes, ruled_as: what the implementation declares.
        target: the machine; its release of FlashInfer decides which rules hold.
        book: the book of rules.
        probe: asks the implementation whether it can express problems, whatever the rules say.
    """
    found: list[Cell] = []

    def judged(title: str, problem: Problem) -> Cell | None:
        asked = replace(problem, **ruled_as) if ruled_as else problem
        return _cell(title, problem, feature_of(asked, backend, decodes=decodes), target, book)

    calls = OPERATIONS[operation]
    lengths = LENGTHS if target.device == "cuda" else ON_CPU
    for base_title, base in _bases(calls.simple(lengths).items(), judged, probe):
        changes = calls.changes(base)
        singles = list(_changed(base_title, base, [(each,) for each in changes]))
        cells = [cell for cell in itertools.starmap(judged, [(base_title, base), *singles]) if cell]
        cells = _expressible(cells, probe)
        if cells[0].side == REFUSED:
            # Everything is refused, mostly by the same rule: once is enough.
            cells = [cells[0], *_one_a_rule(cells[1:], set(cells[0].rules))]
        shown = {rule for cell in cells for rule in cell.rules}
        pairs = _changed(
            base_title,
            base,
            [pair for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]],
        )
        more = [
            cell
            for cell in itertools.starmap(judged, pairs)
            if cell is not None and not set(cell.rules) <= shown
        ]
        found += [*cells, *_one_a_rule(_expressible(more, probe), shown)]
    once = {cell.problem: cell for cell in found}.values()
    return [replace(cell, number=number) for number, cell in enumerate(once)]


def _cell(
    title: str, problem: Problem, feature: Feature, target: Target, book: RuleBook
) -> Cell | None:
    """Return the side that a call is on; None where no rule speaks of it."""
    refusals = refusing(feature, target, book=book)
    if refusals:
        called = tuple(dict.fromkeys(word for rule in refusals for word in rule.called))
        return Cell(title, problem, feature, REFUSED, _ids(refusals), called)
    decision = decide(feature, target, book=book)
    if not decision.supported:
        return None
    return Cell(title, problem, feature, SUPPORTED, (decision.rule,), ("right",))


def _ids(rules: Sequence[Rule]) -> tuple[str, ...]:
    return tuple(rule.id for rule in rules)


def _expressible(cells: Sequence[Cell], probe: Probe) -> list[Cell]:
    reasons = probe([cell.problem for cell in cells])
    return [cell for cell, reason in zip(cells, reasons, strict=True) if reason is None]


def _one_a_rule(cells: Sequence[Cell], shown: set[str]) -> Iterator[Cell]:
    """Return one cell for each rule that is not shown yet, one of which fewest others speak."""
    left = {rule for cell in cells for rule in cell.rules} - shown
    for cell in sorted(cells, key=lambda each: len(each.rules)):
        if left & set(cell.rules):
            left -= set(cell.rules)
            yield cell


def _bases(
    simple: Iterable[tuple[str, Sequence[Problem]]],
    judged: Callable[[str, Problem], Cell | None],
    probe: Probe,
) -> Iterator[tuple[str, Problem]]:
    """Return a simple call of each phase: one that is supported if there is any, else refused."""
    for title, candidates in simple:
        cells = [cell for each in candidates if (cell := judged(title, each))]
        cells = _expressible(cells, probe)
        chosen = next((cell for cell in cells if cell.side == SUPPORTED), None) or next(
            iter(cells), None
        )
        if chosen is not None:
            yield title, chosen.problem


def _changed(
    title: str, base: Problem, changes: Sequence[tuple[Change, ...]]
) -> Iterator[tuple[str, Problem]]:
    """Return the calls that differ from a base by each of some sets of changes, where there are."""
    for some in changes:
        fields = {name: value for _, _, given in some for name, value in given.items()}
        try:
            problem = replace(base, **fields)
        except ValueError:  # no call is like that, such as nvfp4 with 24 channels
            continue
        if problem != base:
            yield f"{title}, {', '.join(name for _, name, _ in some)}", problem
