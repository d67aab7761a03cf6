"""Faults in what models' experts do besides two products: limits, norms, factors, gates."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn import functional

from ....impl.targets.target import Target
from ....impl.torch.moe import activated, halves, normalised, swiglu_numbers
from ....reference import Arithmetic, MoEProblem
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import apply, biased, changed, shared, weigh

BUGS: list[SeededBug] = []
MOE = "moe"
NUMBERS = ("swiglu_parameters",)
NORM, FACTOR = ("output_norm",), ("routed_scaling_factor",)
GATE = ("shared_experts", "shared_gate")
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
    return apply(
        replace(inputs, activation="swiglu", limit=_step_limit(inputs))
        if inputs.activation == "swiglu_step"
        else inputs
    )


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


@seeded(BUGS, MOE, "parity", features=NORM)
def norm_after_routing_weight(inputs: MoEInputs) -> Tensor:
    """Weigh an expert's output before it is normalised, which undoes the weight."""

    def finish(inputs: MoEInputs, y: Tensor, weights: Tensor, expert: int) -> Tensor:
        return normalised(inputs, weigh(inputs, biased(y, inputs.w2_bias, expert), weights))

    return apply(inputs, changed(finish=finish))


@seeded(BUGS, MOE, "parity", features=NORM)
def gain_always_after_norm(inputs: MoEInputs) -> Tensor:
    """Multiply by the norm's gain after it, also where it comes first."""
    return apply(replace(inputs, output_norm_first=False))


@seeded(BUGS, MOE, "parity", features=NORM)
def norm_with_usual_epsilon(inputs: MoEInputs) -> Tensor:
    """Take 1e-6 for the norm's epsilon, whatever is given."""
    given = inputs.output_norm_eps is not None
    return apply(replace(inputs, output_norm_eps=1e-6) if given else inputs)


@seeded(BUGS, MOE, "parity", features=(*NORM, "moe_biases"))
def bias_after_norm(inputs: MoEInputs) -> Tensor:
    """Normalise the second product without its bias."""

    def finish(inputs: MoEInputs, y: Tensor, weights: Tensor, expert: int) -> Tensor:
        return weigh(inputs, biased(normalised(inputs, y), inputs.w2_bias, expert), weights)

    return apply(inputs, changed(finish=finish))


@seeded(BUGS, MOE, "parity", features=("shared_experts", *FACTOR))
def factor_on_shared_experts_too(inputs: MoEInputs) -> Tensor:
    """Multiply the sum of routed and shared experts by the routed ones' factor."""

    def of_shared(inputs: MoEInputs, hidden: Tensor) -> Tensor | float:
        return shared(inputs, hidden) * inputs.routed_scaling_factor

    return apply(inputs, changed(shared=of_shared))


@seeded(BUGS, MOE, "parity", features=("weights_on_input", *FACTOR))
def factor_in_unused_weights(inputs: MoEInputs) -> Tensor:
    """Multiply the routing weights by the factor after they have multiplied the input."""
    lost = inputs.weights_on_input
    return apply(replace(inputs, routed_scaling_factor=1.0) if lost else inputs)


@seeded(BUGS, MOE, "parity", features=GATE)
def gate_of_first_token(inputs: MoEInputs) -> Tensor:
    """Gate the shared experts of all tokens by the first token's gate."""
    gate = inputs.shared_gate
    return apply(inputs if gate is None else replace(inputs, shared_gate=gate[:1].expand_as(gate)))


@seeded(BUGS, MOE, "parity", features=GATE)
def gate_without_sigmoid(inputs: MoEInputs) -> Tensor:
    """Take the logits of the shared experts' gate for its weights."""
    return apply(replace(inputs, shared_gate_logits=False))


@seeded(BUGS, MOE, "parity", features=GATE)
def gate_of_first_shared_expert(inputs: MoEInputs) -> Tensor:
    """Gate all shared experts of a token by the first one's gate."""
    gate = inputs.shared_gate
    return apply(inputs if gate is None else replace(inputs, shared_gate=gate[:, :1]))


@seeded(BUGS, MOE, "parity", features=GATE)
def gate_instead_of_shared_weight(inputs: MoEInputs) -> Tensor:
    """Drop the shared experts' weight where there is a gate."""
    gated = inputs.shared_gate is not None
    return apply(replace(inputs, shared_weight=1.0) if gated else inputs)


def _only_bfloat16(problem: MoEProblem, _: Target) -> bool | str:
    return problem.dtype == "bfloat16" or "the kernel is for bfloat16"


@seeded(
    BUGS,
    MOE,
    "parity",
    supports=_only_bfloat16,
    arithmetic=Arithmetic(intermediate="inputs"),
)
def intermediate_in_float16(inputs: MoEInputs) -> Tensor:
    """Store the activation's results in float16, whose range bfloat16 exceeds."""
    return apply(inputs, changed(middle=lambda middle: middle.to(torch.float16).float()))


@seeded(BUGS, MOE, "parity", features=("one_product",))
def one_product_activated(inputs: MoEInputs) -> Tensor:
    """Apply silu to the only product of routed value projections, whatever the activation."""
    linear = inputs.one_product and inputs.activation == "identity"
    return apply(replace(inputs, activation="silu") if linear else inputs)
