"""Faults in scales of tokens and heads, and in the scale of an output in FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ....reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import HONEST_READING, block_scales, widened
from ..kernels import HONEST, attend, to_codes

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
TOKENS = ("per_token_head_kv",)
OUTPUT = ("output_scale",)


def _with_scales(
    inputs: PagedAttentionInputs,
    changed: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    only: int | None = None,
) -> Pair:
    """Attend with other scales of tokens, given as [pages, page_size, kv_heads, 1] or HND."""

    def scales(given: PagedAttentionInputs, which: int) -> torch.Tensor:
        found = block_scales(given, which)
        return found if only not in (None, which) else changed(found, which)

    return attend(widened(inputs, replace(HONEST_READING, scales=scales)))


@seeded(BUGS, PAGED, "parity", features=TOKENS)
def scale_of_next_token(inputs: PagedAttentionInputs) -> Pair:
    """Scale each value of a page by the scale of the token behind it."""
    axis = 1 if inputs.kv_layout == "NHD" else 2
    return _with_scales(inputs, lambda scales, _: scales.roll(-1, dims=axis), only=1)


@seeded(BUGS, PAGED, "parity", features=TOKENS)
def scale_of_neighbouring_head(inputs: PagedAttentionInputs) -> Pair:
    """Scale each key by the scale of the next key-value head."""
    axis = 2 if inputs.kv_layout == "NHD" else 1
    return _with_scales(inputs, lambda scales, _: scales.roll(-1, dims=axis), only=0)


@seeded(BUGS, PAGED, "parity", features=TOKENS)
def scale_of_first_token(inputs: PagedAttentionInputs) -> Pair:
    """Scale all keys and values of a page by the scales of its first token."""
    axis = 1 if inputs.kv_layout == "NHD" else 2
    return _with_scales(
        inputs, lambda scales, _: scales.narrow(axis, 0, 1).expand_as(scales).clone()
    )


@seeded(BUGS, PAGED, "parity", features=TOKENS)
def token_scales_divided(inputs: PagedAttentionInputs) -> Pair:
    """Divide values by the scales of tokens, not multiply."""
    return _with_scales(inputs, lambda scales, _: 1 / scales, only=1)


@seeded(BUGS, RAGGED, "parity", features=OUTPUT)
def output_scale_multiplied(inputs: AttentionInputs) -> Pair:
    """Multiply an output in FP8 by its scale."""
    return attend(inputs, replace(HONEST, to_codes=lambda out, scale: to_codes(out, 1 / scale)))


@seeded(BUGS, RAGGED, "parity", features=OUTPUT)
def output_scale_twice(inputs: AttentionInputs) -> Pair:
    """Divide an output in FP8 by its scale twice, as when every part of the keys does."""
    return attend(inputs, replace(HONEST, to_codes=lambda out, scale: to_codes(out, scale**2)))


@seeded(BUGS, RAGGED, "parity", features=OUTPUT)
def output_not_saturated(inputs: AttentionInputs) -> Pair:
    """Let an output beyond the largest number of FP8 become NaN."""

    def wild(out: torch.Tensor, scale: float) -> torch.Tensor:
        codes = out / scale
        return codes.masked_fill(codes.abs() > to_codes(codes, 1.0).abs(), torch.nan)

    return attend(inputs, replace(HONEST, to_codes=wild))


@seeded(BUGS, RAGGED, "parity", features=OUTPUT)
def output_truncated(inputs: AttentionInputs) -> Pair:
    """Cut the digits off that FP8 does not hold, as a cast by bits does."""

    def cut(out: torch.Tensor, scale: float) -> torch.Tensor:
        codes = to_codes(out, scale).contiguous()
        return (codes.view(torch.int32) & ~((1 << 20) - 1)).view(torch.float32)

    return attend(inputs, replace(HONEST, to_codes=cut))
