"""Faults beside a right answer: what is written, returned or left unwritten around it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch

from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, attend

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
ROW_TILE = 16


@seeded(BUGS, PAGED, "inputs_unchanged")
def q_scaled_in_place(inputs: PagedAttentionInputs) -> Pair:
    """Scale q in place, where the caller may still need it."""
    out, lse = attend(inputs)
    inputs.q.mul_(inputs.sm_scale)
    return out, lse


@seeded(BUGS, PAGED, "inputs_unchanged")
def tail_zeroed_in_cache(inputs: PagedAttentionInputs) -> Pair:
    """Zero the slot behind a request's last key, which the next append may have filled."""
    metadata, size = inputs.metadata, inputs.metadata.page_size
    ends = metadata.paged_kv_indptr.tolist()[1:]
    for end, length in zip(ends, metadata.seq_lens.tolist(), strict=True):
        if length % size:
            page = int(metadata.paged_kv_indices[end - 1])
            by_slot = inputs.v_cache
            by_slot = by_slot if inputs.kv_layout == "NHD" else by_slot.transpose(1, 2)
            by_slot[page, length % size] = 0
    return attend(inputs)


def _write(
    inputs: PagedAttentionInputs | RaggedAttentionInputs, out: torch.Tensor, lse: torch.Tensor
) -> None:
    if inputs.out is not None and inputs.lse is not None:
        inputs.out.copy_(out)
        inputs.lse.copy_(lse)


@seeded(BUGS, PAGED, "inputs_unchanged", writes_out=True)
def writes_past_the_end(inputs: PagedAttentionInputs) -> None:
    """Write one element behind the output buffer."""
    _write(inputs, *attend(inputs))
    if inputs.out is not None:
        count = inputs.out.numel()
        inputs.out.as_strided((count + 1,), (1,))[count:] = 0


@seeded(BUGS, RAGGED, "well_formed", writes_out=True)
def last_rows_unwritten(inputs: RaggedAttentionInputs) -> None:
    """Leave the rows behind the last full tile of 16 unwritten where there is a full tile."""
    out, lse = attend(inputs)
    if inputs.out is None or inputs.lse is None:
        return
    tokens = len(out)
    whole = tokens // ROW_TILE * ROW_TILE or tokens
    inputs.out[:whole] = out[:whole]
    inputs.lse[:] = lse


@seeded(BUGS, PAGED, "well_formed")
def out_in_float32(inputs: PagedAttentionInputs) -> Pair:
    """Return float32 whatever dtype was asked for."""
    return attend(replace(inputs, out_dtype=torch.float32))


@seeded(BUGS, PAGED, "well_formed")
def lse_heads_first(inputs: PagedAttentionInputs) -> Pair:
    """Return the LSE as [heads, tokens]."""
    out, lse = attend(inputs)
    return out, lse.transpose(0, 1).contiguous()


_calls = count()


@seeded(BUGS, PAGED, "repeated_calls", model="flashinfer#4841")
def sums_in_varying_order(inputs: PagedAttentionInputs) -> Pair:
    """Sum over tiles whose size changes from call to call: right, but not twice the same."""
    return attend(inputs, replace(HONEST, tile=(5, 7)[next(_calls) % 2]))
