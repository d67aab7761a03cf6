"""Faults in what models' experts do besides two products: limits, other activations."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn import functional

from ....impl.torch.moe import activated, halves, swiglu_numbers
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import apply, changed

BUGS: list[SeededBug] = []
MOE = "moe"
NUMBERS = ("swiglu_parameters",)
Tensor = torch.Tensor


@seeded(BUGS, MOE, "parity", features=NUMBERS)
def limit_needs_alpha(inputs: MoEInputs) -> Tensor:
    """Take the way without numbers where no alpha is given: a limit by itself is not applied."""
    plain = inputs.activation == "swiglu" and inputs.alpha is None
    return apply(replace(inputs, beta=None, limit=None) if plain else inputs)


@seeded(BUGS, MOE, "parity", features=NUMBERS)
def limit_of_first_expert(inputs: MoEInputs) -> Tensor:
    """Use the first expert's limit for all where neither alpha nor beta is given."""
    alone = inputs.alpha is None and inputs.beta is None
    if not (alone and isinstance(inputs.limit, Tensor)):
        return apply(inputs)
    return apply(replace(inputs, limit=inputs.limit[:1]))


@seeded(BUGS, MOE, "parity", features=(*NUMBERS, "swiglu_step"))
def swiglu_step_limits_before(inputs: MoEInputs) -> Tensor:
    """Limit the gates of swiglu_step before silu, as swiglu's are."""
    return apply(replace(inputs, activation="swiglu", limit=_step_limit(inputs))
                 if inputs.activation == "swiglu_step" else inputs)  # fmt: skip


def _step_limit(inputs: MoEInputs) -> float | Tensor:
    return 7.0 if inputs.limit is None else inputs.limit


@seeded(BUGS, MOE, "parity", features=("situ",))
def situ_ups_not_capped(inputs: MoEInputs) -> Tensor:
    """Cap the gates of situ only."""
    return apply(replace(inputs, limit=math.inf) if inputs.activation == "situ" else inputs)


@seeded(BUGS, MOE, "parity", features=(*NUMBERS, "situ"))
def situ_caps_the_sigmoid(inputs: MoEInputs) -> Tensor:
    """Take the sigmoid of the capped gate of situ."""

    def activate(inputs: MoEInputs, projected: Tensor, expert: int) -> Tensor:
        if inputs.activation != "situ":
            return activated(inputs, projected, expert)
        gate, up = halves(inputs, projected)
        _, beta, limit = swiglu_numbers(inputs, expert)
        capped = beta * torch.tanh(gate / beta)
        return functional.silu(capped) * limit * torch.tanh(up / limit)

    return apply(inputs, changed(activate=activate))


@seeded(BUGS, MOE, "parity", features=("geglu1",))
def geglu1_as_geglu(inputs: MoEInputs) -> Tensor:
    """Add nothing to the ups of geglu1."""
    return apply(replace(inputs, beta=0.0) if inputs.activation == "geglu1" else inputs)
