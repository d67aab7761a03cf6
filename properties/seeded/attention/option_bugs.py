"""Faults in the arithmetic of attention: masks, scales, heads, sinks, the LSE."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ....reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..catalogue import SeededBug, seeded
from ..kernels import (
    HONEST,
    TILE,
    Request,
    State,
    attend,
    first_position,
    key_counts,
    natural_lse,
    shared_heads,
)

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
COARSE = 16
"""Keys in the tiles to which a sliding window is rounded."""
SENTINEL = -5e4
"""What FlashInfer used for minus infinity."""


@seeded(BUGS, PAGED, "parity")
def causal_from_start(inputs: PagedAttentionInputs) -> Pair:
    """Align queries to the start of the keys under a causal mask, not to their end."""

    def position(request: Request, inputs: AttentionInputs) -> int:
        return 0 if request.causal else first_position(request, inputs)

    return attend(inputs, replace(HONEST, position=position))


@seeded(BUGS, PAGED, "batch_independence")
def causal_from_longest(inputs: PagedAttentionInputs) -> Pair:
    """Align queries to the end of the longest request of the batch."""
    longest = max(key_counts(inputs), default=0)

    def position(request: Request, inputs: AttentionInputs) -> int:
        del inputs
        return longest - request.num_queries

    return attend(inputs, replace(HONEST, position=position))


@seeded(BUGS, PAGED, "parity")
def window_off_by_one(inputs: PagedAttentionInputs) -> Pair:
    """Keep one key too few on the left of a sliding window."""
    return attend(inputs, replace(HONEST, window=lambda position, key, left: key > position - left))


@seeded(BUGS, PAGED, "parity", model="sglang#31501")
def window_by_tiles(inputs: PagedAttentionInputs) -> Pair:
    """Apply the window to whole tiles of keys only."""

    def window(position: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return key >= (position - left) // COARSE * COARSE

    return attend(inputs, replace(HONEST, window=window))


@seeded(BUGS, PAGED, "parity", model="flashinfer#3864")
def window_in_first_tile(inputs: PagedAttentionInputs) -> Pair:
    """Ignore the window in every tile of keys but the first."""

    def window(position: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return (key >= position - left) | (key >= TILE)

    return attend(inputs, replace(HONEST, window=window))


@seeded(BUGS, PAGED, "parity")
def heads_interleaved(inputs: PagedAttentionInputs) -> Pair:
    """Use key-value head h % K for query head h, where h // G is right."""
    return attend(inputs, replace(HONEST, heads=lambda qo, kv: torch.arange(qo) % kv))


