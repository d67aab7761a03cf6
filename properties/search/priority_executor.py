"""Work in the order of rank, not of arrival: what comes late need not wait for all else."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")
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
            owner: the owner whose work it is; nobody's if empty.
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
        _do(queued.work, queued.future)

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
        # Affinity within limits: a worker that has loaded an implementation judges it sooner, but
        # work more than LEAD ranks behind must not overtake what everybody waits for.
        own = [q for q in self._queue if q.owner in mine and q.rank <= first.rank + LEAD]
        # No thread has loaded these yet, so that none loses an advantage by it.
        new = [q for q in self._queue if q.owner not in known and q.rank == first.rank]
        return min(own or new or [first], key=lambda each: each.rank)


class FairQueue(Generic[T]):
    """Items of several owners; the next is of the owner whose items took the least time so far.

    Each owner has one item at work before any has two. A slow owner, or one that hangs, leaves the
    others their share of the time.
    """

    def __init__(self) -> None:
        self._items: dict[str, list[tuple[tuple[int, ...], int, T]]] = {}
        self._at_work: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._serial = itertools.count()

    def put(self, owner: str, rank: tuple[int, ...], item: T) -> None:
        """Add an item; of one owner's, that of the lowest rank comes first, then the earliest."""
        heapq.heappush(self._items.setdefault(owner, []), (rank, next(self._serial), item))

    def take(self) -> tuple[str, T] | None:
        """Return the next item with its owner, and count it as at work; None if there is none."""
        owners = [owner for owner, items in self._items.items() if items]
        if not owners:
            return None
        # The number at work comes first: seconds are known only of what has ended, and a hang would
        # not count until its deadline.
        owner = min(owners, key=lambda each: (self._at_work[each], self._seconds[each]))
        self._at_work[owner] += 1
        return owner, heapq.heappop(self._items[owner])[2]

    def end(self, owner: str, seconds: float) -> None:
        """Record that an owner's item is done, and the seconds that it took."""
        self._at_work[owner] -= 1
        self._seconds[owner] += seconds


class FairExecutor:
    """Threads that take queued work in the order of a ``FairQueue``."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Return the executor itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the work that is left."""
        self._executor.shutdown()

    def submit(self, owner: str, rank: tuple[int, ...], work: Callable[[], Any]) -> Future[Any]:
        """Queue work, see ``FairQueue.put``."""
        future: Future[Any] = Future()
        with self._lock:
            self._queue.put(owner, rank, (future, work))
        self._executor.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            taken = self._queue.take()
        assert taken is not None  # noqa: S101  each call has its own item
        owner, (future, work) = taken
        start = time.monotonic()
        _do(work, future)
        with self._lock:
            self._queue.end(owner, time.monotonic() - start)


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
        future.set_exception(error)
    else:
        future.set_result(result)
