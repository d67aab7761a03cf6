"""What a command shows on standard error while it works: a block of a terminal, or lines of a log.

The block disappears when the work ends, and nothing of it scrolls. A log has a line now and then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...properties.verdicts.text import count_of, one_line

LEAST_PAUSE = 30.0
"""Fewest seconds between two lines of a log."""
PAUSE_SHARE = 0.1
"""Least part of the time that has passed between two lines: an hour has about 35 lines."""
FRAMES_PER_SECOND = 4
BAR_WIDTH = 30
MOST_SHOWN = 8
"""Most findings in the block of a terminal."""


def in_one_log() -> bool:
    """Whether standard output and error are one file or pipe, as after ``2>&1``."""
    try:
        found = [os.fstat(each.fileno()) for each in (sys.stdout, sys.stderr)]
        return os.path.samestat(*found) and not sys.stderr.isatty()
    except (OSError, ValueError):  # there is no file behind one of them
        return False


@contextmanager
def live(
    err: Console, block: Callable[[], RenderableType], line: Callable[[], str]
) -> Iterator[None]:
    """Show the state of some work for the length of a with block.

    Args:
        err: where to.
        block: returns what a terminal shows; called several times a second.
        line: returns the line that a log gets now and then.
    """
    if has_block(err):
        with Live(
            get_renderable=block,
            console=err,
            transient=True,
            refresh_per_second=FRAMES_PER_SECOND,
        ):
            yield
        return
    started, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(pause_after(time.monotonic() - started)):
            log(err, line(), time.monotonic() - started)

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()


def has_block(err: Console) -> bool:
    """Whether a console can show a block that changes: FORCE_COLOR makes no terminal of a log."""
    return err.is_interactive and err.file.isatty()


def log(err: Console, line: str, seconds: float) -> None:
    """Print a line with the seconds that have passed."""
    err.print(Text(one_line(f"[{seconds:5.1f} s] {line}"), "dim"), soft_wrap=True)


def pause_after(seconds: float) -> float:
    """Return the seconds until the next line of a log, by those that have passed."""
    return max(LEAST_PAUSE, PAUSE_SHARE * seconds)


def bar(share: float | None, text: str) -> RenderableType:
    """Return a bar with its percentage and a text behind it; a moving one without a share."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=BAR_WIDTH)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    percent = "" if share is None else f"{share:4.0%}  "
    filled = ProgressBar(total=1.0, completed=share or 0.0, pulse=share is None)
    grid.add_row(filled, Text(one_line(percent + text)))
    return grid


def row(text: str, style: str = "") -> Text:
    """Return a line of a block, which is cut rather than wrapped."""
    return Text(one_line(text), style, no_wrap=True, overflow="ellipsis")


def newest(findings: Sequence[Text]) -> list[Text]:
    """Return the rows of a block for findings: the last of them, and how many came before."""
    shown = [*findings[-MOST_SHOWN:]]
    for line in shown:
        line.no_wrap, line.overflow = True, "ellipsis"
    earlier = len(findings) - len(shown)
    return [*([row(count_of(earlier, "earlier finding"), "bold red")] if earlier else []), *shown]


def minutes(seconds: float) -> str:
    """Return a time as minutes and seconds, such as 2:05."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
