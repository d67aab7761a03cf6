"""Faults with experts whose output is the hidden state: LongCat-Flash's zero experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....impl.torch.moe import identities
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import PLAIN, apply, changed, local_ids

BUGS: list[SeededBug] = []
MOE = "moe"
FEATURES = (*PLAIN, "identity_experts")
Tensor = torch.Tensor


@seeded(BUGS, MOE, "parity", features=FEATURES)
def identities_left_out(inputs: MoEInputs) -> Tensor:
    """Take ids of identity experts for those of other ranks."""
    return apply(inputs, changed(identities=lambda *_: 0.0))


@seeded(BUGS, MOE, "parity", features=FEATURES)
def identities_as_expert_0(inputs: MoEInputs) -> Tensor:
    """Put expert 0 in the place of identity experts and keep their weights, as if these were 0."""

    def ids(inputs: MoEInputs) -> Tensor:
        named = inputs.topk_ids >= (inputs.num_experts or 0)
        return local_ids(inputs).masked_fill(named, 0)

    return apply(inputs, changed(ids=ids))


@seeded(BUGS, MOE, "parity", features=FEATURES)
def one_identity_a_token(inputs: MoEInputs) -> Tensor:
    """Count only the largest weight of a token's identity experts."""

    def largest(inputs: MoEInputs, hidden: Tensor) -> Tensor:
        named = inputs.topk_ids >= (inputs.num_experts or 0)
        weights = inputs.topk_weights.masked_fill(~named, 0.0)
        most = weights == weights.amax(dim=1, keepdim=True)
        first = most & (most.cumsum(dim=1) == 1)
        given = identities(replace(inputs, topk_weights=weights * first), hidden)
        return given if isinstance(given, Tensor) else torch.zeros_like(hidden).unsqueeze(1)

    return apply(inputs, changed(identities=largest))


@seeded(BUGS, MOE, "parity", features=FEATURES)
def identities_unweighted(inputs: MoEInputs) -> Tensor:
    """Add the hidden state of identity experts as it is."""

    def plain(inputs: MoEInputs, hidden: Tensor) -> Tensor | float:
        return identities(replace(inputs, topk_weights=(inputs.topk_weights != 0).float()), hidden)

    return apply(inputs, changed(identities=plain))
