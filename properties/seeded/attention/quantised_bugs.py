"""Faults in reading quantised caches: the wrong view, the wrong scale, the wrong table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....reference.formats.cache_elements import NVFP4
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import (
    BLOCK,
    HONEST_READING,
    block_scales,
    e2m1_values,
    element_of,
    fp8_values,
    queries,
    query_scales,
    widened,
)
from ..honest import EVERYTHING, QUANTISED
from ..kernels import attend
from .stateful_bugs import batch_of, planned

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED = "paged_attention"
FP8, FP4 = ("fp8_kv",), ("nvfp4_kv",)
BOTH = (*FP8, *FP4)
LARGEST_E5M2, NEGATIVE_NAN = 0x7B, 0xFF
SECOND_E4M3 = 2.0**-8


def _read(inputs: PagedAttentionInputs, **steps: Any) -> Pair:  # noqa: ANN401  steps of a Reading
    return attend(widened(inputs, replace(HONEST_READING, **steps)))


def _with(inputs: PagedAttentionInputs, **fields: Any) -> Pair:  # noqa: ANN401  of the record
    return attend(replace(widened(inputs), **fields))


@seeded(BUGS, PAGED, "parity", features=FP8, model="vllm#38822")
def bytes_taken_for_fp4(inputs: PagedAttentionInputs) -> Pair:
    """Read FP8 that is stored as bytes as e2m1: the low nibble of each."""
    bytes_of_fp8 = bool(inputs.kv_format and inputs.kv_format.storage)

    def fp8(codes: torch.Tensor, element: str) -> torch.Tensor:
        return e2m1_values(codes & 0xF) if bytes_of_fp8 else fp8_values(codes, element)

    return _read(inputs, fp8=fp8)


@seeded(BUGS, PAGED, "parity", features=FP8)
def bytes_taken_for_numbers(inputs: PagedAttentionInputs) -> Pair:
    """Convert FP8 that is stored as bytes by value, not by view."""
    bytes_of_fp8 = bool(inputs.kv_format and inputs.kv_format.storage)

    def fp8(codes: torch.Tensor, element: str) -> torch.Tensor:
        return codes.float() / 64 if bytes_of_fp8 else fp8_values(codes, element)

    return _read(inputs, fp8=fp8)


@seeded(BUGS, PAGED, "parity", features=FP8)
def e5m2_taken_for_e4m3(inputs: PagedAttentionInputs) -> Pair:
    """Read every FP8 cache as e4m3."""
    return _read(inputs, fp8=lambda codes, _: fp8_values(codes & ~1, "e4m3"))


@seeded(BUGS, PAGED, "parity", features=FP8)
def e4m3_taken_for_e5m2(inputs: PagedAttentionInputs) -> Pair:
    """Read every FP8 cache as e5m2."""
    return _read(inputs, fp8=lambda codes, _: fp8_values(codes, "e5m2"))


@seeded(BUGS, PAGED, "parity", features=FP8)
def bias_of_other_e4m3(inputs: PagedAttentionInputs) -> Pair:
    """Read e4m3fn with the bias of e4m3fnuz: half of each value."""
    return _read(
        inputs,
        fp8=lambda codes, element: fp8_values(codes, element) * (0.5 if "e4m3" in element else 1),
    )


@seeded(BUGS, PAGED, "extreme_codes", features=FP8)
def subnormals_flushed(inputs: PagedAttentionInputs) -> Pair:
    """Read the two smallest FP8 subnormals as zero."""

    def fp8(codes: torch.Tensor, element: str) -> torch.Tensor:
        values = fp8_values(codes, element)
        return values.masked_fill((codes & 0x7F) <= 2, 0.0)  # noqa: PLR2004  a code

    return _read(inputs, fp8=fp8)


@seeded(BUGS, PAGED, "nan_codes", features=(*FP8, "nan_codes"))
def negative_nan_read_as_number(inputs: PagedAttentionInputs) -> Pair:
    """Read e4m3's code of NaN as -480 where its sign is set."""

    def fp8(codes: torch.Tensor, element: str) -> torch.Tensor:
        values = fp8_values(codes, element)
        return values.masked_fill((codes == NEGATIVE_NAN) & ("e4m3" in element), -480.0)

    return _read(inputs, fp8=fp8)


@seeded(BUGS, PAGED, "extreme_codes", features=FP8)
def largest_wrapped(inputs: PagedAttentionInputs) -> Pair:
    """Turn the sign of e5m2's largest value, as a cast that wraps where it should saturate."""

    def fp8(codes: torch.Tensor, element: str) -> torch.Tensor:
        values = fp8_values(codes, element)
        largest = "e5m2" in element and (codes & 0x7F) == LARGEST_E5M2
        return torch.where(torch.as_tensor(largest), -values, values)

    return _read(inputs, fp8=fp8)


