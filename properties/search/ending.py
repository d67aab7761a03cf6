"""When a run or a comparison ends: its time is over, a signal came, or its device is lost."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..findings.report import TIME

TICK_SECONDS = 0.1
"""Seconds between two checks of the clock and of signals."""


class EndedError(Exception):
    """A question that is not asked any more; the message says why."""


class Ending:
    """The end of a run: its time is over, somebody asks for it, or its device is lost.

    Args:
        seconds: seconds that the run may take.

    Attributes:
        seconds: the seconds as they were given.
        asked: why the run is to end, one of ``ENDINGS``; empty while it is not. The first one
            stays.
        ended: why it ended before all questions were answered; empty if it did not.
        lost: why the device was lost; empty if it was not.
        cut_off: whether workers were ended: what fails from then on is no fault of theirs.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self.asked = self.ended = self.lost = ""
        self.cut_off = False
        self._started = time.monotonic()
        self._share = 1.0
        self._stopped = threading.Event()
        self._closers: list[tuple[float, Callable[[], object]]] = []
        self._lock = threading.Lock()

    def end(self, why: str) -> None:
        """End the run soon, from any thread or a handler of signals.

        Args:
            why: one of ``ENDINGS``.
        """
        # A handler may interrupt any line of the main thread: it takes no lock.
        self.asked = self.asked or why

    @property
    def due(self) -> bool:
        """Whether the run is to end."""
        if self.seconds_until(1.0) < 0:
            self.end(TIME)
        return bool(self.asked)

    def stop(self) -> None:
        """Let no question begin, and those in progress end after their case."""
        self._stopped.set()

    def stopped(self) -> bool:
        """Whether no question is to begin."""
        return self._stopped.is_set()

    def lose(self, why: str) -> None:
        """Stop, as the device is gone, and close what is open; the first reason stays."""
        self.lost = self.lost or why
        self._stop_and_close()

    def allot(self, share: float) -> None:
        """Let questions begin until this share of the time is over."""
        self._share = share

    def seconds_until(self, share: float) -> float:
        """Return the seconds until this share of the time is over."""
        return self._started + share * self.seconds - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether no question may begin: the run ends, or its share of the time is over."""
        return self.stopped() or bool(self.asked) or self.seconds_until(self._share) < 0

    def refuse(self) -> None:
        """Raise EndedError where no question may begin."""
        if self.over:
            raise EndedError(self.lost or self.asked or "the time for it is over")

    def check(self) -> None:
        """Raise EndedError where the run has stopped: what was closed has not answered."""
        if self.stopped():
            raise EndedError(self.lost or self.asked)

    @contextmanager
    def closing(self, close: Callable[[], object], share: float = 1.0) -> Iterator[None]:
        """Have something closed at the end, from another thread; at once where that was before.

        Args:
            close: closes it; it may be called twice.
            share: share of the time after which it is closed in any case.
        """
        closer = (share, close)
        with self._lock:
            self._closers.append(closer)
        if self.stopped():
            close()
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):
                self._closers.remove(closer)

    @contextmanager
    def watched(self, then: Callable[[], object] | None = None) -> Iterator[None]:
        """Watch the clock, and whether somebody asks for the end, from another thread.

        Args:
            then: called once when the run is to end; stops it, and closes what is open, if None.
        """
        done = threading.Event()

        def watch() -> None:
            # Polled: a handler of signals sets a field and wakes nobody, as it may take no lock.
            while not done.wait(TICK_SECONDS):
                if self.due:
                    (then or self._stop_and_close)()
                    return
                self._close()

        watcher = threading.Thread(target=watch, name="ending", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _stop_and_close(self) -> None:
        self.stop()
        self._close()

    def _close(self) -> None:
        """Close what is open: all of it once the run has stopped, else what has had its share."""
        with self._lock:
            due = [
                closer
                for closer in self._closers
                if self.stopped() or self.seconds_until(closer[0]) < 0
            ]
            self._closers = [closer for closer in self._closers if closer not in due]
        for _, close in due:
            close()
