"""What a comparison does, told on standard error while it does it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from ....properties.verdicts.text import printable
from ...console.terminal import console
from .running import Progress

TICK_SECONDS = 5.0


@contextmanager
def progress() -> Iterator[Progress]:
    """Tell what goes on, on standard error: a line for each step, and counts now and then."""
    err = console(sys.stderr)
    started, over, counts = time.monotonic(), threading.Event(), dict[str, int]()

    def say(line: str) -> None:
        clock = f"[{time.monotonic() - started:5.1f} s]"
        err.print(Text(printable(f"{clock} {line}"), "dim"), soft_wrap=True)

    def judged(name: str, count: int) -> None:
        counts[name] = counts.get(name, 0) + count

    def tick() -> None:
        told = 0
        while not over.wait(TICK_SECONDS):
            total = sum(counts.values())
            if total != told:
                say(f"judged {total} problems of {len(counts)} implementations, with both releases")
            told = total

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield Progress(say, judged)
    finally:
        over.set()
        ticker.join()
