"""Functions of the Triton MoE kernels: products of tiles, activations, FP8 of the intermediate.

This module imports triton, so nothing imports it before it is needed.
"""

# Compile-time constants are upper case in Triton, and what a kernel passes on are arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton.language as tl

from .device_functions import device_function
from .kv_formats import widen_fp8

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)
LARGEST_E4M3 = tl.constexpr(448.0)
SMALLEST_NORMAL_E4M3 = tl.constexpr(2.0**-6)
EXPONENT = tl.constexpr(0x7F800000)
"""Mask of a float32's exponent bits."""
ROUNDING = tl.constexpr(1.5 * 2.0**20)
"""Added to numbers from 1 to 2, it leaves three bits behind the point."""


def _tile_of(
    number: tl.tensor, rows: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the row and the column of a tile: GROUP rows take each column before the next."""
    in_group = GROUP * columns
    first = number // in_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    return first + number % in_group % height, number % in_group // height


tile_of = device_function(_tile_of)


def _operand(
    pointers: tl.tensor, is_column: tl.tensor | None, FORMAT: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Load a tile for a product.

    Args:
        pointers: [rows, BLOCK_K].
        is_column: [BLOCK_K], which there are; None: all.
        FORMAT: format of the codes; empty for numbers.
        DTYPE: what they are widened to; None: they are multiplied as they are.
    """
    if is_column is None:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=is_column[None, :], other=0.0)
    if DTYPE is not None:
        # As bytes where Triton does not know the codes: in the interpreter, and on old chips.
        if pointers.dtype.element_ty == tl.uint8:
            loaded = widen_fp8(loaded, FORMAT, DTYPE, False)  # noqa: FBT003  a constant
        else:
            loaded = loaded.to(DTYPE)
    return loaded


operand = device_function(_operand)


