"""Records of latent attention: all that a token has in the cache, as one row of bytes.

DeepSeek's sparse attention keeps 512 compressed channels, which are the values too, and 64 rotary
ones (``values_in_keys``), with their scales in the row. Both layouts are vLLM's:

``fp8_ds_mla``, 656 bytes (``concat_and_cache_ds_mla_kernel`` in ``cache_kernels.cu``; FlashMLA
reads it): 512 e4m3 codes; four float32 scales, of 128 channels each; 64 bfloat16 rotary channels.

``nvfp4_ds_mla``, 352 bytes (``nvfp4_ds_mla_cache_kernels.cu`` of vllm-project/vllm#51724;
vllm-project/FlashMLA#18 reads it): 512 e2m1 codes, two a byte, the even channel in the low nibble;
64 rotary channels in e4m3, without a scale; 32 e4m3 scales, of 16 channels each, where that of
block s is byte 8 (s % 4) + s // 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .fp4 import pack_e2m1, packed_values, quantize_e2m1
from .fp8 import quantize_fp8

COMPRESSED, ROTARY = 512, 64
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
FP8_TILE, FP4_BLOCK = 128, 16
"""Channels that share a scale."""
LEAST_FLOAT = torch.finfo(torch.float32).tiny
LEAST_E4M3 = 2.0**-9
LARGEST_E4M3_CODE = 0x7E
Rounded = Callable[[torch.Tensor], torch.Tensor]
Bytes = tuple[int, ...]


class Record(NamedTuple):
    """A row of bytes that holds a token's keys and values.

    Attributes:
        size: bytes.
        block: channels that share a scale.
        head_dim_qk: channels of a key.
        head_dim_vo: channels of a value, the first of the key.
    """

    size: int
    block: int
    head_dim_qk: int = COMPRESSED + ROTARY
    head_dim_vo: int = COMPRESSED


FP8_RECORD = Record(COMPRESSED + 4 * COMPRESSED // FP8_TILE + 2 * ROTARY, FP8_TILE)
FP4_RECORD = Record(COMPRESSED // 2 + ROTARY + COMPRESSED // FP4_BLOCK, FP4_BLOCK)
_BLOCK_OF_BYTE = torch.arange(32).view(8, 4).T.flatten()
"""Block whose scale each of the last 32 bytes of an nvfp4_ds_mla record is."""


def power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Round scales up to powers of two, which keep the digits of small integers."""
    return torch.exp2(torch.ceil(torch.log2(scales)))


def encode_fp8_record(rows: torch.Tensor, rounded: Rounded | None = None) -> torch.Tensor:
    """Return [..., 656] bytes of rows [..., 576]; a tile's largest number is the largest code.

    Args:
        rows: any floating dtype.
        rounded: what is made of the scales, before they are float32.
    """
    wide = rows.double()
    tiles = wide[..., :COMPRESSED].unflatten(-1, (-1, FP8_TILE))
    exact = (tiles.abs().amax(dim=-1) / LARGEST_E4M3).clamp_min(LEAST_FLOAT)
    scales = (rounded(exact) if rounded else exact).float()
    # A quotient in float32, as kernels have it, is rounded once more.
    codes = quantize_fp8((tiles / scales.double().unsqueeze(-1)).float().flatten(-2))
    rotary = wide[..., COMPRESSED:].to(torch.bfloat16)
    return torch.cat([_bytes(part) for part in (codes, scales, rotary)], dim=-1)


def decode_fp8_record(record: torch.Tensor) -> torch.Tensor:
    """Return [..., 576] float64 of bytes [..., 656], exactly."""
    codes, scales, rotary = record.split((COMPRESSED, 4 * 4, 2 * ROTARY), dim=-1)
    tiles = _numbers(codes, torch.float8_e4m3fn).unflatten(-1, (-1, FP8_TILE))
    tiles = tiles * _numbers(scales, torch.float32).unsqueeze(-1)
    return torch.cat([tiles.flatten(-2), _numbers(rotary, torch.bfloat16)], dim=-1)


