"""How long an implementation's calls take, and how long the next one may therefore take."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from ...reference import AttentionProblem, Problem
from ..isolation.stages import Deadlines

DEADLINE_FLOOR = 3.0
"""Shortest deadline of a run in seconds."""
DEADLINE_FACTOR = 30.0
"""Deadline of a run as a multiple of the median run of its size."""
OUTLIER_FACTOR = 5.0
"""Deadline of a run as a multiple of the second slowest run of any size: the slowest may be an
outlier. It matters where problems of one size differ in cost, as in the Triton interpreter."""
HURRY = 3.0
"""Divisor of the shortest deadline where a HANG is expected: on smaller problems, under other laws.
The smallest problem is confirmed with the full deadline."""
SIZE_BASE = 4
"""Ratio between the work of two neighbouring size classes."""
MOST_GROWTH = 64.0
"""Largest factor by which a measured cost is extrapolated to a larger size."""
COMPILE_SECONDS = 900.0
"""Deadline, in seconds, of a process's first call of a module."""
REMEMBERED = 64
"""Number of latest runs remembered for each size."""


def size_of(work: int) -> int:
    """Return the class of sizes that an amount of work belongs to."""
    size = 0
    while work >= SIZE_BASE:
        work //= SIZE_BASE
        size += 1
    return size


@dataclass
class DeadlineModel:
    """How long an implementation's calls take, over all laws: deadlines follow from it.

    Compiling is no part of it: that is a stage of its own.

    Attributes:
        compile_seconds: seconds that a first call of a module may take in a process.
        slowness: factor of the least of ``run``, of ``materialise`` and of ``judge``, under a tool
            that makes everything slow.
        patience: further factor of the least of ``run``, but not where a HANG is expected.
    """

    compile_seconds: float = COMPILE_SECONDS
    slowness: float = 1.0
    patience: float = 1.0
    _runs: dict[int, deque[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=REMEMBERED))
    )
    _slowest: tuple[float, float] = (0.0, 0.0)

    def record(self, problem: Problem, seconds: float) -> None:
        """Record the seconds of a call on a problem."""
        self._runs[size_of(problem.work)].append((seconds, _rows(problem)))
        # The two slowest runs, the slower one last.
        self._slowest = tuple(sorted((*self._slowest, seconds))[1:])  # type: ignore[assignment]

    def of(self, problem: Problem, *, hurried: bool = False) -> Deadlines:
        """Return the deadlines of the next case.

        Args:
            problem: the problem that is judged.
            hurried: a HANG is expected: wait for a part of the floor.
        """
        least = DEADLINE_FLOOR / HURRY if hurried else DEADLINE_FLOOR * self.patience
        floor = self.slowness * least
        usual = DEADLINE_FACTOR * self.usual_seconds(problem)
        # The largest of three: a floor for noise on a busy machine, the usual cost of this size,
        # and what any size has cost before. A deadline that is too short reports a HANG that is
        # none; one that is too long costs seconds each time that a real one is found.
        run = max(floor, usual, OUTLIER_FACTOR * self._slowest[0])
        usually = Deadlines(run=run, compile=self.compile_seconds)
        return replace(
            usually,
            materialise=self.slowness * usually.materialise,
            judge=self.slowness * usually.judge,
        )

    def usual_seconds(self, problem: Problem) -> float:
        """Return the seconds that a call on a problem usually takes; 0 if none was measured.

        The median of its size; where that was not measured, of the next smaller size that was,
        in proportion to the work; else of the next larger one. With more rows than those had, in
        proportion to the rows too: what loops over them in Python takes its time for each.
        """
        size = size_of(problem.work)
        runs = dict(self._runs)  # laws on other threads take note of theirs meanwhile
        smaller = [each for each in runs if each <= size]
        if not runs:
            return 0.0
        nearest = max(smaller) if smaller else min(runs)
        # Cost grows in proportion to the work. To a smaller size nothing is extrapolated: what a
        # call costs beside its work stays.
        growth = min(float(SIZE_BASE) ** max(size - nearest, 0), MOST_GROWTH)
        there = list(runs[nearest])
        more_rows = max(_rows(problem) / statistics.median(rows for _, rows in there), 1.0)
        seconds = statistics.median(seconds for seconds, _ in there)
        return min(growth * more_rows, MOST_GROWTH) * seconds


def _rows(problem: Problem) -> int:
    """Count the rows of an attention's result, heads of query tokens; 1 for other operations."""
    if not isinstance(problem, AttentionProblem):
        return 1
    return max(problem.num_tokens * problem.num_qo_heads, 1)
