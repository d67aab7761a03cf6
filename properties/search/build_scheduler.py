"""Whose turn it is to build, where there are more modules than may be built at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class _Waiting:
    owner: str
    minutes: float
    share: int
    number: int


class BuildScheduler:
    """Lets a few builds run at a time, each of which takes a share of what there is.

    An owner whose builds have begun goes on first, so that its modules are complete early. Of the
    others the one whose builds take longest: begun last, they would keep everybody waiting.
    """

    def __init__(self, shares: int) -> None:
        self._free = shares
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        self._begun: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, owner: str, minutes: float, share: int = 1) -> Iterator[None]:
        """Wait for a turn, and have it for the length of a with block.

        Args:
            owner: whose build it is.
            minutes: that it takes, roughly.
            share: that it takes of all, of which there must be as many.
        """
        mine = _Waiting(owner, minutes, share, next(self._numbers))
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: self._free >= share and mine is self._next())
            self._waiting.remove(mine)
            self._begun.add(owner)
            self._free -= share
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()

    def _next(self) -> _Waiting:
        return min(
            self._waiting,
            key=lambda each: (each.owner not in self._begun, -each.minutes, each.number),
        )
