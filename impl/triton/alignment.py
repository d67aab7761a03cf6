"""Where values begin that lie beside keys in one allocation: not always where wide loads may.

Triton compiles a kernel of its own for a tensor that does not begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...reference import AttentionProblem
from .units import LARGEST_UNIT

HEADS = (1, 2, 4, 8)
"""Numbers of key-value heads with which, on the smallest pages, values have every alignment."""


def alignment_of(problem: AttentionProblem) -> tuple[bool, ...]:
    """Whether values, and their block scales, begin at a multiple of 16 bytes.

    See ``reference.materialise``: keys of a page come first, and its values right behind them.
    """
    if not problem.strided_kv or problem.values_in_keys:
        return True, True
    width = max(problem.head_dim_qk, problem.head_dim_vo)
    slots = 1 if problem.operation == "ragged_attention" else problem.page_size
    elements = slots * problem.num_kv_heads * width
    entry = problem.cache_entry
    rows = elements // width
    scales = rows * entry.scales_of(width) * entry.scale_dtype.itemsize if entry.scale_dtype else 0
    codes = elements // entry.packed * entry.dtype.itemsize
    return codes % LARGEST_UNIT == 0, scales % LARGEST_UNIT == 0


def in_every_alignment(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """Yield the problem, and others like it whose values begin at every other alignment."""
    yield problem
    seen = {alignment_of(problem)}
    smallest = 1 if problem.page_size & (problem.page_size - 1) == 0 else problem.page_size
    if problem.values_in_keys:
        return
    for heads in HEADS:
        other = replace(problem, strided_kv=True, num_kv_heads=heads, page_size=smallest)
        if alignment_of(other) not in seen:
            seen.add(alignment_of(other))
            yield other
