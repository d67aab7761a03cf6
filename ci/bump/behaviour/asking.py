"""Asking the workers of both releases, through the journal."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ....properties.isolation.outcome import Outcome
from ....properties.isolation.workers import Deadlines, Worker, WorkerPool
from ....properties.search.ending import EndedError, Ending
from ....properties.verdicts.verdict import Verdict
from ....properties.worker.requests import HarnessError, probe_device, verdict_of
from ...answers.journal import Journal
from ..sides.plan import BumpPlan
from ..sides.releases import Release
from .records import LOST
from .watching import BumpProgress

Open = Callable[[], AbstractContextManager[WorkerPool]]
USUAL = Deadlines()
CLOSED = "the workers were ended"
OWNER: ContextVar[str] = ContextVar("OWNER", default="")
"""The implementation and the module that a thread asks about: a worker that has run them has loaded
the module, which takes others some tenths of a second."""
PATIENCE = 0.3
"""Seconds to wait for such a worker."""
FILES = ("keep", "compare")
"""Fields of a request that name files of this run, and so are no part of the question."""


class Side:
    """One release's workers, started when the first question comes that the journal cannot answer.

    Args:
        name: the name of the side.
        journal: the journal of the run.
        open_workers: opens the pool.
        device: the device that is probed after a worker died on it.
    """

    def __init__(
        self, name: str, journal: Journal, open_workers: Open, device: str = "cpu"
    ) -> None:
        self.name = name
        self._device = device
        self._journal, self._open = journal, open_workers
        self._opened: AbstractContextManager[WorkerPool] | None = None
        self._pool: WorkerPool | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> WorkerPool:
        """Start the workers, unless they are; they import in the background.

        Raises:
            EndedError: the side is closed.
        """
        with self._lock:
            if self._closed:
                raise EndedError(CLOSED)
            if self._pool is None:
                self._opened = self._open()
                self._pool = self._opened.__enter__()
            return self._pool

    def ask(
        self,
        payload: Mapping[str, Any],
        deadlines: Deadlines,
        *,
        note: str = "",
        before: Callable[[], object] | None = None,
        fresh: bool = False,
    ) -> Outcome:
        """Have a worker answer a request.

        Args:
            payload: the payload of the request, see ``tasks.TASKS``.
            deadlines: the deadlines of its stages.
            note: separates requests that are otherwise the same, such as rounds of timing.
            before: function that is called first where the journal has no answer yet.
            fresh: whether the worker is a new process, to see whether a failure shows there too.
        """
        question = {
            "note": note,
            "payload": {name: value for name, value in payload.items() if name not in FILES},
        }

        def answer() -> dict[str, Any]:
            if before is not None:
                before()
            with self._worker() as worker:
                if fresh:
                    worker.renew()
                outcome = worker.run(payload, deadlines)
                if outcome.died:
                    # Raises where the device is gone: an answer that this spoils is not kept.
                    probe_device(worker, self._device)
                return dataclasses.asdict(outcome)

        return Outcome(**self.remember(question, answer))

    def remember(self, question: Mapping[str, Any], answer: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Return the answer to a question that takes many requests."""
        return self._journal.ask({"side": self.name, **question}, answer)

    def run(self, payload: Mapping[str, Any], deadlines: Deadlines) -> Outcome:
        """Have a worker answer a request, and keep nothing."""
        with self._worker() as worker:
            return worker.run(payload, deadlines)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        """Have a worker for the length of a with block.

        Raises:
            EndedError: the side was closed before, or meanwhile.
        """
        try:
            owner = OWNER.get()
            with self.start().lease(owner, PATIENCE if owner else 0.0) as worker:
                yield worker
        except RuntimeError as error:
            if self._closed:
                raise EndedError(CLOSED) from error
            raise

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.__exit__(None, None, None)
                self._opened = self._pool = None


class Asker(Worker):
    """What ``preparation`` takes for a worker; the journal keeps nothing of it."""

    def __init__(self, side: Side) -> None:  # it has no process of its own
        self._side = side

    def run(self, payload: Mapping[str, object], deadlines: Deadlines = USUAL) -> Outcome:
        """Ask the side."""
        return self._side.run(payload, deadlines)

    def renew(self, *, keep: bool = False) -> None:
        """Do nothing: the side's pool gives another process where one died."""
        del keep


@dataclass(frozen=True)
class Bench:
    """What the steps of a comparison of behaviour ask with.

    Attributes:
        plan: the plan of the comparison.
        sides: workers of both releases, by side.
        journal: the journal of the run.
        ending: the ending of the comparison, which may come at any moment.
        progress: shows what is done.
    """

    plan: BumpPlan
    sides: Mapping[str, Side]
    journal: Journal
    ending: Ending
    progress: BumpProgress = field(default_factory=BumpProgress)

    def staffed(self, releases: Mapping[str, Release], **options: Any) -> Bench:  # noqa: ANN401
        """Return it with workers of releases, see ``Release.workers``; none is started yet."""
        device = self.plan.device
        sides = {
            name: Side(name, self.journal, partial(release.workers, device, **options), device)
            for name, release in releases.items()
        }
        return replace(self, sides=sides)

    def lease(self, owner: str) -> AbstractContextManager[Bench]:
        """Return itself: its sides lease a worker for what the journal does not know."""
        del owner
        return nullcontext(self)

    def close(self) -> None:
        """End the workers: what other threads still ask for is not waited for."""
        for side in self.sides.values():
            side.close()


def answer_of(outcome: Outcome) -> Verdict:
    """Turn an answer into a verdict; one that the suite itself spoiled is lost, no more."""
    try:
        return verdict_of(outcome)
    except HarnessError as error:
        return Verdict(LOST, "suite", str(error))
