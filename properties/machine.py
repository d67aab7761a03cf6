"""What of this machine is ours."""

from __future__ import annotations

import os


def cores() -> int:
    """Count the processor cores that this process may use, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
