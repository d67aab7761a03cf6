"""Whose turn it is to build, where there are more modules than may be built at a time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class _Waiting:
    owner: str
    minutes: float
    share: int


class BuildScheduler:
    """Lets a few builds run at a time, each of which takes a share of what there is.

    What only has to be loaded goes first. Then owners take turns, so that each has its first
    module before any has its second. In a round the one whose builds take longest begins: begun
    last, they would keep everybody waiting.
    """

    def __init__(self, shares: int) -> None:
        self._free = shares
        self._waiting: list[_Waiting] = []
        self._begun: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, owner: str, minutes: float, share: int = 1) -> Iterator[None]:
        """Wait for a turn, and have it for the length of a with block.

        Args:
            owner: whose build it is.
            minutes: that it takes, roughly; 0 if it only has to be loaded.
            share: that it takes of all, of which there must be as many.
        """
        mine = _Waiting(owner, minutes, share)
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: self._free >= share and mine is self._next())
            self._waiting.remove(mine)
            self._begun[owner] += minutes > 0
            self._free -= share
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()

    def _next(self) -> _Waiting:
        """Return whose turn it is; of several alike, who came first."""
        return min(
            self._waiting,
            key=lambda each: (each.minutes > 0, self._begun[each.owner], -each.minutes),
        )
