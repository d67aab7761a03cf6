"""Contenders timed call by call in turn, and the ratios of their times."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

Contenders = dict[str, Callable[[], torch.Tensor]]
Times = Mapping[str, Sequence[float]]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch use this many threads inside a with block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(
    contenders: Contenders, threads: int, repetitions: int, seconds: float = 0.0
) -> dict[str, list[float]]:
    """Time the contenders in turn, so that whatever else the machine does meets all of them.

    Args:
        contenders: by name.
        threads: of torch.
        repetitions: of each, at least.
        seconds: more repetitions until these are over.

    Returns:
        Seconds of each call.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    with torch_threads(threads):
        while repetitions > 0 or time.perf_counter() < end:
            repetitions -= 1
            for name, contender in contenders.items():
                start = time.perf_counter()
                contender()
                times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Times, name: str, other: str) -> float:
    """Return the median over repetitions: both were timed close to each other in each of them."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def milliseconds(times: Times, name: str) -> tuple[float, float]:
    """Return the least and the median."""
    return 1e3 * min(times[name]), 1e3 * statistics.median(times[name])


def check_agreement(contenders: Contenders, expected: str, tolerance: float) -> None:
    """Refuse to time what computes something else; every contender is warm after it."""
    outs = {name: contender() for name, contender in contenders.items()}
    for name, out in outs.items():
        difference = float((out.double() - outs[expected]).abs().max())
        if not difference <= tolerance:
            message = f"{name} is {difference:.3g} off the oracle: their times do not compare"
            raise RuntimeError(message)


def load(threads: Sequence[int]) -> str:
    """Return how busy the machine is: shared processors and memory slow contenders unequally."""
    at_work, processors = os.getloadavg()[0], os.cpu_count() or 1
    busy = f"Before: {at_work:.1f} processes at work on {processors} processors."
    free = processors - at_work
    return busy if free >= max(threads) - 0.5 else f"{busy} These times are not to be relied on."