@seeded(BUGS, PAGED, "parity", model="flashinfer#996")
def group_size_power_of_two(inputs: PagedAttentionInputs) -> Pair:
    """Round group sizes down to a power of two: the rest of a group reads its neighbour's head."""

    def heads(qo: int, kv: int) -> torch.Tensor:
        group = 1 << ((qo // kv).bit_length() - 1)
        return (torch.arange(qo) // group) % kv if group * kv != qo else shared_heads(qo, kv)

    return attend(inputs, replace(HONEST, heads=heads))


@seeded(BUGS, PAGED, "parity")
def scale_without_root(inputs: PagedAttentionInputs) -> Pair:
    """Take 1 / head_dim as the default scale, not its square root."""
    head_dim = inputs.q.shape[-1]
    default = 1.0 / math.sqrt(head_dim)
    scale = 1.0 / head_dim if inputs.sm_scale == default else inputs.sm_scale
    return attend(replace(inputs, sm_scale=scale))


@seeded(BUGS, PAGED, "parity", model="sglang#33915")
def soft_cap_skipped(inputs: PagedAttentionInputs) -> Pair:
    """Accept the soft cap and ignore it."""
    return attend(replace(inputs, logits_soft_cap=0.0))


@seeded(BUGS, PAGED, "parity")
def soft_cap_after_mask(inputs: PagedAttentionInputs) -> Pair:
    """Cap masked logits too, which makes them visible again at -cap."""
    return attend(inputs, replace(HONEST, caps_masked=True))


@seeded(BUGS, PAGED, "parity", model="vllm#52148")
def sinks_ignored_in_prefill(inputs: PagedAttentionInputs) -> Pair:
    """Use the sinks for requests with one query only."""

    def sinks(inputs: AttentionInputs, request: Request) -> torch.Tensor | None:
        return inputs.sinks if request.num_queries == 1 else None

    return attend(inputs, replace(HONEST, sinks=sinks))


@seeded(BUGS, RAGGED, "parity", model="flashinfer#4485")
def lse_base_2(inputs: RaggedAttentionInputs) -> Pair:
    """Return the logarithm to base 2."""
    out, lse = attend(inputs)
    return out, lse * math.log2(math.e)


@seeded(BUGS, PAGED, "parity")
def lse_without_sinks(inputs: PagedAttentionInputs) -> Pair:
    """Leave the sinks out of the LSE, though not out of the output."""
    return attend(inputs)[0], attend(replace(inputs, sinks=None))[1]


@seeded(BUGS, RAGGED, "parity", model="flashinfer#4979")
def k_scale_ignored(inputs: RaggedAttentionInputs) -> Pair:
    """Accept k_scale and ignore it."""
    return attend(replace(inputs, k_scale=1.0))


@seeded(BUGS, PAGED, "parity", model="flashinfer#1023")
def scales_swapped(inputs: PagedAttentionInputs) -> Pair:
    """Scale K by v_scale and V by k_scale."""
    return attend(replace(inputs, k_scale=inputs.v_scale, v_scale=inputs.k_scale))


@seeded(BUGS, PAGED, "sensitivity", features=("per_head_scales",))
def one_scale_for_all_heads(inputs: PagedAttentionInputs) -> Pair:
    """Use the first head's k_scale for every head."""
    scale = inputs.k_scale
    first = float(scale[0]) if isinstance(scale, torch.Tensor) else scale
    return attend(replace(inputs, k_scale=first))


@seeded(BUGS, PAGED, "parity", model="flashinfer#4267")
def sentinel_for_infinity(inputs: PagedAttentionInputs) -> Pair:
    """Start the maximum of q k^T at -5e4: rows whose products all lie below it give zero."""
    return attend(inputs, replace(HONEST, start=SENTINEL))


@seeded(BUGS, PAGED, "parity", model="flashinfer#4452")
def masked_row_finite_lse(inputs: PagedAttentionInputs) -> Pair:
    """Return a finite LSE for rows that see no key."""
    out, lse = attend(inputs)
    return out, lse.nan_to_num(neginf=SENTINEL)


@seeded(BUGS, PAGED, "parity")
def masked_row_averages(inputs: PagedAttentionInputs) -> Pair:
    """Mask with the smallest finite number, so that a row that sees no key averages V."""
    return attend(inputs, replace(HONEST, masked=torch.finfo(torch.float32).min))


@seeded(BUGS, RAGGED, "well_formed", model="vllm#39148")
def empty_request_nan(inputs: RaggedAttentionInputs) -> Pair:
    """Divide zero by zero where a request has no keys."""
    out, lse = attend(inputs)
    if inputs.sinks is None:
        out = torch.where(lse.isneginf().unsqueeze(-1), torch.nan, out)
    return out, lse


@seeded(BUGS, RAGGED, "parity")
def accumulator_not_rescaled(inputs: RaggedAttentionInputs) -> Pair:
    """Rescale the row sum by a new maximum, but not the accumulator."""

    def rescale(state: State, factor: torch.Tensor) -> State:
        return State(state.weighted, state.total * factor, state.largest)

    return attend(inputs, replace(HONEST, rescale=rescale))


@seeded(BUGS, PAGED, "parity")
def accumulator_in_half(inputs: PagedAttentionInputs) -> Pair:
    """Round the accumulator to the inputs' dtype after each tile, and declare float32."""

    def rescale(state: State, factor: torch.Tensor) -> State:
        rounded = state.weighted.to(inputs.q.dtype).float()
        return State(rounded * factor, state.total * factor, state.largest)

    return attend(inputs, replace(HONEST, rescale=rescale))


@seeded(BUGS, RAGGED, "parity")
def logits_in_half(inputs: RaggedAttentionInputs) -> Pair:
    """Round q k^T to the inputs' dtype, where float16 overflows."""

    def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).to(inputs.q.dtype).float()

    return attend(inputs, replace(HONEST, dot=dot))


@seeded(BUGS, RAGGED, "parity", model="flashinfer#4299")
def head_dim_tail_dropped(inputs: RaggedAttentionInputs) -> Pair:
    """Leave out the channels of q k^T beyond the last multiple of 16."""

    def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        whole = q.shape[-1] // 16 * 16
        return q[..., :whole] @ k[..., :whole].transpose(-1, -2)

    return attend(inputs, replace(HONEST, dot=dot))


@seeded(BUGS, RAGGED, "parity")
def key_indptr_from_queries(inputs: RaggedAttentionInputs) -> Pair:
    """Start each request's keys where its queries start."""
    starts = inputs.qo_indptr.tolist()
    counts = inputs.kv_indptr.diff().tolist()
    index = [
        torch.arange(start, start + count).clamp(max=max(len(inputs.k) - 1, 0))
        for start, count in zip(starts, counts, strict=False)
    ]
    rows = torch.cat([*index, torch.arange(0)])
    return attend(replace(inputs, k=inputs.k[rows], v=inputs.v[rows]))


@seeded(BUGS, RAGGED, "parity", features=("custom_mask",))
def mask_offset_in_queries(inputs: RaggedAttentionInputs) -> Pair:
    """Advance through the flat custom mask by the square of the query length."""
    if inputs.custom_mask is None:
        return attend(inputs)
    parts, start, length = [], 0, inputs.custom_mask.shape[0]
    queries, keys = inputs.qo_indptr.diff().tolist(), inputs.kv_indptr.diff().tolist()
    for t, s in zip(queries, keys, strict=True):
        parts.append((start + torch.arange(t * s)) % max(length, 1))
        start += t * t
    mask = inputs.custom_mask[torch.cat([*parts, torch.arange(0)])]
    return attend(replace(inputs, custom_mask=mask))


def lse_of_largest(total: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return only the largest logit."""
    return torch.where(total > 0, largest, natural_lse(total, largest))


@seeded(BUGS, RAGGED, "parity")
def lse_is_maximum(inputs: RaggedAttentionInputs) -> Pair:
    """Return the largest logit as the LSE."""
    return attend(inputs, replace(HONEST, lse=lse_of_largest))
