"""Faults in what new keys and values become: nvfp4, int4, and latents with their records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ....reference.tensors.inputs import AppendInputs
from ..append_codes import (
    BLOCK,
    COMPRESSED,
    LARGEST_SCALE,
    LEAST_SCALE,
    LEVELS,
    MIDDLES,
    ZERO_POINT,
    Int4,
    Written,
    block_scales,
    has_four_bits,
    int4,
    is_nvfp4,
    is_record,
    nvfp4,
    nvfp4_codes,
    of_rows,
    packed,
    record,
    rounded,
    tile_scales,
    write_codes,
    write_records,
    written_int4,
)
from ..appending import Caches, Pair, write_scaled
from ..catalogue import SeededBug, seeded
from ..honest import append

BUGS: list[SeededBug] = []
APPEND = "append_paged_kv"
NVFP4, INTERLEAVED, INT4 = ("nvfp4_kv",), ("nvfp4_kv", "interleaved_v_scales"), ("int4_kv",)
Rows = Callable[[torch.Tensor, float], Written]


def _otherwise(inputs: AppendInputs, rows: Rows) -> Caches:
    """Write nvfp4 otherwise, and everything else as it is."""
    if not is_nvfp4(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    k, v = rows(inputs.k, float(inputs.k_scale)), rows(inputs.v, float(inputs.v_scale))
    return write_codes(inputs, k, v)


def _otherwise_int4(inputs: AppendInputs, made: Callable[[torch.Tensor], Written]) -> Caches:
    """Write int4 otherwise, and everything else as it is."""
    if not has_four_bits(inputs) or is_nvfp4(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    return write_codes(inputs, made(inputs.k), made(inputs.v))


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_block_scale_cut(inputs: AppendInputs) -> Caches:
    """Cut block scales off to e4m3 in place of rounding them."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        exact = block_scales(x, scale)
        nearest = exact.to(torch.float8_e4m3fn)
        above = (nearest.float() > exact).to(torch.uint8)
        scales = (nearest.view(torch.uint8) - above).view(torch.float8_e4m3fn)
        return Written(packed(nvfp4_codes(x, scales, scale)), scales)

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_codes_by_exact_scale(inputs: AppendInputs) -> Caches:
    """Divide by block scales as they were before e4m3, by which codes are not read."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        exact = block_scales(x, scale)
        return Written(packed(nvfp4_codes(x, exact, scale)), exact.to(torch.float8_e4m3fn))

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_global_scale_inverse(inputs: AppendInputs) -> Caches:
    """Take the global scale for its reciprocal, as FlashInfer's other quantisers do."""
    return _otherwise(inputs, lambda x, scale: nvfp4(x, 1 / scale))


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_values_by_scale_of_keys(inputs: AppendInputs) -> Caches:
    """Divide values by the global scale of the keys."""
    return _otherwise(replace(inputs, v_scale=inputs.k_scale), nvfp4)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_block_of_32(inputs: AppendInputs) -> Caches:
    """Take the largest number of 32 channels, as MXFP4 has it, for both blocks of 16."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        scales = block_scales(x, scale)
        pairs = scales[..., : scales.shape[-1] // 2 * 2].unflatten(-1, (-1, 2))
        pairs.copy_(pairs.amax(-1, keepdim=True).expand_as(pairs))
        found = scales.to(torch.float8_e4m3fn)
        return Written(packed(nvfp4_codes(x, found, scale)), found)

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_fp4_ties_away(inputs: AppendInputs) -> Caches:
    """Round ties of e2m1 away from zero."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        scales = block_scales(x, scale).to(torch.float8_e4m3fn)
        steps = (scales.float() * scale).unsqueeze(-1)
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        quotients = torch.where(steps == 0, blocks * 0, blocks / steps).flatten(-2)
        size = torch.bucketize(quotients.abs(), MIDDLES, right=True)
        return Written(packed((size + 8 * quotients.signbit()).to(torch.uint8)), scales)

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_odd_channel_first(inputs: AppendInputs) -> Caches:
    """Put the even channel into the high nibble."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        codes, scales = nvfp4(x, scale)
        return Written(codes << 4 | codes >> 4, scales)

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_last_block_without_scale(inputs: AppendInputs) -> Caches:
    """Write the scales of a row's blocks but the last one, which keeps that of the token before."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        codes, scales = nvfp4(x, scale)
        bytes_of = scales.view(torch.uint8)
        bytes_of[1:, :, -1] = bytes_of[:-1, :, -1].clone()
        return Written(codes, scales)

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=INTERLEAVED)
def append_v_scales_linear(inputs: AppendInputs) -> Caches:
    """Write V's block scales in linear order into a cache that has them interleaved."""
    if not is_nvfp4(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    k, v = of_rows(inputs)
    return write_scaled(inputs, (k.codes, v.codes), (k.scales, v.scales))


@seeded(BUGS, APPEND, "append_parity", features=NVFP4)
def append_zeros_by_scale_of_one(inputs: AppendInputs) -> Caches:
    """Write the scale 1 for a block of zeros, which leaves no other number as it should."""

    def rows(x: torch.Tensor, scale: float) -> Written:
        codes, scales = nvfp4(x, scale)
        one = torch.ones_like(scales)
        return Written(
            codes, torch.where(scales.float() == 0, one.float(), scales.float()).to(scales)
        )

    return _otherwise(inputs, rows)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_exact_zero_point(inputs: AppendInputs) -> Caches:
    """Count codes from the least number, not from the rounded zero point that is read."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        least = x.float().amin(-1, keepdim=True)
        return written_int4(found._replace(codes=rounded((x.float() - least) / found.scales)))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_symmetric(inputs: AppendInputs) -> Caches:
    """Scale by the largest magnitude, with 8 for the zero point."""

    def made(x: torch.Tensor) -> Written:
        scales = (x.float().abs().amax(-1, keepdim=True) / 7).clamp(min=LEAST_SCALE)
        zero_points = torch.full_like(scales, 8)
        return written_int4(Int4(rounded(x.float() / scales + zero_points), zero_points, scales))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_in_halves(inputs: AppendInputs) -> Caches:
    """Put the first half of the channels into the low nibbles, as lmdeploy's caches have it."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        low, high = found.codes.to(torch.uint8).chunk(2, dim=-1)
        return Written(low | high << 4, written_int4(found).scales)

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_scale_bits_kept(inputs: AppendInputs) -> Caches:
    """Add the zero point to the lowest bits of a scale without clearing them before."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        bits = found.scales.view(torch.int32) | found.zero_points.to(torch.int32)
        return Written(written_int4(found).codes, bits.view(torch.float32))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_range_of_token(inputs: AppendInputs) -> Caches:
    """Take the range of all heads of a token."""

    def made(x: torch.Tensor) -> Written:
        flat = int4(x.flatten(1))
        heads = x.shape[1]
        codes = flat.codes.unflatten(1, x.shape[1:])
        pair = (
            each[:, None].expand(-1, heads, 1).clone() for each in (flat.zero_points, flat.scales)
        )
        return written_int4(Int4(codes, *pair))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_zero_point_wraps(inputs: AppendInputs) -> Caches:
    """Keep four bits of a zero point that lies beyond the codes, where a row has one sign."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        least = x.float().amin(-1, keepdim=True)
        wide = (-least / found.scales + 0.5).floor().clamp(-(2**30), 2**30)
        zero_points = (wide.long() & ZERO_POINT).float()
        return written_int4(found._replace(zero_points=zero_points))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "append_parity", features=INT4)
