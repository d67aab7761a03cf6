"""Widening the codes of a quantised KV cache in registers: FP8 and NVFP4.

By integer arithmetic: bits are moved to where a wider type has them, and a power of two corrects
the exponent's bias. That is exact, subnormals too, and runs in the interpreter and on every chip;
where a chip converts e4m3 itself (SM89 and newer), it does so in a quarter of the instructions. All
values fit into float16 and bfloat16: those of e4m3, those of e5m2, and an e2m1 code times an e4m3
scale, which has six significant bits, is a multiple of 2**-10 and at most 2688.

Tensors are bytes throughout: ``triton_attention_call`` passes views of the caches as uint8.
"""

# Compile-time constants are upper case in Triton, and what a kernel passes on are arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton.language as tl

from .device_functions import device_function

BLOCK = tl.constexpr(16)
"""Channels that share a block scale."""
E4M3_NAN = tl.constexpr(0x7F)


def _widen_fp8(
    codes: tl.tensor, FORMAT: tl.constexpr, DTYPE: tl.constexpr, CONVERTS: tl.constexpr
) -> tl.tensor:
    """Return the values of FP8 codes of any shape.

    Args:
        codes: uint8.
        FORMAT: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        DTYPE: float32, float16 or bfloat16.
        CONVERTS: whether the chip converts e4m3 itself.
    """
    if FORMAT == "float8_e5m2":
        # The upper byte of a float16. (Triton 3.6 converts infinities and NaN to bfloat16 wrongly.)
        wide = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif CONVERTS:
        wide = codes.to(tl.float8e4nv, bitcast=True)
    else:
        word = codes.to(tl.uint16)
        is_nan = (word & E4M3_NAN) == E4M3_NAN
        sign = (word & 0x80) << 8
        if tl.bfloat16 == DTYPE:
            bits = tl.where(is_nan, 0x7FC0, ((word & 0x7F) << 4) + sign)
            wide = bits.to(tl.bfloat16, bitcast=True) * 2.0**120
        else:
            bits = tl.where(is_nan, 0x7E00, ((word & 0x7F) << 7) + sign)
            wide = bits.to(tl.float16, bitcast=True) * 2.0**8
    return wide.to(DTYPE)


def _widen_e2m1(magnitude: tl.tensor, sign: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the values of e2m1 codes of any shape.

    Args:
        magnitude: uint16, the three low bits of a code.
        sign: uint16, its highest bit at bit 15.
        DTYPE: float32, float16 or bfloat16.
    """
    if tl.bfloat16 == DTYPE:
        wide = ((magnitude << 6) + sign).to(tl.bfloat16, bitcast=True) * 2.0**126
    else:
        wide = ((magnitude << 9) + sign).to(tl.float16, bitcast=True) * 2.0**14
    return wide.to(DTYPE)


widen_fp8 = device_function(_widen_fp8)
widen_e2m1 = device_function(_widen_e2m1)


def _load_nvfp4(
    rows: tl.tensor,
    dim_stride: tl.tensor,
    scale_rows: tl.tensor,
    scale_stride: tl.tensor,
    is_row: tl.tensor | None,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> tl.tensor:
    """Load rows of an NVFP4 cache: [BLOCK_N, BLOCK_DIM], 0 past HEAD_DIM, without global scale.

    Args:
        rows: [BLOCK_N] pointers to the first byte of each row: two codes, the even channel's low.
        dim_stride: distance in bytes from a byte of codes to the next.
        scale_rows: [BLOCK_N] pointers to the first e4m3 block scale of each row.
        scale_stride: distance in elements from a scale to the next.
        is_row: [BLOCK_N], which rows there are; None: all.
        HEAD_DIM: channels, a multiple of 16.
        BLOCK_DIM: channels, rounded up to a power of two.
        BLOCK_N: rows.
        DTYPE: dtype of the result.
        CONVERTS: see ``widen_fp8``.
    """
    byte = tl.arange(0, BLOCK_DIM // 2)
    block = tl.arange(0, BLOCK_DIM // BLOCK)
    is_byte = byte[None, :] < HEAD_DIM // 2
    is_block = block[None, :] < HEAD_DIM // BLOCK
    if is_row is not None:
        is_byte = is_row[:, None] & is_byte
        is_block = is_row[:, None] & is_block
    codes = tl.load(rows[:, None] + byte[None, :] * dim_stride, mask=is_byte, other=0)
    scales = tl.load(scale_rows[:, None] + block[None, :] * scale_stride, mask=is_block, other=0)
    word = codes.to(tl.uint16)
    low = widen_e2m1(word & 7, (word & 8) * 0x1000, DTYPE)
    high = widen_e2m1((word >> 4) & 7, (word & 0x80) << 8, DTYPE)
    blocks = tl.reshape(tl.join(low, high), (BLOCK_N, BLOCK_DIM // BLOCK, BLOCK))
    scaled = blocks * widen_fp8(scales, "float8_e4m3fn", DTYPE, CONVERTS)[:, :, None]
    return tl.reshape(scaled, (BLOCK_N, BLOCK_DIM))


load_nvfp4 = device_function(_load_nvfp4)
