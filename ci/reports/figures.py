"""What the page of a run draws: where answers are wrong, how errors are spread, laws by kernels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from markupsafe import Markup

from ...properties.findings.causes import Cause
from ...properties.findings.report import RATIO_EDGES, ImplementationReport, LawReport
from ...properties.verdicts.text import compact
from ...properties.verdicts.verdict import Verdict
from ...reference import Problem
from ..console.rendering import number
from .pictures import grid, histogram, quantile_edge, ranges

COLUMNS = 8
"""Most implementations in one table of laws."""
PASSING = (0.1, 0.5)
"""Edges of the shades of passing laws, by their worst ratio."""
WORTH_SAYING = 0.01
"""Least ratio that is written as a number."""
CELLS = {
    "FAIL": ("✗ FAIL", "bad"),
    "HANG": ("✗ HANG", "bad"),
    "CRASH": ("✗ CRASH", "bad"),
    "REJECTED": ("✗ REJECTED", "bad"),
    "FLAKY": ("✗ FLAKY", "bad"),
    "KNOWN": ("known", "known"),
    "INCOMPLETE": ("too few", "short"),
    "UNSUPPORTED": ("–", "none"),  # noqa: RUF001  a dash of its own
}
"""Text and class of a law's cell, by its verdict; where it passed, its worst ratio stands there."""


class ErrorMap(NamedTuple):
    """Where the answer to one problem is wrong: a picture, and its rows as a table."""

    title: str
    problem: str
    sentence: str
    axes: tuple[str, str]
    drawn: Markup
    rows: tuple[tuple[str, str, str], ...]


def error_maps(cause: Cause) -> list[ErrorMap]:
    """Return the maps with more than one cell: the largest as first found, and the smallest."""
    small = cause.finding
    seen = [
        (f"As first found under {each.law}", *each.first)
        for each in cause.members
        if each.first and each.first[0].id != small.problem.id
    ]
    largest = max(seen, key=lambda each: _cells(each[2]), default=None)
    shrunk = ("Shrunk to the smallest problem", small.problem, small.verdict)
    return [
        _error_map(title, problem, verdict.error_map)
        for title, problem, verdict in filter(None, (largest, shrunk))
        if verdict.error_map and _cells(verdict) > 1
    ]


def _cells(verdict: Verdict) -> int:
    return sum(map(len, verdict.error_map["worst"])) if verdict.error_map else 0


def _error_map(title: str, problem: Problem, found: Mapping[str, Any]) -> ErrorMap:
    worst: Sequence[Sequence[float]] = found["worst"]
    axes = _axes(found["tensor"], len(found["shape"]), problem)
    down, across = found["step"]

    def spread(cells: Iterator[int], axis: int, step: int) -> str:
        most = found["shape"][axis] if len(found["shape"]) > axis else 1
        inside = (range(each * step, min(each * step + step, most)) for each in cells)
        return ranges(chain.from_iterable(inside))

    outside = [(i, j) for i, row in enumerate(worst) for j, each in enumerate(row) if each > 1]
    largest = max(chain.from_iterable(worst))
    i, j = next(
        (i, j) for i, row in enumerate(worst) for j, each in enumerate(row) if each == largest
    )
    exact = "NaN, or wrong where every bit counts"
    size = f"{number(largest)} times the bound" if largest < math.inf else exact
    sentence = (
        f"{found['tensor']}: {len(outside)} of {sum(map(len, worst))} cells are outside the bound, "
        f"in {axes[0]} {spread((a for a, _ in outside), 0, down)} and "
        f"{axes[1]} {spread((b for _, b in outside), 1, across)}. "
        f"The worst is {size}, at {axes[0]} {i * down}, {axes[1]} {j * across}."
    )
    rows = tuple(
        (
            spread(iter((a,)), 0, down),
            spread((b for b, each in enumerate(row) if each > 1), 1, across),
            number(max(row)) if max(row) < math.inf else "NaN or exact",
        )
        for a, row in enumerate(worst)
        if max(row) > 1
    )
    drawn = grid(f"{title}: error over bound", sentence, axes, worst, found["step"])
    return ErrorMap(title, compact(problem), sentence, axes, drawn, rows)


