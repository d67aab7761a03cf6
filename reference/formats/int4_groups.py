"""Unsigned 4-bit codes of weights, with a scale, and maybe a zero point, for a group of columns.

A number is (code - zero point) * scale; without zero points, 8 is the zero point of all. Two codes
lie in a byte along the input axis, the one of even column in the low nibble. That is what vLLM's
``fused_moe_kernel_gptq_awq`` reads (0.33.0, ``fused_moe.py``: ``use_int4_w4a16`` takes byte k // 2
and shifts by 4 (k % 2); the scale is that of k // group; without ``has_zp`` it subtracts 8). There,
zero points are packed too, two rows a byte, even row in the low nibble; here they are one a byte.
The last group of a row has what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from ..validation import check_values
from .fp4 import check_packed, unpack_e2m1
from .fp8 import check_floating, check_scale, check_wide_dtype
from .small_floats import round_to_dtype

LARGEST_CODE = 15
MIDDLE = 8
"""The zero point of codes without one."""
ROOM = 7.0
"""The largest number on both sides of it."""


class Int4Groups(NamedTuple):
    """A tensor in 4-bit codes, its scales in linear order.

    Attributes:
        codes: uint8 [..., n / 2], two codes a byte, the even element in the low nibble.
        scales: float32 [..., n / group], rounded up; positive.
        zero_points: uint8 of the scales' shape, 0 to 15; None: 8.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None


@torch.no_grad()
def quantize_int4_groups(x: torch.Tensor, group: int, *, zero_points: bool = False) -> Int4Groups:
    """Quantise groups of columns to 4 bits, as GPTQ and AWQ do without a search.

    Without zero points the scale is amax / 7. With them it is (largest - least) / 15 of a range
    that includes 0, and the zero point is where 0 falls, rounded. A group of zeros has scale 1.

    Args:
        x: any floating dtype, [..., n], finite; n is even.
        group: columns that share a scale.
        zero_points: whether groups have one each.

    Returns:
        Int4Groups.

    Raises:
        ValueError: an x that is not floating, or an odd n.
    """
    blocks = groups_of(x, group)
    if zero_points:
        least, largest = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((largest - least) / LARGEST_CODE).to(torch.float32)
    else:
        scales = (blocks.abs().amax(-1) / ROOM).to(torch.float32)
    scales = torch.where(scales > 0, scales, 1.0)
    zeros = None
    if zero_points:
        zeros = (-least / scales).round().clamp(0, LARGEST_CODE).to(torch.uint8)
    return Int4Groups(encode_int4_groups(x, group, scales, zeros), scales, zeros)


def groups_of(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return [..., n] as float64 [..., groups, group], zeros behind what the last group has.

    Raises:
        ValueError: an x that is not floating, or an odd n.
    """
    check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        message = f"x has shape {tuple(x.shape)}; its last dim must be even to be packed"
        raise ValueError(message)
    wide = functional.pad(x.to(torch.float64), (0, -x.shape[-1] % group))
    return wide.view(*x.shape[:-1], -(-x.shape[-1] // group), group)


@torch.no_grad()
def encode_int4_groups(
    x: torch.Tensor, group: int, scales: torch.Tensor, zero_points: torch.Tensor | None = None
) -> torch.Tensor:
    """Round x / scale + zero point to packed codes: to nearest even, saturating at 0 and 15.

    Args:
        x: any floating dtype, [..., n]; n is even.
        group: columns that share a scale.
        scales: positive, [..., n / group], rounded up.
        zero_points: integers of the scales' shape; 8 if None.

    Returns:
        uint8 [..., n / 2].

    Raises:
        ValueError: an x that is not floating, or an odd n.
    """
    blocks = groups_of(x, group)
    steps = check_scale("scales", scales, scales).unsqueeze(-1)
    zeros = MIDDLE if zero_points is None else zero_points.to(torch.float64).unsqueeze(-1)
    codes = ((blocks / steps).round() + zeros).clamp(0, LARGEST_CODE).to(torch.uint8).flatten(-2)
    codes = codes[..., : x.shape[-1]]
    return codes[..., 0::2] | codes[..., 1::2] << 4


@torch.no_grad()
def dequantize_int4_groups(
    codes: torch.Tensor,
    group: int,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the numbers of 4-bit codes: (code - zero point) * scale, exact in float64.

    Args:
        codes: uint8 [..., n / 2], the element of even index in the low nibble.
        group: columns that share a scale.
        scales: positive, [..., n / group], rounded up.
        zero_points: uint8 of the scales' shape, 0 to 15; 8 if None.
        dtype: float64, float32, float16 or bfloat16; rounded to once.

    Returns:
        Numbers of ``dtype``, [..., n].

    Raises:
        ValueError: codes, scales, zero points or a dtype of another type, or shapes that disagree.
    """
    check_packed("codes", codes)
    check_wide_dtype(dtype)
    columns = 2 * codes.shape[-1]
    wanted = (*codes.shape[:-1], -(-columns // group))
    if tuple(scales.shape) != wanted:
        message = f"scales has shape {tuple(scales.shape)}; {columns} columns need {wanted}"
        raise ValueError(message)
    numbers = unpack_e2m1(codes).to(torch.float64)
    if zero_points is None:
        numbers -= MIDDLE
    else:
        check_zero_points("zero_points", zero_points, scales)
        numbers -= _spread(zero_points, group, columns)
    numbers *= _spread(check_scale("scales", scales, scales), group, columns)
    return round_to_dtype(numbers, dtype)


def _spread(each: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Repeat what a group has for each of its columns."""
    return each.repeat_interleave(group, dim=-1)[..., :columns]


def check_zero_points(name: str, zero_points: torch.Tensor, scales: torch.Tensor) -> None:
    """Check that there is one zero point of 0 to 15 for each scale."""
    if zero_points.dtype != torch.uint8 or zero_points.shape != scales.shape:
        found = f"{zero_points.dtype} {list(zero_points.shape)}"
        message = f"{name} is {found}; it must be uint8, one for each scale {list(scales.shape)}"
        raise ValueError(message)
    check_values(name, zero_points)
    if (zero_points > LARGEST_CODE).any():
        message = f"{name} holds {int(zero_points.max())}; a zero point is 0 to {LARGEST_CODE}"
        raise ValueError(message)