@seeded(BUGS, PAGED, "parity", features=FP8, model="flashinfer#4979")
def scales_dropped_for_fp8(inputs: PagedAttentionInputs) -> Pair:
    """Ignore k_scale and v_scale where the cache is FP8."""
    if element_of(inputs).startswith("float8"):
        return _with(inputs, k_scale=1.0, v_scale=1.0)
    return attend(widened(inputs))


@seeded(BUGS, PAGED, "parity", features=BOTH)
def scales_swapped_when_quantised(inputs: PagedAttentionInputs) -> Pair:
    """Apply v_scale to K and k_scale to V of a quantised cache."""
    if element_of(inputs):
        return _with(inputs, k_scale=inputs.v_scale, v_scale=inputs.k_scale)
    return attend(widened(inputs))


@seeded(BUGS, PAGED, "parity", features=FP4)
def global_scale_inverted(inputs: PagedAttentionInputs) -> Pair:
    """Divide by V's global scale of an nvfp4 cache."""
    if element_of(inputs) == NVFP4:
        return _with(inputs, v_scale=1 / inputs.v_scale)
    return attend(widened(inputs))


@seeded(BUGS, PAGED, "parity", features=FP4)
def nibbles_swapped(inputs: PagedAttentionInputs) -> Pair:
    """Read the high nibble of each byte first."""
    return _read(
        inputs, nibbles=lambda codes: torch.stack([codes >> 4, codes & 0xF], -1).flatten(-2)
    )


@seeded(BUGS, PAGED, "parity", features=FP4)
def nibbles_by_halves(inputs: PagedAttentionInputs) -> Pair:
    """Take the low nibbles for the first half of the channels, the high ones for the second."""
    return _read(inputs, nibbles=lambda codes: torch.cat([codes & 0xF, codes >> 4], dim=-1))


@seeded(BUGS, PAGED, "parity", features=FP4)
def fp4_sign_dropped(inputs: PagedAttentionInputs) -> Pair:
    """Read e2m1 codes without their sign."""
    return _read(inputs, e2m1=lambda codes: e2m1_values(codes & 7))


@seeded(BUGS, PAGED, "parity", features=FP4)
def fp4_as_integers(inputs: PagedAttentionInputs) -> Pair:
    """Read e2m1 magnitudes as 0 to 7 halves."""

    def e2m1(codes: torch.Tensor) -> torch.Tensor:
        magnitude = (codes & 7).float() / 2
        return torch.where(codes & 8 != 0, -magnitude, magnitude)

    return _read(inputs, e2m1=e2m1)


@seeded(BUGS, PAGED, "parity", features=FP4)
def block_scales_dropped(inputs: PagedAttentionInputs) -> Pair:
    """Ignore the block scales."""
    return _read(inputs, scales=lambda given, which: torch.ones_like(block_scales(given, which)))


@seeded(BUGS, PAGED, "parity", features=FP4)
def block_scales_of_keys_for_values(inputs: PagedAttentionInputs) -> Pair:
    """Scale V by K's block scales, where they have the same shape."""
    same = inputs.kv_cache_sf and inputs.kv_cache_sf[0].shape == inputs.kv_cache_sf[1].shape
    return _read(inputs, scales=lambda given, which: block_scales(given, 0 if same else which))


@seeded(BUGS, PAGED, "parity", features=FP4)
def block_scales_of_next_page(inputs: PagedAttentionInputs) -> Pair:
    """Take each page's block scales from the page behind it."""
    return _read(inputs, scales=lambda given, which: block_scales(given, which).roll(-1, dims=0))


@seeded(BUGS, PAGED, "parity", features=FP4)
def blocks_of_thirty_two(inputs: PagedAttentionInputs) -> Pair:
    """Take every other block scale, for twice as many channels."""

    def spread(scales: torch.Tensor) -> torch.Tensor:
        channels = scales.shape[-1] * BLOCK
        return scales[..., ::2].repeat_interleave(2 * BLOCK, dim=-1)[..., :channels]

    return _read(inputs, spread=spread)


def _with_layout(inputs: PagedAttentionInputs, layout: str) -> Pair:
    """Read V's block scales in another layout than the format says, where there are such."""
    tokens = inputs.k_cache.shape[1 if inputs.kv_layout == "NHD" else 2]
    blocks = inputs.kv_cache_sf[1].shape[-1] if inputs.kv_cache_sf else 0
    if inputs.kv_format is None or not blocks or tokens % 4 or blocks % 4:
        return attend(widened(inputs))
    mistaken = replace(inputs.kv_format, v_scale_layout=layout)
    return attend(widened(replace(inputs, kv_format=mistaken)))


