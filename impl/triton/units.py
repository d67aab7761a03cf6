"""Strides and alignments for Triton kernels: in units, of which a kernel is compiled for few.

Left to itself, Triton compiles a kernel anew for each set of strides that happen to be 1, or a
multiple of 16: heads, pages and layouts would each bring kernels of their own. It must know of
what an address is a multiple, though, to load several elements at once. So strides come in units, a
constant of the kernel, and are no constants themselves.
Triton also compiles a kernel of its own for a tensor that does not begin at a multiple of 16 bytes,
as values may that lie beside keys in one allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...reference import AttentionProblem

LARGEST_UNIT = 16
"""Elements: of one byte, as many as one instruction loads."""
BEYOND_INT32 = 2**31


def unit_of(*strides: int | None) -> int:
    """Return the largest power of two up to 16 that divides these strides; None is none.

    Of strides beyond int32 the unit is 1: in units they would be passed as int32, and in elements
    wrap around.
    """
    present = [stride for stride in strides if stride is not None]
    if any(abs(stride) >= BEYOND_INT32 for stride in present):
        return 1
    return math.gcd(LARGEST_UNIT, *present)


def in_units(strides: dict[str, int | None], unit: int) -> dict[str, int | None]:
    """Return named strides in units."""
    return {name: None if each is None else each // unit for name, each in strides.items()}


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int | None]:
    """Name a tensor's first strides as kernels do; None of one that is absent."""
    names = [f"{name}_{axis}" for axis in axes.split()]
    if tensor is None:
        return dict.fromkeys(names)
    return dict(zip(names, tensor.stride(), strict=False))


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
