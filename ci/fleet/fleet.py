"""A run over machines of several kinds: what is asked of them, and what they answer, as one run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...properties.findings.names import Names, tell_apart
from ...properties.findings.report import (
    FOUND,
    SUITE_FAILED,
    Finding,
    ImplementationReport,
    RunReport,
)
from ...properties.search.ending import Ending
from ...properties.search.plan import Plan, first_laws, laws_planned
from ...properties.search.priority_executor import Queued, RankedQueue
from ...properties.search.priority_executor import Work as Waiting
from ...properties.search.progress import Progress
from ...properties.search.scheduler import Question, Scheduler
from ...properties.space.profiles import Cost
from ..answers.identity import with_seed
from ..answers.journal import Journal
from ..console.lines import note
from .ray_machines import RayMachines
from .units import GRACE_SECONDS, Job, Unit, UnitResult, Work

TICK_SECONDS = 0.2
"""Seconds between two checks of what units say."""


class PlaceQueue(RankedQueue[Waiting]):
    """Units in the order of their ranks, each of which waits until there is a place for it.

    Those that wait for one machine hold up none that may run elsewhere.
    """

    def __init__(self, machines: RayMachines) -> None:
        super().__init__()
        self._machines = machines

    def _may_begin(self, owner: str) -> bool:
        chip, _, node = owner.partition(" ")
        every, here = self._machines.places(chip), self._machines.places(chip, node)
        taken = sum(each for on, each in self._at_work.items() if on.startswith(f"{chip} "))
        # Of the units on a machine, those count that must run there: where the others do, the
        # machines decide. A unit of a chip without machines begins, to learn that there are none.
        return not every or (taken < every and self._at_work[owner] < here)

    def _choose(self, first: Sequence[Queued[Waiting]]) -> Queued[Waiting]:
        return min(first)


class Fleet:
    """Carries out a plan on machines; it is used as a `Run` is.

    Its units are questions to the scheduler that a run on one machine has, too.

    Args:
        plan: the plan, the same as for one machine.
        machines: the machines that carry it out.
        journal: the journal of the units that have ended; none is kept without.
    """

    def __init__(self, plan: Plan, machines: RayMachines, journal: Journal | None = None) -> None:
        self._journal = journal or Journal(None)
        # Examples are kept in a database of one machine.
        self.plan = replace(with_seed(plan, self._journal), examples=None)
        self.reference = ""
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
        self._places = {chip: machines.places(chip) for chip in machines.chips}
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._units: list[dict[str, Any]] = []
        self._scheduler = Scheduler(
            machines,
            sum(self._places.values()),
            self.ending,
            queue=PlaceQueue(machines),
            grace=GRACE_SECONDS,
            close=self._end_units,
        )
        self.report = self._report(list(machines.chips), ended=False)

    @property
    def chips(self) -> list[str]:
        """The kinds of machines."""
        return list(self.machines.chips)

    def fail(self, error: object) -> None:
        """Record a failure of what passes events on; the first error stays."""
        self.report.failure = self.report.failure or f"{SUITE_FAILED}: {error}"

    def execute(self) -> RunReport:
        """Run everything, and report what was learned even if the run ends early."""
        start = time.monotonic()
        finite = self.plan.seconds < float("inf")
        self.machines.start(Job(self.plan, time.time() + self.plan.seconds if finite else None))
        try:
            self._ask_ready()
            with closing(self.machines), self._listening():
                self._scheduler.run()
        finally:
            self._seconds = time.monotonic() - start
            self._take_report(self._report(self.chips, ended=True))
        return self.report

    def of_chip(self, chip: str) -> RunReport:
        """Return the report of one kind of machines, as one of them would write it."""
        return self._report([chip], ended=True)

    def _end_units(self) -> None:
        if self.ending.asked:
            self.machines.end(self.ending.asked)

    def _ask_ready(self) -> None:
        """Ask for the units that may begin; take the results that the journal has."""
        asked: list[tuple[Work, Unit]] = []
        for work in self._works.values():
            known = True
            while known and (units := work.ready()):
                known = False
                for unit in units:
                    if self.ending.asked:  # at a result of the run before
                        self.ending.ended = self.ending.asked
                        return
                    if (result := self._recalled(unit)) is None:
                        asked.append((work, unit))
                    else:
                        known = True
                        self._take(unit, result)
        # All of them before the first begins: those of a machine share its cores.
        with self._lock:
            self._asked.update(work.chip for work, _ in asked)
        for work, unit in asked:
            ask, take = partial(self._carried_out, unit), partial(self._take_answer, work, unit)
            self._scheduler.ask(Question(work, ask, take, (work.rank(unit),)))

    def _recalled(self, unit: Unit) -> UnitResult | None:
        """Return what a unit has learned in the run before; None where it has not ended there."""
        result = self._journal.recall(
            unit.question, lambda answer: UnitResult.from_data(answer["result"])
        )
        if result is not None and self.plan.exit_first:
            result.keep_first()
        return result

    def _carried_out(self, unit: Unit, machines: RayMachines) -> tuple[UnitResult | None, float]:
        """Return what a unit has learned, and the seconds that it took."""
        begun = time.monotonic()
        try:
            return machines.carry_out(unit, self._asked[unit.chip]), time.monotonic() - begun
        finally:
            with self._lock:
                self._asked[unit.chip] -= 1

    def _take_answer(self, work: Work, unit: Unit, answer: tuple[UnitResult | None, float]) -> None:
        result, seconds = answer
        if result is None and not self.machines.places(unit.chip):
            self._lost.setdefault(unit.chip, "its last machine is gone")
        elif result is None:
            work.again(unit)
        elif result.elsewhere:
            work.again(unit, result.elsewhere)
        elif result.run.lost:
            self.machines.leave(result.node)
            if self.machines.places(unit.chip) and not self.ending.ended:
                work.again(unit)
            else:
                self._lost[unit.chip] = result.run.lost
                self._take(unit, result)
        else:
            self._note(unit, result, seconds)
            if not result.ended_early:
                known = {"unit": unit.key, "result": result.to_data()}
                self._journal.keep_or_stop(unit.question, known, note)
            self._listen()
            self._take(unit, result)
        self._ask_ready()

    def _note(self, unit: Unit, result: UnitResult, seconds: float) -> None:
        name, took = result.report.name, round(seconds, 3)
        self._units.append(
            {"chip": unit.chip, "implementation": name, "number": unit.number, "seconds": took}
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

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Have what units say passed on now and then, in the thread that takes answers."""
        done, taken = threading.Event(), threading.Event()

        def take() -> None:
            try:
                self._listen()
            finally:
                taken.set()

        def listen() -> None:
            taken.set()
            while not done.wait(TICK_SECONDS):
                if taken.is_set():  # one at a time: machines may be slower than the clock
                    taken.clear()
                    self._scheduler.post(self, take)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            yield
        finally:
            done.set()
            listener.join()

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
        kept = {"broken": self.report.broken, "failure": self.report.failure}
        vars(self.report).update(vars(report) | kept)

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
