"""Device functions of the Triton kernels, and their decorator; only kernels import them."""

# Compile-time constants are upper case in Triton.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SMALL = tl.constexpr(0.5)


def device_function(function: Callable[..., Any]) -> Any:  # noqa: ANN401  what a kernel may call
    """Compile a function for kernels to call; in the interpreter, leave it what it is.

    There each call of a ``triton.jit`` function would patch triton's whole language once more.
    """
    compiled = triton.jit(function)
    return compiled if isinstance(compiled, triton.JITFunction) else function


def _soft_capped(logits: tl.tensor, soft_cap: tl.tensor) -> tl.tensor:
    """Return soft_cap * tanh(logits)."""
    # tanh as one quotient: Lambert's fraction keeps its relative error (1e-10) near 0,
    # where 1 - exp(-2x) would cancel.
    square = logits * logits
    decay = tl.exp2(tl.abs(logits) * (-2.0 * LOG2_E))
    is_small = square < SMALL * SMALL
    sign = tl.where(logits < 0, -1.0, 1.0)
    above = tl.where(is_small, logits * (945.0 + square * (105.0 + square)), sign * (1.0 - decay))
    below = tl.where(is_small, 945.0 + square * (420.0 + 15.0 * square), 1.0 + decay)
    return above / below * soft_cap


soft_capped = device_function(_soft_capped)


def _quotient(number: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Divide by what ``inverse`` is 2**30 divided by, rounded up.

    The compiler would spend twenty instructions on a division.
    """
    return ((number.to(tl.int64) * inverse) >> 30).to(tl.int32)


quotient = device_function(_quotient)


def _in_elements(stride: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    """Return a stride that comes in units of UNIT elements; the compiler sees what divides it."""
    return stride * UNIT


in_elements = device_function(_in_elements)


def _place_of(
    key: tl.tensor, page_shift: tl.tensor, page_inverse: tl.tensor, SHIFTS: tl.constexpr
) -> tl.tensor:
    """Return the place of a key's page among those of its request; -1 for key -1."""
    return key >> page_shift if SHIFTS else quotient(key, page_inverse)


place_of = device_function(_place_of)


def _load_rows(
    rows: tl.tensor,
    stride: tl.tensor,
    is_row: tl.tensor | None,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load rows of channels: [rows, BLOCK], 0 past DIM and where there is no row.

    Args:
        rows: [rows] pointers to the first channel of each.
        stride: distance in elements from a channel to the next.
        is_row: [rows], which there are; None: all. What needs no mask does without.
        DIM: channels.
        BLOCK: DIM, rounded up to a power of two.
    """
    channel = tl.arange(0, BLOCK)
    pointers = rows[:, None] + channel[None, :] * stride
    if is_row is None:
        if DIM == BLOCK:
            loaded = tl.load(pointers)
        else:
            loaded = tl.load(pointers, mask=(channel < DIM)[None, :], other=0.0)
    elif DIM == BLOCK:
        loaded = tl.load(pointers, mask=is_row[:, None], other=0.0)
    else:
        loaded = tl.load(pointers, mask=is_row[:, None] & (channel < DIM)[None, :], other=0.0)
    return loaded


load_rows = device_function(_load_rows)
