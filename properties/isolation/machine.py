"""What of this machine is ours."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

MOST_LAUNCHES = 1_000_000
"""Most launches of one problem under the law soak: a GPU makes as many in minutes."""


def cores() -> int:
    """Count the processor cores that this process may use, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waited() -> float:
    """Return the seconds that this thread waited for a processor; 0 if nobody counts.

    Linux does, in the second field of schedstat (Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def undisturbed() -> float:
    """Return the seconds of a clock that stands still while this thread waits for a processor."""
    return perf_counter() - waited()
