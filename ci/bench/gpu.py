"""Times on a GPU: calls are captured in a CUDA graph, as engines run them, and replayed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from ..console.errors import MachineError

Call = Callable[[], object]
COLD_BYTES = 256 * 2**20
"""What calls that take turns read in all: several times the L2 cache of any GPU so far."""
REPLAY_MS = 4.0
"""About how long one timed replay takes."""
MOST_CALLS = 256
REPLAYS = 7


def require_gpu() -> None:
    """Refuse where torch sees no CUDA device.

    Raises:
        MachineError: it sees none.
    """
    if not torch.cuda.is_available():
        message = "bench kernels needs a CUDA device, and torch sees none"
        raise MachineError(message)


def turns(bytes_read: int, most: int = 32) -> int:
    """Return how many sets of buffers must take turns so that none is in the L2 cache."""
    return min(max(-(-COLD_BYTES // max(bytes_read, 1)), 1), most)


def race(contenders: Mapping[str, Sequence[Call]], *, replays: int = REPLAYS) -> dict[str, float]:
    """Time contenders: the median milliseconds of a call over several replays of a graph each.

    The graphs take turns, so that a GPU that grows hot slows all of them.

    Args:
        contenders: calls by name that do the same work on buffers of their own, which take turns
            too; each is called twice before the clock starts.
        replays: how many of each are timed.
    """
    captured = {name: _captured(calls) for name, calls in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(replays):
        for name, (graph, count) in captured.items():
            times[name].append(_elapsed(graph.replay) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def milliseconds(calls: Sequence[Call]) -> float:
    """Time one contender, see ``race``."""
    return race({"": calls})[""]


def _captured(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture calls in a graph, often enough for a replay that can be timed; say how many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
        once = _elapsed(lambda: [call() for call in calls]) / len(calls)
    torch.cuda.current_stream().wait_stream(side)
    rounds = max(1, min(int(REPLAY_MS / max(once, 1e-3)), MOST_CALLS) // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return graph, rounds * len(calls)


def copy_bandwidth() -> float:
    """Measure the bytes a second that a large copy within the device reads and writes.

    Launched, not replayed: in a graph a copy becomes a node of its own, which may run otherwise.
    """
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    once = statistics.median(_elapsed(lambda: target.copy_(source)) for _ in range(REPLAYS))
    return 2 * source.nbytes / once * 1e3


def matrix_rate() -> float:
    """Measure the floating-point operations a second of a large bfloat16 matrix product."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds([lambda: a @ b]) * 1e3


def _elapsed(call: Call) -> float:
    """Time a call in milliseconds, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
