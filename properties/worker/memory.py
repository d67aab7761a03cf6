"""What a call needs of memory: what it allocates, and how far it writes into its workspace."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import torch

QUIET = "99"
"""Level of the profiler's log; without it, the profiler writes a line when it starts and ends."""
PATTERN = 0xA5
CHUNK_BYTES = 4 << 20
"""Bytes of a workspace that are read together, from its end: it may have hundreds of MiB."""


def allocated(call: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes that torch has allocated on a device at a time during a call.

    Allocations are counted, not what the operating system lends: what an allocator keeps, and how
    it lies scattered, moves that by a megabyte from process to process. What a BLAS sets aside for
    itself is not counted.

    Args:
        call: waits for the device where that matters.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    assert profile.profiler is not None  # noqa: S101  it has run
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(max(itertools.accumulate((event.nbytes() for event in events), initial=0)))


def written(workspaces: Sequence[torch.Tensor], call: Callable[[], object]) -> int:
    """Return how many bytes of workspaces a call needs: up to the last that it writes, of all.

    Args:
        workspaces: the workspaces that may hold anything before the call.
        call: waits for the device where that matters.
    """
    views = [each.view(torch.uint8).view(-1) for each in workspaces]
    for view in views:
        view.fill_(PATTERN)
    call()
    return sum(map(_end, views))


def _end(view: torch.Tensor) -> int:
    for stop in range(len(view), 0, -CHUNK_BYTES):
        start = max(0, stop - CHUNK_BYTES)
        changed = view[start:stop] != PATTERN
        if changed.any():
            return start + int(changed.nonzero()[-1].item()) + 1
    return 0
