"""Which modules a run builds: chosen for all its implementations together, within its time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..findings.report import ImplementationReport
from ..space.module_selection import Module, Selection

BUILD_SHARE = 0.6
"""Share of a run's time in which compilers may run; the rest is for judging what is built last."""
LONGEST_SHARE = 0.5
"""Largest share of a run's time that one build may take. A longer one may begin late, and all else
would wait for it at the end."""
PATIENCE_SECONDS = 60.0
"""Seconds to wait for the survey of all implementations before modules are chosen. Those surveyed
later choose after the others, which leave them their share of the time."""


@dataclass
class Chosen:
    """The modules of one implementation.

    Attributes:
        modules: the modules to be built, or built before.
        minutes: the minutes of one core that they take.
        missing: minutes of one core that the first module would have taken for which there was no
            time; 0 if there was.
        left: minutes of one core that the others had left for it then.
    """

    modules: list[Module] = field(default_factory=list)
    minutes: float = 0.0
    missing: float = 0.0
    left: float = 0.0


@dataclass
class _Wish:
    report: ImplementationReport
    selection: Selection
    minutes: float
    compilers: int
    chosen: Chosen = field(default_factory=Chosen)
    open: bool = True


class ModulePlan:
    """Chooses modules for the implementations of a run, one each before any has its second.

    Seconds of several query tokens, where the first has one, come before others.

    A module that exists, or that another implementation has chosen, costs nothing: it comes before
    others that cover as much. How many are built follows the time all the same as if none existed,
    but for each implementation's first: after a run that built its share, another builds nothing.

    Args:
        implementations: how many there are; each of them calls ``choose`` or ``leave``.
        minutes: the minutes of one core that there are for building.
        longest: minutes by the clock that one build may take.
        learned: minutes of one core that libraries took in earlier runs.
        complete: called once each implementation has come, or after ``PATIENCE_SECONDS``.

    Attributes:
        minutes: the minutes of one core that there are for building.
        longest: minutes by the clock that one build may take.
        chosen: the chosen modules by implementation, for those whose modules take long.
    """

    def __init__(
        self,
        implementations: int,
        *,
        minutes: float = math.inf,
        longest: float = math.inf,
        learned: Mapping[str, float] | None = None,
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        self.minutes = self._left = self._unspent = minutes
        self.longest = longest
        self.chosen: dict[str, Chosen] = {}
        self._learned, self._complete = learned or {}, complete
        self._implementations, self._expected = implementations, implementations
        self._taken = set[str]()
        self._wishes: list[_Wish] = []
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._completed = False
        self._until = time.monotonic() + PATIENCE_SECONDS

    def choose(
        self,
        report: ImplementationReport,
        selection: Selection,
        minutes: float,
        compilers: int = 1,
    ) -> Chosen:
        """Choose modules once all implementations are known; waits until then.

        Args:
            report: the report of the implementation.
            selection: its modules; what it has taken already exists, and is among the chosen.
            minutes: the minutes of one core that it says that one of them takes.
            compilers: the compilers that the building of one of them keeps busy.
        """
        # Whoever surveys first would otherwise take the minutes of all: choosing waits until the
        # wishes of all, or of those that came in time, can be weighed together.
        wish = _Wish(report, selection, minutes, compilers, Chosen([*selection.chosen]))
        with self._changed:
            self._wishes.append(wish)
            self._take(wish, selection.chosen)
            self._come(report)
            # Whoever comes last, or has waited longest, chooses for all that wait; the others only
            # wake.
            self._changed.wait_for(
                lambda: not self._expected or not wish.open, self._until - time.monotonic()
            )
            if wish.open:
                self._allocate([each for each in self._wishes if each.open])
            self._end()
        return wish.chosen

    def leave(self, report: ImplementationReport) -> None:
        """Wait no more for an implementation, which has no modules to choose or has chosen."""
        with self._changed:
            self._come(report)
            if not self._expected and not any(each.open for each in self._wishes):
                self._end()

    def _come(self, report: ImplementationReport) -> None:
        if id(report) not in self._gone:
            self._gone.add(id(report))
            self._expected -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        if not self._completed:
            self._completed = True
            self._complete()

    def _allocate(self, wishes: Sequence[_Wish]) -> None:
        # By name: the order in which surveys end is the machine's.
        wishes = sorted(wishes, key=lambda each: (each.minutes, each.report.name))
        # Round by round, one module each: the time left is shared out evenly, whoever asks for how
        # many.
        while left := [each for each in wishes if each.open]:
            # A decode of several query tokens comes before what merely differs in more pairs.
            for each in sorted(left, key=lambda each: not each.selection.lacks_several_tokens):
                self._give(each)
        for each in wishes:
            self.chosen[each.report.name] = each.chosen
        self._changed.notify_all()

    def _give(self, wish: _Wish) -> None:
        """Choose an implementation's next module, or close its wish."""
        found = wish.selection.next(self._free)
        cost = self._cost(wish, found)
        left = self._left_for(wish)
        if cost > left or self._too_long(wish, found):
            if not wish.chosen.modules and not wish.chosen.missing:
                wish.chosen.missing, wish.chosen.left = cost, left
            found = wish.selection.next(self._free, only_free=True)
            cost = self._cost(wish, found)
        wish.open = bool(found)
        wish.selection.take(found)
        self._left -= cost
        self._take(wish, found)
        wish.chosen.modules += found
        wish.chosen.minutes += cost

    def _take(self, wish: _Wish, modules: Sequence[Module]) -> None:
        """Count modules as if they did not exist: each library once."""
        for each in modules:
            if each.library not in self._taken:
                self._unspent -= self._price(wish, each)
            self._taken |= {each.library} - {""}

    def _left_for(self, wish: _Wish) -> float:
        """Return the minutes that an implementation's next module may take.

        Its second leaves those that are still surveyed their share, and counts what exists; its
        first need not.
        """
        if not wish.chosen.modules or math.isinf(self.minutes):
            return self._left
        waiting = self.minutes * self._expected / self._implementations
        return max(0.0, min(self._left - waiting, self._unspent))

    def _cost(self, wish: _Wish, modules: Sequence[Module]) -> float:
        return sum(self._minutes(wish, each) for each in modules)

    def _price(self, wish: _Wish, module: Module) -> float:
        return self._learned.get(module.library, wish.minutes)

    def _too_long(self, wish: _Wish, modules: Sequence[Module]) -> bool:
        """Whether one of the builds would not end in time, however many others there are."""
        return any(self._minutes(wish, each) > wish.compilers * self.longest for each in modules)

    def _minutes(self, wish: _Wish, module: Module) -> float:
        return 0.0 if self._free(module) else self._price(wish, module)

    def _free(self, module: Module) -> bool:
        return module.exists or module.library in self._taken
