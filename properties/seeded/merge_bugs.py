"""Faults in merging states (out, lse)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ...impl.features import CONTEXT
from ...reference.tensors.inputs import MergeInputs
from .catalogue import SeededBug, seeded
from .honest import merge_states, merge_within
from .kernels import to_codes

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
MERGE = "merge_state"
ROW_TILE = 16
"""Rows (tokens times heads) from which a fast path is taken."""


def _weighted(inputs: MergeInputs, weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    out = (weights.unsqueeze(-1) * inputs.outs.float()).sum(dim=0) / total.unsqueeze(-1)
    return out.to(inputs.out_dtype)


@seeded(BUGS, MERGE, "parity", model="flashinfer#4051")
def empty_states_nan(inputs: MergeInputs) -> Pair:
    """Subtract minus infinity from minus infinity where all states are empty."""
    largest = inputs.lses.amax(dim=0)
    weights = torch.exp(inputs.lses - largest)
    total = weights.sum(dim=0)
    return _weighted(inputs, weights, total), largest + torch.log(total)


@seeded(BUGS, MERGE, "parity")
def maximum_not_subtracted(inputs: MergeInputs) -> Pair:
    """Exponentiate the LSEs as they are, which overflows or vanishes."""
    weights = torch.exp(inputs.lses)
    total = weights.sum(dim=0)
    out = _weighted(inputs, weights, torch.where(total == 0, 1.0, total))
    return out, torch.log(total)


@seeded(BUGS, MERGE, "merge_associativity")
def merged_lse_is_maximum(inputs: MergeInputs) -> Pair:
    """Return the largest LSE as the merged one."""
    out, _ = merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    return out, inputs.lses.amax(dim=0)


@seeded(BUGS, MERGE, "parity")
def bases_mixed(inputs: MergeInputs) -> Pair:
    """Take natural-log LSEs for base 2."""
    out, lse = merge_states(inputs.outs, inputs.lses * math.log(2.0), inputs.out_dtype)
    return out, lse / math.log(2.0)


@seeded(BUGS, MERGE, "merge_many_at_once")
def third_state_against_first(inputs: MergeInputs) -> Pair:
    """Weigh the third and later states against the first one, not against what is merged."""
    out, lse = inputs.outs[0].float(), inputs.lses[0]
    for index in range(1, len(inputs.outs)):
        other = torch.stack([lse if index == 1 else inputs.lses[0], inputs.lses[index]])
        out, _ = merge_states(torch.stack([out, inputs.outs[index].float()]), other, out.dtype)
        lse = torch.logaddexp(lse, inputs.lses[index])
    return out.to(inputs.out_dtype), lse


@seeded(BUGS, MERGE, "merge_commutativity")
def later_state_wins(inputs: MergeInputs) -> Pair:
    """Return only the later state where its LSE is above the first one's by more than 4."""
    out, lse = merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    wins = (inputs.lses[-1] - inputs.lses[0] > 4).unsqueeze(-1)  # noqa: PLR2004  as documented
    return torch.where(wins, inputs.outs[-1].to(out.dtype), out), lse


@seeded(BUGS, MERGE, "merge_identity", model="vllm#39148")
def empty_pair_keeps_no_lse(inputs: MergeInputs) -> Pair:
    """Skip a pair's merge, its LSE too, where 16 or more rows of the first are all empty."""
    out, lse = merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    empty = inputs.lses.isneginf().flatten(1).all(dim=1).tolist()
    if empty == [True, False] and lse.numel() >= ROW_TILE:
        lse = torch.zeros_like(lse)
    return out, lse


@seeded(BUGS, MERGE, "merge_union")
def stops_at_empty_state(inputs: MergeInputs) -> Pair:
    """Stop before the first state after the first whose 16 or more rows are all empty."""
    empty = inputs.lses.isneginf().flatten(1).all(dim=1).tolist()
    stop = len(empty)
    if inputs.lses[0].numel() >= ROW_TILE and True in empty[1:]:
        stop = empty.index(True, 1)
    return merge_states(inputs.outs[:stop], inputs.lses[:stop], inputs.out_dtype)


@seeded(BUGS, MERGE, "inputs_unchanged")
def lses_shifted_in_place(inputs: MergeInputs) -> Pair:
    """Subtract the largest LSE from the input itself."""
    merged = merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    inputs.lses.sub_(inputs.lses.amax(dim=0).nan_to_num(neginf=0.0))
    return merged


