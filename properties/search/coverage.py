"""Measuring what a run has reached of an implementation, and which floors it has missed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ...impl.features import drawn_features
from ...reference import Problem
from ...reference.operations import OPERATIONS as REFERENCE
from ..findings.claimed_space import AxisClaims, ClaimTally, surveyed
from ..findings.coverage import Coverage, Gap
from ..findings.kernels import kernel_gaps
from ..findings.report import EARLY, LawReport
from ..laws import Law
from ..space.axes import Axes, all_axes, example, fields_of, has
from ..space.axis_values import NO_FIELDS
from ..space.operations import OPERATIONS

EDGE_FLOOR = 3
"""Fewest problems beyond the largest tile, or split, that an implementation names."""
MOST_KNOWN = 10_000
"""Number of an implementation's problems that are counted once across laws. Later ones count once a
law, so that memory does not grow with the length of a run."""
DUE, LEAST_DUE = 20, 60
"""Structures per value of an axis, and in all, from which on a value that none has is a gap. A
structure is a problem without its regime and seed: its switches are drawn once. Half of a slow
implementation's structures are long requests, which have few switches."""
QUANTILES = (0.0, 0.5, 0.9, 1.0)


class Reached:
    """What the problems of an implementation have reached so far: counts, not the problems.

    Args:
        axes: what was drawn from.
        declared: what the implementation declares; ``tile`` and ``split`` are numbers of keys.
    """

    def __init__(self, axes: Axes, declared: Mapping[str, Any]) -> None:
        self._space = OPERATIONS[axes.operation]
        self._tile, self._split = int(declared.get("tile") or 0), int(declared.get("split") or 0)
        self._values = _Values(axes, REFERENCE[axes.operation].problem)
        space = all_axes(axes.operation)
        # A law changes fields: a problem that is judged may have a value that is never drawn.
        every = _Values(Axes(axes.operation, space, 0), REFERENCE[axes.operation].problem)
        self._claims = ClaimTally(
            surveyed(space, axes.values, axes.refused),
            every.of,
            set(every.claimed),
            whole=not axes.restrictions,
        )
        self._known: set[str] = set()
        self._structures: set[Hashable] = set()
        self._edges: Counter[str] = Counter()
        self._lengths: dict[str, Counter[int]] = {}
        self._owed = self._space.owed(axes)
        self._real = _Real(axes)
        self._axes, self._declared = axes, frozenset(declared.get("features", ()))
        self._unset = frozenset(declared.get("unset_flags", ()))
        self._taken: set[str] = set()
        self._seen = _Seen()
        self._refused = _Seen()

    def include(self, report: LawReport) -> None:
        """Count the problems of a law that has ended."""
        for name, each in report.problems.items():
            if each.status == "UNSUPPORTED":
                self._refused.add(self._values.of(each.problem))
                self._real.refused |= self._real.of(each.problem)
                self._taken.update(drawn_features(each.problem))
                self._claims.refused(each.problem, report.unsupported_reason)
            elif not each.vacuous and name not in self._known:
                if len(self._known) < MOST_KNOWN:
                    self._known.add(name)
                self._add(each.problem)

    def _add(self, problem: Problem) -> None:
        for name, crossed in self._space.edges(problem, self._tile, self._split).items():
            self._edges[name] += crossed
        for name, length in self._space.lengths(problem).items():
            self._lengths.setdefault(name, Counter())[length] += 1
        values = self._values.of(problem)
        self._seen.add(values)
        self._claims.judged(problem)
        if len(self._structures) < MOST_KNOWN:
            lengths = (getattr(problem, "query_lens", ()), getattr(problem, "seq_lens", ()))
            named = (pair for pair in values.items() if pair[0] != "regime")
            self._structures.add((*lengths, *named))
        self._real.seen |= self._real.of(problem)
        self._taken.update(drawn_features(problem))

    def _of_features(self) -> list[Gap]:
        """Return the declared features that no problem took, though a value that is drawn has them.

        One that the implementation refuses on this machine is among the claimed space's refusals.
        """
        if len(self._structures) < LEAST_DUE:
            return []
        missing = self._declared & _features_of(self._axes) - self._taken
        return [Gap("feature", name) for name in sorted(missing)]

    def _of_kernels(self, reports: Sequence[LawReport]) -> list[Gap]:
        """Return what is owed of Triton kernels: lines, and features of their adapter."""
        kernels = [each.kernels for each in reports]
        if not any(each.files for each in kernels):
            return []
        return [*self._of_features(), *kernel_gaps(kernels, self._unset)]

    def claimed_space(self) -> dict[str, AxisClaims]:
        """Return the values claimed and refused, by axis."""
        return self._claims.space()

    def coverage(
        self, laws: Sequence[Law], reports: Sequence[LawReport], *, thorough: bool = False
    ) -> Coverage:
        """Return what was reached.

        Args:
            laws: the laws that were to run.
            reports: the reports of those that have run.
            thorough: whether features and lines of kernels count too, see ``Profile.thorough``.
        """
        values = self._values
        unseen = values.unseen(self._seen)
        edges = [("several_tiles", self._tile), ("several_splits", self._split)]
        if len(self._structures) >= DUE:
            edges += [(name, 1) for name in self._owed]
        gaps = [
            *_of_laws(laws, reports),
            *(
                Gap("edge", name, judged=self._edges[name], floor=EDGE_FLOOR)
                for name, wanted in edges
                if wanted and self._edges[name] < EDGE_FLOOR
            ),
            *(
                Gap("axis", axis, value)
                for axis, missing in unseen.items()
                if axis in values.named
                and len(self._structures) >= max(LEAST_DUE, DUE * len(values.claimed[axis]))
                # What was refused each time that it was drawn is not claimed.
                for value in missing
                if (axis, value) not in self._refused.values and values.reachable(axis, value)
            ),
            *self._real.gaps(len(self._structures)),
            *(self._of_kernels(reports) if thorough else ()),
        ]
        return Coverage(
            asked=len(laws),
            judged={each.law: each.judged for each in reports},
            early={each.law: each.ended for each in reports if each.ended in EARLY},
            idle=tuple(each.law for each in reports if each.ended == "idle"),
            lengths={name: _quantiles(counts) for name, counts in self._lengths.items()},
            edges=dict(self._edges),
            pairs=(len(self._seen.pairs), values.all_pairs),
            unseen=unseen,
            gaps=tuple(gaps),
            real=self._real.by_axis(self._real.seen),
            real_unseen=self._real.by_axis(self._real.known - self._real.seen),
            without_long=next((each.without_long for each in reports if each.without_long), ""),
            without_full=next((each.without_full for each in reports if each.without_full), ""),
        )


