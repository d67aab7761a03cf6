"""A run over machines of several kinds: what is asked of them, and what they answer, as one run."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...properties.findings.names import Names, tell_apart
from ...properties.findings.report import (
    FOUND,
    INTERRUPTED,
    Finding,
    ImplementationReport,
    RunReport,
)
from ...properties.search.ending import Ending
from ...properties.search.plan import Plan, first_laws, laws_planned
from ...properties.search.progress import Progress
from ...properties.space.profiles import Cost
from ..answers.identity import with_seed
from ..answers.journal import Journal
from .units import Job, Unit, UnitResult, Work

TICK_SECONDS = 0.2
"""Most seconds between two checks of whether the run ends early."""
GRACE_SECONDS = 20.0
"""Seconds that a run which ends early waits for units under way, which end as whole runs do."""


@dataclass(frozen=True)
class Ended:
    """A unit that has ended.

    Attributes:
        unit: the unit that was submitted.
        result: None where there is none.
        error: why there is none; empty where its machine died, and it may run on another.
    """

    unit: Unit
    result: UnitResult | None = None
    error: str = ""


@dataclass(frozen=True)
class Event:
    """What a unit under way says: the name of a method of `Progress`, and its arguments."""

    unit: Unit
    method: str
    arguments: tuple[Any, ...]


class Machines(Protocol):
    """What carries units out."""

    @property
    def chips(self) -> Sequence[str]:
        """The kinds of machines, each with one that can be used."""

    def start(self, job: Job) -> None:
        """Take the job, which all units share."""

    def free(self, chip: str, node: str = "") -> int:
        """Count the units that can begin now; negative where no machine is left.

        Where a machine is named, those on it; where it is gone, those on the others.
        """

    def submit(self, units: Sequence[Unit]) -> None:
        """Begin units together: those of a machine share its cores."""

    def ended(self, seconds: float) -> list[Ended]:
        """Return the units that have ended, after a wait of at most these seconds."""

    def events(self) -> list[Event]:
        """Return what units have said since the last call."""

    def end(self, why: str) -> None:
        """Have units under way end soon; ``why`` is one of ``ENDINGS``."""

    def leave(self, node: str) -> None:
        """Stop using a machine that has lost its device."""


class Fleet:
    """Carries out a plan on machines; it is used as a `Run` is.

    Args:
        plan: the plan, the same as for one machine.
        machines: the machines that carry it out.
        journal: the journal of the units that have ended; none is kept without.
    """

    def __init__(self, plan: Plan, machines: Machines, journal: Journal | None = None) -> None:
        self._journal = journal or Journal(None)
        # Examples are kept in a database of one machine.
        self.plan = replace(with_seed(plan, self._journal), examples=None)
        self.ending = Ending(plan.seconds)
        self.progress = Progress()
        self.machines = machines
        self.costs: dict[str, Cost] = {}
        self.builds: dict[str, float] = {}
        self._works = {
            (chip, name): Work(chip, name, self.plan)
            for chip in machines.chips
            for name in plan.implementations
        }
        self._order = {key: number for number, key in enumerate(self._works)}
        self._names = Names()
        self._targets: dict[str, dict[str, Any]] = {}
        self._lost: dict[str, str] = {}
        self._respawns = 0
        self._left: list[Any] = []
        self._seconds = 0.0
        self._places: dict[str, int] = {}
        self._submitted: dict[tuple[str, str, int], float] = {}
        self._units: list[dict[str, Any]] = []
        self._queue: list[tuple[tuple[int, float], int, Unit]] = []
        self._count = itertools.count()
        self._running = 0
        self.report = self._report(list(machines.chips), ended=False)

    @property
    def chips(self) -> list[str]:
        """The kinds of machines."""
        return list(self.machines.chips)

    def execute(self) -> RunReport:
        """Run everything, and report what was learned even if the run ends early."""
        start = time.monotonic()
        finite = self.plan.seconds < float("inf")
        self.machines.start(Job(self.plan, time.time() + self.plan.seconds if finite else None))
        self._places = {chip: self.machines.free(chip) for chip in self.chips}
        try:
            self._begin_ready()
            while (self._queue or self._running) and not self.ending.due:
                self._submit()
                self._listen()
                self._collect(TICK_SECONDS)
            if self._queue or self._running:
                self._end_early()
        except KeyboardInterrupt:
            self.ending.end(INTERRUPTED)
            self._end_early()
        finally:
            self._seconds = time.monotonic() - start
            self._take_report(self._report(self.chips, ended=True))
        return self.report

    def of_chip(self, chip: str) -> RunReport:
        """Return the report of one kind of machines, as one of them would write it."""
        return self._report([chip], ended=True)

    def _end_early(self) -> None:
        self.ending.ended = self.ending.asked
        self._queue.clear()
        self.machines.end(self.ending.ended)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._running and time.monotonic() < deadline:
            self._listen()
            self._collect(TICK_SECONDS)

    def _begin_ready(self) -> None:
        """Queue the units that may begin; take the results that the journal has."""
        if self.ending.ended:
            return
        for work in self._works.values():
            while units := work.ready():
                known = False
                for unit in units:
                    result = self._journal.recall(
                        unit.question, lambda answer: UnitResult.from_data(answer["result"])
                    )
                    if result is None:
                        heapq.heappush(self._queue, (work.rank(unit), next(self._count), unit))
                    else:
                        known = True
                        self._take(unit, result)
                if not known:
                    break

    def _submit(self) -> None:
        """Submit as many units of each chip as its machines have room for."""
        kept: list[tuple[tuple[int, float], int, Unit]] = []
        begun: list[Unit] = []
        free: Counter[tuple[str, str]] = Counter()
        while self._queue:
            entry = heapq.heappop(self._queue)
            unit = entry[2]
            places = {(unit.chip, ""), (unit.chip, unit.node)}
            free.update({each: self.machines.free(*each) for each in places if each not in free})
            if free[unit.chip, ""] < 0:
                self._lost.setdefault(unit.chip, "its last machine is gone")
            elif all(free[each] for each in places):
                free.subtract(places)
                self._running += 1
                self._submitted[unit.key] = time.monotonic()
                begun.append(unit)
            else:
                kept.append(entry)
        if begun:
            self.machines.submit(begun)
        self._queue = kept
        heapq.heapify(self._queue)

    def _collect(self, seconds: float) -> None:
        for ended in self.machines.ended(seconds):
            self._running -= 1
            unit, result = ended.unit, ended.result
            work = self._works[unit.chip, unit.implementation]
            if result is not None and result.elsewhere:
                work.again(unit, result.elsewhere)
            elif result is not None and result.run.lost:
                self.machines.leave(result.node)
                if self.machines.free(unit.chip) >= 0 and not self.ending.ended:
                    work.again(unit)
                else:
                    self._lost[unit.chip] = result.run.lost
                    self._take(unit, result)
            elif result is not None:
                self._note(unit, result)
                if not result.ended_early:
                    answer = {"unit": unit.key, "result": result.to_data()}
                    self._journal.keep(unit.question, answer)
                self._listen()
                self._take(unit, result)
            elif ended.error:
                work.error = work.error or ended.error
            else:
                work.again(unit)
        self._begin_ready()

    def _note(self, unit: Unit, result: UnitResult) -> None:
        seconds = round(time.monotonic() - self._submitted[unit.key], 3)
        name = result.report.name
        self._units.append(
            {"chip": unit.chip, "implementation": name, "number": unit.number, "seconds": seconds}
        )

    def timing(self) -> dict[str, Any]:
        """Return the seconds of each unit, and how many run on a chip's machines at a time."""
        return {"seconds": self._seconds, "places": self._places, "units": self._units}

    def _take(self, unit: Unit, result: UnitResult) -> None:
        """Take a result; no event of its unit comes after it."""
        work = self._works[unit.chip, unit.implementation]
        if (new := work.take(unit, result)) is None:
            return
        report = result.report
        self._targets.setdefault(unit.chip, result.run.target)
        self._respawns += result.run.respawns
        self._left += result.run.left
        if len(self.chips) == 1:  # chips differ
            self.costs |= result.costs
        self.builds |= result.builds
        if not unit.number:
            if result.axes is None:
                self.progress.skipped(self._named(unit, report))
            else:
                self.progress.prepared(self._named(unit, report), 0)
        self._show(unit)
        for finding in [*report.replayed, *(law.finding for law in new if law.finding)]:
            self._announce(finding)
        for law in new:
            self.progress.law_done(self._named(unit, report), law)

    def _listen(self) -> None:
        """Pass the events of units on to the progress."""
        for event in self.machines.events():
            unit, (first, *more) = event.unit, event.arguments
            if event.method == "law_done":
                work, law = self._works[unit.chip, unit.implementation], more[0]
                if work.show(unit, law):
                    self._show(unit)
                    if law.finding:
                        self._announce(law.finding)
                    self.progress.law_done(self._named(unit, first), law)
            elif event.method == "prepared":
                self.progress.prepared(self._named(unit, first), self._planned(first, *more))
            else:
                getattr(self.progress, event.method)(self._told(unit, first), *more)

    def _announce(self, finding: Finding) -> None:
        """Show a finding that no entry explains, which ends a run that looks for one only."""
        if not finding.entry:
            self.progress.found(finding)
            if self.plan.exit_first:
                self.ending.end(FOUND)

    def _planned(self, report: ImplementationReport, problems: int) -> int:
        """Return the number of problems of all laws, estimated from that of the first laws."""
        laws = laws_planned(self.plan, report.operation)
        first = sum(law.weight for law in first_laws(laws))
        return round(problems * sum(law.weight for law in laws) / first) if first else problems

    def _name(self, chip: str, name: str) -> str:
        return f"{name} on {chip}" if len(self.chips) > 1 else name

    def _named(self, unit: Unit, report: ImplementationReport) -> ImplementationReport:
        return replace(report, name=self._told(unit, report.name))

    def _told(self, unit: Unit, name: str) -> str:
        return self._name(unit.chip, self._names.tell(name, unit.implementation))

    def _show(self, unit: Unit) -> None:
        """Put what is known of an implementation into the report."""
        key = unit.chip, unit.implementation
        report = self._works[key].report()
        self.report.implementations[self._order[key]] = self._named(unit, report)

    def _take_report(self, report: RunReport) -> None:
        """Copy a report into the one that others already hold."""
        vars(self.report).update(vars(report) | {"broken": self.report.broken})

    def _report(self, chips: Sequence[str], *, ended: bool) -> RunReport:
        target: dict[str, Any] = {"device": self.plan.device}
        if len(chips) == 1:
            target = self._targets.get(chips[0], target)
        reports = []
        for chip in chips:
            here = [
                work.final if ended else work.report()
                for (of, _), work in self._works.items()
                if of == chip
            ]
            tell_apart(here)
            reports += [
                replace(report, name=self._name(chip, report.name)) if len(chips) > 1 else report
                for report in here
            ]
        return RunReport(
            self.plan.profile.name,
            self.plan.seed,
            target,
            reports,
            seconds=self._seconds,
            respawns=self._respawns,
            soak=self.plan.profile.soak,
            sanitizer=self.plan.sanitizer,
            distrust=self.plan.distrust,
            lost="; ".join(f"{chip}: {why}" for chip, why in self._lost.items() if chip in chips),
            left=list(self._left),
            ended=self.ending.ended,
        )