@seeded(BUGS, MERGE, "parity", features=("padded_states",))
def padding_of_states_read(inputs: MergeInputs) -> Pair:
    """Read states as if their rows were as wide as their channels."""
    dense = torch.empty(inputs.outs.shape, device="meta").stride()
    outs = inputs.outs.as_strided(inputs.outs.shape, dense)
    return merge_states(outs, inputs.lses, inputs.out_dtype)


@seeded(BUGS, MERGE, "parity", features=("lse_views",))
def lses_taken_for_dense(inputs: MergeInputs) -> Pair:
    """Read lses as if they were dense."""
    dense = torch.empty(inputs.lses.shape, device="meta").stride()
    return merge_states(
        inputs.outs, inputs.lses.as_strided(inputs.lses.shape, dense), inputs.out_dtype
    )


@seeded(BUGS, MERGE, "parity", features=("lse_views",))
def heads_of_lses_by_tokens(inputs: MergeInputs) -> Pair:
    """Read lses that are [heads, tokens] as if each head had no more than the batch's tokens."""
    lses = inputs.lses
    if lses.stride(1) == 1 and lses.shape[1] > 1:
        lses = lses.as_strided(lses.shape, (lses.stride(0), 1, lses.shape[1]))
    return merge_states(inputs.outs, lses, inputs.out_dtype)


@seeded(BUGS, MERGE, "parity", features=("different_state_strides",))
def strides_of_first_state(inputs: MergeInputs) -> Pair:
    """Read every state with the strides of the first."""
    first = inputs.states[0]
    outs = [state.as_strided(first.shape, first.stride()) for state in inputs.states]
    return merge_states(torch.stack(outs), inputs.lses, inputs.out_dtype)


@seeded(BUGS, MERGE, "parity", features=("context_tokens",))
def context_one_token_too_long(inputs: MergeInputs) -> Pair:
    """Merge the first state into one token more than has it."""
    tokens = inputs.context_tokens
    return merge_within(inputs, None if tokens is None else tokens + 1)


@seeded(BUGS, MERGE, "parity", features=("inf_marks_empty",))
def inf_taken_for_a_logarithm(inputs: MergeInputs) -> Pair:
    """Subtract the largest LSE from all of them where it is inf and marks an empty state."""
    return merge_states(inputs.outs, inputs.lses, inputs.out_dtype)


@seeded(BUGS, MERGE, "parity", features=("inf_marks_empty",))
def inf_marks_first_state_only(inputs: MergeInputs) -> Pair:
    """Take inf for the mark of an empty state in the first state, and for a large LSE in others."""
    lses = inputs.lses.clone()
    lses[:1].masked_fill_(lses[:1] == torch.inf, -torch.inf)
    return merge_states(inputs.outs, lses.clamp(max=torch.finfo(lses.dtype).max), inputs.out_dtype)


def _in_fp8(inputs: MergeInputs, codes: Callable[[torch.Tensor, float], torch.Tensor]) -> Pair:
    """Merge, and make an output in FP8 by another function of the output and its scale."""
    if inputs.output_scale is None:
        return merge_within(inputs, inputs.context_tokens)
    wide = replace(inputs, output_scale=None, out_dtype=torch.float32)
    out, lse = merge_within(wide, inputs.context_tokens)
    return codes(out, inputs.output_scale).to(inputs.out_dtype), lse


@seeded(BUGS, MERGE, "parity", features=("output_scale",))
def merge_scale_multiplied(inputs: MergeInputs) -> Pair:
    """Multiply a merged output in FP8 by its scale."""
    return _in_fp8(inputs, lambda out, scale: to_codes(out, 1 / scale))


@seeded(BUGS, MERGE, "parity", features=("output_scale",))
def merge_not_saturated(inputs: MergeInputs) -> Pair:
    """Let a merged output beyond the largest number of FP8 become NaN."""

    def wild(out: torch.Tensor, scale: float) -> torch.Tensor:
        codes = out / scale
        return codes.masked_fill(codes.abs() > to_codes(codes, 1.0).abs(), torch.nan)

    return _in_fp8(inputs, wild)


@seeded(BUGS, MERGE, "parity", features=("output_scale", CONTEXT))
def copied_state_not_scaled(inputs: MergeInputs) -> Pair:
    """Leave an output in FP8 unscaled where a token has no first state, and others are copied."""
    first = inputs.context_tokens

    def codes(out: torch.Tensor, scale: float) -> torch.Tensor:
        scaled = to_codes(out, scale)
        if first is not None:
            scaled[first:] = to_codes(out[first:], 1.0)
        return scaled

    return _in_fp8(inputs, codes)
