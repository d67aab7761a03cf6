"""SIGINT and SIGTERM: the first ends a run, which then reports; a second one ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...properties.findings.report import INTERRUPTED, TERMINATED
from ...properties.isolation.spawning import kill_children

ENDINGS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
SIGNALLED = 128
"""Exit code of a command that a signal ended, less the signal's number."""
TWICE_SECONDS = 0.5
"""Signals that are closer together are one: timeout(1) and service managers send it twice."""
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def ended_by_signals(
    end: Callable[[str], object],
    again: Callable[[int], object] | None = None,
    numbers: Sequence[signal.Signals] = tuple(ENDINGS),
) -> Iterator[None]:
    """Have the first SIGINT or SIGTERM call `end`, and a later one end the process at once.

    Args:
        end: function that is called with one of ``ENDINGS``. It may interrupt any line of the main
            thread.
        again: function that is called with a later signal's number, ``end_at_once`` if None.
        numbers: the signals; others keep their handlers.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not for it
        yield
        return
    first: list[float] = []

    def handle(number: int, _: object) -> None:
        if not first:
            first.append(time.monotonic())
            end(ENDINGS[signal.Signals(number)])
        elif time.monotonic() - first[0] > TWICE_SECONDS:
            (again or end_at_once)(number)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_once(end: Callable[[str], object]) -> Iterator[None]:
    """Have Ctrl-C call `end`, and a second one raise: the process is a notebook's, or pytest's."""

    def again(number: int) -> None:
        signal.default_int_handler(number, None)

    with ended_by_signals(end, again, (signal.SIGINT,)):
        yield


def signal_of(why: str) -> signal.Signals:
    """Return the signal that is meant by one of ``ENDINGS``."""
    return next(number for number, each in ENDINGS.items() if each == why)


def end_at_once(number: int) -> None:
    """End this process without a report, and all that it has started."""
    kill_children()
    shown = _SHOW_CURSOR if sys.stderr.isatty() else ""
    why = ENDINGS[signal.Signals(number)]
    os.write(2, f"{shown}\nkernelproof: {why} again: ended at once\n".encode())
    os._exit(SIGNALLED + number)
