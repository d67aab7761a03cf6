# ruff: noqa: ANN001, ANN201, N803, PLR0917  kernels have no types, and name constexprs so
"""Kernels that merge states: one has a branch that no caller takes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernelproof.impl import implementation


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def weigh(outs, weights, out, states, rows, dim, SIZE: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    places = tl.arange(0, SIZE)
    kept = places < dim
    total = tl.zeros([SIZE], tl.float32)
    for state in range(states):
        weight = tl.load(weights + state * rows + row)
        number = tl.load(outs + (state * rows + row) * dim + places, mask=kept, other=0.0)
        total += tl.where(weight > 0, number.to(tl.float32) * weight, 0.0)
    if PACKED:
        total = unpacked(total)
        low = total * 0.5
        high = total - low
        low = low + 1.0
        high = high + 1.0
        low = low - 1.0
        high = high - 1.0
        low = low * 2.0
        high = high * 2.0
        low = low * 1.0
        total = (low + high) * 0.5
    tl.store(out + row * dim + places, total, mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def unpacked(total):  # type: ignore[no-untyped-def]
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def plain(outs, weights, out, states, rows, dim, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    places = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for state in range(states):
        weight = tl.load(weights + state * rows + row)
        number = tl.load(outs + (state * rows + row) * dim + places, mask=places < dim, other=0.0)
        total += tl.where(weight > 0, number.to(tl.float32) * weight, 0.0)
    tl.store(out + row * dim + places, total, mask=places < dim)


def _merged(inputs: Any, kernel: Any, **flags: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    lse = inputs.lses.logsumexp(0)
    weights = (inputs.lses - lse).exp().nan_to_num(0.0)
    outs = inputs.outs.contiguous()
    states, tokens, heads, dim = outs.shape
    out = torch.empty(tokens, heads, dim, dtype=inputs.out_dtype)
    if out.numel():
        rows, size = tokens * heads, triton.next_power_of_2(dim)
        kernel[(rows,)](outs, weights, out, states, rows, dim, SIZE=size, **flags)
    return out, lse


UNSET = {"PACKED": "engine/merging.py:12"}


@implementation("merge_state", name="partly")
def partly(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Merge with a kernel of which most is behind a flag that is never set."""
    return _merged(inputs, weigh, PACKED=False)


@implementation("merge_state", name="declares", unset_flags=UNSET)
def declares(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Merge with it, and say which line of an engine leaves the flag unset."""
    return _merged(inputs, weigh, PACKED=False)


@implementation("merge_state", name="wholly")
def wholly(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Merge with a kernel without branches."""
    return _merged(inputs, plain)
