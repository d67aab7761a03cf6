"""Trying both sides of the support table: what it allows must work, what it refuses must not.

Cells are called in isolated workers, all rules left out, module by module: the first call of a
module builds it, in parallel with others, and the rest then cost milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...impl import Target
from ...impl.gating import RuleBook
from ...impl.protocol import EVERY_RULE
from ..findings.ledger import Ledger
from ..findings.report import INTERRUPTED, TERMINATED
from ..isolation.machine import cores
from ..isolation.workers import Deadlines, Worker
from ..search.building import BUILD_DEADLINES, compilers, limited_to
from ..search.ending import Ending
from ..search.scheduler import Question, Scheduler
from ..space.restrictions import WHOLE_SPACE, Only
from ..verdicts.operations import OPERATIONS
from ..verdicts.verdict import Verdict
from ..worker.pools import open_pool
from ..worker.requests import Address, probe_device, verdict_of
from .cells import SUPPORTED, Cell
from .grouping import Choice, Group, groups_of
from .trials import (
    HANGS,
    KNOWN,
    NOT_RUN,
    RAISES,
    UNBUILT,
    Build,
    Trial,
    Tried,
    counts,
    outcome_of,
    status_of,
)

CALLING = Deadlines(run=20.0, compile=180.0, specialise=180.0)
"""Deadlines of a call whose module is built; the first call of each process still loads it."""
CALLING_SLOWLY = Deadlines(run=120.0, compile=180.0, specialise=180.0)
"""Deadlines of a call on a CPU, where Triton's interpreter is slow."""
MOST_WORKERS = 16
"""Most workers at a time, where the order names no number."""
LEFT_OUT = "its module is not among those that were to be built"
SLOWEST_FIRST = ("fa3", "fa2", "cuda-core")
"""Backends whose modules take longest to build."""


@dataclass(frozen=True)
class Order:
    """What is to be tried.

    Attributes:
        implementations: name and MODULE:NAME of each.
        device: ``"cpu"`` or ``"cuda"``.
        book: the book of support rules.
        ledger: known failures of supported calls.
        modules: most modules that are built of an implementation; all if 0.
        jobs: workers at a time; by cores if 0.
        only: values that a cell's problem must have.
        seconds: the seconds that the run may take, building included.
    """

    implementations: Mapping[str, str]
    device: str
    book: RuleBook
    ledger: Ledger = field(default_factory=Ledger)
    modules: int = 0
    jobs: int = 0
    only: Only = WHOLE_SPACE
    seconds: float = math.inf


