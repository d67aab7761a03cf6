"""Trying both sides of the support table: what it allows must work, what it refuses must not.

Cells are called in isolated workers, all rules left out, module by module: the first call of a
module builds it, in parallel with others, and the rest then cost milliseconds.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...impl import Target
from ...impl.gating import RuleBook
from ...impl.protocol import EVERY_RULE
from ...reference import Problem
from ..findings.ledger import Ledger
from ..findings.report import INTERRUPTED, TERMINATED, TIME
from ..isolation.machine import cores
from ..isolation.workers import Deadlines, Worker
from ..search.building import BUILD_DEADLINES, compilers, limited_to
from ..space.restrictions import WHOLE_SPACE, Only
from ..verdicts.operations import OPERATIONS
from ..verdicts.verdict import Verdict
from ..worker.pools import open_pool
from ..worker.requests import Address, DeviceLostError, HarnessError, probe_device, verdict_of
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
    outcome_of,
    status_of,
)

CALLING = Deadlines(run=20.0, compile=180.0, specialise=180.0)
"""Modules are built by then; the first call of each process still loads them."""
CALLING_SLOWLY = Deadlines(run=120.0, compile=180.0, specialise=180.0)
"""On a CPU: Triton's interpreter takes its time."""
MOST_WORKERS = 16
LEFT_OUT = "its module is not among those that were to be built"
WATCH_SECONDS = 0.1
"""Seconds between two questions whether the run is to end early."""
SLOWEST_FIRST = ("fa3", "fa2", "cuda-core")
"""Backends whose modules take longest to build."""


