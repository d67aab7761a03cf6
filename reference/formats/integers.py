"""Integer codes of weights and hidden states: int8 with scales, and what is shared with int4."""

from __future__ import annotations

import torch

from ..validation import check_values
from .fp8 import check_floating, check_scale, check_wide_dtype
from .small_floats import elementwise, round_to_dtype

LARGEST_INT8 = 127.0
"""Largest code of int8, as kernels quantise: -128 is never written, but read as it is."""


@torch.no_grad()
def quantize_int8(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Round x / scale to int8 codes: to nearest, ties to even, saturating at -127 and 127.

    Symmetric: code 0 is 0, as in vLLM's ``int8_w8a8`` and ``int8_w8a16`` experts and in SGLang's
    ``w8a8_int8`` and blockwise int8. NaN becomes 0: the format has none.

    Args:
        x: any floating dtype and shape.
        scale: positive and finite, a float or a tensor that broadcasts to x.

    Returns:
        int8 codes, of x's shape.

    Raises:
        ValueError: an x that is not floating, or a scale that is not positive and finite or does
            not broadcast.
    """
    check_floating("x", x)
    divisor = check_scale("scale", scale, x)

    def encode(part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        codes = (part.to(torch.float64) / by).round()
        return codes.clamp(-LARGEST_INT8, LARGEST_INT8).nan_to_num(nan=0.0)

    return elementwise(encode, torch.int8, x, divisor)


@torch.no_grad()
def dequantize_int8(
    codes: torch.Tensor, scale: float | torch.Tensor = 1.0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the numbers that int8 codes stand for: code * scale, exact in float64.

    Args:
        codes: int8, any shape.
        scale: positive and finite, a float or a tensor that broadcasts to the codes.
        dtype: float64, float32, float16 or bfloat16; rounded to once.

    Returns:
        Numbers of ``dtype``, of the codes' shape.

    Raises:
        ValueError: codes or a dtype of another type, or a scale that is not positive and finite or
            does not broadcast.
    """
    if codes.dtype != torch.int8:
        message = f"codes must be int8, not {codes.dtype}"
        raise ValueError(message)
    check_values("codes", codes)
    check_wide_dtype(dtype)
    return round_to_dtype(codes.to(torch.float64) * check_scale("scale", scale, codes), dtype)