@dataclass
class Report:
    """A whole run: see ``Tried`` for its parts.

    Attributes:
        target: the machine, as JSON.
        implementations: the implementations that were tried.
        seconds: the seconds of the run.
        build_seconds: seconds from its start until the last module was built.
        lost: why the device was lost; empty if it was not.
        ended: why the run ended early, one of ``ENDINGS``; empty if it did not.
    """

    target: dict[str, Any]
    implementations: list[Tried] = field(default_factory=list)
    seconds: float = 0.0
    build_seconds: float = 0.0
    lost: str = ""
    ended: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run."""
        return self.ended in (INTERRUPTED, TERMINATED)

    @property
    def trials(self) -> list[Trial]:
        """All cells."""
        return [trial for tried in self.implementations for trial in tried.trials]


class Trying:
    """Carries out an order."""

    def __init__(self, order: Order, tell: Callable[[str], None] = lambda _: None) -> None:
        self.order = order
        self.target = Target.here(order.device)
        self.report = Report(self.target.to_json())
        self.ending = Ending(order.seconds)
        self._tell, self._started = tell, time.monotonic()
        self._groups: list[Group] = []
        self._cell_count = self._build_count = 0
        most = cores() // 2 if order.device == "cuda" else cores()
        jobs = order.jobs or max(1, min(most, MOST_WORKERS))
        environment = limited_to(compilers() // jobs)
        self._pool = open_pool(order.device, size=jobs, standby=False, environment=environment)
        self._scheduler = Scheduler(self._pool, jobs, self.ending)

    def execute(self) -> Report:
        """Try everything, and report what was learned even if the run ends early."""
        for name, reference in self.order.implementations.items():
            tried = Tried(name, reference)
            self.report.implementations.append(tried)
            take = partial(self._take_survey, tried)
            self._scheduler.ask(Question(tried, partial(self._survey, tried), take))
        with self._pool:
            self._scheduler.run(self._ask_groups)
        self.report.ended, self.report.lost = self.ending.ended, self.ending.lost
        self._add_unreached()
        self.report.seconds = time.monotonic() - self._started
        return self.report

    def _survey(self, tried: Tried, worker: Worker) -> tuple[list[Group], list[Cell]]:
        """Ask an implementation what it can express, and group that by module."""
        order = self.order
        address = Address(tried.reference, None, order.device, without_rules=(EVERY_RULE,))
        choice = Choice(order.book, order.modules, order.only)
        return groups_of(worker, tried, address, self.target, choice)

    def _take_survey(self, tried: Tried, found: tuple[list[Group], list[Cell]]) -> None:
        groups, left_out = found
        self._groups += groups
        tried.trials += [_unrun(tried, cell, LEFT_OUT) for cell in left_out]

    def _ask_groups(self) -> None:
        """Ask about all cells, once every implementation is known: those of slow builds first."""
        if self._cell_count:
            return  # they were asked about, and all is answered
        self._cell_count = sum(len(group.cells) for group in self._groups)
        self._build_count = sum(group.first is not None for group in self._groups)
        self._say(f"{self._cell_count} cells, {self._build_count} modules to build")
        for rank, group in enumerate(sorted(self._groups, key=_slowest_first)):
            ask = partial(self._try_group, group)
            self._scheduler.ask(Question(group.tried, ask, lambda _: None, (rank,)))

    def _try_group(self, group: Group, worker: Worker) -> None:
        """Build a module and try its cells, in one process as long as that lives."""
        broken = self._build(worker, group)
        for cell in group.cells:
            if self.ending.stopped():
                return
            trial = self._try(worker, group, cell, broken)
            # One by one: of a group that the end cuts off, those that were tried count.
            self._scheduler.post(group.tried, partial(self._take_trial, group.tried, trial))

    def _build(self, worker: Worker, group: Group) -> Verdict | None:
        """Build a group's module; return the verdict on all its calls where it does not compile."""
        if group.first is None:
            return None
        start = time.monotonic()
        verdict = self._first_call(worker, group, BUILD_DEADLINES)
        seconds = time.monotonic() - start
        if verdict is not None and verdict.status != "HANG":
            said = f"{verdict.message}\n{verdict.trace}\n{verdict.printed}"
            verdict = verdict if UNBUILT.search(said) else None
        message = "" if verdict is None else verdict.message
        build = Build(group.tried.name, group.key, seconds, message)
        self._scheduler.post(
            group.tried, partial(self._take_build, group.tried, build, built=verdict is None)
        )
        return verdict

    def _take_build(self, tried: Tried, build: Build, *, built: bool) -> None:
        tried.builds.append(build)
        self.report.build_seconds = time.monotonic() - self._started
        done = sum(len(each.builds) for each in self.report.implementations)
        what = "built" if built else "could not be built"
        self._say(
            f"{tried.name}: module {done} of {self._build_count} {what} in {build.seconds:.0f} s"
        )

    def _first_call(self, worker: Worker, group: Group, deadlines: Deadlines) -> Verdict | None:
        """Make the smallest call of a module; gives the verdict where it fails."""
        if group.first is None:
            return None
        request = group.address.request("cost", problem=group.first.to_json(), calls=1)
        outcome = worker.run(request, deadlines)
        if outcome.status != "done":
            return verdict_of(outcome)
        stopped: Any = (outcome.result or {}).get("stopped")
        return Verdict.from_json(stopped) if stopped else None

    def _try(self, worker: Worker, group: Group, cell: Cell, broken: Verdict | None) -> Trial:
        name, law = group.tried.name, OPERATIONS[group.tried.operation].law
        if broken is not None:
            came_to = HANGS if broken.status == "HANG" else RAISES
            return Trial(name, cell, law, came_to, status_of(cell, came_to), broken)
        slow = self.order.device == "cpu"
        request = group.address.case(law, cell.problem)
        outcome = worker.run(request, CALLING_SLOWLY if slow else CALLING)
        verdict = verdict_of(outcome)
        if outcome.status in ("hang", "crash"):
            probe_device(worker, self.order.device)
            self._first_call(worker, group, CALLING)  # the process is another one
        happened = outcome_of(outcome, verdict)
        status = status_of(cell, happened)
        entry = self.order.ledger.explanation(name, law, verdict, cell.problem, self.target)
        if entry is not None and cell.side == SUPPORTED:
            status = KNOWN
        return Trial(name, cell, law, happened, status, verdict, entry.id if entry else "")

    def _take_trial(self, tried: Tried, trial: Trial) -> None:
        tried.trials.append(trial)
        if trial.status == NOT_RUN:
            return
        done = counts(self.report.trials)["tried"]
        if trial.meaning:
            self._say(f"{trial.implementation}: {trial.cell.title}: {trial.happened}"[:300])
        if done % 50 == 0:
            self._say(f"{done} of {self._cell_count} cells tried")

    def _add_unreached(self) -> None:
        """Add the cells that were not reached, and put all cells in their order."""
        for group in self._groups:
            reached = {trial.cell.number for trial in group.tried.trials}
            why = self.report.lost or "the run ended before"
            group.tried.trials += [
                _unrun(group.tried, cell, why) for cell in group.cells if cell.number not in reached
            ]
        for tried in self.report.implementations:
            tried.trials.sort(key=lambda trial: trial.cell.number)

    def _say(self, text: str) -> None:
        self._tell(f"[{time.monotonic() - self._started:5.1f} s] {text}")


def _slowest_first(group: Group) -> tuple[int, int]:
    backend = group.tried.backend
    rank = SLOWEST_FIRST.index(backend) if backend in SLOWEST_FIRST else len(SLOWEST_FIRST)
    return rank, group.first is None


def _unrun(tried: Tried, cell: Cell, why: str) -> Trial:
    verdict = Verdict("UNSUPPORTED", message=why)
    return Trial(tried.name, cell, OPERATIONS[tried.operation].law, "", NOT_RUN, verdict)