def encode_fp4_record(rows: torch.Tensor, rounded: Rounded | None = None) -> torch.Tensor:
    """Return [..., 352] bytes of rows [..., 576]; a block's largest number is within the codes.

    Scales are rounded up to e4m3, so that no number of a block saturates.

    Args:
        rows: any floating dtype.
        rounded: what is made of the scales, before they are e4m3.
    """
    wide = rows.double()
    blocks = wide[..., :COMPRESSED].unflatten(-1, (-1, FP4_BLOCK))
    exact = (blocks.abs().amax(dim=-1) / LARGEST_E2M1).clamp_min(LEAST_E4M3)
    exact = rounded(exact) if rounded else exact
    nearest = quantize_fp8(exact)
    below = (nearest.double() < exact) & (nearest.view(torch.uint8) < LARGEST_E4M3_CODE)
    scales = nearest.view(torch.uint8) + below.to(torch.uint8)
    steps = _numbers(scales, torch.float8_e4m3fn).unsqueeze(-1)
    codes = pack_e2m1(quantize_e2m1((blocks / steps).flatten(-2)))
    rotary = quantize_fp8(wide[..., COMPRESSED:])
    in_order = scales[..., _BLOCK_OF_BYTE.to(scales.device)]
    return torch.cat([codes, _bytes(rotary), in_order], dim=-1)


def decode_fp4_record(record: torch.Tensor) -> torch.Tensor:
    """Return [..., 576] float64 of bytes [..., 352], exactly."""
    codes, rotary, scales = record.split((COMPRESSED // 2, ROTARY, 32), dim=-1)
    blocks = packed_values(codes).unflatten(-1, (-1, FP4_BLOCK))
    linear = torch.empty_like(scales)
    linear[..., _BLOCK_OF_BYTE.to(scales.device)] = scales
    blocks = blocks * _numbers(linear, torch.float8_e4m3fn).unsqueeze(-1)
    return torch.cat([blocks.flatten(-2), _numbers(rotary, torch.float8_e4m3fn)], dim=-1)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8)


def _numbers(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.contiguous().view(dtype).double()


def _filled(codes: Bytes, scales: Bytes, rotary: Bytes, order: str, sizes: Bytes) -> Bytes:
    """Return a record whose parts repeat bytes; ``order`` is that of its parts, by their letter."""
    parts = {"c": codes, "s": scales, "r": rotary}
    whole: Bytes = ()
    for letter, size in zip(order, sizes, strict=True):
        part = parts[letter]
        whole += part * (size // len(part))
    return whole


ONE, STEPS = (0x00, 0x00, 0x80, 0x3F), (0x00, 0x00, 0x00, 0x3E, *(0x00, 0x00, 0x00, 0x41))
"""Bytes of the float32 number 1, and of 2^-3 and 2^3."""
FP8_EXTREMES = tuple(
    _filled(codes, scales, rotary, "csr", (COMPRESSED, 16, 2 * ROTARY))
    for codes, scales, rotary in (
        ((0x00, 0x80), ONE, (0x00, 0x00)),
        ((0x01, 0x83), ONE, (0x00, 0x3B)),
        ((0x7E, 0xFE), ONE, (0xE0, 0x43)),
        ((0x7E, 0xFE), STEPS, (0xE0, 0x43)),
    )
)
"""fp8_ds_mla records of zeros, of small numbers, of the largest codes, and with unlike scales."""
FP4_EXTREMES = tuple(
    _filled(codes, scales, rotary, "crs", (COMPRESSED // 2, ROTARY, 32))
    for codes, scales, rotary in (
        ((0x00, 0x88), (0x38,), (0x00, 0x80)),
        ((0x11, 0x91), (0x38,), (0x01, 0x83)),
        ((0x77, 0xF7), (0x38,), (0x7E, 0xFE)),
        ((0x77, 0xF7), (0x01, 0x7E), (0x7E, 0xFE)),
    )
)
"""The same of nvfp4_ds_mla."""
