"""Merging attention states over disjoint sets of keys, and the bound on an honest merge.

    lse = log(sum_s exp(lse_s)),   out = sum_s exp(lse_s - lse) out_s

A state is (out, lse) with a natural-log lse; (0, -inf) is the state of no keys and the identity of
the merge, which is associative and commutative (FlashInfer's recursive attention; Cascade).
"""

from __future__ import annotations

import torch

from ..formats.arithmetic import (
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    checked_arithmetic,
    dtype_name,
)
from ..validation import check_same, check_tensor
from .definition import AttentionOutput
from .error_terms import EXP, LOGIT, LSE, OUTPUT_SCALE, SUM, growth
from .options import LARGEST_OUTPUT, OUTPUT_DTYPE, check_output_scale
from .reordering import LARGEST_LOGIT_ERROR


@torch.no_grad()
def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    context_tokens: int | None = None,
    inf_marks_empty: bool = False,
    output_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """Merge attention states over disjoint sets of keys.

    Args:
        outs: [states, tokens, heads, dim], each state's normalised attention.
        lses: [states, tokens, heads], natural log; -inf marks a state of no keys, whose out is
            never read.
        context_tokens: tokens of the first state, which is not read behind them; None for all. So
            vLLM merges a prefix that only the first tokens of a batch have.
        inf_marks_empty: whether an lse of inf marks a state of no keys, too, as FlashAttention 2
            gives it: it is read as -inf.
        output_scale: scale of outputs in FP8 (float8_e4m3fn), a positive number: the merged ``out``
            is divided by it and saturates, as that of ``paged_attention``.
        compute_dtype: float64 (default) or float32.

    Returns:
        AttentionOutput of out [tokens, heads, dim] and lse [tokens, heads] in ``compute_dtype``;
        0 and -inf where every state is empty (and where there is no state).

    Raises:
        ValueError: shapes that disagree, a dtype that is not floating, or negative tokens.
    """
    weights, lse = _weights(
        _checked(outs, lses, context_tokens, inf_marks_empty=inf_marks_empty), compute_dtype
    )
    return AttentionOutput(_scaled(_sum(weights, outs.to(compute_dtype)), output_scale), lse)


def _scaled(out: torch.Tensor, output_scale: float | None) -> torch.Tensor:
    """Return what an output would be if it were not rounded: divided and saturated, if in FP8."""
    check_output_scale("output_scale", output_scale)
    if output_scale is None:
        return out
    return (out / output_scale).clamp_(-LARGEST_OUTPUT, LARGEST_OUTPUT)


def _checked(
    outs: torch.Tensor,
    lses: torch.Tensor,
    context_tokens: int | None,
    *,
    inf_marks_empty: bool = False,
) -> torch.Tensor:
    """Return the lses, -inf where a mark is inf and behind the first state's tokens."""
    check_tensor("outs", outs, "states tokens heads dim")
    check_tensor("lses", lses, "states tokens heads")
    for axis, name in enumerate(("states", "tokens", "heads")):
        check_same("lses", name, lses.shape[axis], "outs", outs.shape[axis])
    if inf_marks_empty:
        lses = lses.masked_fill(torch.isposinf(lses), -torch.inf)
    if context_tokens is None:
        return lses
    if not isinstance(context_tokens, int) or context_tokens < 0:
        message = f"context_tokens is {context_tokens!r}; it must be a whole number of tokens"
        raise ValueError(message)
    lses = lses.clone()
    lses[:1, context_tokens:] = -torch.inf
    return lses


