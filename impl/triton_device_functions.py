"""Functions that Triton kernels call, and what makes them so; imported by kernels alone."""

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
    """Give soft_cap * tanh(logits)."""
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
