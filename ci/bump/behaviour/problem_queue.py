"""The queue of a comparison's problems: it shares the time fairly among implementations.

The order depends on the clock: on which module is built first, and on which implementation is
quick. The report does not: each problem has its place there, and its answer is the journal's.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..sides.ending import Ending
from .comparison import Compared, Tried

POLL_SECONDS = 0.5
"""Most seconds that a thread waits for a problem before it checks whether the time is over."""


@dataclass(frozen=True)
class Task:
    """A problem of an implementation that waits to be judged.

    Attributes:
        found: the implementation.
        place: place of the problem in the report.
        rank: priority of the problem among those of its implementation; the lowest is first.
        ask: function that judges the problem with both releases.
        module: key of the module that must be built before; None if it needs none.
    """

    found: Compared
    place: tuple[int, ...]
    rank: tuple[int, ...]
    ask: Callable[[], Tried]
    module: str | None = None


class ProblemQueue:
    """Problems that wait to be judged; the implementation that took the least time is next.

    Each implementation gets its first problem before any gets its second. A slow implementation, or
    one that hangs, leaves the others their share of the time.

    Args:
        ending: end of the comparison. After it, problems whose module was never built are returned
            too, because the journal may have their answers.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._ready: dict[str, list[tuple[tuple[int, ...], int, Task]]] = {}
        self._waiting: dict[tuple[str, str], list[Task]] = {}
        self._built: set[tuple[str, str]] = set()
        self._judged_now: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._serial = itertools.count()
        self._more = True
        self._changed = threading.Condition()

    def add(self, tasks: Iterable[Task]) -> None:
        """Add problems."""
        with self._changed:
            for task in tasks:
                place = (task.found.name, task.module or "")
                if task.module is None or place in self._built:
                    self._put(task)
                else:
                    self._waiting.setdefault(place, []).append(task)
            self._changed.notify_all()

    def built(self, found: Compared, module: str) -> None:
        """Release the problems of a module that is now built for both releases."""
        with self._changed:
            place = (found.name, module)
            self._built.add(place)
            for task in self._waiting.pop(place, ()):
                self._put(task)
            self._changed.notify_all()

    def close(self) -> None:
        """Declare that no more problems are added and no more modules are built."""
        with self._changed:
            self._more = False
            self._release()
            self._changed.notify_all()

    def drop(self) -> None:
        """Discard all problems that wait."""
        with self._changed:
            self._more = False
            self._waiting.clear()
            self._ready.clear()
            self._changed.notify_all()

    def take(self) -> Task | None:
        """Wait for the next problem and return it; None if there will be none."""
        with self._changed:
            while True:
                if self._ending.over:
                    self._release()
                if (task := self.next()) is not None:
                    return task
                if not self._more or self._ending.over:
                    return None
                self._changed.wait(POLL_SECONDS)

    def next(self) -> Task | None:
        """Return the next problem that can be judged now; None if there is none."""
        with self._changed:
            names = [name for name, tasks in self._ready.items() if tasks]
            if not names:
                return None
            name = min(names, key=lambda each: (self._judged_now[each], self._seconds[each]))
            self._judged_now[name] += 1
            return heapq.heappop(self._ready[name])[2]

    def judged(self, task: Task, seconds: float) -> None:
        """Record that a problem was judged, and the seconds that it took."""
        with self._changed:
            self._judged_now[task.found.name] -= 1
            self._seconds[task.found.name] += seconds

    def _put(self, task: Task) -> None:
        ready = self._ready.setdefault(task.found.name, [])
        heapq.heappush(ready, (task.rank, next(self._serial), task))

    def _release(self) -> None:
        for tasks in self._waiting.values():
            for task in tasks:
                self._put(task)
        self._waiting.clear()
