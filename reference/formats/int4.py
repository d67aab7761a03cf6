"""Unsigned 4-bit codes with a float32 scale and a zero point for each row of a KV cache.

The layout is vLLM's ``int4_per_token_head`` (``vllm/v1/attention/ops/int4_per_token_head.py`` of
vllm-project/vllm#40835): two codes a byte, the even channel in the low nibble, and the zero point
in the four lowest bits of the scale's mantissa, which are no part of the scale. A row is
(code - zero point) * scale. vLLM rotates queries, keys and outputs about the cache; the rotation is
no part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LARGEST_CODE = 15.0
"""Largest code of four bits, and so the largest difference of a code and a zero point."""
LEAST_SCALE = 1e-6
"""Least scale of a row: a row of equal numbers has this one, as in vLLM."""
ZERO_POINT = 0xF
"""Bits of a scale's mantissa that hold the zero point."""


def quantize_int4(
    rows: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [..., channels], so that their least and largest numbers are the end codes.

    The zero point is rounded and kept within the codes: what a row has beyond a range that
    includes 0, saturates.

    Args:
        rows: any floating dtype, an even number of channels.
        rounded: what is made of the scales (largest - least) / 15.

    Returns:
        (codes [..., channels / 2] uint8, scales with their zero points [..., 1] float32).
    """
    wide = rows.double()
    if not wide.numel():
        return (
            torch.empty((*rows.shape[:-1], rows.shape[-1] // 2), dtype=torch.uint8).to(rows.device),
            torch.empty((*rows.shape[:-1], 1), device=rows.device),
        )
    least, largest = wide.amin(dim=-1, keepdim=True), wide.amax(dim=-1, keepdim=True)
    exact = ((largest - least) / LARGEST_CODE).clamp_min(LEAST_SCALE)
    scales = rounded(exact).float()
    zero_points = _nearest(-least / scales)
    codes = _nearest(wide / scales + zero_points).to(torch.uint8).unflatten(-1, (-1, 2))
    bits = scales.view(torch.int32) & ~ZERO_POINT | zero_points.to(torch.int32)
    return codes[..., 0] | codes[..., 1] << 4, bits.view(torch.float32)


def _nearest(numbers: torch.Tensor) -> torch.Tensor:
    """Round to the nearest code, halves up."""
    return torch.floor(numbers + 0.5).clamp_(0.0, LARGEST_CODE)


def dequantize_int4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows [..., channels] in float64, exactly.

    Args:
        codes: [..., channels / 2] uint8.
        scales: [..., 1] float32, zero points in the lowest bits.
    """
    bits = scales.contiguous().view(torch.int32)
    zero_points = bits & ZERO_POINT
    steps = (bits & ~ZERO_POINT).view(torch.float32).double()
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    return (nibbles.double() - zero_points) * steps
