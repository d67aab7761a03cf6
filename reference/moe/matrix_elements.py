"""What the codes of a matrix may be: how each element is made and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formats.int4_groups import (
    ROOM,
    dequantize_int4_groups,
    quantize_int4_groups,
)
from ..formats.integers import LARGEST_INT8, dequantize_int8, quantize_int8
from ..formats.quantization import dequantize_fp8, quantize_fp8
from ..formats.small_floats import FP8_FORMATS

SCALE_BLOCK = 128
"""Rows and columns of one scale of ``"block"``, as DeepSeek-V3's checkpoints have them."""
SCALES = ("tensor", "channel", "block")
POWERS = "block_ue8m0"
"""Scales of FP8 in blocks that are powers of two, as bytes of their exponents."""
Scale = float | torch.Tensor


class MatrixElement(NamedTuple):
    """What the codes of a matrix are, and how they are made and read.

    Attributes:
        dtype: dtype of the tensor of codes.
        encode: function from numbers and scales that broadcast to them (of block formats: a global
            scale) to codes and, of block formats, block scales.
        decode: function from codes, scales, and a global scale or zero points, to float64 numbers.
        scales: what ``MatrixFormat.scales`` may be.
        packed: columns in one code's byte.
        block: columns that share a block scale; 0: ``scales`` says which numbers share one.
        has_global_scale: whether a global scale multiplies the block scales.
        short: whether the last block of a row may have fewer columns.
        has_zero_points: whether each block has one, which is subtracted from its codes.
        largest: the largest number of a code, which scales that are not the element's are made for.
    """

    dtype: torch.dtype
    encode: Callable[[torch.Tensor, Scale], tuple[torch.Tensor, ...]]
    decode: Callable[[torch.Tensor, torch.Tensor, Scale], torch.Tensor]
    scales: tuple[str, ...] = ("",)
    packed: int = 1
    block: int = 0
    has_global_scale: bool = False
    short: bool = False
    has_zero_points: bool = False
    largest: float = 0.0


def fp8(dtype: torch.dtype) -> MatrixElement:
    """Return the element of an FP8 format."""
    return MatrixElement(
        dtype,
        lambda values, scales: (quantize_fp8(values, dtype, scales),),
        lambda codes, scales, _: dequantize_fp8(codes, scales),
        (*SCALES, POWERS),
        largest=FP8_FORMATS[dtype].largest,
    )


def int8() -> MatrixElement:
    """Return the element of signed bytes."""
    return MatrixElement(
        torch.int8,
        lambda values, scales: (quantize_int8(values, scales),),
        lambda codes, scales, _: dequantize_int8(codes, scales),
        SCALES,
        largest=LARGEST_INT8,
    )


def int4(group: int, *, zero_points: bool = False) -> MatrixElement:
    """Return the element of 4 bits with a scale for a group of columns, and maybe a zero point."""

    def encode(values: torch.Tensor, _: Scale) -> tuple[torch.Tensor, ...]:
        made = quantize_int4_groups(values, group, zero_points=zero_points)
        return tuple(each for each in made if each is not None)

    def decode(codes: torch.Tensor, scales: torch.Tensor, zeros: Scale) -> torch.Tensor:
        given = zeros if zero_points and isinstance(zeros, torch.Tensor) else None
        return dequantize_int4_groups(codes, group, scales, given)

    return MatrixElement(
        torch.uint8,
        encode,
        decode,
        packed=2,
        block=group,
        short=True,
        has_zero_points=zero_points,
        largest=ROOM,
    )
