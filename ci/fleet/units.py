"""The units of work of a fleet, each some laws on one implementation, on one kind of machine.

A unit is carried out by ``run_unit``; ``Work`` divides an implementation into units, says which of
them may begin, and makes its report of their results.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import structs

from ...fixtures import FOLDER
from ...impl.registry import resolve_name
from ...properties.findings.coverage import Coverage, Gap
from ...properties.findings.ledger import Ledger
from ...properties.findings.report import (
    CorpusReport,
    ImplementationReport,
    LawReport,
    RunReport,
)
from ...properties.laws import Law
from ...properties.search.building import Claim
from ...properties.search.coverage import Reached
from ...properties.search.engine import Run, not_begun, usual_jobs
from ...properties.search.plan import (
    NOTHING,
    Learned,
    Part,
    Plan,
    first_laws,
    is_thorough,
    laws_planned,
)
from ...properties.search.progress import Progress
from ...properties.space.axes import Axes
from ...properties.space.profiles import Cost
from ..answers.records import from_data, to_data

UNIT_SECONDS = 60.0
"""Seconds that a later unit is to take; starting its processes takes some of its own."""

GRACE_SECONDS = 20.0
"""Seconds that a run which ends early waits for units under way, which end as whole runs do."""
RANKS = 1_000_000
"""Ranks in the queue that the units of one number have, by their weights in hundredths."""


@dataclass(frozen=True)
class Unit:
    """Some laws on one implementation.

    Attributes:
        chip: the kind of machine that it needs.
        implementation: its name, or MODULE:NAME.
        number: the number of the unit, among those of the implementation; the first is 0.
        laws: their names; None for the first ones, see ``Part``.
        learned: what the laws before these have found.
        costs: the costs that the first unit has measured, by the implementation's name.
        node: the node that has its modules, or builds them; any of the chip if empty.
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
        """Chip, implementation and number, which identify the unit."""
        return self.chip, self.implementation, self.number

    @property
    def question(self) -> dict[str, Any]:
        """The question that its result answers in a journal; it is the same on every node."""
        told = (each for each in fields(self) if each.compare)
        return {"unit": {each.name: to_data(getattr(self, each.name)) for each in told}}


@dataclass(frozen=True)
class Event:
    """What a unit under way says: the name of a method of `Progress`, and its arguments."""

    unit: Unit
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class UnitResult:
    """What a unit has learned.

    Attributes:
        run: its report, of one implementation.
        learned: what its own laws have found, for those after them.
        axes: what problems were drawn from; None where none were.
        costs: the costs of the implementation, by its name.
        builds: minutes of one core that each library took to build.
        node: the node on which it ran.
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

    def keep_first(self) -> None:
        """Leave out all findings that no entry explains except the first."""
        report, found = self.report, False
        for finding in [*report.replayed, *(law.finding for law in report.laws)]:
            if finding is None or finding.entry:
                continue
            if found:
                report.replayed = [each for each in report.replayed if each is not finding]
                report.laws = [law for law in report.laws if law.finding is not finding]
            found = True

    def to_data(self) -> dict[str, Any]:
        """Return it as a journal keeps it."""
        return {name: to_data(each) for name, each in vars(self).items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> UnitResult:
        """Make it again from what ``to_data`` has written."""
        return cls(**from_data(data))


def later_laws(laws: Sequence[Law], seconds: float) -> list[tuple[str, ...]]:
    """Return the names of the laws of each later unit.

    Args:
        laws: the laws of the implementation, in their order.
        seconds: the seconds that the first unit's laws took.
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
        plan: the plan of the whole run.
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
        job: the job of the run.
        unit: the unit of the job.
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
    """Return this machine's path of a file that Kernelproof ships, any other path as it is."""
    if job.fixtures in path.parents:
        return FOLDER / path.relative_to(job.fixtures)
    return path


