"""FP4 codes (e2m1), two of them a byte."""

from __future__ import annotations

import torch

from ..validation import check_values
from .fp8 import check_floating, check_wide_dtype
from .small_floats import E2M1, decode_table, elementwise, round_to_format

_NUM_CODES = 16

E2M1_VALUES = decode_table(E2M1, _NUM_CODES)
"""[16], float64: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives from code 8 on."""

_PAIRS = torch.stack((E2M1_VALUES.repeat(16), E2M1_VALUES.repeat_interleave(16)), dim=-1)
_CODES = torch.zeros(256, dtype=torch.uint8)  # by the e4m3 byte: every e2m1 number is one of e4m3
_CODES[E2M1_VALUES.to(torch.float8_e4m3fn).view(torch.uint8).long()] = torch.arange(
    16, dtype=torch.uint8
)


@torch.no_grad()
def quantize_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1 codes: to nearest, ties to even, saturating at 6.

    The format has neither infinity nor NaN: infinity becomes 6, NaN becomes 0 (block formats keep
    it in the block's scale). Zeros, and what is rounded to them, keep their sign (code 8).

    Args:
        x: any floating dtype and shape.

    Returns:
        uint8 codes 0 to 15, of x's shape, one a byte.

    Raises:
        ValueError: an x that is not floating.
    """
    check_floating("x", x)
    return elementwise(encode_e2m1, torch.uint8, x)


def dequantize_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the values of e2m1 codes, one a byte, exactly.

    Args:
        codes: uint8, 0 to 15, any shape.
        dtype: float64, float32, float16 or bfloat16.

    Returns:
        Numbers of ``dtype``, of the codes' shape.

    Raises:
        ValueError: codes that are not uint8 or exceed 15, or another dtype.
    """
    _check_nibbles(codes)
    check_wide_dtype(dtype)
    return E2M1_VALUES.to(codes.device, dtype)[codes.int()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Put two codes into a byte: the element of even index in the low nibble.

    That is the order of FlashInfer (``nvfp4_append_quantize_block`` in its ``page.cuh``) and of
    PTX's ``cvt.rn.satfinite.e2m1x2.f32 d, a, b`` with b the even one.

    Args:
        codes: uint8 [..., n], 0 to 15; n is even.

    Returns:
        uint8 [..., n / 2].

    Raises:
        ValueError: codes that are not uint8 or exceed 15, or an odd n.
    """
    _check_nibbles(codes)
    if codes.dim() == 0 or codes.shape[-1] % 2:
        message = f"codes has shape {tuple(codes.shape)}; its last dim must be even to be packed"
        raise ValueError(message)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Take bytes apart into two codes each: the inverse of ``pack_e2m1``.

    Args:
        packed: uint8 [..., n / 2].

    Returns:
        uint8 [..., n], 0 to 15.

    Raises:
        ValueError: bytes that are not uint8, or no dim.
    """
    check_packed("packed", packed)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def packed_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes in float64: uint8 [..., n / 2] to [..., n]."""
    values = _PAIRS.to(packed.device).index_select(0, packed.flatten().int())
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round numbers to e2m1 codes, as ``quantize_e2m1`` does, all at once."""
    rounded = round_to_format(x.to(torch.float64), E2M1).to(torch.float8_e4m3fn)
    index = rounded.view(torch.uint8).flatten().int()
    return _CODES.to(x.device).index_select(0, index).view(x.shape)


def check_packed(name: str, packed: torch.Tensor) -> None:
    """Check that packed codes are bytes."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        shape = tuple(packed.shape)
        message = f"{name} must be uint8 [..., n / 2], not {packed.dtype} of shape {shape}"
        raise ValueError(message)
    check_values(name, packed)


def _check_nibbles(codes: torch.Tensor) -> None:
    if codes.dtype != torch.uint8:
        message = f"codes must be uint8, not {codes.dtype}"
        raise ValueError(message)
    check_values("codes", codes)
    if (codes >= _NUM_CODES).any():
        message = f"codes holds {int(codes.max())}; an unpacked e2m1 code is 0 to 15"
        raise ValueError(message)