def _weights(lses: torch.Tensor, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if compute_dtype not in (torch.float64, torch.float32):
        message = f"compute_dtype is {compute_dtype}; it must be float64 or float32"
        raise ValueError(message)
    logits = lses.to(compute_dtype)
    lse = torch.logsumexp(logits, dim=0)
    # exp(l - max) / sum rather than exp(l - lse): equal states get weights equal to the last bit.
    largest = logits.amax(dim=0) if len(lses) else lse
    exponentials = torch.exp(logits - torch.where(torch.isneginf(largest), 0.0, largest))
    total = exponentials.sum(dim=0)
    return exponentials / torch.where(total == 0, 1.0, total), lse


def _sum(weights: torch.Tensor, outs: torch.Tensor) -> torch.Tensor:
    # The out of an empty state is undefined by convention: a zero weight alone would keep its NaN.
    defined = torch.where(weights.unsqueeze(-1) == 0, 0.0, outs)
    return (weights.unsqueeze(-1) * defined).sum(dim=0)


@torch.no_grad()
def merge_error_bound(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    context_tokens: int | None = None,
    inf_marks_empty: bool = False,
    output_scale: float | None = None,
    out_errors: torch.Tensor | None = None,
    lse_errors: torch.Tensor | None = None,
    arithmetic: Arithmetic | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> AttentionOutput:
    """Bound, element by element, how far an honest merge may be from ``merge_states``.

    The weight of state s is ``exp(lse_s - lse)``. Its relative error is
    ``expm1(u [LOGIT (|lse_s| + max |lse_s|) + EXP] + lse_error_s)``, by the reasoning of
    ``attention_error_bound`` with states in the place of keys. The errors of the states themselves
    enter with their weights. An output in FP8 is divided by its scale, which adds
    ``OUTPUT_SCALE u |out|`` before the division, and is rounded once, as that of attention is.

    Args:
        outs, lses, context_tokens, inf_marks_empty, output_scale: the same as in ``merge_states``.
        out_errors: [states, tokens, heads, dim], how far each out may already be off; 0 if None.
        lse_errors: [states, tokens, heads], the same for lses.
        arithmetic: what the kernel rounds; float32 throughout if None. ``partial_outputs``: some
            states are merged first, and stored in the output's dtype.
        out_dtype: dtype of the kernel's output; that of outs if None, with ``output_scale``
            float8_e4m3fn.
        compute_dtype: float64 (default) or float32.

    Returns:
        AttentionOutput of bounds in ``compute_dtype``.

    Raises:
        ValueError: as ``merge_states``.
    """
    lses = _checked(outs, lses, context_tokens, inf_marks_empty=inf_marks_empty)
    weights, lse = _weights(lses, compute_dtype)
    u = UNIT_ROUNDOFF[checked_arithmetic(arithmetic).accumulate]
    usual = outs.dtype if output_scale is None else OUTPUT_DTYPE
    out_format = dtype_name(out_dtype or usual)
    finite = torch.where(torch.isneginf(lses), 0.0, lses.to(compute_dtype))
    magnitude = finite.abs()
    largest = magnitude.amax(dim=0) if len(lses) else lse.abs()
    absolute = u * (LOGIT * (magnitude + largest) + EXP)
    if lse_errors is not None:
        absolute = absolute + lse_errors
    relative = torch.expm1(absolute.clamp(max=LARGEST_LOGIT_ERROR))
    mean = (weights * relative).sum(dim=0)
    deviation = (weights * relative.square()).sum(dim=0).sqrt().unsqueeze(-1)
    defined = torch.where(weights.unsqueeze(-1) == 0, 0.0, outs.to(compute_dtype))
    weighted = (weights.unsqueeze(-1) * defined.square()).sum(dim=0).sqrt()
    error = (2 * deviation + (2 * growth(len(outs)) + SUM) * u) * weighted
    if out_errors is not None:
        # w_s (1 + t_s) / sum w (1 + t) <= w_s (1 + e_s) (1 + sum w e), by Jensen's inequality.
        carried = _sum(weights * (1 + relative), out_errors.to(compute_dtype))
        error = error + carried * (1 + mean).unsqueeze(-1)
    out = _sum(weights, defined)
    rounding = UNIT_ROUNDOFF[out_format]
    if arithmetic is not None and arithmetic.partial_outputs:
        # What is merged first is stored as states are.
        error = error + UNIT_ROUNDOFF[dtype_name(outs.dtype)] * weighted
    if output_scale is not None:
        error = (error + OUTPUT_SCALE * u * out.abs()) / output_scale
        out = _scaled(out, output_scale)
    out_bound = (1 + rounding) * error + rounding * out.abs() + SMALLEST_SUBNORMAL[out_format] / 2
    empty = torch.isneginf(lse)
    finite_lse = torch.where(empty, 0.0, lse)
    lse_bound = (
        2 * mean
        + (growth(len(outs)) + SUM) * u
        + LSE * u * (finite_lse.abs() + largest)
        + UNIT_ROUNDOFF["float32"] * finite_lse.abs()
    )
    return AttentionOutput(
        out_bound.masked_fill(empty.unsqueeze(-1), 0.0), lse_bound.masked_fill(empty, 0.0)
    )
