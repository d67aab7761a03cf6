"""FP8 codes: e4m3fn and e5m2, with scales that multiply at dequantisation."""

from __future__ import annotations

import torch

from ..validation import check_values
from .small_floats import (
    FP8_FORMATS,
    WIDE_DTYPES,
    decode_table,
    elementwise,
    quotient,
    round_to_dtype,
    round_to_format,
)

_TABLES = {dtype: decode_table(form, 256) for dtype, form in FP8_FORMATS.items()}


@torch.no_grad()
def quantize_fp8(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Round x / scale to FP8 codes: to nearest, ties to even, in one rounding.

    The formats are those of the OCP 8-bit Floating Point Specification (OFP8) v1.0. What exceeds
    the largest finite number (448 for e4m3fn, 57344 for e5m2), infinity too, saturates to it; NaN
    stays NaN; zeros keep their sign.

    Args:
        x: any floating dtype and shape.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: positive and finite, a float or a tensor that broadcasts to x ([kv_heads, 1] scales
            the heads of [tokens, kv_heads, head_dim]).

    Returns:
        Codes of ``dtype``, of x's shape.

    Raises:
        ValueError: an x that is not floating, another dtype, or a scale that is not positive and
            finite or does not broadcast.
    """
    check_floating("x", x)
    form = FP8_FORMATS[check_fp8_dtype("dtype", dtype)]
    divisor = check_scale("scale", scale, x)

    def encode(part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return round_to_format(quotient(part, by), form)

    return elementwise(encode, dtype, x, divisor)


@torch.no_grad()
def dequantize_fp8(
    codes: torch.Tensor,
    scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the numbers that FP8 codes stand for: value * scale.

    In float64 the product is exact where the scale has at most 49 significant bits, as every
    float32 has. Another ``dtype`` is rounded to from there, once.

    Args:
        codes: ``float8_e4m3fn`` or ``float8_e5m2``, any shape. Raw bytes are refused: view them
            as the format that they are in.
        scale: positive and finite, a float or a tensor that broadcasts to the codes.
        dtype: float64, float32, float16 or bfloat16.

    Returns:
        Numbers of ``dtype``, of the codes' shape; codes of infinity and NaN give these.

    Raises:
        ValueError: codes or a dtype of another format, or a scale that is not positive and finite
            or does not broadcast.
    """
    check_fp8_dtype("codes.dtype", codes.dtype)
    check_values("codes", codes)
    check_wide_dtype(dtype)
    factor = check_scale("scale", scale, codes)
    table = _TABLES[codes.dtype].to(codes.device)
    index = codes.view(torch.uint8).flatten().int()
    if factor.numel() == 1:
        table = round_to_dtype(table * factor.reshape(()), dtype)
        return table.index_select(0, index).view(codes.shape)
    values = table.index_select(0, index).view(codes.shape)
    return round_to_dtype(values.mul_(factor), dtype)


def check_floating(name: str, x: torch.Tensor) -> None:
    """Check that an argument is a tensor of a floating dtype."""
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x)
        message = f"{name} must be a tensor of a floating dtype, not {kind}"
        raise ValueError(message)
    check_values(name, x)


def check_fp8_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Check that a dtype is one of the FP8 formats known here."""
    if dtype not in FP8_FORMATS:
        message = f"{name} is {dtype}; it must be torch.float8_e4m3fn or torch.float8_e5m2"
        raise ValueError(message)
    return dtype


def check_wide_dtype(dtype: torch.dtype) -> None:
    """Check that a dtype is one to dequantise into."""
    if dtype not in WIDE_DTYPES:
        message = f"dtype is {dtype}; it must be torch.float64, float32, float16 or bfloat16"
        raise ValueError(message)


def check_scale(name: str, scale: float | torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Bring a scale to float64 on the target's device; it is positive, finite and broadcasts."""
    if isinstance(scale, torch.Tensor):
        check_values(name, scale)
    factor = torch.as_tensor(scale, dtype=torch.float64, device=target.device)
    good = factor.isfinite() & (factor > 0)
    if not good.all():
        bad = factor[~good].flatten()[0].item()
        message = f"{name} is {bad}, or holds it; a scale is positive and finite"
        raise ValueError(message)
    shape, wanted = tuple(factor.shape), tuple(target.shape)
    padded = (1,) * (len(wanted) - len(shape)) + shape
    fits = all(size in (1, into) for size, into in zip(padded, wanted, strict=False))
    if len(shape) > len(wanted) or not fits:
        message = f"{name} has shape {shape}, which does not broadcast to {wanted}"
        raise ValueError(message)
    return factor
