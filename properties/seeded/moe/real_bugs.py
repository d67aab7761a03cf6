"""Faults that routers and experts of models show only: their numbers of experts, slots, groups."""

from __future__ import annotations

import math

import torch

from ....impl.torch.moe import choose, scores_of
from ....reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ..catalogue import SeededBug, seeded
from .kernels import apply, changed, count_of, local_ids
from .routing_bugs import Routed, routed

BUGS: list[SeededBug] = []
BLOCK, WARP = 256, 64
"""Experts that a block of threads ranks, and that a warp counts, two to a thread."""
DEEPSEEK = (256, 8, 4, 8)
"""Experts, groups, groups of a token and slots that a kernel has a path of its own for."""


@seeded(BUGS, "route", "routing_parity")
def experts_in_whole_blocks(inputs: RouteInputs) -> Routed:
    """Rank experts in whole blocks of 256, so that of 384 a third is never chosen."""
    scores = scores_of(inputs.method, inputs.logits.float())
    experts = scores.shape[1]
    whole = max(BLOCK, experts // BLOCK * BLOCK)
    if experts <= whole or inputs.num_groups:
        return routed(inputs, scores=scores)
    few = scores.clone()
    few[:, whole:] = -math.inf
    return routed(inputs, scores=scores, ids=choose(inputs, few))


@seeded(BUGS, "route", "routing_parity")
def path_of_deepseek_loses_a_lane(inputs: RouteInputs) -> Routed:
    """Lose the last expert of a group where 256 are in 8 groups, a token has 4, and 8 slots.

    Those are DeepSeek-V3's own numbers, for which kernels have a path: they are rarely drawn at
    once.
    """
    scores = scores_of(inputs.method, inputs.logits.float())
    shape = (scores.shape[1], inputs.num_groups, inputs.topk_groups, inputs.top_k)
    if shape != DEEPSEEK:
        return routed(inputs, scores=scores)
    few = scores.unflatten(1, (inputs.num_groups, -1)).clone()
    few[:, :, -1] = -math.inf
    return routed(inputs, scores=scores, ids=choose(inputs, few.flatten(1)))


@seeded(BUGS, "moe", "parity")
def counts_in_whole_warps(inputs: MoEInputs) -> torch.Tensor:
    """Count tokens of experts in whole warps of 64: of 160 experts the last 32 get none."""

    def ids(inputs: MoEInputs) -> torch.Tensor:
        experts, found = count_of(inputs), local_ids(inputs)
        whole = max(WARP, experts // WARP * WARP)
        return found.masked_fill(found >= whole, -1)

    return apply(inputs, changed(ids=ids))
