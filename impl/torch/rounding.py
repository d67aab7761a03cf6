"""Whether an output of 16 bits stays as it is where a number multiplies it, or is rounded again."""

from __future__ import annotations

import math

POWER_OF_TWO = 0.5
"""The mantissa that math.frexp gives a power of two."""


def rounds_twice(factor: float, dtype: str) -> bool:
    """Whether an output that was rounded to a dtype may be rounded again by a factor.

    Subnormal numbers, which float16 has from 6e-5 down, have fewer digits: a power of two below 1
    rounds them again, and one above 1 makes of their rounding error a larger one than the product
    has. An average of small values is among them. Those of bfloat16, below 1e-38, are none that
    problems have.
    """
    if dtype == "float32":
        return False
    return math.frexp(factor)[0] != POWER_OF_TWO or (dtype == "float16" and factor != 1)
