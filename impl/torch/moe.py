"""Routing and experts in plain torch: the loop over experts that serving stacks fall back to.

It computes in float32, and shares no code with the oracle. Codes are widened to float32 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from ...reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ..features import MOE_FEATURES, ROUTE_FEATURES, ROUTE_VALUES
from ..protocol import implementation
from .moe_weights import first_weights, hidden_states, second_weights, true_rows

RENORMALISED = ("renormalize_naive", "deepseek_v3", "minimax2", "sigmoid_renorm", "deepseek_v4")
LARGEST_FP8 = 448.0
SWIGLU = {"swiglu": (1.0, 0.0, math.inf), "swiglu_oai": (1.702, 1.0, 7.0)}
"""alpha, beta and limit that the activations have by themselves."""
LATER = {"swiglu_step": (1.0, 0.0, 7.0), "situ": (1.0, 4.0, 25.0), "geglu1": (1.0, 1.0, math.inf)}
"""The same of activations that a feature is named for."""
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "identity": lambda x: x,
}


def scores_of(method: str, logits: torch.Tensor) -> torch.Tensor:
    """Return the scores [tokens, experts] that a method ranks by, of float32 logits."""
    if method in ("default", "renormalize_naive"):
        return torch.softmax(logits, dim=-1)
    if method in ("deepseek_v3", "minimax2", "sigmoid", "sigmoid_renorm"):
        return torch.sigmoid(logits)
    if method == "deepseek_v4":
        return functional.softplus(logits, threshold=50.0).sqrt()
    return logits


def choose(inputs: RouteInputs, scores: torch.Tensor) -> torch.Tensor:
    """Return the experts [tokens, top_k] of the best scores and groups; ties in any order."""
    if inputs.expert_table is not None and inputs.input_ids is not None:
        return inputs.expert_table[inputs.input_ids].long()
    ranking = scores[:, : scores.shape[1] - inputs.shared_experts]
    ranking = ranking if inputs.bias is None else ranking + inputs.bias
    if inputs.best_of_each_group:
        return best_of_each(ranking, inputs.num_groups or 1, inputs.top_k)
    if inputs.num_groups and inputs.topk_groups:
        groups = ranking.unflatten(1, (inputs.num_groups, -1))
        two = inputs.method == "deepseek_v3" or inputs.bias is not None
        two = inputs.group_score == "two_best" if inputs.group_score else two
        of_group = groups.topk(min(2 if two else 1, groups.shape[2]), dim=-1).values.sum(dim=-1)
        keep = torch.zeros_like(of_group, dtype=torch.bool)
        keep.scatter_(1, of_group.topk(inputs.topk_groups, dim=-1).indices, value=True)
        fill = 0.0 if inputs.masked_groups == "zero" else -math.inf
        ranking = groups.masked_fill(~keep.unsqueeze(-1), fill).flatten(1)
    return ranking.topk(inputs.top_k, dim=-1).indices


def weigh(inputs: RouteInputs, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights [tokens, slots] of chosen experts."""
    weights = scores.gather(1, ids)
    if inputs.method in RENORMALISED:
        weights = weights / (weights.sum(dim=1, keepdim=True) + inputs.renormalise_floor)
    elif inputs.method == "renormalize":
        weights = torch.softmax(weights, dim=1)
    elif inputs.method in ("llama4", "topk_sigmoid"):
        weights = torch.sigmoid(weights)
    elif inputs.method == "sparsemixer":
        weights = one_after_another(scores, ids, inputs.jitter)
    if inputs.expert_scales is not None:
        weights = weights * inputs.expert_scales[ids]
    return weights * inputs.scaling_factor