def _features_of(axes: Axes) -> set[str]:
    """Return the features of problems that may be drawn: those with one value of one axis."""
    examples = (
        example(part.operation, {**part.simplest, axis: value})
        for part in axes.restricted()
        if part.simplest
        for axis, values in part.values.items()
        for value in values
    )
    return {name for problem in examples for name in drawn_features(problem)}


class _Real:
    """Values that models have, of the table ``real_values.TABLE``.

    Attributes:
        known: those that may be drawn, by axis and in words.
        seen, refused: those that judged problems had, and refused ones.
    """

    def __init__(self, axes: Axes) -> None:
        real = OPERATIONS[axes.operation].real
        parts = axes.restricted() if real else []
        rows = [row for part in parts for row in real.values(part)] if real else []
        self._values = {(axis, value) for row in rows for axis, value in row.items()}
        self.known = {(axis, str(value)) for axis, value in self._values}
        # One part's problems are a part of all: its shares are of those.
        self._many: dict[tuple[str, str], float] = {}
        for part in parts:
            for key, share in (real.many(part) if real else {}).items():
                self._many[key] = self._many.get(key, 0.0) + share / len(parts)
        self.seen: set[tuple[str, str]] = set()
        self.refused: set[tuple[str, str]] = set()

    def of(self, problem: Problem) -> set[tuple[str, str]]:
        """Return the values that a problem has."""
        return {(axis, str(value)) for axis, value in self._values if has(problem, axis, value)}

    def by_axis(self, values: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
        """Return values by axis, in order."""
        found: dict[str, list[str]] = {}
        for axis, value in sorted(values, key=lambda each: (each[0], len(each[1]), each[1])):
            found.setdefault(axis, []).append(value)
        return {axis: tuple(each) for axis, each in found.items()}

    def gaps(self, judged: int) -> list[Gap]:
        """Return the values of many families that no problem had, though many were to have it."""
        return [
            Gap("real", axis, value)
            for (axis, value), share in self._many.items()
            if (axis, value) not in self.seen | self.refused and share * judged >= DUE
        ]


@dataclass
class _Seen:
    """Values of axes, by their names, that problems had, and pairs of them in the axes' order."""

    values: set[tuple[str, str]] = field(default_factory=set)
    pairs: set[tuple[tuple[str, str], tuple[str, str]]] = field(default_factory=set)

    def add(self, values: Mapping[str, str]) -> None:
        """Add the values of a problem."""
        these = tuple(values.items())
        self.values.update(these)
        self.pairs.update(itertools.combinations(these, 2))


def _of_laws(laws: Sequence[Law], reports: Sequence[LawReport]) -> list[Gap]:
    by_name = {each.law: each for each in reports}
    gaps = []
    for law in laws:
        report = by_name.get(law.name)
        if report is None:
            gaps.append(Gap("law", law.name, floor=law.floor))
        elif report.incomplete:
            each = report.seconds / report.judged if report.judged else None
            left = report.floor - report.drawn
            seconds = None if each is None else round(each * left, 1)
            gaps.append(Gap("law", law.name, "", report.drawn, report.floor, seconds))
    return gaps


def _quantiles(counts: Counter[int]) -> tuple[int, int, int, int]:
    numbers = sorted(counts.elements())
    least, median, p90, most = (numbers[round(q * (len(numbers) - 1))] for q in QUANTILES)
    return least, median, p90, most


class _Values:
    """The values of axes that problems have.

    Attributes:
        claimed: values of each axis that follow from a problem's fields.
        named: names of the axes that no module fixes, and whose values are switches or names: of
            numbers, such as lengths, an axis lists those that are likely to show a fault.
    """

    def __init__(self, axes: Axes, kind: type[Problem]) -> None:
        fixed = {name for part in axes.restrictions for name in part}
        self._axes = axes
        self.claimed: dict[str, tuple[Any, ...]] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[Hashable, ...], str | None] = {}
        for axis, values in axes.values.items():
            if axis in NO_FIELDS:
                continue
            # Modules that were built hold these values only.
            part = tuple(value for each in axes.restrictions for value in each.get(axis, ()))
            names = dict.fromkeys(name for each in part or values for name in fields_of(axis, each))
            if names.keys() <= {each.name for each in fields(kind)}:
                # A value of more fields first: it has all those of a value of fewer.
                claimed = dict.fromkeys(sorted(part or values, key=partial(_fewest_fields, axis)))
                self.claimed[axis], self._names[axis] = tuple(claimed), tuple(names)
        self.named = {
            axis
            for axis, claimed in self.claimed.items()
            if axis not in fixed and all(map(_is_name, claimed))
        }

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

    def unseen(self, seen: _Seen) -> dict[str, tuple[str, ...]]:
        """Return the claimed values of each axis that no problem has."""
        missing = {}
        for axis, claimed in self.claimed.items():
            left = tuple(value for value in map(str, claimed) if (axis, value) not in seen.values)
            if left:
                missing[axis] = left
        return missing

    def reachable(self, axis: str, name: str) -> bool:
        """Whether a problem of the modules that were built can have a claimed value of an axis.

        A pattern needs a mask, and views need keys that do not hold the values: where all modules
        are of other values, no problem that is drawn has them.
        """
        value = next(each for each in self.claimed[axis] if str(each) == name)
        space = all_axes(self._axes.operation)
        for part in self._axes.restrictions or ({},):
            fixed = {each: values for each, values in part.items() if each not in NO_FIELDS}
            base = {each: values[0] for each, values in {**space, **part}.items()}
            base |= {k: v for k, v in self._axes.simplest.items() if k not in part}
            for dims in part.get("head_dims") or self._axes.values.get("head_dims") or (None,):
                chosen = {**base, **({} if dims is None else {"head_dims": dims}), axis: value}
                problem = example(self._axes.operation, chosen)
                if has(problem, axis, value) and all(
                    any(has(problem, each, allowed) for allowed in values)
                    for each, values in fixed.items()
                ):
                    return True
        return False

    @property
    def all_pairs(self) -> int:
        """How many pairs of values of two axes there are."""
        sizes = [len(claimed) for claimed in self.claimed.values()]
        return sum(a * b for a, b in itertools.combinations(sizes, 2))


def _fewest_fields(axis: str, value: Any) -> int:  # noqa: ANN401  a value of any axis
    return -len(fields_of(axis, value))


def _is_name(value: object) -> bool:
    """Whether a value of an axis is a switch or a name, or several."""
    several = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | str) for each in several)
