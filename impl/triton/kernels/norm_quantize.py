"""A norm that quantises as a Triton kernel; ``impl.triton.norm_quantize`` launches it.

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


def _norm_and_quantize(
    x: tl.tensor,  # [tokens, channels]
    residual: tl.tensor,  # the same, if ADDED
    gamma: tl.tensor,  # [channels]
    codes: tl.tensor,  # [tokens, channels], contiguous
    scales: tl.tensor,  # float32 [tokens, groups] by strides, or [1] if GIVEN
    num_channels: tl.tensor,
    x_token: tl.tensor,
    residual_token: tl.tensor,
    scales_token: tl.tensor,
    scales_group: tl.tensor,
    offset: tl.tensor,
    eps: tl.tensor,
    floor: tl.tensor,
    LARGEST: tl.constexpr,
    ADDED: tl.constexpr,
    GIVEN: tl.constexpr,
    POWER: tl.constexpr,
    GROUP: tl.constexpr,  # channels of a group, a power of two; those of the block of one group
    BLOCK: tl.constexpr,
) -> None:
    """Add, normalise and quantise one row, by roots and divisions in float32."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < num_channels
    h = tl.load(x + row * x_token + channel, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        place = residual + row * residual_token + channel
        h += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, h.to(residual.dtype.element_ty), mask=mask)
    one = tl.full((1,), 1.0, tl.float32)
    size = one * num_channels
    mean = tl.div_rn(tl.sum(h * h, axis=0) + tl.zeros((1,), tl.float32), size)
    root = tl.div_rn(one, tl.sqrt_rn(mean + eps))
    gain = tl.load(gamma + channel, mask=mask, other=0.0).to(tl.float32) + offset
    y = tl.where(mask, h * root * gain, 0.0)
    groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
    if GIVEN:
        scale = tl.load(scales) + tl.zeros((BLOCK // GROUP,), tl.float32)
    else:
        amax = tl.maximum(tl.max(tl.abs(groups), axis=1), floor)
        scale = tl.div_rn(amax, tl.full((BLOCK // GROUP,), LARGEST, tl.float32))
        if POWER:
            number = scale.to(tl.int32, bitcast=True)
            scale = ((number + MANTISSA) & EXPONENT).to(tl.float32, bitcast=True)
        group = tl.arange(0, BLOCK // GROUP)
        stored = scales + row * scales_token + group.to(tl.int64) * scales_group
        tl.store(stored, scale, mask=group * GROUP < num_channels)
    quotient = tl.div_rn(groups, tl.broadcast_to(scale[:, None], groups.shape))
    code = tl.clamp(quotient, -LARGEST, LARGEST).to(codes.dtype.element_ty)
    tl.store(codes + row * num_channels + channel, tl.reshape(code, (BLOCK,)), mask=mask)


norm_and_quantize = triton.jit(
    _norm_and_quantize,
    do_not_specialize=(
        "num_channels", "x_token", "residual_token", "scales_token", "scales_group", "offset",
    ),
)  # fmt: skip