def best_of_each(ranking: torch.Tensor, groups: int, top_k: int) -> torch.Tensor:
    """Return the experts [tokens, top_k], the same number from each group."""
    parts = ranking.chunk(groups, dim=1)
    found = [part.topk(top_k // groups, dim=1).indices for part in parts]
    size = parts[0].shape[1]
    return torch.cat([number * size + each for number, each in enumerate(found)], dim=1)


def one_after_another(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return sparsemixer's weights of the best, and of the best of the others."""
    weights, left = [], logits
    for taken in ids.split(1, dim=1):
        best = left.gather(1, taken)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        near = left.masked_fill(far, -math.inf)
        weights.append(torch.softmax(near, dim=1).gather(1, taken))
        left = left.scatter(1, taken, -math.inf)
    return torch.cat(weights, dim=1)


def with_shared(inputs: RouteInputs, ids: torch.Tensor) -> torch.Tensor:
    """Return ids with those of the shared experts behind them."""
    if not inputs.shared_experts:
        return ids
    experts = inputs.logits.shape[1]
    shared = torch.arange(experts - inputs.shared_experts, experts, device=ids.device)
    return torch.cat([ids, shared.expand(len(ids), -1)], dim=1)


@implementation(
    "route", name="torch-route", features=(*ROUTE_FEATURES, *ROUTE_VALUES, "large_rows")
)
def route(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Score in float32, take the best with torch.topk, and weigh them."""
    scores = scores_of(inputs.method, inputs.logits.float())
    ids = with_shared(inputs, choose(inputs, scores))
    return ids.to(torch.int32), weigh(inputs, scores, ids)


@implementation(
    "moe",
    name="torch-moe",
    features=(*MOE_FEATURES, "large_weights", "large_rows", "unread_padding", "nan_codes"),
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Compute each expert's tokens in turn and add up what they give."""
    hidden = hidden_states(inputs.hidden)[:, : inputs.hidden_size]
    # A row a slot, and the slots added up in their order: an expert may be in several slots of a
    # token, and index_add_ on a GPU adds what has one place in any order.
    channels = hidden.shape[1]
    if inputs.one_product and isinstance(inputs.w2, torch.Tensor):
        channels = inputs.w2.shape[1]
    parts = hidden.new_zeros(*inputs.topk_ids.shape, channels)
    ids = inputs.topk_ids - inputs.expert_offset
    used = ids if inputs.weights_on_input else ids.masked_fill(inputs.topk_weights == 0, -1)
    count = len(inputs.w13 if isinstance(inputs.w13, torch.Tensor) else inputs.w13.codes)
    for expert in used.unique().tolist():
        if not 0 <= expert < count:
            continue
        tokens, slots = (used == expert).nonzero(as_tuple=True)
        weights = inputs.topk_weights[tokens, slots].unsqueeze(1)
        parts[tokens, slots] = _expert(inputs, hidden[tokens], weights, expert)
    parts += identities(inputs, hidden)
    routed = parts.sum(dim=1) * inputs.routed_scaling_factor
    return (routed + _shared(inputs, hidden)).to(inputs.out_dtype)


def identities(inputs: MoEInputs, hidden: torch.Tensor) -> torch.Tensor | float:
    """Return what experts whose output is the hidden state give [tokens, top_k, hidden]."""
    if not inputs.identity_experts:
        return 0.0
    named = (inputs.topk_ids >= (inputs.num_experts or 0)) & (inputs.topk_weights != 0)
    given = inputs.topk_weights.unsqueeze(-1) * hidden.unsqueeze(1)
    return torch.where(named.unsqueeze(-1), given, 0.0)


def _expert(inputs: MoEInputs, x: torch.Tensor, weights: torch.Tensor, expert: int) -> torch.Tensor:
    """Return what an expert adds to its tokens."""
    if inputs.weights_on_input:
        x = x * weights
    projected = x @ first_weights(inputs, inputs.w13, expert).T
    if inputs.w13_bias is not None:
        projected += true_rows(inputs, inputs.w13_bias[expert].float())
    middle = activated(inputs, projected, expert)
    if inputs.intermediate_scale is not None:
        largest = LARGEST_FP8 * of_expert(inputs.intermediate_scale, expert)
        middle = middle.clamp(-largest, largest)
    y = middle if inputs.one_product else middle @ second_weights(inputs, inputs.w2, expert).T
    if inputs.w2_bias is not None:
        y += inputs.w2_bias[expert, : inputs.hidden_size].float()
    y = normalised(inputs, y)
    return y if inputs.weights_on_input else y * weights


def _shared(inputs: MoEInputs, hidden: torch.Tensor) -> torch.Tensor:
    if inputs.shared_w13 is None or inputs.shared_w2 is None:
        return hidden.new_zeros(())
    total = torch.zeros_like(hidden)
    first = inputs.shared_w13
    for expert in range(len(first if isinstance(first, torch.Tensor) else first.codes)):
        middle = activated(inputs, hidden @ first_weights(inputs, first, expert).T, expert)
        out = middle @ second_weights(inputs, inputs.shared_w2, expert).T
        total += out * gate_of_shared(inputs, expert)
    return total * inputs.shared_weight


def normalised(inputs: MoEInputs, y: torch.Tensor) -> torch.Tensor:
    """Divide an expert's outputs [rows, hidden] by their root mean square, where that is asked."""
    if inputs.output_norm_eps is None:
        return y
    gain = 1.0 if inputs.output_norm_gain is None else inputs.output_norm_gain.float()
    before, after = (gain, 1.0) if inputs.output_norm_first else (1.0, gain)
    y = y * before
    return y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + inputs.output_norm_eps) * after


def gate_of_shared(inputs: MoEInputs, expert: int) -> torch.Tensor | float:
    """Return what a shared expert's outputs are multiplied by, [tokens, 1] or 1."""
    if inputs.shared_gate is None:
        return 1.0
    gate = inputs.shared_gate.float()
    gate = gate[:, expert : expert + 1] if gate.shape[1] > 1 else gate
    return torch.sigmoid(gate) if inputs.shared_gate_logits else gate


def activated(inputs: MoEInputs, projected: torch.Tensor, expert: int) -> torch.Tensor:
    """Apply the activation to [rows, inter], or to [rows, 2 inter] of gates and ups."""
    if inputs.activation in PLAIN:
        return PLAIN[inputs.activation](projected)
    gate, up = halves(inputs, projected)
    if inputs.activation in GATES:
        return GATES[inputs.activation](gate) * up
    return gated_by_numbers(inputs.activation, gate, up, *swiglu_numbers(inputs, expert))


def gated_by_numbers(
    activation: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float
) -> torch.Tensor:
    """Return an activation of gates and ups that takes some of alpha, beta and limit."""
    if activation == "geglu1":
        return functional.gelu(gate) * (up + beta)
    if activation == "situ":
        gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        return gate * (up if math.isinf(limit) else limit * torch.tanh(up / limit))
    if activation == "swiglu_step":
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def halves(inputs: MoEInputs, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gates and the ups of [rows, 2 inter]."""
    if inputs.interleaved:
        return projected[:, 0::2], projected[:, 1::2]
    gate, up = projected.chunk(2, dim=1)
    return gate, up


def swiglu_numbers(inputs: MoEInputs, expert: int) -> tuple[float, float, float]:
    """Return an expert's alpha, beta and limit."""
    alpha, beta, limit = (
        usual if given is None else of_expert(given, expert)
        for given, usual in zip(
            (inputs.alpha, inputs.beta, inputs.limit),
            (SWIGLU | LATER)[inputs.activation],
            strict=True,
        )
    )
    return alpha, beta, limit


def of_expert(given: float | torch.Tensor, expert: int) -> float:
    """Return an expert's number, of one for all or of a tensor [experts]."""
    if isinstance(given, torch.Tensor):
        return float(given[expert] if given.numel() > 1 else given)
    return given