@dataclass(frozen=True)
class Order:
    """What is to be tried.

    Attributes:
        implementations: name and MODULE:NAME of each.
        device: ``"cpu"`` or ``"cuda"``.
        book: of support rules.
        ledger: known failures of supported calls.
        modules: most modules that are built of an implementation; all if 0.
        jobs: workers at a time; by cores if 0.
        only: values that a cell's problem must have.
        seconds: that the run may take, building included.
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
        implementations: that were tried.
        seconds: of the run.
        build_seconds: from its start until the last module was built.
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
        self._tell = tell
        self._stop = threading.Event()
        self._asked_to_end = ""
        self._lock = threading.Lock()
        self._trials: dict[tuple[str, Problem], Trial] = {}
        most = cores() // 2 if order.device == "cuda" else cores()
        self._jobs = order.jobs or max(1, min(most, MOST_WORKERS))
        self._pool = open_pool(
            order.device,
            size=self._jobs,
            standby=False,
            environment=limited_to(compilers() // self._jobs),
        )
        self._numbers = {"built": itertools.count(1), "tried": itertools.count(1)}

    def execute(self) -> Report:
        """Try everything, and report what was learned even if the run ends early."""
        self._started = time.monotonic()
        groups: list[Group] = []
        with self._ended_early(), self._pool, ThreadPoolExecutor(self._jobs) as threads:
            try:
                made = threads.map(self._prepare, *zip(*self._names(), strict=True))
                groups = [group for each in made for group in each]
                self._build_count = sum(group.first is not None for group in groups)
                self._cell_count = sum(len(group.cells) for group in groups)
                self._say(f"{self._cell_count} cells, {self._build_count} modules to build")
                list(threads.map(self._try_group, sorted(groups, key=_slowest_first)))
            except BaseException:
                self._stop.set()
                self._pool.close()  # ends whatever still runs: the executor waits for it
                raise
        self._collect(groups)
        self.report.seconds = time.monotonic() - self._started
        return self.report

    def end(self, why: str) -> None:
        """End the run early, from any thread or a handler of signals: ``execute`` returns soon.

        Args:
            why: one of ``ENDINGS``.
        """
        # A handler may interrupt any line of the main thread: it takes no lock.
        self._asked_to_end = why

    @contextmanager
    def _ended_early(self) -> Iterator[None]:
        """End the run, and what is built or called then, when its time is over or somebody asks."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(WATCH_SECONDS):
                if time.monotonic() - self._started > self.order.seconds:
                    self.end(TIME)
                if self._asked_to_end:
                    self.report.ended = self._asked_to_end
                    self._stop.set()
                    self._pool.close()
                    return

        watcher = threading.Thread(target=watch, name="ending", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _names(self) -> list[tuple[str, str]]:
        for name, reference in self.order.implementations.items():
            self.report.implementations.append(Tried(name, reference))
        return [(each.name, each.reference) for each in self.report.implementations]

    def _prepare(self, name: str, reference: str) -> list[Group]:
        """Ask an implementation what it can express, and group that by module."""
        tried = next(each for each in self.report.implementations if each.name == name)
        address = Address(reference, None, self.order.device, without_rules=(EVERY_RULE,))
        try:
            with self._pool.lease() as worker:
                order = self.order
                choice = Choice(order.book, order.modules, order.only)
                groups, left_out = groups_of(worker, tried, address, self.target, choice)
            why = Verdict("UNSUPPORTED", message=LEFT_OUT)
            for cell in left_out:
                self._note(_unrun(tried, cell, why))
        except HarnessError as error:
            tried.error = str(error).strip().splitlines()[0]
            return []
        except RuntimeError:  # the pool was closed
            if not self._stop.is_set():
                raise
            return []
        return groups

    def _try_group(self, group: Group) -> None:
        """Build a module and try its cells, in one process as long as that lives."""
        if self._stop.is_set():
            return
        try:
            with self._pool.lease() as worker:
                broken = self._build(worker, group)
                for cell in group.cells:
                    if self._stop.is_set():
                        return
                    self._note(self._try(worker, group, cell, broken))
        except DeviceLostError as error:
            self.report.lost = self.report.lost or str(error)
            self._stop.set()
        except HarnessError as error:
            group.tried.error = group.tried.error or str(error).strip().splitlines()[0]
        except RuntimeError:  # the pool was closed
            if not self._stop.is_set():
                raise

    def _build(self, worker: Worker, group: Group) -> Verdict | None:
        """Build a group's module; return the verdict on all its calls where it does not compile."""
        if group.first is None:
            return None
        start = time.monotonic()
        verdict = self._first_call(worker, group, BUILD_DEADLINES)
        seconds = time.monotonic() - start
        failed = verdict is not None and bool(
            UNBUILT.search(f"{verdict.message}\n{verdict.trace}\n{verdict.printed}")
            or verdict.status == "HANG"
        )
        message = verdict.message if failed and verdict else ""
        with self._lock:
            group.tried.builds.append(Build(group.tried.name, group.key, seconds, message))
            self.report.build_seconds = time.monotonic() - self._started
            done = next(self._numbers["built"])
        what = "could not be built" if failed else "built"
        self._say(
            f"{group.tried.name}: module {done} of {self._build_count} {what} in {seconds:.0f} s"
        )
        return verdict if failed else None

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

    def _note(self, trial: Trial) -> None:
        with self._lock:
            self._trials[(trial.implementation, trial.cell.problem)] = trial
        if trial.status == NOT_RUN:
            return
        done = next(self._numbers["tried"])
        if trial.meaning:
            self._say(f"{trial.implementation}: {trial.cell.title}: {trial.happened}"[:300])
        if done % 50 == 0:
            self._say(f"{done} of {self._cell_count} cells tried")

    def _collect(self, groups: Sequence[Group]) -> None:
        """Return the trials of each implementation in order, those that were not reached too."""
        unreached = Verdict("UNSUPPORTED", message=self.report.lost or "the run ended before")
        for group in groups:
            for cell in group.cells:
                key = (group.tried.name, cell.problem)
                self._trials.setdefault(key, _unrun(group.tried, cell, unreached))
        for tried in self.report.implementations:
            mine = [trial for (name, _), trial in self._trials.items() if name == tried.name]
            tried.trials = sorted(mine, key=lambda trial: trial.cell.number)

    def _say(self, text: str) -> None:
        self._tell(f"[{time.monotonic() - self._started:5.1f} s] {text}")


def _slowest_first(group: Group) -> tuple[int, int]:
    backend = group.tried.backend
    rank = SLOWEST_FIRST.index(backend) if backend in SLOWEST_FIRST else len(SLOWEST_FIRST)
    return rank, group.first is None


def _unrun(tried: Tried, cell: Cell, why: Verdict) -> Trial:
    return Trial(tried.name, cell, OPERATIONS[tried.operation].law, "", NOT_RUN, why)
