"""The unit of work of a fleet: some laws on one implementation, on one kind of machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ...fixtures import FOLDER
from ...properties.findings.ledger import Ledger
from ...properties.findings.report import ImplementationReport, RunReport
from ...properties.laws import Law
from ...properties.search.building import Claim
from ...properties.search.engine import Run, usual_jobs
from ...properties.search.plan import NOTHING, Learned, Part, Plan, first_laws
from ...properties.search.progress import Progress
from ...properties.space.axes import Axes
from ...properties.space.profiles import Cost

UNIT_SECONDS = 60.0
"""Seconds that a later unit is to take; starting its processes takes some of its own."""


@dataclass(frozen=True)
class Unit:
    """Some laws on one implementation.

    Attributes:
        chip: the kind of machine that it needs.
        implementation: its name, or MODULE:NAME.
        number: of the unit, among those of the implementation; the first is 0.
        laws: their names; None for the first ones, see ``Part``.
        learned: what the laws before these have found.
        costs: that the first unit has measured, by the implementation's name.
        node: that has its modules, or builds them; any of the chip if empty.
    """

    chip: str
    implementation: str
    number: int = 0
    laws: tuple[str, ...] | None = None
    learned: Learned = NOTHING
    costs: dict[str, Cost] = field(default_factory=dict)
    node: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is known by."""
        return self.chip, self.implementation, self.number


@dataclass(frozen=True)
class UnitResult:
    """What a unit has learned.

    Attributes:
        run: its report, of one implementation.
        learned: what its own laws have found, for those after them.
        axes: what problems were drawn from; None where none were.
        costs: of the implementation, by its name.
        builds: minutes of one core that each library took to build.
        node: on which it ran.
        elsewhere: node on which it is to run, for its modules are built there; empty for this one.
    """

    run: RunReport
    learned: Learned = NOTHING
    axes: Axes | None = None
    costs: dict[str, Cost] = field(default_factory=dict)
    builds: dict[str, float] = field(default_factory=dict)
    node: str = ""
    elsewhere: str = ""

    @property
    def report(self) -> ImplementationReport:
        """The report of its implementation."""
        return self.run.implementations[0]

    @property
    def ended_early(self) -> bool:
        """Whether it ended before it was done: another run would learn more."""
        return bool(self.run.ended or self.run.lost)


def later_laws(laws: Sequence[Law], seconds: float) -> list[tuple[str, ...]]:
    """Return the names of the laws of each later unit.

    Args:
        laws: of the implementation, in their order.
        seconds: that the first unit's laws took.
    """
    first = first_laws(laws)
    rest = laws[len(first) :]
    each = seconds / sum(law.weight for law in first) if first else 0.0
    weight = sum(law.weight for law in rest)
    count = min(len(rest), max(1, round(each * weight / UNIT_SECONDS)))
    parts: list[tuple[str, ...]] = [()] * count
    passed = 0.0
    for law in rest:
        part = min(count - 1, int(count * (passed + law.weight / 2) / weight))
        parts[part] += (law.name,)
        passed += law.weight
    return [part for part in parts if part]


@dataclass(frozen=True)
class Job:
    """What every unit of a run is given beside its own fields.

    Attributes:
        plan: of the whole run.
        until: seconds since the epoch at which the run ends; None for no limit.
        fixtures: folder of the driver's data, whose paths become this machine's.
    """

    plan: Plan
    until: float | None = None
    fixtures: Path = FOLDER


def run_unit(
    job: Job,
    unit: Unit,
    progress: Progress,
    started: Callable[[Run], Any] = lambda _: None,
    claimed: Claim = lambda _: True,
) -> UnitResult:
    """Carry out a unit on this machine.

    Args:
        job: of the run.
        unit: of the job.
        progress: receives what it does.
        started: receives the run, which it may end.
        claimed: asks the other machines before modules are built.

    Raises:
        UnsupportedError: there is no such device.
    """
    run = Run(_plan_of(job, unit), progress, claimed)
    started(run)
    report = run.execute()
    candidate = next(iter(run.candidates.values()), None)
    if candidate is None:
        return UnitResult(report, builds=dict(run.builds))
    given = unit.learned
    learned = Learned(
        tuple(candidate.smallest[len(given.smallest) :]),
        tuple(candidate.deadly[len(given.deadly) :]),
    )
    return UnitResult(report, learned, candidate.axes, dict(run.costs), dict(run.builds))


def _plan_of(job: Job, unit: Unit) -> Plan:
    plan = job.plan
    return replace(
        plan,
        implementations=[unit.implementation],
        jobs=1,
        ledger=_ledger_here(job),
        corpus=[replace(case, path=_here(job, case.path)) for case in plan.corpus],
        costs={**plan.costs, **unit.costs},
        seconds=plan.seconds if job.until is None else max(0.0, job.until - time.time()),
        part=Part(unit.laws, not unit.number, unit.learned, plan.jobs or usual_jobs(plan.device)),
    )


def _ledger_here(job: Job) -> Ledger:
    ledger = job.plan.ledger
    return replace(
        ledger,
        entries=tuple(
            structs.replace(each, case=_here(job, each.case)) if each.case else each
            for each in ledger.entries
        ),
    )


def _here(job: Job, path: Path) -> Path:
    """Return this machine's path of a file that ships with Kernelproof; others stay."""
    if job.fixtures in path.parents:
        return FOLDER / path.relative_to(job.fixtures)
    return path
