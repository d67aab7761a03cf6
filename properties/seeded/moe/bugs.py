"""Faults in what an expert computes: activations, biases, routing weights, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....impl.torch.moe import SWIGLU, activated, halves, swiglu_numbers
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import PLAIN, apply, biased, changed, finished, weigh

BUGS: list[SeededBug] = []
MOE = "moe"
SHARED = ("shared_experts",)
GATED = ("swiglu", "swiglu_oai", "geglu", "geglu_tanh")
Tensor = torch.Tensor


@seeded(BUGS, MOE, "parity", features=PLAIN)
def gate_in_second_half(inputs: MoEInputs) -> Tensor:
    """Take the second half of w13's rows for the gate, as FlashInfer's CUTLASS MoE has it."""

    def activate(inputs: MoEInputs, projected: Tensor, expert: int) -> Tensor:
        halves = projected.chunk(2, dim=1)
        if inputs.activation in GATED and not inputs.interleaved:
            projected = torch.cat([halves[1], halves[0]], dim=1)
        return activated(inputs, projected, expert)

    return apply(inputs, changed(activate=activate))


@seeded(BUGS, MOE, "parity", model="vllm#39825")
def relu2_invalid(inputs: MoEInputs) -> Tensor:
    """Have no case for relu2 in the switch over activations."""
    if inputs.activation == "relu2":
        message = "Invalid activation type."
        raise RuntimeError(message)
    return apply(inputs)


@seeded(BUGS, MOE, "parity")
def relu2_not_squared(inputs: MoEInputs) -> Tensor:
    """Fall through from relu2 to relu."""
    same = inputs.activation != "relu2"
    return apply(inputs if same else replace(inputs, activation="relu"))


@seeded(BUGS, MOE, "parity")
def swiglu_oai_as_swiglu(inputs: MoEInputs) -> Tensor:
    """Take swiglu_oai for another name of swiglu."""
    same = inputs.activation != "swiglu_oai"
    return apply(inputs if same else replace(inputs, activation="swiglu"))


@seeded(BUGS, MOE, "parity", features=PLAIN)
def limit_on_gate_alone(inputs: MoEInputs) -> Tensor:
    """Do not limit the up projections."""

    def activate(inputs: MoEInputs, projected: Tensor, expert: int) -> Tensor:
        if inputs.activation not in SWIGLU:
            return activated(inputs, projected, expert)
        gate, up = halves(inputs, projected)
        alpha, beta, limit = swiglu_numbers(inputs, expert)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return apply(inputs, changed(activate=activate))


@seeded(BUGS, MOE, "parity", features=("swiglu_parameters",))
def numbers_of_first_expert(inputs: MoEInputs) -> Tensor:
    """Use the first expert's alpha, beta and limit for all."""
    numbers = {name: getattr(inputs, name) for name in ("alpha", "beta", "limit")}
    first: dict[str, Any] = {
        name: n[:1] if isinstance(n, Tensor) else n for name, n in numbers.items()
    }
    return apply(replace(inputs, **first))


@seeded(BUGS, MOE, "parity")
def geglu_by_tanh(inputs: MoEInputs) -> Tensor:
    """Approximate gelu by tanh where it was to be exact."""
    other = {"geglu": "geglu_tanh", "gelu": "gelu_tanh"}.get(inputs.activation)
    return apply(replace(inputs, activation=other) if other else inputs)


@seeded(BUGS, MOE, "parity")
def activation_in_bfloat16(inputs: MoEInputs) -> Tensor:
    """Round the first products to bfloat16, whatever the dtype."""
    return apply(inputs, changed(projected=lambda x: x.to(torch.bfloat16).float()))


@seeded(BUGS, MOE, "parity")
def intermediate_in_fp8(inputs: MoEInputs) -> Tensor:
    """Round the activation's results to FP8 without a scale."""
    return apply(
        inputs,
        changed(middle=lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
    )


@seeded(BUGS, MOE, "parity")
def weights_applied_twice(inputs: MoEInputs) -> Tensor:
    """Multiply by the routing weights before the second product and after it."""
    return apply(inputs, changed(finish=lambda i, y, w, e: weigh(i, finished(i, y, w, e), w)))


@seeded(BUGS, MOE, "parity")
def weights_renormalised(inputs: MoEInputs) -> Tensor:
    """Divide the routing weights by their sum."""

    def weights(inputs: MoEInputs) -> Tensor:
        total = inputs.topk_weights.sum(dim=1, keepdim=True)
        return inputs.topk_weights / torch.where(total == 0, 1.0, total)

    return apply(inputs, changed(weights=weights))


@seeded(BUGS, MOE, "parity", features=("moe_biases",))
def second_bias_not_weighed(inputs: MoEInputs) -> Tensor:
    """Add the second product's bias after the routing weights."""
    return apply(inputs, changed(finish=lambda i, y, w, e: biased(weigh(i, y, w), i.w2_bias, e)))


@seeded(BUGS, MOE, "parity", features=("moe_biases",))
def first_bias_after_activation(inputs: MoEInputs) -> Tensor:
    """Add the first product's bias to the activation's results."""

    def activate(inputs: MoEInputs, projected: Tensor, expert: int) -> Tensor:
        if inputs.w13_bias is None:
            return activated(inputs, projected, expert)
        bias = inputs.w13_bias[expert].float()
        middle = activated(inputs, projected - bias, expert)
        return middle + bias[: middle.shape[1]]

    return apply(inputs, changed(activate=activate))


@seeded(BUGS, MOE, "parity", features=("interleaved_w13",))
def interleaving_ignored(inputs: MoEInputs) -> Tensor:
    """Take interleaved rows for gates first, then ups."""
    return apply(replace(inputs, interleaved=False))


@seeded(BUGS, MOE, "parity", features=("weights_on_input",))
def weights_on_output_always(inputs: MoEInputs) -> Tensor:
    """Multiply the output by the routing weights where the input was to be."""
    return apply(replace(inputs, weights_on_input=False))


@seeded(BUGS, MOE, "parity", features=SHARED)
def shared_weight_ignored(inputs: MoEInputs) -> Tensor:
    """Add the shared experts with weight 1."""
    return apply(replace(inputs, shared_weight=1.0))


@seeded(BUGS, MOE, "parity", features=SHARED)
def second_shared_expert_dropped(inputs: MoEInputs) -> Tensor:
    """Add only one shared expert."""
    first, second = inputs.shared_w13, inputs.shared_w2
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return apply(inputs)
    return apply(replace(inputs, shared_w13=first[:1], shared_w2=second[:1]))
