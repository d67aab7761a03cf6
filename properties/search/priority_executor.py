"""Work in an order of its own, not of arrival: what comes late need not wait for all else."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")
LEAD = 4
"""Most ranks by which a thread takes work of an owner that it knows before that of the lowest."""


@dataclass(frozen=True, order=True)
class Queued(Generic[T]):
    """An item that waits; they compare by rank, and of one rank by arrival.

    Attributes:
        rank: the lowest is first.
        serial: number of the items that came before.
        owner: the owner of the item.
        item: what waits.
    """

    rank: tuple[int, ...]
    serial: int
    owner: str = field(compare=False)
    item: T = field(compare=False)


class RankedQueue(Generic[T]):
    """Items of several owners; that of the lowest rank comes first, then the earliest.

    An implementation whose modules take minutes to build queues its laws after all others: with
    the number of a law as its rank, its first law comes before the others' second one, and its
    stored cases before all laws.

    A thread prefers owners whose items it has taken: the worker that it had last has loaded their
    modules, and holds their workspaces. Who has no such item takes that of an owner whom no thread
    knows. So each owner keeps few threads, and each worker few owners.
    """

    def __init__(self) -> None:
        self._items: dict[str, list[Queued[T]]] = {}
        self._known: dict[int, set[str]] = {}
        self._at_work: Counter[str] = Counter()
        self._serial = itertools.count()

    def put(self, owner: str, rank: tuple[int, ...], item: T) -> None:
        """Add an item."""
        queued = Queued(rank, next(self._serial), owner, item)
        heapq.heappush(self._items.setdefault(owner, []), queued)

    def take(self, gone: Callable[[T], bool] = lambda _: False) -> Queued[T] | None:
        """Return the item that this thread is to have next; None if none may begin.

        Args:
            gone: whether an item is nobody's any more: neither its rank nor its owner counts.
        """
        for items in self._items.values():
            while items and gone(items[0].item):
                heapq.heappop(items)
        first = [items[0] for name, items in self._items.items() if items and self._may_begin(name)]
        if not first:
            return None
        chosen = self._choose(first)
        heapq.heappop(self._items[chosen.owner])
        self._at_work[chosen.owner] += 1
        return chosen

    def end(self, owner: str, seconds: float) -> None:
        """Record that an owner's item is done, and the seconds that it took."""
        del seconds
        self._at_work[owner] -= 1

    def _may_begin(self, owner: str) -> bool:
        """Whether an owner's items may be taken now; that may change when any item ends."""
        del owner
        return True

    def _choose(self, first: Sequence[Queued[T]]) -> Queued[T]:
        """Choose one of the first items of all owners."""
        lowest = min(first)
        mine = self._known.setdefault(threading.get_ident(), set())
        known = set().union(*self._known.values())
        # Affinity within limits: a worker that has loaded an implementation judges it sooner, but
        # work more than LEAD ranks behind must not overtake what everybody waits for.
        own = [q for q in first if q.owner in mine and q.rank[0] <= lowest.rank[0] + LEAD]
        # No thread has loaded these yet, so that none loses an advantage by it.
        new = [q for q in first if q.owner not in known and q.rank == lowest.rank]
        chosen = min(own or new or [lowest])
        if chosen.owner:
            mine.add(chosen.owner)
        return chosen


class FairQueue(RankedQueue[T]):
    """Items of several owners; the next is of the owner whose items took the least time so far.

    Each owner has one item at work before any has two. A slow owner, or one that hangs, leaves the
    others their share of the time. Of one owner's items, that of the lowest rank comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def end(self, owner: str, seconds: float) -> None:
        """Record that an owner's item is done, and the seconds that it took."""
        super().end(owner, seconds)
        self._seconds[owner] += seconds

    def _choose(self, first: Sequence[Queued[T]]) -> Queued[T]:
        # The number at work comes first: seconds are known only of what has ended, and a hang would
        # not count until its deadline.
        return min(first, key=lambda each: (self._at_work[each.owner], self._seconds[each.owner]))


Work = tuple["Future[Any]", Callable[[], Any]]
"""What a thread is to do, and the future of its result."""


class PriorityExecutor:
    """Threads that take work in the order of a queue.

    Args:
        threads: how many there are.
        queue: orders the work.
    """

    def __init__(self, threads: int, queue: RankedQueue[Work] | None = None) -> None:
        self._executor = ThreadPoolExecutor(threads)
        self._queue = RankedQueue[Work]() if queue is None else queue
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Return the executor itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the work that is left."""
        self._executor.shutdown()

    def submit(self, work: Callable[[], Any], *rank: int, owner: str = "") -> Future[Any]:
        """Queue work; its future may be cancelled while it waits.

        Args:
            work: called in a thread.
            rank: the lowest is first.
            owner: the owner whose work it is; nobody's if empty.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._queue.put(owner, rank, (future, work))
        # A thread that becomes free takes the best work at that moment, which need not be this one.
        # There are as many calls of ``_next`` as works, so that none is left.
        self._executor.submit(self._next)
        return future

    def _next(self) -> None:
        """Do work as long as some may begin: what ends may be what other work has waited for."""
        while True:
            with self._lock:
                taken = self._queue.take(_cancelled)
            if taken is None:
                return
            start, (future, work) = time.monotonic(), taken.item
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
            with self._lock:
                self._queue.end(taken.owner, time.monotonic() - start)


def _cancelled(work: Work) -> bool:
    return work[0].cancelled()


def for_each(
    items: Iterable[T],
    at_a_time: int,
    do: Callable[[T], object],
    failed: Callable[[], object] = lambda: None,
) -> None:
    """Do something with each item in their order, several at a time, until the first error.

    Args:
        items: what is done, which the first error leaves out where it has not begun.
        at_a_time: number of threads.
        do: called with an item, in a thread.
        failed: called after the first error, to end what is in progress.
    """
    left = iter([*items])

    def one_after_another() -> None:
        try:
            for each in left:  # which all threads share
                do(each)
        finally:
            deque(left, maxlen=0)  # after an error, none is left for the other threads

    with ThreadPoolExecutor(at_a_time) as threads:
        every = [threads.submit(one_after_another) for _ in range(at_a_time)]
        try:
            for ended in as_completed(every):  # the first error is not one that ``failed`` causes
                ended.result()
        except BaseException:  # a signal, too
            deque(left, maxlen=0)
            failed()
            raise