def _product(
    a_rows: tl.tensor,
    a_column: tl.tensor,
    a_scales: tl.tensor | None,
    a_scales_block: tl.tensor | None,
    b_rows: tl.tensor,
    b_column: tl.tensor,
    b_scales: tl.tensor | None,
    b_scales_block: tl.tensor | None,
    columns: tl.tensor,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_SCALED: tl.constexpr,
    B_SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of two matrices: [BLOCK_M, BLOCK_N] float32.

    Args:
        a_rows, b_rows: [BLOCK_M] and [BLOCK_N] pointers to the first element of each row.
        a_column, b_column: distances from an element to the next.
        a_scales, b_scales: [BLOCK_M] and [BLOCK_N] pointers to the first scale of each row, read
            if A_SCALED and B_SCALED.
        a_scales_block, b_scales_block: distances from a scale to the next.
        columns: elements of a row.
        A_FORMAT, B_FORMAT: formats of the codes; empty for numbers.
        A_SCALED, B_SCALED: columns that a scale is for, a multiple of BLOCK_K; 0: there is none.
        DTYPE: what both are widened to; None: nothing is.
        EVEN: whether columns is a multiple of BLOCK_K.
        BLOCK_M, BLOCK_N, BLOCK_K: sizes of the tiles.
    """
    column = tl.arange(0, BLOCK_K)
    a_tiles = a_rows[:, None] + column[None, :] * a_column
    b_tiles = b_rows[:, None] + column[None, :] * b_column
    sums = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for first in range(0, columns, BLOCK_K):
        is_column = None if EVEN else first + column < columns
        a = operand(a_tiles, is_column, A_FORMAT, DTYPE)
        b = operand(b_tiles, is_column, B_FORMAT, DTYPE)
        # ieee: TensorFloat-32 would give float32 inputs the mantissa of float16.
        if A_SCALED == 0 and B_SCALED == 0:
            sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
        else:
            part = tl.dot(a, tl.trans(b), input_precision="ieee")
            if A_SCALED > 0:
                part *= tl.load(a_scales + first // A_SCALED * a_scales_block)[:, None]
            if B_SCALED > 0:
                part *= tl.load(b_scales + first // B_SCALED * b_scales_block)[None, :]
            sums += part
        a_tiles += BLOCK_K * a_column
        b_tiles += BLOCK_K * b_column
    return sums


product = device_function(_product)


def _phi(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply the function of a gate, or of the only projection; NaN stays NaN."""
    if ACTIVATION == "geglu" or ACTIVATION == "gelu":  # noqa: PLR1714  Triton knows no sets
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "geglu_tanh" or ACTIVATION == "gelu_tanh":  # noqa: PLR1714
        # (1 + tanh(y)) / 2 is sigmoid(2 y), which does not cancel where x is negative.
        y = x / (1.0 + tl.exp((x + x * x * x * GELU_CUBE) * -TWICE_SQRT_2_OVER_PI))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    elif ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:
        y = x
    return y


phi = device_function(_phi)


def _swiglu(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, beta: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """Return gate' sigmoid(alpha gate') (up' + beta), cut off at the limit; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)


swiglu = device_function(_swiglu)


def _soft_cap(x: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """Return cap tanh(x / cap), by way of a sigmoid; x where there is no cap. NaN stays NaN."""
    capped = cap * (2.0 / (1.0 + tl.exp(-2.0 * x / cap)) - 1.0)
    return tl.where(cap == float("inf"), x, capped)


soft_cap = device_function(_soft_cap)


def _gated(
    gate: tl.tensor,
    up: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    ACTIVATION: tl.constexpr,
) -> tl.tensor:
    """Apply an activation that takes some of alpha, beta and limit; NaN stays NaN."""
    if ACTIVATION == "swiglu_step":
        kept = gate / (1.0 + tl.exp(-gate))
        kept = tl.where(kept > limit, limit, kept)
        y = kept * tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    elif ACTIVATION == "situ":
        y = soft_cap(gate, beta) / (1.0 + tl.exp(-gate)) * soft_cap(up, limit)
    elif ACTIVATION == "geglu1":
        y = 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF)) * (up + beta)
    else:
        y = swiglu(gate, up, alpha, beta, limit)
    return y


gated = device_function(_gated)


def _activated(
    x: tl.tensor,
    expert: tl.tensor,
    alphas: tl.tensor | None,
    betas: tl.tensor | None,
    limits: tl.tensor | None,
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Apply an activation: [BLOCK_M, COLUMNS].

    Args:
        x: [BLOCK_M, 2 * COLUMNS], gate and up taking turns, if GATED, else [BLOCK_M, COLUMNS].
        expert: the expert of these rows.
        alphas, betas, limits: [experts], where each has its own.
        alpha, beta, limit: otherwise.
        ACTIVATION, GATED, NUMBERS: which; whether it takes some of alpha, beta and limit.
        BLOCK_M, COLUMNS: sizes.
    """
    if GATED:
        gate, up = tl.split(tl.reshape(x, (BLOCK_M, COLUMNS, 2)))
        if NUMBERS:
            if alphas is not None:
                alpha = tl.load(alphas + expert)
            if betas is not None:
                beta = tl.load(betas + expert)
            if limits is not None:
                limit = tl.load(limits + expert)
            y = gated(gate, up, alpha, beta, limit, ACTIVATION)
        else:
            y = phi(gate, ACTIVATION) * up
    else:
        y = phi(x, ACTIVATION)
    return y


activated = device_function(_activated)


def _rounded_to_e4m3(x: tl.tensor) -> tl.tensor:
    """Round float32 numbers of at most 448 to e4m3's, to nearest even.

    By adding and subtracting a number whose last bit is what the result may differ by: so the
    interpreter, which has no FP8, rounds as a GPU does.
    """
    power = (x.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    added = tl.maximum(power, SMALLEST_NORMAL_E4M3) * ROUNDING
    return (x + added) - added


rounded_to_e4m3 = device_function(_rounded_to_e4m3)
