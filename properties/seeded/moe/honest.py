"""Honest experts and routers: right answers by the ways that real kernels take."""

from __future__ import annotations

import torch

from ....impl.features import LATER_ACTIVATIONS, MOE_FEATURES, ROUTE_FEATURES, ROUTE_VALUES
from ....impl.torch.moe import activated, choose, normalised, scores_of, with_shared
from ....impl.torch.moe import weigh as weigh_chosen
from ....reference import Arithmetic
from ....reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ..catalogue import SeededBug, seeded
from .kernels import HONEST, PLAIN, apply, biased, changed, weigh

CONTROLS: list[SeededBug] = []
MOE, ROUTE = "moe", "route"
LARGEST_FP8 = 448.0
Routed = tuple[torch.Tensor, torch.Tensor]
_calls = 0


@seeded(CONTROLS, MOE, control="honest", features=MOE_FEATURES)
def experts_in_float32(inputs: MoEInputs) -> torch.Tensor:
    """Compute experts one after another in float32."""
    return apply(inputs)


def _as_inputs(inputs: MoEInputs) -> torch.dtype:
    hidden = inputs.hidden
    return hidden.dtype if isinstance(hidden, torch.Tensor) else inputs.out_dtype


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=(
        *PLAIN,
        *LATER_ACTIVATIONS,
        "shared_experts",
        "shared_gate",
        "output_norm",
        "routed_scaling_factor",
        "one_product",
    ),
    arithmetic=Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True),
)
def experts_as_vllm_triton(inputs: MoEInputs) -> torch.Tensor:
    """Round as vLLM's Triton kernels: projections, intermediates and parts in the inputs' dtype."""
    dtype = _as_inputs(inputs)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    def combine(out: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor) -> None:
        out.index_add_(0, tokens, rounded(y))

    def finish(
        inputs: MoEInputs, y: torch.Tensor, weights: torch.Tensor, expert: int
    ) -> torch.Tensor:
        y = biased(y, inputs.w2_bias, expert)
        return weigh(
            inputs, y if inputs.output_norm_eps is None else normalised(inputs, rounded(y)), weights
        )

    stages = changed(projected=rounded, middle=rounded, combine=combine, finish=finish)
    return apply(inputs, stages)


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=(*PLAIN, "fp8_weights", "quantized_hidden"),
    arithmetic=Arithmetic(intermediate="float8_e4m3fn"),
)
def experts_with_fp8_intermediate(inputs: MoEInputs) -> torch.Tensor:
    """Quantise the activation's results to FP8 with a scale a row, or the one that is given."""

    def quantised(middle: torch.Tensor) -> torch.Tensor:
        scale = (middle.abs().amax(dim=1, keepdim=True) / LARGEST_FP8).clamp(min=1e-30)
        if inputs.intermediate_scale is not None:
            scale = torch.as_tensor(inputs.intermediate_scale)
        return (middle / scale).to(torch.float8_e4m3fn).float() * scale

    return apply(inputs, changed(middle=quantised))


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=(*PLAIN, "nondeterministic", "duplicate_ids", "expert_parallel"),
    arithmetic=Arithmetic(combine="inputs", partial_outputs=True),
)
def experts_by_atomics(inputs: MoEInputs) -> torch.Tensor:
    """Add experts' outputs up in the output's dtype, in another order at every call."""
    global _calls  # noqa: PLW0603  what changes from call to call is the point
    _calls += 1
    turn = torch.randperm(4096, generator=torch.Generator().manual_seed(_calls))
    dtype = inputs.out_dtype
    total = torch.zeros(0)

    def combine(out: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal total
        total = out
        order = turn[turn < len(tokens)]
        for row in order.tolist():
            token = tokens[row]
            out[token] = (out[token] + y[row].to(dtype).float()).to(dtype).float()

    return apply(inputs, changed(combine=combine))


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=PLAIN,
    arithmetic=Arithmetic(sigmoid="tanh", tanh="approximate"),
)
def experts_with_approximate_tanh(inputs: MoEInputs) -> torch.Tensor:
    """Compute sigmoids as (1 + tanh(x / 2)) / 2, with a tanh of which half the digits are right."""

    def rough_tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).to(torch.float16).float()

    def activate(inputs: MoEInputs, projected: torch.Tensor, expert: int) -> torch.Tensor:
        if inputs.activation == "silu":
            return projected * 0.5 * (1.0 + rough_tanh(0.5 * projected))
        return activated(inputs, projected, expert)

    return apply(inputs, changed(activate=activate))


@seeded(CONTROLS, MOE, control="honest", features=PLAIN, writes_out=True)
def experts_into_given_output(inputs: MoEInputs) -> None:
    """Write into the buffer that it is given."""
    if inputs.out is not None:
        inputs.out.copy_(apply(inputs))


@seeded(CONTROLS, MOE, control="honest", features=MOE_FEATURES)
def experts_strided_output(inputs: MoEInputs) -> torch.Tensor:
    """Return a view that is not contiguous."""
    out = apply(inputs, HONEST)
    wide = out.new_full((out.shape[0], 2 * out.shape[1] + 1), torch.nan)
    wide[:, 1::2] = out
    return wide[:, 1::2]


@seeded(CONTROLS, ROUTE, control="honest", features=(*ROUTE_FEATURES, *ROUTE_VALUES))
def routes_in_float64(inputs: RouteInputs) -> Routed:
    """Compute scores and weights in float64, with ids in int64."""
    scores = scores_of(inputs.method, inputs.logits.double())
    ids = with_shared(inputs, choose(inputs, scores))
    return ids, weigh_chosen(inputs, scores, ids).float()


@seeded(CONTROLS, ROUTE, control="honest", features=tuple(ROUTE_VALUES))
def routes_with_ties_to_last(inputs: RouteInputs) -> Routed:
    """Take the last of equal experts, and of equal groups, first."""
    from dataclasses import replace

    bias = inputs.bias
    mirrored = replace(
        inputs, logits=inputs.logits.flip(1), bias=None if bias is None else bias.flip(0)
    )
    scores = scores_of(inputs.method, mirrored.logits.float())
    order = scores.shape[1] - 1 - choose(mirrored, scores)
    return order.to(torch.int32), weigh_chosen(inputs, scores.flip(1), order)


@seeded(
    CONTROLS,
    ROUTE,
    control="honest",
    features=ROUTE_FEATURES,
    arithmetic=Arithmetic(sigmoid="tanh"),
)
def routes_with_tanh(inputs: RouteInputs) -> Routed:
    """Compute sigmoids as (1 + tanh(x / 2)) / 2, as FlashInfer's kernels do."""
    logits = inputs.logits.float()
    scores = scores_of(inputs.method, logits)
    if inputs.method in ("deepseek_v3", "minimax2", "sigmoid", "sigmoid_renorm"):
        scores = 0.5 * (1.0 + torch.tanh(0.5 * logits))
    ids = with_shared(inputs, choose(inputs, scores))
    return ids.to(torch.int32), weigh_chosen(inputs, scores, ids)


@seeded(CONTROLS, ROUTE, control="honest", features=ROUTE_FEATURES)
def routes_with_bfloat16_weights(inputs: RouteInputs) -> Routed:
    """Store the weights in bfloat16, the worst expert first."""
    scores = scores_of(inputs.method, inputs.logits.float())
    ids = with_shared(inputs, choose(inputs, scores))
    weights = weigh_chosen(inputs, scores, ids).to(torch.bfloat16)
    return ids.flip(1).to(torch.int32), weights.flip(1)
