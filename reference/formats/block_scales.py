"""What the block formats share: blocks along the last dim, each with a scale of its own."""

from __future__ import annotations

import torch

from .fp8 import check_floating
from .small_floats import round_to_dtype


def split_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """View [..., n] as [..., n / size, size]; FP8, in which torch does not compute, in float32."""
    check_floating("x", x)
    if x.dim() == 0 or x.shape[-1] % size:
        message = f"x has shape {tuple(x.shape)}; its last dim must be a multiple of {size}"
        raise ValueError(message)
    wide = x.to(torch.float32) if x.dtype.itemsize == 1 else x
    return wide.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def scale_blocks(
    values: torch.Tensor, steps: torch.Tensor, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply each block of values by its step, in place, and round once to the dtype."""
    values.unflatten(-1, (steps.shape[-1], size)).mul_(steps.unsqueeze(-1))
    return round_to_dtype(values, dtype)


def check_block_scales(codes: torch.Tensor, packing: int, scales: torch.Tensor, size: int) -> None:
    """Check that there is one block scale for every block of codes."""
    elements = packing * (codes.shape[-1] if codes.dim() else 0)
    if codes.dim() == 0 or elements % size:
        message = (
            f"codes has shape {tuple(codes.shape)}, that is {elements} elements in the last dim, "
            f"not a multiple of {size}"
        )
        raise ValueError(message)
    expected = (*codes.shape[:-1], elements // size)
    if tuple(scales.shape) != expected:
        message = (
            f"block_scales has shape {tuple(scales.shape)}, but codes of shape "
            f"{tuple(codes.shape)} have block scales of shape {expected}"
        )
        raise ValueError(message)
