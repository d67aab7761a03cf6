"""Work in the order of rank, not of arrival: what comes late need not wait for all else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


LEAD = 4
"""Most ranks by which a thread takes work of an owner that it knows before that of the lowest."""


@dataclass(frozen=True)
class _Queued:
    rank: int
    owner: str
    future: Future[Any]
    work: Callable[[], Any]


class PriorityExecutor:
    """Threads that take the queued work of the lowest rank first; of one rank, the earliest.

    An implementation whose modules take minutes to build queues its laws after all others: with
    the number of a law as its rank, its first law comes before the others' second one, and its
    stored cases before all laws.

    A thread prefers owners whose work it has done: the worker that it had last has loaded their
    modules, and holds their workspaces. Who has no such work takes that of an owner whom no thread
    knows. So each owner keeps few threads, and each worker few owners.
    """

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._queue: list[_Queued] = []
        self._lock = threading.Lock()
        self._owners: dict[int, set[str]] = {}

    def __enter__(self) -> Self:
        """Return the executor itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the work that is left."""
        self._executor.shutdown()

    def submit(self, rank: int, work: Callable[[], Any], owner: str = "") -> Future[Any]:
        """Queue work; its future may be cancelled while it waits.

        Args:
            rank: the lowest is first.
            work: called in a thread.
            owner: whose work it is; nobody's if empty.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._queue.append(_Queued(rank, owner, future, work))
        # A thread that becomes free takes the best work at that moment, which need not be this one.
        # There are as many calls of ``_next`` as works, so that none is left.
        self._executor.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            self._drop_cancelled()
            if not self._queue:
                return
            queued = self._best()
            self._queue.remove(queued)
            if not queued.future.set_running_or_notify_cancel():
                return
            if queued.owner:
                self._owners[threading.get_ident()].add(queued.owner)
        try:
            result = queued.work()
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
            queued.future.set_exception(error)
        else:
            queued.future.set_result(result)

    def _drop_cancelled(self) -> None:
        """Leave out what nobody is to do: neither its rank nor its owner counts."""
        for each in [each for each in self._queue if each.future.cancelled()]:
            each.future.set_running_or_notify_cancel()  # and so wake whoever waits for it
            self._queue.remove(each)

    def _best(self) -> _Queued:
        """Return the work that this thread is to do next; of one rank, what came first."""
        first = min(self._queue, key=lambda each: each.rank)
        mine = self._owners.setdefault(threading.get_ident(), set())
        known = set().union(*self._owners.values())
        own = [q for q in self._queue if q.owner in mine and q.rank <= first.rank + LEAD]
        new = [q for q in self._queue if q.owner not in known and q.rank == first.rank]
        return min(own or new or [first], key=lambda each: each.rank)
