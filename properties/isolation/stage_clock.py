"""How long another process waited for a processor in the stage that it is in (Linux).

A deadline counts the seconds in which a process may have done something. On a busy machine it may
get a quarter of a processor: what it waits for one is nobody's fault, and no part of its running.
A loop that never ends, a sleep and a deadlock wait little or use what they get: their time passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# A deadline is at most this many times as long by the clock on the wall, whatever waits.
MOST_TIMES: Final = 10.0
# Stages that come and go inside another one, which goes on after them where it was.
_WITHIN: Final = frozenset({"compile", "specialise"})
_NANOSECONDS: Final = 1e9


class StageClock:
    """Adds up what the threads of a process waited, from one look at its stage to the next."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a request: no wait and no reading of the stage counts before it."""
        self._stage, self._looked = "", 0.0
        self._waited: dict[str, float] = {}
        self._delays: dict[str, int] = {}

    def waited(self, process: int | None, stage: str, started: int, limit: float) -> float:
        """Return the seconds of a stage in which its process only waited for a processor.

        At the first look it is 0: what was waited before is not known.

        Args:
            process: its id; None while it is not known.
            stage, started: the same as in ``Board.read``.
            limit: the deadline of the stage in seconds.
        """
        if process is None:
            return 0.0
        before, delays = self._delays, _delays(process)
        if stage == self._stage:
            self._waited[stage] += _longest(before, delays)
        elif stage not in self._waited:
            self._waited[stage] = 0.0
        # It has begun anew, and is not the one that went on after another within it.
        if started / _NANOSECONDS > self._looked and not {stage, self._stage} & _WITHIN:
            self._waited[stage] = 0.0
        self._stage, self._looked, self._delays = stage, time.monotonic(), delays
        # Bounded: on a machine that never gives it a processor, the deadline still comes.
        return min(self._waited[stage], (MOST_TIMES - 1) * limit)


def _delays(process: int) -> dict[str, int]:
    """Return the nanoseconds that each thread has waited on a run queue; empty if nobody counts.

    They are the second field of schedstat (Documentation/scheduler/sched-stats.rst).
    """
    tasks = Path(f"/proc/{process}/task")
    try:
        names = os.listdir(tasks)  # noqa: PTH208  names only, ten times a second
    except OSError:
        return {}
    return {name: _delay(tasks / name / "schedstat") for name in names}


def _delay(path: Path) -> int:
    try:
        return int(path.read_text().split()[1])
    except (OSError, ValueError, IndexError):  # the thread has ended, or nobody counts
        return 0


def _longest(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Return the most seconds that one thread has waited: others may wait for what it does."""
    return (
        max((after[name] - before[name] for name in after if name in before), default=0)
        / _NANOSECONDS
    )
