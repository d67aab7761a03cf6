"""How much memory the oracle takes, measured in a fresh process by the operating system (Linux)."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernelproof.reference import Arithmetic, AttentionProblem, materialise
from kernelproof.reference.oracle import attention, bounded_attention
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def unmeasurable() -> str:
    """Return why memory cannot be measured here; empty if it can."""
    return "" if CLEAR.exists() else f"Memory is not measured: this system has no {CLEAR}."


@dataclass(frozen=True)
class Footprint:
    """Bytes: of what a call reads (q, and each request's keys and values) in float64; its peak."""

    read: int
    peak: int

    @property
    def ratio(self) -> float:
        """Peak to read."""
        return self.peak / self.read


def footprints(
    calls: Sequence[tuple[AttentionProblem, Arithmetic | None]],
) -> list[Footprint]:
    """Weigh the oracle on paged problems, and its bound too where an arithmetic is given."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as fresh:
        peaks = [fresh.submit(_peak, *call) for call in calls]
        return [
            Footprint(_read(problem), peak.result())
            for (problem, _), peak in zip(calls, peaks, strict=True)
        ]


def _read(problem: AttentionProblem) -> int:
    queries = sum(problem.query_lens) * problem.num_qo_heads * problem.head_dim_qk
    channels = problem.num_kv_heads * (problem.head_dim_qk + problem.head_dim_vo)
    return 8 * (queries + sum(problem.seq_lens) * channels)


def _peak(problem: AttentionProblem, arithmetic: Arithmetic | None) -> int:
    torch.set_num_threads(1)
    # What libraries set aside at their first call is theirs, once and for all.
    _call(replace(problem, query_lens=(1,), seq_lens=(16,)), arithmetic)()
    run = _call(problem, arithmetic)
    before = _reset()
    run()
    return max(_high_water() - before, 0)


def _call(problem: AttentionProblem, arithmetic: Arithmetic | None) -> Callable[[], object]:
    inputs = materialise(problem)
    if not isinstance(inputs, PagedAttentionInputs):
        message = f"operation is {problem.operation}; paged_attention alone is weighed"
        raise ValueError(message)
    if arithmetic is None:
        return lambda: attention(inputs)
    return lambda: bounded_attention(inputs, arithmetic)


def _reset() -> int:
    """Forget the peak of making the inputs; give the bytes resident now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps freed memory, which the call would reuse unseen
        trim(0)
    CLEAR.write_text("5", encoding="ascii")  # resets the high-water mark, see proc(5)
    return _high_water()


def _high_water() -> int:
    """Return the most bytes that were resident.

    Not ``ru_maxrss``: a process inherits that from its parent and cannot reset it.
    """
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    message = f"{STATUS} has no line VmHWM"
    raise RuntimeError(message)
