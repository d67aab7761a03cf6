"""Quantising a matrix by rows or groups as a Triton kernel; ``impl.triton.quantize`` launches it.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

MANTISSA, EXPONENT = tl.constexpr(0x7FFFFF), tl.constexpr(0x7F800000)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: a sum of it and a small float32 has no bit behind the point."""


def _quantize(
    x: tl.tensor,  # [tokens, channels]
    codes: tl.tensor,  # [tokens, channels], contiguous
    scales: tl.tensor,  # float32 [tokens, groups] by strides, or [1] if GIVEN
    num_tokens: tl.tensor,
    num_channels: tl.tensor,
    group: tl.tensor,  # channels of a group
    x_token: tl.tensor,
    scales_token: tl.tensor,
    scales_group: tl.tensor,
    floor: tl.tensor,
    LARGEST: tl.constexpr,
    BEYOND: tl.constexpr,  # the largest float32 that is rounded to a number; 0 to saturate
    OVERFLOW: tl.constexpr,  # the code of what is beyond it
    GIVEN: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    """Quantise one group of BLOCK_TOKENS rows, by division in float32."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    within = tl.arange(0, BLOCK_CHANNELS)
    channel = tl.program_id(1) * group + within
    is_token = token < num_tokens
    mask = is_token[:, None] & ((within < group) & (channel < num_channels))[None, :]
    row = token.to(tl.int64)
    value = tl.load(x + (row * x_token)[:, None] + channel[None, :], mask=mask, other=0.0)
    value = value.to(tl.float32)
    if GIVEN:
        scale = tl.load(scales) + tl.zeros((BLOCK_TOKENS,), tl.float32)
    else:
        amax = tl.maximum(tl.max(tl.abs(value), axis=1), floor)
        scale = tl.div_rn(amax, tl.full((BLOCK_TOKENS,), LARGEST, tl.float32))
        if POWER:
            number = scale.to(tl.int32, bitcast=True)
            scale = ((number + MANTISSA) & EXPONENT).to(tl.float32, bitcast=True)
        place = row * scales_token + tl.program_id(1).to(tl.int64) * scales_group
        tl.store(scales + place, scale, mask=is_token)
    quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    target = codes + (row * num_channels)[:, None] + channel[None, :]
    if codes.dtype.element_ty == tl.int8:
        small = tl.minimum(tl.maximum(quotient, -128.0), 127.0)
        tl.store(target, ((small + ROUNDER) - ROUNDER).to(tl.int8), mask=mask)
    else:
        code = tl.clamp(quotient, -LARGEST, LARGEST).to(codes.dtype.element_ty)
        if BEYOND > 0:  # a bare float is no condition to the compiler
            number = code.to(tl.uint8, bitcast=True).to(tl.int32)
            beyond = tl.where(quotient < 0, OVERFLOW + 128, OVERFLOW)  # with the sign bit
            number = tl.where(tl.abs(quotient) > BEYOND, beyond, number)
            code = number.to(tl.uint8).to(codes.dtype.element_ty, bitcast=True)
        tl.store(target, code, mask=mask)


quantize = triton.jit(
    _quantize,
    do_not_specialize=(
        "num_tokens", "num_channels", "group", "x_token", "scales_token", "scales_group",
    ),
)  # fmt: skip