def append_int4_sixteen_steps(inputs: AppendInputs) -> Caches:
    """Divide the range by 16, the number of codes, and not by the 15 steps between them."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        scales = (found.scales * (LEVELS / (LEVELS + 1))).clamp(min=LEAST_SCALE)
        least = x.float().amin(-1, keepdim=True)
        zero_points = rounded(-least / scales)
        return written_int4(Int4(rounded(x.float() / scales + zero_points), zero_points, scales))

    return _otherwise_int4(inputs, made)


@seeded(BUGS, APPEND, "vectors_of_one_value", features=INT4)
def append_int4_scale_of_no_range(inputs: AppendInputs) -> Caches:
    """Write the scale 0 for a vector of equal numbers."""

    def made(x: torch.Tensor) -> Written:
        found = int4(x)
        alike = x.amax(-1, keepdim=True) == x.amin(-1, keepdim=True)
        return written_int4(found._replace(scales=found.scales.masked_fill(alike, 0.0)))

    return _otherwise_int4(inputs, made)


MLA, RECORD = ("mla",), ("mla", "fp8_ds_mla")


def _latents(inputs: AppendInputs, rows: torch.Tensor) -> Pair:
    """Write other rows for latent keys, whose first channels are the values."""
    return append(replace(inputs, k=rows, v=rows[..., : inputs.v.shape[2]]))  # type: ignore[no-any-return]


def _is_latent(inputs: AppendInputs) -> bool:
    return inputs.v.data_ptr() == inputs.k.data_ptr() and inputs.k.shape[1] == 1


@seeded(BUGS, APPEND, "append_parity", features=MLA)
def append_rotary_channels_first(inputs: AppendInputs) -> Pair:
    """Put the rotary channels of a latent before the compressed ones."""
    if not _is_latent(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    rotary = inputs.k.shape[2] - inputs.v.shape[2]
    return _latents(inputs, inputs.k.roll(rotary, 2))


@seeded(BUGS, APPEND, "append_parity", features=MLA)
def append_compressed_channels_only(inputs: AppendInputs) -> Pair:
    """Leave the rotary channels of a latent's slot as they were."""
    if not _is_latent(inputs) or is_record(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    before = inputs.k_cache.clone()
    k_cache, _ = append(inputs)
    width = inputs.v.shape[2]
    as_bytes = k_cache.view(torch.uint8), before.view(torch.uint8)
    first = width * k_cache.element_size()
    as_bytes[0][..., first:] = as_bytes[1][..., first:]
    return k_cache, k_cache[..., :width]


def _of_records(inputs: AppendInputs, scales: Callable[[torch.Tensor], torch.Tensor]) -> Caches:
    """Write records by other scales of tiles, and everything else as it is."""
    if not is_record(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    return write_records(inputs, record(inputs.k, scales(inputs.k)))


@seeded(BUGS, APPEND, "append_parity", features=RECORD)
def append_record_scale_of_row(inputs: AppendInputs) -> Caches:
    """Take one scale for all four tiles of a record."""
    return _of_records(inputs, lambda x: _all_alike(tile_scales(x)))


def _all_alike(scales: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(scales) * scales.amax(-1, keepdim=True)


@seeded(BUGS, APPEND, "append_parity", features=RECORD)
def append_record_power_of_two(inputs: AppendInputs) -> Caches:
    """Round the scales of a record up to powers of two, as DeepGEMM's are."""
    return _of_records(inputs, lambda x: torch.exp2(torch.ceil(torch.log2(tile_scales(x)))))


@seeded(BUGS, APPEND, "append_parity", features=RECORD)
def append_record_rotary_quantised(inputs: AppendInputs) -> Caches:
    """Round the rotary channels of a record to e4m3 before they are bfloat16."""
    if not is_record(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    rows = inputs.k.clone()
    rotary = rows[..., COMPRESSED:].float().clamp(-LARGEST_SCALE, LARGEST_SCALE)
    rows[..., COMPRESSED:] = rotary.to(torch.float8_e4m3fn).to(rows.dtype)
    return write_records(inputs, record(rows, tile_scales(rows)))


@seeded(BUGS, APPEND, "append_parity", features=RECORD)
def append_record_scales_inverse(inputs: AppendInputs) -> Caches:
    """Store the four scales of a record as their inverses, by which others multiply."""
    if not is_record(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    scales = tile_scales(inputs.k)
    made = record(inputs.k, scales)
    made[..., COMPRESSED : COMPRESSED + 16] = (1 / scales).view(torch.uint8)
    return write_records(inputs, made)


@seeded(BUGS, APPEND, "vectors_of_one_value", features=RECORD)
def append_record_scale_of_zero(inputs: AppendInputs) -> Caches:
    """Write the scale 0 for a tile of zeros."""
    if not is_record(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    scales = tile_scales(inputs.k)
    made = record(inputs.k, scales)
    tiles = inputs.k[..., :COMPRESSED].unflatten(-1, (4, -1))
    kept = scales.masked_fill(~tiles.any(-1), 0.0)
    made[..., COMPRESSED : COMPRESSED + 16] = kept.view(torch.uint8)
    return write_records(inputs, made)
