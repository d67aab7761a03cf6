"""MXFP8 and MXFP4: blocks of 32 that share a power of two (OCP Microscaling Formats v1.0)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..validation import check_values
from .block_scales import check_block_scales, scale_blocks, split_blocks
from .fp4 import check_packed, encode_e2m1, pack_e2m1, packed_values
from .fp8 import check_floating, check_fp8_dtype, check_scale, check_wide_dtype, dequantize_fp8
from .small_floats import E2M1, FP8_FORMATS, SmallFloat, elementwise, round_to_format

MX_BLOCK = 32
"""Elements of one e8m0 block scale (OCP Microscaling Formats v1.0, table 1)."""

E8M0: torch.dtype = getattr(torch, "float8_e8m0fnu", torch.uint8)
"""Dtype of scales that are powers of two, where torch has it."""

_E8M0_BIAS = 127
_E8M0_NAN = 255
_E8M0_VALUES = torch.tensor(
    [math.ldexp(1.0, code - _E8M0_BIAS) for code in range(_E8M0_NAN)] + [math.nan],
    dtype=torch.float64,
)


class MXTensor(NamedTuple):
    """A tensor in MXFP8 or MXFP4, its scales in linear order.

    Attributes:
        codes: float8_e4m3fn or float8_e5m2 [..., n], or packed e2m1 codes, uint8 [..., n / 2].
        block_scales: e8m0 codes, uint8 [..., n / 32].
    """

    codes: torch.Tensor
    block_scales: torch.Tensor


@torch.no_grad()
def quantize_mxfp8(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> MXTensor:
    """Quantise blocks of 32 to FP8 with a power of two a block.

    OCP Microscaling Formats v1.0, section 6.3: the shared exponent is floor(log2(amax(block))) -
    emax, with emax 8 for e4m3 and 15 for e5m2; elements are rounded to nearest even and saturate.
    FlashInfer's kernels choose another scale: amax / 448 (e2m1: amax / 6) rounded up to a power of
    two, so that nothing saturates (``quantization_utils.cuh``).

    The exponent is held to -127..127; a block of zeros gets -127. Infinity gives the block the
    exponent 127, NaN the scale code 255, that is NaN for the whole block.

    Args:
        x: any floating dtype, [..., n]; n is a multiple of 32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        MXTensor.

    Raises:
        ValueError: an x that is not floating, an n that is no multiple of 32, another dtype.
    """
    form = FP8_FORMATS[check_fp8_dtype("dtype", dtype)]
    blocks = split_blocks(x, MX_BLOCK)
    scales = _shared_exponents(blocks, form)

    def encode(part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return round_to_format(part.to(torch.float64) / by, form)

    steps = dequantize_e8m0(scales).unsqueeze(-1)
    return MXTensor(elementwise(encode, dtype, blocks, steps).flatten(-2), scales)


def dequantize_mxfp8(
    codes: torch.Tensor, block_scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the numbers of an MXFP8 tensor: FP8 value * 2^(scale code - 127), exact in float64.

    Args:
        codes: float8_e4m3fn or float8_e5m2, [..., n].
        block_scales: e8m0 codes, uint8 (or torch's float8_e8m0fnu) [..., n / 32], linear order.
        dtype: float64, float32, float16 or bfloat16; rounded to once.

    Returns:
        Numbers of ``dtype``, [..., n]; blocks with scale code 255 are NaN.

    Raises:
        ValueError: codes, scales or a dtype of another type, or shapes that disagree.
    """
    check_fp8_dtype("codes.dtype", codes.dtype)
    check_wide_dtype(dtype)
    check_block_scales(codes, 1, block_scales, MX_BLOCK)
    return scale_blocks(dequantize_fp8(codes), dequantize_e8m0(block_scales), MX_BLOCK, dtype)


