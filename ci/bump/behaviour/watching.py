"""What a comparison does, shown on standard error while it does it."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from ...console.live import bar, has_block, live, log, minutes, newest, row
from ...console.terminal import console


class Count:
    """How many of something are done, are at work, and are to be done; for several threads.

    Args:
        words: a sentence with ``done``, ``of`` and ``working`` in braces.
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

    @property
    def share(self) -> float | None:
        """Part that is done; None where it is not known how many there are."""
        return min(1.0, self._done / self._of) if self._of else None

    def __str__(self) -> str:
        """Return the words; none where nothing was ever to be done."""
        if not self._of:
            return ""
        working = max(0, self._begun - self._done)
        return self._words.format(done=f"{self._done:,}", of=f"{self._of:,}", working=working)


@dataclass(frozen=True)
class BumpProgress:
    """Shows what goes on; the default shows nothing.

    Attributes:
        tell: called with each step, a line, when it begins.
        found: called with each finding, a line, as it comes.
        surveyed, compiled, judged, examined, timed: counts, which are shown now and then.
    """

    tell: Callable[[str], None] = lambda _: None
    found: Callable[[str], None] = lambda _: None
    surveyed: Count = field(
        default_factory=lambda: Count("asked {done} of {of} implementations what they support")
    )
    compiled: Count = field(
        default_factory=lambda: Count("{done} of {of} compilations done, {working} at work")
    )
    judged: Count = field(
        default_factory=lambda: Count("ran {done} of about {of} problems with both releases")
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
def progress(seconds: float = math.inf) -> Iterator[BumpProgress]:
    """Show what goes on, on standard error.

    A terminal shows a bar of the problems, the step that began last, what is done of each kind, and
    the last findings. A log has a line for each step and each finding, and now and then one for
    what is unfinished.

    Args:
        seconds: the seconds that the comparison may take.
    """
    err = console(sys.stderr)
    started = time.monotonic()
    steps, findings = ["starting"], list[Text]()

    def begin(step: str) -> None:
        steps.append(step)
        if not has_block(err):
            log(err, step, time.monotonic() - started)

    def find(finding: str) -> None:
        findings.append(row(finding, "bold red"))
        if not has_block(err):
            log(err, finding, time.monotonic() - started)

    made = BumpProgress(begin, find)

    def line() -> str:
        unfinished = [str(each) for each in made.counts if each.unfinished]
        return "; ".join(unfinished or [f"still: {steps[-1]}"])

    def block() -> RenderableType:
        passed = time.monotonic() - started
        left = f"  at most {minutes(seconds - passed)} left" if seconds < math.inf else ""
        counts = [row(f"  {each}", "dim") for each in made.counts if str(each)]
        # A share of what is known so far would go back with each implementation that is asked.
        share = None if made.surveyed.unfinished else made.judged.share
        shown = newest(findings)
        return Group(bar(share, minutes(passed) + left), row(steps[-1]), *counts, *shown)

    with live(err, block, line):
        yield made
