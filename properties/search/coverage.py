"""Measuring what a run has reached of an implementation, and which floors it has missed."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from ...reference import Problem
from ...reference.operations import OPERATIONS as REFERENCE
from ..findings.coverage import Coverage, Gap
from ..findings.report import EARLY, LawReport
from ..laws import Law
from ..space.axes import Axes, fields_of, has
from ..space.operations import OPERATIONS

EDGE_FLOOR = 3
"""Problems beyond the largest tile, or split, that an implementation names."""
DUE = 20
"""Problems judged for each value of an axis from which on a value that none has is a gap."""
QUANTILES = (0.0, 0.5, 0.9, 1.0)


def covered(
    axes: Axes, laws: Sequence[Law], reports: Sequence[LawReport], declared: Mapping[str, Any]
) -> Coverage:
    """Return what was reached of an implementation.

    Args:
        axes: what was drawn from.
        laws: that were to run.
        reports: of those that have run.
        declared: by the implementation; ``tile`` and ``split`` are numbers of keys.
    """
    judged, refused = _problems(reports)
    space = OPERATIONS[axes.operation]
    tile, split = int(declared.get("tile") or 0), int(declared.get("split") or 0)
    edges = [space.edges(problem, tile, split) for problem in judged]
    counts = {name: sum(each[name] for each in edges) for name in (edges[0] if edges else ())}
    values = _Values(axes, REFERENCE[axes.operation].problem)
    seen = [values.of(problem) for problem in judged]
    result = Coverage(
        asked=len(laws),
        judged={each.law: each.judged for each in reports},
        early={each.law: each.ended for each in reports if each.ended in EARLY},
        idle=tuple(each.law for each in reports if each.ended == "idle"),
        lengths=_lengths([space.lengths(problem) for problem in judged]),
        edges=counts,
        pairs=values.pairs(seen),
        unseen=values.unseen(seen),
    )
    tried = values.unseen([values.of(problem) for problem in refused])
    gaps = [
        *_of_laws(laws, reports),
        *(
            Gap("edge", name, judged=counts.get(name, 0), floor=EDGE_FLOOR)
            for name, wanted in (("several_tiles", tile), ("several_splits", split))
            if wanted and counts.get(name, 0) < EDGE_FLOOR
        ),
        *(
            Gap("axis", axis, value)
            for axis, missing in result.unseen.items()
            if axis in values.named and len(judged) >= DUE * len(values.claimed[axis])
            # What was refused each time that it was drawn is not claimed.
            for value in missing
            if value in tried.get(axis, ())
        ),
    ]
    return replace(result, gaps=tuple(gaps))


def _problems(reports: Sequence[LawReport]) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that a law judged, and those that were refused only; none twice."""
    judged, refused = {}, {}
    for report in reports:
        for name, seen in report.problems.items():
            if seen.status == "UNSUPPORTED":
                refused[name] = seen.problem
            elif not seen.vacuous:
                judged[name] = seen.problem
    return list(judged.values()), [each for name, each in refused.items() if name not in judged]


def _of_laws(laws: Sequence[Law], reports: Sequence[LawReport]) -> list[Gap]:
    by_name = {each.law: each for each in reports}
    gaps = []
    for law in laws:
        report = by_name.get(law.name)
        if report is None:
            gaps.append(Gap("law", law.name, floor=law.floor))
        elif report.incomplete:
            each = report.seconds / report.judged if report.judged else None
            left = report.floor - report.judged
            seconds = None if each is None else round(each * left, 1)
            gaps.append(Gap("law", law.name, "", report.judged, report.floor, seconds))
    return gaps


def _lengths(found: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int, int, int]]:
    if not found:
        return {}
    result = {}
    for name in found[0]:
        numbers = sorted(each[name] for each in found)
        least, median, p90, most = (numbers[round(q * (len(numbers) - 1))] for q in QUANTILES)
        result[name] = (least, median, p90, most)
    return result


class _Values:
    """The values of axes that problems have.

    Attributes:
        claimed: values of each axis that can be told by a problem's fields.
        named: names of the axes that no module fixes, and whose values are switches or names: of
            numbers, such as lengths, an axis lists those that are likely to show a fault.
    """

    def __init__(self, axes: Axes, kind: type[Problem]) -> None:
        fixed = {name for part in axes.restrictions for name in part}
        self.claimed: dict[str, tuple[Any, ...]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[Hashable, ...], str | None] = {}
        for axis, values in axes.values.items():
            # Modules that were built hold these values only.
            part = tuple(value for each in axes.restrictions for value in each.get(axis, ()))
            names = dict.fromkeys(name for each in part or values for name in fields_of(axis, each))
            if names.keys() <= {each.name for each in fields(kind)}:
                # A value of more fields first: it has all those of a value of fewer.
                claimed = dict.fromkeys(sorted(part or values, key=partial(_fewest_fields, axis)))
                self.claimed[axis], self._names[axis] = tuple(claimed), tuple(names)
        self.named = {
            axis for axis, claimed in self.claimed.items()
            if axis not in fixed and all(map(_is_name, claimed))
        }  # fmt: skip

    def of(self, problem: Problem) -> dict[str, str]:
        """Return the claimed value that a problem has of each axis."""
        found = {}
        for axis, names in self._names.items():
            key = (axis, *(getattr(problem, name) for name in names))
            if key not in self._known:
                claimed = (str(value) for value in self.claimed[axis] if has(problem, axis, value))
                self._known[key] = next(claimed, None)
            if (value := self._known[key]) is not None:
                found[axis] = value
        return found

    def unseen(self, seen: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
        """Return the claimed values of each axis that no problem has."""
        missing = {}
        for axis, claimed in self.claimed.items():
            had = {each.get(axis) for each in seen}
            if left := tuple(value for value in map(str, claimed) if value not in had):
                missing[axis] = left
        return missing

    def pairs(self, seen: Sequence[Mapping[str, str]]) -> tuple[int, int]:
        """Count the pairs of values of two axes that some problem has, and all pairs."""
        had = {pair for each in seen for pair in itertools.combinations(each.items(), 2)}
        sizes = [len(claimed) for claimed in self.claimed.values()]
        return len(had), sum(a * b for a, b in itertools.combinations(sizes, 2))


def _fewest_fields(axis: str, value: Any) -> int:  # noqa: ANN401  a value of any axis
    return -len(fields_of(axis, value))


def _is_name(value: object) -> bool:
    """Whether a value of an axis is a switch or a name, or several."""
    several = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | str) for each in several)
