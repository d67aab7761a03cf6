"""Trying both sides of the support table: what it allows must work, what it refuses must not.

Cells are called in isolated workers, all rules left out, module by module: the first call of a
module builds it, in parallel with others, and the rest then cost milliseconds.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ...impl import Target
from ...impl.gating import RuleBook
from ...impl.protocol import EVERY_RULE
from ...reference import AttentionProblem, Problem
from ..building import share_of_compilers
from ..isolation import Deadlines, Worker
from ..ledger import Ledger
from ..pools import open_pool
from ..quarry import Address, DeviceLostError, HarnessError, probe_device, verdict_of
from ..verdict import Verdict
from .cells import SUPPORTED, Cell, cells_of
from .trials import (
    HANGS,
    KNOWN,
    LAWS,
    NOT_RUN,
    RAISES,
    RIGHT,
    UNBUILT,
    Build,
    Trial,
    Tried,
    outcome_of,
    status_of,
)

ASKING = Deadlines(run=60.0)
BUILDING = Deadlines(run=120.0, compile=1800.0)
CALLING = Deadlines(run=20.0, compile=180.0)
"""Modules are built by then; the first call of each process still loads them."""
CALLING_SLOWLY = Deadlines(run=120.0, compile=180.0)
"""On a CPU: Triton's interpreter takes its time."""
MOST_WORKERS = 16
SLOWEST_FIRST = ("fa3", "fa2", "cuda-core")
"""Backends whose modules take longest to build."""
SMALLEST: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((1,), (1,)),
    "prefill": ((3,), (3,)),
    "mixed": ((1, 3), (1, 3)),
}
"""Lengths of the call that builds a module: nothing hangs on so few."""


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
    """

    implementations: Mapping[str, str]
    device: str
    book: RuleBook
    ledger: Ledger = field(default_factory=Ledger)
    modules: int = 0
    jobs: int = 0


@dataclass(frozen=True)
class Group:
    """Cells that need the same module."""

    tried: Tried
    address: Address
    key: str
    cells: tuple[Cell, ...]
    first: Problem | None


@dataclass
class Report:
    """A whole run: see ``Tried`` for its parts."""

    target: dict[str, Any]
    implementations: list[Tried] = field(default_factory=list)
    seconds: float = 0.0
    build_seconds: float = 0.0
    """From the start until the last module was built."""
    lost: str = ""
    interrupted: bool = False

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
        self._lock = threading.Lock()
        self._trials: dict[tuple[str, Problem], Trial] = {}
        cores = os.cpu_count() or 1
        most = cores // 2 if order.device == "cuda" else cores
        self._jobs = order.jobs or max(1, min(most, MOST_WORKERS))
        self._pool = open_pool(
            order.device,
            size=self._jobs,
            standby=False,
            environment=share_of_compilers(self._jobs),
        )
        self._numbers = {"built": itertools.count(1), "tried": itertools.count(1)}

    def execute(self) -> Report:
        """Try everything, and report what was learned even if the run ends early."""
        self._started = time.monotonic()
        groups: list[Group] = []
        try:
            with self._pool, ThreadPoolExecutor(self._jobs) as threads:
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
        except KeyboardInterrupt:
            self.report.interrupted = True
        self._collect(groups)
        self.report.seconds = time.monotonic() - self._started
        return self.report

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
                return self._groups(worker, tried, address)
        except HarnessError as error:
            tried.error = str(error).strip().splitlines()[0]
        except RuntimeError:  # the pool was closed
            if not self._stop.is_set():
                raise
        return []

    def _groups(self, worker: Worker, tried: Tried, address: Address) -> list[Group]:
        declared = _ask(worker, address, "describe")
        tried.operation, tried.backend = str(declared["operation"]), str(declared["backend"])
        if not tried.backend:
            tried.reason = "it names no backend, so that no support rule is about it"
            return []
        reasons: list[str] = []

        def probe(problems: Sequence[Problem]) -> list[str | None]:
            asked = [problem.to_json() for problem in problems]
            found = list(_ask(worker, address, "probe", problems=asked)["reasons"])
            reasons.extend(filter(None, found))
            return found

        cells = cells_of(tried.operation, tried.backend, self.target, self.order.book, probe)
        if not cells:
            tried.reason = reasons[0] if reasons else "no rule speaks of any of its simple calls"
            return []
        problems = [cell.problem.to_json() for cell in cells]
        keys = _ask(worker, address, "modules", problems=problems)["keys"]
        by_key: dict[str, list[Cell]] = {}
        for cell, key in zip(cells, keys, strict=True):
            by_key.setdefault(key or "", []).append(cell)
        ahead = bool(declared["build_ahead"])
        chosen = chosen_modules(by_key, self.order.modules) if ahead else list(by_key)
        self._leave_out(tried, by_key, chosen)
        return [
            Group(tried, address, key, _dirty_last(by_key[key]), _first(by_key[key], ahead=ahead))
            for key in chosen
        ]

    def _leave_out(
        self, tried: Tried, by_key: Mapping[str, Sequence[Cell]], chosen: Sequence[str]
    ) -> None:
        why = Verdict("UNSUPPORTED", message="its module is not among those that were to be built")
        for key in by_key.keys() - set(chosen):
            for cell in by_key[key]:
                self._note(_unrun(tried, cell, why))

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
        """Build a group's module; gives what its calls will come to where it does not compile."""
        if group.first is None:
            return None
        start = time.monotonic()
        verdict = self._first_call(worker, group, BUILDING)
        seconds = time.monotonic() - start
        failed = verdict is not None and bool(
            UNBUILT.search(f"{verdict.message}\n{verdict.trace}") or verdict.status == "HANG"
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
        name, law = group.tried.name, LAWS.get(group.tried.operation, "parity")
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
        """Give each implementation its trials in order, those that were not reached too."""
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


def chosen_modules(by_key: Mapping[str, Sequence[Cell]], most: int) -> list[str]:
    """Choose the modules that show most: the simplest first, then rules not seen yet, then cells.

    Args:
        by_key: cells by the key of their module.
        most: modules; all if 0.
    """
    left = dict(by_key)
    chosen: list[str] = []
    shown: set[str] = set()

    def worth(key: str) -> tuple[bool, int, int]:
        simplest = not chosen and min(cell.number for cell in left[key]) == 0
        return simplest, len(_rules_of(left[key]) - shown), len(left[key])

    while left and (not most or len(chosen) < most):
        chosen.append(max(left, key=worth))
        shown.update(_rules_of(left.pop(chosen[-1])))
    return chosen


def _rules_of(cells: Sequence[Cell]) -> set[str]:
    return {rule for cell in cells for rule in cell.rules}


def _dirty_last(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Put calls that may end their process after those that must not."""
    clean = (RIGHT,), (RAISES,)
    return tuple(sorted(cells, key=lambda each: (each.side != SUPPORTED, each.called not in clean)))


def _first(cells: Sequence[Cell], *, ahead: bool) -> Problem | None:
    """Give the smallest call that builds the module of some cells, where that takes long."""
    if not ahead:
        return None
    cell = max(cells, key=lambda each: each.feature.phase == "mixed")
    if not isinstance(cell.problem, AttentionProblem):
        return cell.problem
    query_lens, seq_lens = SMALLEST[cell.feature.phase]
    return replace(cell.problem, query_lens=query_lens, seq_lens=seq_lens)


def _slowest_first(group: Group) -> tuple[int, int]:
    backend = group.tried.backend
    rank = SLOWEST_FIRST.index(backend) if backend in SLOWEST_FIRST else len(SLOWEST_FIRST)
    return rank, group.first is None


def _unrun(tried: Tried, cell: Cell, why: Verdict) -> Trial:
    return Trial(tried.name, cell, LAWS.get(tried.operation, "parity"), "", NOT_RUN, why)


def _ask(worker: Worker, address: Address, task: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Ask about an implementation.

    Raises:
        HarnessError: it cannot be imported or asked.
    """
    outcome = worker.run(address.request(task, **more), ASKING)
    if outcome.status != "done":
        raise HarnessError(verdict_of(outcome).message)
    result = outcome.result or {}
    if "error" in result:
        raise HarnessError(str(result["error"]))
    return result