@seeded(BUGS, PAGED, "parity", features=FP4)
def value_scales_interleaved(inputs: PagedAttentionInputs) -> Pair:
    """Read V's block scales as if four tokens were interleaved, though they are linear."""
    return _with_layout(inputs, "interleaved")


@seeded(BUGS, PAGED, "parity", features=(*FP4, "interleaved_v_scales"), model="vllm#50084")
def interleaved_scales_read_linearly(inputs: PagedAttentionInputs) -> Pair:
    """Read V's block scales as linear, though four tokens are interleaved."""
    return _with_layout(inputs, "linear")


@seeded(BUGS, PAGED, "parity", features=FP4)
def block_scales_as_powers(inputs: PagedAttentionInputs) -> Pair:
    """Drop the fraction of block scales, as if they were e8m0."""

    def scales(given: PagedAttentionInputs, which: int) -> torch.Tensor:
        assert given.kv_cache_sf is not None  # noqa: S101
        return fp8_values(given.kv_cache_sf[which].view(torch.uint8) & 0xF8, "e4m3")

    return _read(inputs, scales=scales)


@seeded(BUGS, PAGED, "extreme_codes", features=FP4)
def smallest_block_scale_flushed(inputs: PagedAttentionInputs) -> Pair:
    """Read the smallest block scale as zero."""

    def scales(given: PagedAttentionInputs, which: int) -> torch.Tensor:
        found = block_scales(given, which)
        return found.masked_fill(found.abs() < SECOND_E4M3, 0.0)

    return _read(inputs, scales=scales)


@seeded(BUGS, PAGED, "contiguity", features=FP4, model="flashinfer#4044")
def strides_of_block_scales(inputs: PagedAttentionInputs) -> Pair:
    """Read block scales as if they were contiguous."""

    def scales(given: PagedAttentionInputs, which: int) -> torch.Tensor:
        assert given.kv_cache_sf is not None  # noqa: S101
        tensor = given.kv_cache_sf[which]
        shape = tensor.shape
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        dense = tensor.as_strided(shape, strides, tensor.storage_offset())
        return fp8_values(dense.contiguous().view(torch.uint8), "e4m3")

    return _read(inputs, scales=scales)


@seeded(BUGS, PAGED, "formats_in_turn", features=FP8)
def format_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the FP8 format of the first call with these queries and a cache of bytes."""
    if not (inputs.kv_format and inputs.kv_format.storage):
        return attend(widened(inputs))
    element = planned(("format", batch_of(inputs)), element_of(inputs))
    return _read(inputs, element=lambda _: element)


FP8_QUERIES = (*FP8, "fp8_q")


@seeded(BUGS, PAGED, "parity", features=FP8_QUERIES)
def q_scale_dropped(inputs: PagedAttentionInputs) -> Pair:
    """Ignore q_scale."""
    return _read(inputs, queries=lambda given: queries(replace(given, q_scale=1.0)))


@seeded(BUGS, PAGED, "parity", features=(*FP8_QUERIES, "per_head_scales"))
def q_scale_of_kv_head(inputs: PagedAttentionInputs) -> Pair:
    """Take each query head's scale from the place of its key-value head."""
    if not isinstance(inputs.q_scale, torch.Tensor):
        return attend(widened(inputs))
    heads = inputs.q.shape[1]
    kv_heads = inputs.k_cache.shape[2 if inputs.kv_layout == "NHD" else 1]
    scale = inputs.q_scale[torch.arange(heads) // (heads // kv_heads)]
    return _read(inputs, queries=lambda given: queries(replace(given, q_scale=scale)))


@seeded(BUGS, PAGED, "parity", features=FP8_QUERIES)
def queries_always_e4m3(inputs: PagedAttentionInputs) -> Pair:
    """Read queries of e5m2 as e4m3."""
    if inputs.q.dtype != torch.float8_e5m2:
        return attend(widened(inputs))
    codes = inputs.q.contiguous().view(torch.uint8) & ~1
    return _read(inputs, queries=lambda given: fp8_values(codes, "e4m3") * query_scales(given))


# None of 3,000 drawn problems of such a kernel has both: the covered pairs of the gate do.
@seeded(
    BUGS, PAGED, "parity", features=(*EVERYTHING, *(each for each in QUANTISED if each != "fp8_q"))
)
def slopes_beside_interleaved_scales(inputs: PagedAttentionInputs) -> Pair:
    """Forget ALiBi's slopes where the block scales of V are interleaved."""
    form = inputs.kv_format
    interleaved = form is not None and form.v_scale_layout == "interleaved"
    return _with(inputs, alibi_slopes=None) if interleaved else attend(widened(inputs))
