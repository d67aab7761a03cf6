"""An honest control that multiplies FP8 operands as Hopper's tensor cores do."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference import Arithmetic
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import widened
from ..kernels import HONEST, attend

CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
ADDENDS = 32
"""Products that are summed in one step."""
BITS = 13
"""Of an addend below the leading bit of the largest one."""


@seeded(
    CONTROLS,
    "paged_attention",
    control="honest",
    features=("fp8_kv", "fp8_q"),
    arithmetic=Arithmetic(fp8_products="fixed_point"),
)
def fixed_point_products(inputs: PagedAttentionInputs) -> Pair:
    """Sum products of FP8 operands in fixed point, 32 at a time, cut off after 13 bits."""
    if inputs.q.dtype.itemsize > 1:
        return attend(widened(inputs))
    stages = replace(HONEST, dot=lambda q, k: multiplied(q, k.transpose(-1, -2)), weigh=multiplied)
    return attend(widened(inputs), stages)


def multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [H, M, N] by [H, N, P] in fixed point."""
    total = left.new_zeros((*left.shape[:2], right.shape[-1]))
    for start in range(0, left.shape[-1], ADDENDS):
        part = slice(start, start + ADDENDS)
        products = left[:, :, part, None] * right[:, None, part]
        addends = torch.cat([total.unsqueeze(2), products], dim=2)
        # Of exponents no smaller than float32's, so that a sum of zeros stays one.
        leading = torch.frexp(addends.abs().amax(dim=2, keepdim=True)).exponent.clamp(min=-100) - 1
        unit = torch.ldexp(torch.ones_like(leading, dtype=left.dtype), leading - BITS)
        total = (torch.trunc(addends / unit) * unit).sum(dim=2)
    return total
