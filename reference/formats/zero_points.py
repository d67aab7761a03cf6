"""Unsigned codes of 8 or 4 bits with a scale and a zero point for each row of a KV cache.

The layout is lmdeploy's (``lmdeploy/pytorch/kernels/cuda/fill_kv_cache.py`` of 0.18.0, quant
policies 8 and 4): scale and zero point lie side by side in a tensor of the model's dtype, and a row
is (code - zero point) * scale. The zero point is -least / scale, no integer, and beyond the codes
where all numbers of a row have one sign. Of two codes in a byte, the low nibble is of the first
half of the channels, and the high one of the second half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .int4 import LEAST_SCALE

NARROWEST = 2.0**-11
"""Least scale of a row, as a share of its largest number: 16 bits tell no finer steps apart, and
the zero point of a row of equal numbers stays within float16."""


def quantize_zero_points(
    rows: torch.Tensor,
    bits: int,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [..., channels], so that their least and largest numbers are the end codes.

    Args:
        rows: any floating dtype; of 4 bits, an even number of channels.
        bits: 8 or 4.
        rounded: what is made of the scales (largest - least) / largest code.

    Returns:
        (codes [..., channels * bits / 8] uint8, scales and zero points [..., 2] float32).
    """
    wide = rows.double()
    if not wide.numel():
        codes = torch.empty((*rows.shape[:-1], rows.shape[-1] * bits // 8), dtype=torch.uint8)
        return codes.to(rows.device), torch.empty((*rows.shape[:-1], 2), device=rows.device)
    scales = rounded(steps_of(wide, bits)).float()
    zero_points = (-wide.amin(dim=-1, keepdim=True) / scales).float()
    codes = torch.floor(wide / scales + zero_points + 0.5).clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:  # noqa: PLR2004  two codes a byte
        low, high = codes.chunk(2, dim=-1)
        codes = low | high << 4
    return codes, torch.cat([scales, zero_points], dim=-1)


def steps_of(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scale [..., 1] with which a row's least and largest numbers are the end codes."""
    width = rows.amax(dim=-1, keepdim=True) - rows.amin(dim=-1, keepdim=True)
    narrowest = rows.abs().amax(dim=-1, keepdim=True) * NARROWEST
    return torch.maximum(width / (2**bits - 1), narrowest).clamp_min(LEAST_SCALE)


def dequantize_zero_points(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows [..., channels] in float64, exactly.

    Args:
        codes: [..., channels * bits / 8] uint8.
        scales: scales and zero points, [..., 2] of any floating dtype.
        bits: 8 or 4.
    """
    if bits == 4:  # noqa: PLR2004  two codes a byte
        codes = torch.cat([codes & 0xF, codes >> 4], dim=-1)
    steps, zero_points = scales.double().unbind(dim=-1)
    return (codes.double() - zero_points.unsqueeze(-1)) * steps.unsqueeze(-1)
