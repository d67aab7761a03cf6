"""What a comparison does, shown on standard error while it does it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.text import Text

from ....properties.verdicts.text import one_line
from ...console.terminal import console

TICK_SECONDS = 5.0
SILENT_TICKS = 6
"""Ticks in which nothing changes, after which what is unfinished is shown once more."""


class Count:
    """How many of something are done, are at work, and are to be done; for several threads.

    Args:
        words: with ``done``, ``of`` and ``working`` in braces.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._done = self._begun = self._of = 0
        self._lock = threading.Lock()

    def expect(self, more: int) -> None:
        """Expect more of them, or fewer."""
        with self._lock:
            self._of += more

    def begin(self) -> None:
        """Begin one."""
        with self._lock:
            self._begun += 1

    def add(self) -> None:
        """Have one done."""
        with self._lock:
            self._done += 1

    @property
    def unfinished(self) -> bool:
        """Whether some are not done."""
        return self._done < self._of

    def __str__(self) -> str:
        """Return the words; none where nothing was ever to be done."""
        if not self._of:
            return ""
        working = max(0, self._begun - self._done)
        return self._words.format(done=f"{self._done:,}", of=f"{self._of:,}", working=working)


@dataclass(frozen=True)
class Progress:
    """Shows what goes on; the default shows nothing.

    Attributes:
        tell: called with each step, a line, when it begins.
        surveyed, compiled, judged, examined, timed: counts, which are shown now and then.
    """

    tell: Callable[[str], None] = lambda _: None
    surveyed: Count = field(
        default_factory=lambda: Count("asked {done} of {of} implementations what they support")
    )
    compiled: Count = field(
        default_factory=lambda: Count("{done} of {of} compilations done, {working} at work")
    )
    judged: Count = field(
        default_factory=lambda: Count("judged {done} of about {of} problems with both releases")
    )
    examined: Count = field(
        default_factory=lambda: Count("ran failures again, and made them small: {done} of {of}")
    )
    timed: Count = field(default_factory=lambda: Count("timed {done} of {of} implementations"))

    @property
    def counts(self) -> tuple[Count, ...]:
        """All of them, in the order of the work."""
        return (self.surveyed, self.compiled, self.judged, self.examined, self.timed)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show what goes on, on standard error: each step when it begins, and counts now and then.

    A step that takes long without a count is shown again, so that the screen is never silent.
    """
    err = console(sys.stderr)
    started, over = time.monotonic(), threading.Event()
    steps: list[str] = []

    def say(line: str) -> None:
        clock = f"[{time.monotonic() - started:5.1f} s]"
        err.print(Text(one_line(f"{clock} {line}"), "dim"), soft_wrap=True)

    def begin(step: str) -> None:
        steps.append(step)
        say(step)

    made = Progress(begin)

    def tick() -> None:
        said: dict[Count, str] = {}
        silent = begun = 0
        while not over.wait(TICK_SECONDS):
            silent = silent + 1 if len(steps) == begun else 0
            begun = len(steps)
            now = {each: text for each in made.counts if (text := str(each))}
            changed = [each for each in now if now[each] != said.get(each)]
            shown = [each for each in now if each in changed or each.unfinished]
            if changed or silent >= SILENT_TICKS:
                still = [f"still: {each}" for each in steps[-1:]]
                say("; ".join([now[each] for each in shown] or still))
                said, silent = now, 0

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield made
    finally:
        over.set()
        ticker.join()
