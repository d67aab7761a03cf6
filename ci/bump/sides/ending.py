"""When a comparison stops asking: its time is over, or somebody ends it. Its answers stay."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...console.signals import SIGNALLED, ended_by_signals, signal_of

JUDGED, EXAMINED = 0.8, 0.9
"""Shares of the time after which nothing more is built or judged, and no failure is examined any
more; the rest is for speed."""
WATCH_SECONDS = 0.1


class EndedError(Exception):
    """A question that is not asked any more; the message says why."""


class Ending:
    """The end of a comparison: of its time, or by a signal.

    What a comparison learns stands in its journal. So the end only refuses new questions: whatever
    makes findings and reports of answers runs on, with those that are there.

    Args:
        minutes: the minutes that it may take; as many as it needs if None.

    Attributes:
        minutes: the minutes as they were given.
        code: exit code of an end that is not that of the time; 0 before.
        why: a sentence; empty before the end.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self.minutes = minutes
        self.code, self.why = 0, ""
        self.started = time.monotonic()
        self._mark = self._at(1.0)
        self._ended = threading.Event()
        self._signalled = ""
        self._closers: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether no new question may be asked."""
        return self._ended.is_set() or time.monotonic() > self._mark

    @property
    def left(self) -> float:
        """Seconds in which new questions may be asked."""
        return 0.0 if self._ended.is_set() else max(0.0, self._mark - time.monotonic())

    def allot(self, share: float) -> None:
        """Let new questions be asked until this share of the time is over."""
        self._mark = self._at(share)

    def _at(self, share: float) -> float:
        return math.inf if self.minutes is None else self.started + 60 * share * self.minutes

    def seconds_until(self, share: float) -> float:
        """Return the seconds until this share of the time is over."""
        return self._at(share) - time.monotonic()

    def refuse(self) -> None:
        """Raise EndedError where no new question may be asked."""
        if self.over:
            given = "" if self.minutes is None else f" (--minutes {self.minutes:g})"
            raise EndedError(self.why or f"its share of the time is over{given}")

    def check(self) -> None:
        """Raise EndedError where the comparison has ended: what it killed has not answered."""
        if self._ended.is_set():
            raise EndedError(self.why)

    def end(self, why: str, code: int = 0) -> None:
        """End the comparison: kill what still runs for it; only the first end counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self.why, self.code = why, code
            self._ended.set()
            closers = [*self._closers]
        for close in closers:
            close()

    @contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """Have something closed at the end, from another thread; at once where that was before."""
        with self._lock:
            self._closers.append(close)
        if self._ended.is_set():
            close()
        try:
            yield
        finally:
            with self._lock:
                self._closers.remove(close)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the comparison when its time is over, and at the first signal of ``handled``."""
        done = threading.Event()

        def watch() -> None:
            until = self._at(1.0)
            while not done.wait(WATCH_SECONDS):
                if self._signalled:
                    self.end(*signalled(self._signalled))
                elif time.monotonic() > until:
                    self.end(f"the time was over (--minutes {self.minutes:g})")

        watcher = threading.Thread(target=watch, name="ending", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Record SIGTERM and SIGINT rather than die of them; a second one ends this process."""
        with ended_by_signals(self.note):
            yield

    def note(self, why: str) -> None:
        """Record a signal, one of ``ENDINGS``, for ``watched``; may be called by its handler."""
        # Nothing that takes a lock: whoever holds it may be the thread that is interrupted.
        self._signalled = why


def signalled(why: str) -> tuple[str, int]:
    """Return the sentence and the exit code of a comparison that a signal of ``ENDINGS`` ended."""
    number = signal_of(why)
    return f"ended by {number.name}: --resume goes on from here", SIGNALLED + number
