"""Honest codes of four bits, and records of latent attention, in float32, for bugs and control."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ...reference.formats.scale_layouts import deinterleave_v_scales, interleave_v_scales
from ...reference.tensors.inputs import AppendInputs
from .appending import Caches, Pair, addresses, by_slot, write_scaled

MIDDLES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Numbers halfway between two of e2m1; ties go to the even code."""
BLOCK, LARGEST, LARGEST_SCALE = 16, 6.0, 448.0
LEVELS, LEAST_SCALE, ZERO_POINT = 15.0, 1e-6, 15
COMPRESSED, TILE = 512, 128


class Written(NamedTuple):
    """What is written of new keys, or of new values.

    Attributes:
        codes: uint8 [tokens, kv_heads, channels / 2].
        scales: [tokens, kv_heads, channels / 16] float8_e4m3fn, or [tokens, kv_heads, 1] float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def is_nvfp4(inputs: AppendInputs) -> bool:
    """Whether the caches hold nvfp4."""
    return inputs.kv_format is not None and inputs.kv_format.element == "nvfp4"


def is_record(inputs: AppendInputs) -> bool:
    """Whether the caches hold records of fp8_ds_mla."""
    return inputs.kv_format is not None and inputs.kv_format.element == "fp8_ds_mla"


def has_four_bits(inputs: AppendInputs) -> bool:
    """Whether the caches hold nvfp4, or int4 with the zero points in its scales."""
    return inputs.kv_format is not None and inputs.kv_format.element in (
        "nvfp4", "int4_per_token_head",
    )  # fmt: skip


def block_scales(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [..., channels / 16] float32: what the scales of blocks of 16 are before e4m3."""
    largest = rows.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    quotients: torch.Tensor = largest / (LARGEST * scale)
    return quotients.clamp(max=LARGEST_SCALE)


def nvfp4_codes(rows: torch.Tensor, scales: torch.Tensor, scale: float) -> torch.Tensor:
    """Return e2m1 codes, one by one, of rows by their blocks' scales [..., channels / 16]."""
    steps = (scales.float() * scale).unsqueeze(-1)
    blocks = rows.float().unflatten(-1, (-1, BLOCK))
    quotients = torch.where(steps == 0, blocks * 0, blocks / steps).flatten(-2)
    size = torch.bucketize(quotients.abs(), MIDDLES)
    tie = quotients.abs() == MIDDLES[size.clamp(max=len(MIDDLES) - 1)]
    return (size + (tie & (size % 2 == 1)) + 8 * quotients.signbit()).to(torch.uint8)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Put two codes into a byte, the even channel into the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nvfp4(rows: torch.Tensor, scale: float) -> Written:
    """Quantise rows to nvfp4, whose global scale is that of the call."""
    scales = block_scales(rows, scale).to(torch.float8_e4m3fn)
    return Written(packed(nvfp4_codes(rows, scales, scale)), scales)


class Int4(NamedTuple):
    """Rows of int4 before they are packed: codes and zero points from 0 to 15, float32 scales."""

    codes: torch.Tensor
    zero_points: torch.Tensor
    scales: torch.Tensor


def int4(rows: torch.Tensor) -> Int4:
    """Quantise rows to int4 between the least and the largest number of each."""
    wide = rows.float()
    least, largest = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scales = ((largest - least) / LEVELS).clamp(min=LEAST_SCALE)
    zero_points = rounded(-least / scales)
    return Int4(rounded(wide / scales + zero_points), zero_points, scales)


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Round to the nearest code, halves up, within 0 to 15."""
    return (numbers + 0.5).floor().clamp(0, LEVELS)


def written_int4(of: Int4) -> Written:
    """Pack codes, and zero points into the lowest bits of their scales."""
    bits = of.scales.view(torch.int32) & ~ZERO_POINT | of.zero_points.to(torch.int32)
    return Written(packed(of.codes.to(torch.uint8)), bits.view(torch.float32))


def of_rows(inputs: AppendInputs) -> tuple[Written, Written]:
    """Return what is written of new keys and of new values."""
    if is_nvfp4(inputs):
        return nvfp4(inputs.k, float(inputs.k_scale)), nvfp4(inputs.v, float(inputs.v_scale))
    return written_int4(int4(inputs.k)), written_int4(int4(inputs.v))


def write_codes(inputs: AppendInputs, k: Written, v: Written) -> Caches:
    """Write codes and scales of new rows, V's scales in the order of the format."""
    codes: Pair = (k.codes, v.codes)
    scales: Pair = (k.scales, v.scales)
    layout = inputs.kv_layout
    if inputs.kv_format is None or inputs.kv_format.v_scale_layout == "linear":
        return write_scaled(inputs, codes, scales)
    assert inputs.kv_cache_sf is not None  # noqa: S101  such a cache has them
    k_scales, v_scales = inputs.kv_cache_sf
    linear = deinterleave_v_scales(v_scales, kv_layout=layout)
    given = replace(inputs, kv_cache_sf=(k_scales, linear))
    *caches, made = write_scaled(given, codes, scales)
    whole = v_scales if inputs.in_place else v_scales.clone()
    return (*caches, whole.copy_(interleave_v_scales(made, kv_layout=layout)))


def tile_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scales [..., 4] float32 of the tiles of 128 compressed channels."""
    largest = rows[..., :COMPRESSED].float().unflatten(-1, (-1, TILE)).abs().amax(-1)
    scales: torch.Tensor = largest / LARGEST_SCALE
    return scales.clamp(min=torch.finfo(torch.float32).tiny)


def record(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., 656] of latent rows [..., 576] by the scales of their tiles."""
    tiles = rows[..., :COMPRESSED].float().unflatten(-1, (-1, TILE))
    codes = (tiles / scales.unsqueeze(-1)).clamp(-LARGEST_SCALE, LARGEST_SCALE).flatten(-2)
    parts = codes.to(torch.float8_e4m3fn), scales, rows[..., COMPRESSED:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def write_records(inputs: AppendInputs, records: torch.Tensor) -> Pair:
    """Write records [tokens, 1, 656], which are keys and values."""
    cache = inputs.k_cache if inputs.in_place else inputs.k_cache.clone()
    by_slot(cache, inputs.kv_layout)[addresses(inputs)] = records
    return cache, cache
