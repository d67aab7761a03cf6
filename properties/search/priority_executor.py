"""Work in the order of rank, not of arrival: what comes late need not wait for all else."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class PriorityExecutor:
    """Threads that take the queued work of the lowest rank first; of one rank, the earliest.

    An implementation whose modules take minutes to build queues its laws after all others: with
    the number of a law as its rank, its first law comes before the others' second one, and its
    stored cases before all laws.
    """

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._queue: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._arrivals = itertools.count()

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

    def submit(self, rank: int, work: Callable[[], Any]) -> Future[Any]:
        """Queue work; its future may be cancelled while it waits."""
        future: Future[Any] = Future()
        with self._lock:
            heapq.heappush(self._queue, (rank, next(self._arrivals), future, work))
        self._executor.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            _, _, future, work = heapq.heappop(self._queue)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)