def _axes(tensor: str, dimensions: int, problem: Problem) -> tuple[str, str]:
    """Name the first two axes of a tensor of an answer."""
    if tensor == "out":
        # The answer of experts has no heads.
        return ("token", "head" if dimensions == 3 else "channel")  # noqa: PLR2004
    if tensor in ("k_cache", "v_cache"):
        return ("page", "slot" if getattr(problem, "kv_layout", "NHD") == "NHD" else "head")
    return {
        "lse": ("token", "head"),
        "topk_weights": ("token", "choice"),
        "topk_ids": ("token", "choice"),
    }.get(tensor, ("entry", "column"))


@dataclass(frozen=True)
class Spread:
    """How error over bound is spread over the problems of an implementation.

    ``half`` and ``most`` are ratios that half of them, and 95 %, do not exceed; ``worst`` is the
    largest of those that passed.
    """

    name: str
    count: int
    outside: int
    half: str
    most: str
    worst: float
    drawn: Markup


def spreads(reports: Sequence[ImplementationReport]) -> list[Spread]:
    """Return how errors are spread, of the implementations of which some were measured."""
    return [_spread(each) for each in reports if each.ratios]


def _spread(report: ImplementationReport) -> Spread:
    counts = report.ratios
    count, outside = sum(counts), sum(counts[RATIO_EDGES.index(1.0) + 1 :])
    half, most = (_at_most(quantile_edge(counts, RATIO_EDGES, part)) for part in (0.5, 0.95))
    worst = max((law.passing_ratio for law in report.laws), default=0.0)
    told = f"Of {count} problems, half are {half}, 95 % {most}, and {outside} exceed the bound."
    drawn = histogram(f"Error over bound of {report.name}", told, RATIO_EDGES, counts)
    return Spread(report.name, count, outside, half, most, worst, drawn)


def _at_most(edge: float) -> str:
    if edge == math.inf:
        return f"> {RATIO_EDGES[-1]:,.0f}"
    return f"≤ {edge:,.0f}" if edge >= 1 else f"≤ {edge:.1g}"


class Cell(NamedTuple):
    """One law on one implementation: the text that stands there, and how it is coloured."""

    text: str
    tone: str


class Heat(NamedTuple):
    """Laws by implementations of one operation; a law that was not run has no cell."""

    operation: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def heat(reports: Sequence[ImplementationReport]) -> Iterator[Heat]:
    """Yield the tables of laws by implementations, by operation, each of a width to be read."""
    for operation in dict.fromkeys(each.operation for each in reports if each.laws):
        mine = [each for each in reports if each.operation == operation and each.laws]
        # Nine are five and four, not eight and one.
        size = math.ceil(len(mine) / math.ceil(len(mine) / COLUMNS))
        for start in range(0, len(mine), size):
            some = mine[start : start + size]
            laws = [{law.law: law for law in each.laws} for each in some]
            names = dict.fromkeys(chain.from_iterable(laws))
            rows = tuple(
                (name, tuple(_cell(of[name]) if name in of else None for of in laws))
                for name in names
            )
            yield Heat(operation, tuple(each.name for each in some), rows)


def _cell(law: LawReport) -> Cell:
    if law.verdict != "PASS":
        return Cell(*CELLS.get(law.verdict, (law.verdict, "bad")))
    ratio = law.passing_ratio
    if not ratio:
        return Cell("✓", "exact")
    # Cut, not rounded: 1.00 would be the bound itself.
    cut = math.floor(100 * ratio) / 100
    text = f"{cut:.2f}" if ratio >= WORTH_SAYING else f"<{WORTH_SAYING}"
    return Cell(text, f"pass{bisect_left(PASSING, ratio)}")
