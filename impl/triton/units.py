"""Strides for Triton kernels: in units, of which a kernel is compiled for few.

Left to itself, Triton compiles a kernel anew for each set of strides that happen to be 1, or a
multiple of 16: heads, pages and layouts would each bring kernels of their own. It must know of
what an address is a multiple, though, to load several elements at once. So strides come in units, a
constant of the kernel, and are no constants themselves.
"""

from __future__ import annotations

import math

import torch

LARGEST_UNIT = 16
"""Elements: of one byte, as many as one instruction loads."""
BEYOND_INT32 = 2**31


def unit_of(*strides: int | None) -> int:
    """Return the largest power of two up to 16 that divides these strides; None is none.

    Of strides beyond int32 the unit is 1: in units they would be passed as int32, and in elements
    wrap around.
    """
    present = [stride for stride in strides if stride is not None]
    if any(abs(stride) >= BEYOND_INT32 for stride in present):
        return 1
    return math.gcd(LARGEST_UNIT, *present)


def in_units(strides: dict[str, int | None], unit: int) -> dict[str, int | None]:
    """Return named strides in units."""
    return {name: None if each is None else each // unit for name, each in strides.items()}


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int | None]:
    """Name a tensor's first strides as kernels do; None of one that is absent."""
    names = [f"{name}_{axis}" for axis in axes.split()]
    if tensor is None:
        return dict.fromkeys(names)
    return dict(zip(names, tensor.stride(), strict=False))