@torch.no_grad()
def quantize_mxfp4(x: torch.Tensor) -> MXTensor:
    """Quantise blocks of 32 to e2m1 with a power of two a block.

    As ``quantize_mxfp8`` with emax 2; in a block with a NaN the codes say nothing.

    Args:
        x: any floating dtype, [..., n]; n is a multiple of 32.

    Returns:
        MXTensor with packed codes, the even element in the low nibble.

    Raises:
        ValueError: an x that is not floating, or an n that is no multiple of 32.
    """
    blocks = split_blocks(x, MX_BLOCK)
    scales = _shared_exponents(blocks, E2M1)

    def encode(part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return encode_e2m1(part.to(torch.float64) / by)

    codes = elementwise(encode, torch.uint8, blocks, dequantize_e8m0(scales).unsqueeze(-1))
    return MXTensor(pack_e2m1(codes.flatten(-2)), scales)


def dequantize_mxfp4(
    codes: torch.Tensor, block_scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the numbers of an MXFP4 tensor: e2m1 value * 2^(scale code - 127), exact in float64.

    Args:
        codes: uint8 [..., n / 2], the element of even index in the low nibble.
        block_scales: e8m0 codes, uint8 (or torch's float8_e8m0fnu) [..., n / 32], linear order.
        dtype: float64, float32, float16 or bfloat16; rounded to once.

    Returns:
        Numbers of ``dtype``, [..., n]; blocks with scale code 255 are NaN.

    Raises:
        ValueError: codes, scales or a dtype of another type, or shapes that disagree.
    """
    check_packed("codes", codes)
    check_wide_dtype(dtype)
    check_block_scales(codes, 2, block_scales, MX_BLOCK)
    return scale_blocks(packed_values(codes), dequantize_e8m0(block_scales), MX_BLOCK, dtype)


def dequantize_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return the value of e8m0 scale codes: 2^(code - 127); code 255 is NaN.

    OCP Microscaling Formats v1.0, section 5.4.1.

    Args:
        codes: uint8, or torch's float8_e8m0fnu, any shape.

    Returns:
        float64, of the codes' shape.

    Raises:
        ValueError: codes of another dtype.
    """
    if codes.dtype not in (torch.uint8, E8M0):
        message = f"block_scales must hold e8m0 codes (uint8 or float8_e8m0fnu), not {codes.dtype}"
        raise ValueError(message)
    check_values("block_scales", codes)
    return _E8M0_VALUES.to(codes.device)[codes.view(torch.uint8).int()]


@torch.no_grad()
def quantize_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Round scales up to the codes of powers of two: the least one that is at least x.

    Nothing that x leaves room for saturates then. DeepGEMM rounds so where it quantises with
    UE8M0 scales (``ceil_to_ue8m0`` in its ``utils/math.py``), of amax / 448 for FP8; so do the
    checkpoints of DeepSeek-V3.1 (``"scale_fmt": "ue8m0"``).

    Args:
        x: positive and finite, any floating dtype and shape; 2^-127 and less becomes 2^-127.

    Returns:
        e8m0 codes of x's shape: torch's float8_e8m0fnu, where torch has it, else uint8.

    Raises:
        ValueError: an x that is not floating, not positive or not finite, or beyond 2^127.
    """
    check_floating("x", x)
    wide = check_scale("x", x, x)
    mantissa, exponent = torch.frexp(wide)
    codes = exponent - (mantissa == 0.5).to(exponent.dtype) + _E8M0_BIAS  # noqa: PLR2004  2^(e - 1)
    if (codes >= _E8M0_NAN).any():
        message = f"x holds {wide.max().item()}; the largest e8m0 scale is 2^127"
        raise ValueError(message)
    return codes.clamp(min=0).to(torch.uint8).view(E8M0)


def _shared_exponents(blocks: torch.Tensor, form: SmallFloat) -> torch.Tensor:
    """Choose the power of two of each block: [..., blocks, 32] to e8m0 codes."""
    amax = blocks.abs().amax(-1).to(torch.float64)
    floor_log2 = (amax.view(torch.int64) >> 52) - 1023  # the exponent field of a float64
    biased = (floor_log2 - form.max_exponent + _E8M0_BIAS).clamp(0, _E8M0_NAN - 1)
    return torch.where(amax.isnan(), _E8M0_NAN, biased).to(torch.uint8)