class Work:
    """One implementation on one chip.

    Its first unit begins alone: it says whether the implementation can be judged there at all,
    builds its modules, and measures what laws cost, which decides how large the later units are.
    They begin together, as if the laws before them found nothing. Where one does find something,
    the units after it run again, one after another: the report is that of one process.

    Args:
        chip: the kind of machine.
        name: the implementation's, or MODULE:NAME.
        plan: the plan of the whole run.
    """

    def __init__(self, chip: str, name: str, plan: Plan) -> None:
        self.chip, self._name, self._plan = chip, name, plan
        self._blank = ImplementationReport(name, resolve_name(name))
        self._shown: dict[int, dict[str, LawReport]] = {}
        self._results: dict[int, UnitResult] = {}
        self._units: list[Unit] = [Unit(chip, name)]
        self._begun: set[int] = set()
        self.error = ""
        """Reason why a unit has no result; empty if all have one."""
        self._weights: dict[int, float] = {}

    @property
    def reference(self) -> str:
        """Its chip and the machine that has its modules, by which its units wait in the queue."""
        return f"{self.chip} {self._units[-1].node}"

    def fail(self, error: object) -> None:
        """Record why a unit has no result; the first reason stays."""
        self.error = self.error or str(error)

    def ready(self) -> list[Unit]:
        """Return the units that may begin and have not, and count them as begun."""
        units = []
        for number, unit in enumerate(self._units):
            if number not in self._begun and (not number or 0 in self._results):
                learned = self._learned_before(number)
                whole = all(each in self._results for each in range(number))
                if whole or not (learned.smallest or learned.deadly):
                    self._begun.add(number)
                    units.append(replace(unit, learned=learned))
        self._units = [
            next((new for new in units if new.number == old.number), old) for old in self._units
        ]
        return units

    def rank(self, unit: Unit) -> int:
        """Return the place of a unit in the queue: breadth first, then the longest."""
        return RANKS * unit.number - round(100 * self._weights.get(unit.number, 0.0))

    def show(self, unit: Unit, law: LawReport) -> bool:
        """Keep what a law of a unit under way has found; whether it is new."""
        shown = self._shown.setdefault(unit.number, {})
        if not self._is_current(unit) or unit.number in self._results or law.law in shown:
            return False
        shown[law.law] = law
        return True

    def take(self, unit: Unit, result: UnitResult) -> list[LawReport] | None:
        """Take the result of a unit; None for one that had to run again, whose result is dropped.

        Returns:
            The laws that were not shown before.
        """
        if not self._is_current(unit) or unit.number in self._results:
            return None
        self._results[unit.number] = result
        report = result.report
        # Findings that were shown stay the same objects: what was said of them is kept by identity.
        shown = self._shown.pop(unit.number, {})
        new = [law for law in report.laws if law.law not in shown]
        report.laws = [shown.get(law.law, law) for law in report.laws]
        if not unit.number and not (report.error or report.refusal):
            self._divide(result)
        if result.learned.smallest or result.learned.deadly:
            for later in range(unit.number + 1, len(self._units)):
                self._results.pop(later, None)
                self._shown.pop(later, None)
                self._begun.discard(later)
        return new

    def again(self, unit: Unit, node: str = "") -> None:
        """Let a unit begin again that was lost with its machine, or is to run on another."""
        if self._is_current(unit):
            self._units[unit.number] = replace(unit, node=node or unit.node)
            self._shown.pop(unit.number, None)
            self._begun.discard(unit.number)

    def _is_current(self, unit: Unit) -> bool:
        return unit.number in self._begun and self._units[unit.number] == unit

    def _divide(self, first: UnitResult) -> None:
        laws = laws_planned(self._plan, first.report.operation)
        seconds = sum(law.seconds for law in first.report.laws)
        node = first.node if first.report.modules else ""
        for number, names in enumerate(later_laws(laws, seconds), 1):
            unit = Unit(self.chip, self._name, number, names, costs=dict(first.costs), node=node)
            self._units.append(unit)
            self._weights[number] = sum(law.weight for law in laws if law.name in names)

    def _learned_before(self, number: int) -> Learned:
        found = [self._results[each].learned for each in range(number) if each in self._results]
        return Learned(
            tuple(itertools.chain.from_iterable(each.smallest for each in found)),
            tuple(itertools.chain.from_iterable(each.deadly for each in found)),
        )

    @cached_property
    def final(self) -> ImplementationReport:
        """The report once nothing more comes: laws without a result are named in it."""
        report = self.report()
        self._complete(report)
        return report

    def report(self) -> ImplementationReport:
        """Return the report as far as it is known."""
        results = [self._results[number] for number in sorted(self._results)]
        parts = [result.report for result in results]
        laws = [law for part in parts for law in part.laws]
        laws += [law for shown in self._shown.values() for law in shown.values()]
        if not parts:
            merged = replace(self._blank, laws=laws)
        else:
            merged = replace(
                parts[0],
                laws=laws,
                replayed=[each for part in parts for each in part.replayed],
                corpus=sum((part.corpus for part in parts), CorpusReport()),
                error=next((part.error for part in parts if part.error), ""),
                suite_failed=any(part.suite_failed for part in parts),
                left=[left for part in parts for left in part.left],
                build_seconds=sum(part.build_seconds for part in parts),
                seconds=sum(part.seconds for part in parts),
            )
        if self.error:
            merged.fail(self.error)
        return merged

    def _complete(self, merged: ImplementationReport) -> None:
        laws = laws_planned(self._plan, merged.operation)
        known = {law.law: law for law in merged.laws}
        if not (merged.error or merged.refusal):
            declares = merged.declared.get("declares")
            merged.laws = [known.get(law.name) or not_begun(law, declares) for law in laws]
        axes = next(
            (result.axes for result in self._results.values() if result.axes is not None), None
        )
        if axes is None:
            if not (merged.error or merged.refusal):
                merged.coverage = Coverage(len(laws), gaps=(Gap("law", "any law"),))
            return
        reached = Reached(axes, merged.declared)
        for law in merged.laws:
            reached.include(law)
        thorough = is_thorough(self._plan)
        merged.coverage = reached.coverage(laws, merged.laws, thorough=thorough)
        merged.claimed_space = reached.claimed_space()
        for law in merged.laws:
            law.forget(all_of_them=law.finding is None)
