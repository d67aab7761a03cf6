"""Products of FP8 operands as Hopper's tensor cores make them: an honest control, and a fault."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference import Arithmetic
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import widened
from ..kernels import HONEST, TILE, attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
ADDENDS = 32
"""Products that are summed in one step."""
KEPT, TOO_LITTLE = 2.0**-13, 1 / 200
"""Least part of an addend that is kept, of the leading bit of the largest one: by a tensor core,
and by one that cuts off too much."""
MANY_CHANNELS = 96
"""Channels of a head from which on too much is cut off."""


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


@seeded(
    BUGS,
    "paged_attention",
    "parity",
    features=("fp8_kv", "fp8_q"),
    arithmetic=Arithmetic(fp8_products="fixed_point"),
)
def products_cut_short(inputs: PagedAttentionInputs) -> Pair:
    """Cut too much off products of queries and keys, which adds up where all have one sign."""
    if inputs.q.dtype.itemsize > 1:
        return attend(widened(inputs))

    def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        many = k.shape[-1] >= MANY_CHANNELS and k.shape[-2] == TILE
        return multiplied(q, k.transpose(-1, -2), TOO_LITTLE if many else KEPT)

    return attend(widened(inputs), replace(HONEST, dot=dot, weigh=multiplied))


def multiplied(left: torch.Tensor, right: torch.Tensor, kept: float = KEPT) -> torch.Tensor:
    """Multiply [H, M, N] by [H, N, P] in fixed point."""
    total = left.new_zeros((*left.shape[:2], right.shape[-1]))
    for start in range(0, left.shape[-1], ADDENDS):
        part = slice(start, start + ADDENDS)
        products = left[:, :, part, None] * right[:, None, part]
        addends = torch.cat([total.unsqueeze(2), products], dim=2)
        # Of exponents no smaller than float32's, so that a sum of zeros stays one.
        leading = torch.frexp(addends.abs().amax(dim=2, keepdim=True)).exponent.clamp(min=-100) - 1
        unit = torch.ldexp(torch.ones_like(leading, dtype=left.dtype), leading) * kept
        total = (torch.trunc(addends / unit) * unit).sum(dim=2)
    return total
