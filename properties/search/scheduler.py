"""Questions to isolated workers: which is asked next, and who takes the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from ..findings.report import INTERRUPTED
from ..isolation.workers import Worker
from ..worker.requests import DeviceLostError
from .ending import EndedError, Ending
from .priority_executor import PriorityExecutor, RankedQueue, Work

GRACE_SECONDS = 4.0
"""Seconds that a run which ends early waits for the questions that its own workers have."""
LAST_SECONDS = 2.0
"""Seconds that it then waits for questions whose workers were ended."""
Lease = Callable[[], AbstractContextManager[Worker]]
"""Returns a context in which a worker belongs to the caller."""


class Asked(Protocol):
    """The record of an implementation that is asked about."""

    @property
    def reference(self) -> str:
        """Its MODULE:NAME, by which workers know whose code they have loaded."""

    def fail(self, error: Exception, /) -> None:
        """Record a failure of the suite itself."""


class Pool(Protocol):
    """Lends workers: of one kind, or of both releases that are compared."""

    def lease(self, owner: str, /) -> AbstractContextManager[Any]:
        """Return a context in which a worker belongs to the caller."""

    def close(self) -> None:
        """End all workers; who asks one of them has no answer."""


@dataclass(frozen=True)
class Question:
    """One question about an implementation.

    Attributes:
        about: the record of the implementation.
        ask: asks a place of the pool, most often a worker, in a thread that has leased it.
        take: takes the answer, in the thread of ``Scheduler.run``.
        rank: the question of the lowest rank is asked first.
    """

    about: Asked
    ask: Callable[[Any], Any]
    take: Callable[[Any], None]
    rank: tuple[int, ...] = (0,)


class Scheduler:
    """Asks questions, several at a time, until all are answered or the run ends.

    All answers are taken in one thread, that of ``run``: whoever takes them needs no lock.

    Args:
        pool: the workers, which the scheduler closes only where the run ends early.
        jobs: questions that are asked at a time.
        ending: the time when the run ends.
        grace: seconds that a run which ends early waits for the questions in progress.
        beside: most threads of ``ask_beside``.
        close: ends what runs beside the workers, such as builds; called when the run ends.
        queue: orders the questions; by their rank if None.
    """

    def __init__(
        self,
        pool: Pool,
        jobs: int,
        ending: Ending,
        *,
        grace: float = GRACE_SECONDS,
        beside: int = 1,
        close: Callable[[], None] = lambda: None,
        queue: RankedQueue[Work] | None = None,
    ) -> None:
        self.ending = ending
        self._pool, self._close, self._grace = pool, close, grace
        self._asking = PriorityExecutor(jobs, queue)
        # Preparing waits for compilers, which must not keep other questions from being asked.
        self._beside = PriorityExecutor(max(1, beside))
        # Not ``concurrent.futures.wait``: it would look at each of a thousand futures each time.
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pending: dict[Future[Any], tuple[Asked, Callable[[Any], None]]] = {}

    def ask(self, question: Question) -> None:
        """Queue a question; it is dropped where the run ends."""
        if not self.ending.stopped():
            work = partial(self._leased, question)
            owner = question.about.reference
            future = self._asking.submit(work, *question.rank, owner=owner)
            self._expect(future, question.about, question.take)

    def ask_beside(
        self, about: Asked, ask: Callable[[Lease], Any], take: Callable[[Any], None], rank: int = 0
    ) -> None:
        """Ask in a thread that has no worker; it is given a function that leases one."""
        work = partial(ask, partial(self._lease, about))
        self._expect(self._beside.submit(work, rank), about, take)

    def post(self, about: Asked, take: Callable[[], None]) -> None:
        """Have a part of an answer taken in the thread of ``run``, from any other thread."""
        self._events.put(partial(self._settle, about, take))

    def withdraw(self, about: Asked | None = None) -> None:
        """Drop the questions that have not begun: about one implementation, or about all."""
        for future, (of, _) in [*self._pending.items()]:
            if (about is None or of is about) and future.cancel():
                del self._pending[future]

    def run(self, idle: Callable[[], None] = lambda: None) -> None:
        """Take answers until there are none to come, or the run ends early.

        Args:
            idle: called when nothing is in progress; may ask more.
        """
        # Only woken: what stops before ``_end_early`` would look like a run that has all answers.
        with self._asking, self._beside, self.ending.watched(self._wake):
            try:
                while not self.ending.due:
                    if not self._pending:
                        idle()
                    if not self._pending:
                        break
                    self._take(None)
                if self._pending:
                    self._end_early()
            except KeyboardInterrupt:
                self.ending.end(INTERRUPTED)
                self._end_early()
            finally:
                self._close()
                if self._pending:  # the executors wait for their threads
                    self.ending.stop()
                    self._pool.close()
        # Answers that came while the executors waited for their threads still count.
        self._take(0)

    def _end_early(self) -> None:
        """Let questions in progress end after their case, and take what they have learned."""
        self.ending.ended = self.ending.asked
        self.ending.stop()
        self._close()
        # What has not begun would take a worker from what is to end within its case.
        self.withdraw()
        self._take_for(self._grace)
        # From here on an error may be the doing of ``close``, and accuses nobody.
        self.ending.cut_off = True
        self._pool.close()
        self._take_for(LAST_SECONDS)

    def _take_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._pending and (left := deadline - time.monotonic()) > 0:
            self._take(left)

    def _wake(self) -> None:
        """Have ``run`` go on, from any other thread."""
        self._events.put(lambda: None)

    def _take(self, timeout: float | None) -> None:
        """Wait for the next answer, and take all that have come."""
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            return
        event()
        # Those that are there: more may come as fast as they are taken, and the end is due.
        for _ in range(self._events.qsize()):
            self._events.get()()

    def _expect(self, future: Future[Any], about: Asked, take: Callable[[Any], None]) -> None:
        self._pending[future] = about, take
        # Called in the thread that has finished the work, or at once here: only the queue is
        # touched.
        future.add_done_callback(lambda ended: self._events.put(partial(self._take_answer, ended)))

    def _take_answer(self, future: Future[Any]) -> None:
        if future in self._pending:  # else it was withdrawn
            about, take = self._pending.pop(future)
            self._settle(about, lambda: take(future.result()))

    def _settle(self, about: Asked, take: Callable[[], None]) -> None:
        try:
            take()
        except (CancelledError, EndedError):
            pass
        except DeviceLostError as error:
            self.ending.lose(str(error))
            self._close()
            self.withdraw()
        except Exception as error:  # noqa: BLE001  one failure must not cost the others' results
            if not self.ending.cut_off:
                about.fail(error)

    @contextmanager
    def _lease(self, about: Asked) -> Iterator[Worker]:
        with self._pool.lease(about.reference) as worker:
            if self.ending.stopped():  # since it was queued
                raise CancelledError
            try:
                yield worker
            except DeviceLostError:
                # Here: the thread that takes answers may be too late for the next question.
                self.ending.stop()
                raise

    def _leased(self, question: Question) -> Any:  # noqa: ANN401  whatever the worker answers
        with self._lease(question.about) as worker:
            return question.ask(worker)
