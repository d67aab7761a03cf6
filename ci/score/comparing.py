"""What usual comparisons would have found of the seeded bugs, on the same problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...properties.findings.report import ImplementationReport
from ...properties.isolation.machine import cores
from ...properties.isolation.workers import Deadlines, WorkerPool
from ...properties.search.preparation import survey
from ...properties.seeded import BUGS, HONEST, SeededBug
from ...properties.space.profiles import Profile
from ...properties.space.rounds import draw_problems
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, verdict_of
from ...properties.worker.tolerance_baselines import LOW_PRECISION, NAMES

DEADLINES = Deadlines(run=20.0)
Tell = Callable[[SeededBug, int], None]
"""Called with each bug that is done, and the number of its problems."""


@dataclass(frozen=True)
class Compared:
    """What became of one bug or control.

    Attributes:
        bug: which.
        judged: problems that every yardstick judged.
        rejected: number of these that each yardstick rejected.
    """

    bug: SeededBug
    judged: int
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Comparison:
    """What became of all."""

    compared: tuple[Compared, ...]

    def of(self, control: str) -> list[Compared]:
        """Return the bugs, or the honest controls, of the comparison."""
        return [each for each in self.compared if each.bug.control == control]

    def caught(self, yardstick: str, operation: str = "") -> list[str]:
        """Name the bugs, of an operation or of all, of which a yardstick rejected an answer."""
        return [
            each.bug.name
            for each in self.of("bug")
            if each.rejected[yardstick] and operation in ("", each.bug.operation)
        ]

    def accused(self, yardstick: str) -> list[str]:
        """Name the honest controls of which a yardstick rejected an answer."""
        return [each.bug.name for each in self.of("honest") if each.rejected[yardstick]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "compared": [each.bug.name for each in self.compared],
            "bugs": len(self.of("bug")),
            "moe_bugs": sum(each.bug.operation == "moe" for each in self.of("bug")),
            "honest": len(self.of("honest")),
            "problems": sum(each.judged for each in self.compared),
            "yardsticks": {
                name: {
                    "caught": self.caught(name),
                    "caught_of_moe": len(self.caught(name, "moe")),
                    "accused": self.accused(name),
                }
                for name in NAMES
            },
        }


def comparable(names: Sequence[str] = ()) -> list[SeededBug]:
    """Return the bugs and honest controls, or those of these names, that there is a measure for."""
    return [
        bug
        for bug in (*BUGS, *HONEST)
        if bug.operation in LOW_PRECISION and (not names or bug.name in names)
    ]


def compare(
    chosen: Sequence[SeededBug],
    profile: Profile,
    *,
    seed: int = 0,
    jobs: int = 0,
    judged: Tell = lambda _bug, _count: None,
) -> Comparison:
    """Measure bugs and honest controls by every yardstick, on a profile's number of problems."""
    jobs = jobs or cores()
    with open_pool("cpu", size=jobs) as pool, ThreadPoolExecutor(jobs) as executor:
        return Comparison(
            tuple(executor.map(lambda bug: _compare(pool, bug, profile, seed, judged), chosen))
        )


def _compare(
    pool: WorkerPool,
    bug: SeededBug,
    profile: Profile,
    seed: int,
    judged: Tell,
) -> Compared:
    address = Address(bug.reference, None, "cpu")
    rejected: Counter[str] = Counter()
    count = 0
    with pool.lease() as worker:
        report = ImplementationReport(bug.name, bug.reference)
        axes = survey(worker, address, profile.max_work, report)
        if axes is None:
            message = f"{bug.name} cannot be compared: {report.error or report.refusal}"
            raise RuntimeError(message)
        for problem in draw_problems(axes, profile, seed, profile.problems):
            outcome = worker.run(address.request("measure", problem=problem.to_json()), DEADLINES)
            if outcome.status != "done":
                verdict_of(outcome)
                rejected.update(NAMES)  # it hung or died: no comparison misses that
            elif outcome.result:
                rejected.update(name for name, accepts in outcome.result.items() if not accepts)
            else:
                continue
            count += 1
        judged(bug, count)
    return Compared(bug, count, rejected)
