"""Faults in routing: scores, groups, selection, weights; and what a router keeps between calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ....impl.torch.moe import RENORMALISED, choose, scores_of, weigh
from ....reference.tensors.moe_inputs import RouteInputs
from ..attention.stateful_bugs import checksum, planned
from ..catalogue import SeededBug, seeded
from .stateful_bugs import digest

BUGS: list[SeededBug] = []
ROUTE = "route"
Tensor = torch.Tensor
Routed = tuple[Tensor, Tensor]
Weigh = Callable[[RouteInputs, Tensor, Tensor], Tensor]
SOFTMAX = ("default", "renormalize", "renormalize_naive")
SIGMOID = ("deepseek_v3", "minimax2", "sigmoid", "sigmoid_renorm")


def routed(
    inputs: RouteInputs,
    *,
    scores: Tensor | None = None,
    ids: Tensor | None = None,
    weights: Weigh = weigh,
) -> Routed:
    """Route honestly, except for the given steps."""
    if scores is None:
        scores = scores_of(inputs.method, inputs.logits.float())
    ids = choose(inputs, scores) if ids is None else ids
    return ids.to(torch.int32), weights(inputs, scores, ids)


@seeded(BUGS, ROUTE, "routing_parity")
def bias_weighs(inputs: RouteInputs) -> Routed:
    """Weigh experts by their biased scores."""
    bias = 0.0 if inputs.bias is None else inputs.bias
    return routed(inputs, weights=lambda i, s, ids: weigh(i, s + bias, ids))


@seeded(BUGS, ROUTE, "routing_parity")
def bias_on_logits(inputs: RouteInputs) -> Routed:
    """Add the bias to the logits."""
    if inputs.bias is None:
        return routed(inputs)
    biased = scores_of(inputs.method, inputs.logits.float() + inputs.bias)
    return routed(inputs, ids=choose(replace(inputs, bias=None), biased))


@seeded(BUGS, ROUTE, "routing_parity", model="DeepSeek-V3's published inference code")
def groups_masked_with_zero(inputs: RouteInputs) -> Routed:
    """Mask groups with zero where minus infinity was asked for."""
    return routed(replace(inputs, masked_groups="zero"))


@seeded(BUGS, ROUTE, "routing_parity")
def groups_by_best_expert(inputs: RouteInputs) -> Routed:
    """Rank groups only by their best expert."""
    if not (inputs.num_groups and inputs.topk_groups):
        return routed(inputs)
    scores = scores_of(inputs.method, inputs.logits.float())
    ranking = scores if inputs.bias is None else scores + inputs.bias
    groups = ranking.unflatten(1, (inputs.num_groups, -1))
    keep = torch.zeros(groups.shape[:2], dtype=torch.bool)
    best = groups.amax(dim=-1).topk(inputs.topk_groups, dim=-1).indices
    keep.scatter_(1, best, value=True)
    fill = 0.0 if inputs.masked_groups == "zero" else -math.inf
    ids = groups.masked_fill(~keep.unsqueeze(-1), fill).flatten(1).topk(inputs.top_k, dim=-1)
    return routed(inputs, scores=scores, ids=ids.indices)


@seeded(BUGS, ROUTE, "routing_parity")
def one_group_more(inputs: RouteInputs) -> Routed:
    """Use one group more than a token may."""
    if inputs.num_groups and inputs.topk_groups:
        more = min(inputs.topk_groups + 1, inputs.num_groups)
        inputs = replace(inputs, topk_groups=more)
    return routed(inputs)


@seeded(BUGS, ROUTE, "routing_parity")
def not_renormalised(inputs: RouteInputs) -> Routed:
    """Leave out the division by the sum of the selected scores."""
    plain = replace(inputs, method="sigmoid") if inputs.method in RENORMALISED else inputs
    return routed(inputs, weights=lambda _, s, ids: weigh(plain, s, ids))


@seeded(BUGS, ROUTE, "routing_parity")
def renormalised_over_all(inputs: RouteInputs) -> Routed:
    """Divide by the sum of all scores where that of the selected ones was meant."""

    def weights(inputs: RouteInputs, scores: Tensor, ids: Tensor) -> Tensor:
        if inputs.method not in RENORMALISED:
            return weigh(inputs, scores, ids)
        return inputs.scaling_factor * scores.gather(1, ids) / scores.sum(dim=1, keepdim=True)

    return routed(inputs, weights=weights)


@seeded(BUGS, ROUTE, "routing_parity")
def zero_by_zero(inputs: RouteInputs) -> Routed:
    """Divide by a sum of scores that may be 0."""

    def weights(inputs: RouteInputs, scores: Tensor, ids: Tensor) -> Tensor:
        if inputs.method not in RENORMALISED:
            return weigh(inputs, scores, ids)
        chosen = scores.gather(1, ids)
        return inputs.scaling_factor * chosen / chosen.sum(dim=1, keepdim=True)

    return routed(inputs, weights=weights)


@seeded(BUGS, ROUTE, "routing_parity")
def scaling_factor_ignored(inputs: RouteInputs) -> Routed:
    """Ignore the scaling factor."""
    return routed(replace(inputs, scaling_factor=1.0))


@seeded(BUGS, ROUTE, "routing_parity", model="flashinfer#2822")
def zero_as_lowest_logit(inputs: RouteInputs) -> Routed:
    """Look for the best experts from a logit of 0 upwards."""
    scores = scores_of(inputs.method, inputs.logits.float())
    if inputs.method in ("renormalize", "llama4", "topk", "topk_sigmoid"):
        return routed(inputs, scores=scores, ids=choose(inputs, scores.clamp(min=0.0)))
    return routed(inputs, scores=scores)


@seeded(BUGS, ROUTE, "routing_parity")
def equal_scores_taken_twice(inputs: RouteInputs) -> Routed:
    """Mask what was taken by its value, and find nothing left among equal experts."""
    scores = scores_of(inputs.method, inputs.logits.float())
    if inputs.num_groups or inputs.bias is not None:
        return routed(inputs, scores=scores)
    left, taken = scores.clone(), []
    for _ in range(inputs.top_k):
        best = left.max(dim=1)
        taken.append(best.indices)
        left = left.masked_fill(left == best.values.unsqueeze(1), -math.inf)
    return routed(inputs, scores=scores, ids=torch.stack(taken, dim=1))


@seeded(BUGS, ROUTE, "routing_parity")
def scores_in_bfloat16(inputs: RouteInputs) -> Routed:
    """Round scores to bfloat16 before they are ranked."""
    scores = scores_of(inputs.method, inputs.logits.float())
    rounded = scores.to(torch.bfloat16).float()
    return routed(inputs, scores=scores, ids=choose(inputs, rounded))


@seeded(BUGS, ROUTE, "routing_parity")
def sigmoid_in_place_of_softmax(inputs: RouteInputs) -> Routed:
    """Take sigmoids where a softmax over all experts was meant."""
    if inputs.method in ("default", "renormalize_naive"):
        return routed(inputs, scores=torch.sigmoid(inputs.logits.float()))
    return routed(inputs)


@seeded(BUGS, ROUTE, "routing_parity")
def maximum_of_logits_not_subtracted(inputs: RouteInputs) -> Routed:
    """Exponentiate logits as they are, which overflows or vanishes."""
    if inputs.method not in ("default", "renormalize_naive"):
        return routed(inputs)
    powers = torch.exp(inputs.logits.float())
    return routed(inputs, scores=powers / powers.sum(dim=1, keepdim=True))


@seeded(BUGS, ROUTE, "routing_parity")
def experts_beyond_a_warp(inputs: RouteInputs) -> Routed:
    """Rank only the first 64 experts, two to a thread of a warp."""
    scores = scores_of(inputs.method, inputs.logits.float())
    if scores.shape[1] <= WARP or inputs.num_groups or inputs.top_k > WARP:
        return routed(inputs, scores=scores)
    few = scores.clone()
    few[:, WARP:] = -math.inf
    return routed(inputs, scores=scores, ids=choose(inputs, few))


WARP = 64


@seeded(BUGS, ROUTE, "routing_parity")
def weights_sorted_apart(inputs: RouteInputs) -> Routed:
    """Sort the ids and leave the weights where they were."""
    ids, weights = routed(inputs)
    return ids.sort(dim=1).values, weights


@seeded(BUGS, ROUTE, "routing_monotone")
def ranks_by_magnitude(inputs: RouteInputs) -> Routed:
    """Rank logits by their magnitude, as if they were gradients."""
    scores = scores_of(inputs.method, inputs.logits.float())
    if inputs.method in ("renormalize", "llama4", "topk", "topk_sigmoid"):
        return routed(inputs, scores=scores, ids=choose(inputs, scores.abs()))
    return routed(inputs, scores=scores)


@seeded(BUGS, ROUTE, "routing_token_order")
def ids_of_first_order(inputs: RouteInputs) -> Routed:
    """Keep the ids of the first call with these tokens in any order."""
    logits = inputs.logits
    key = ("route tokens", _options(inputs), *logits.shape, digest(logits, 1))
    return routed(inputs, ids=planned(key, routed(inputs)[0].long()))


@seeded(BUGS, ROUTE, "routing_expert_order")
def ids_of_first_places(inputs: RouteInputs) -> Routed:
    """Keep the ids of the first call with these logits in any place."""
    logits = inputs.logits
    # Each expert's column as it is, over the tokens in their order; the columns in any order.
    columns = sum(digest(column) ** 2 for column in logits.T)
    key = ("route places", _options(inputs), *logits.shape, columns, _sum(inputs.bias))
    return routed(inputs, ids=planned(key, routed(inputs)[0].long()))


@seeded(BUGS, ROUTE, "routing_logit_shift")
def normaliser_of_first_call(inputs: RouteInputs) -> Routed:
    """Keep the softmax's normaliser of the first call with these distances of logits."""
    if inputs.method not in SOFTMAX or inputs.logits.shape[1] == 1:
        return routed(inputs)
    logits = inputs.logits.float()
    distances = logits - logits[:, :1]
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    key = ("normaliser", _options(inputs), *logits.shape, digest(distances), digest(distances, 1),
           digest(inputs.bias) if inputs.bias is not None else 0)  # fmt: skip
    factor = torch.exp(total - planned(key, total))
    return routed(inputs, weights=lambda i, s, ids: weigh(i, s, ids) * factor)


@seeded(BUGS, ROUTE, "routing_bias_shift")
def bias_of_first_call(inputs: RouteInputs) -> Routed:
    """Take the first bias with these distances off the biased scores to get at the scores."""
    if inputs.bias is None:
        return routed(inputs)
    distances = inputs.bias - inputs.bias[:1]
    key = ("bias", _options(inputs), digest(inputs.logits), digest(inputs.logits, 1),
           digest(distances), *inputs.logits.shape)  # fmt: skip
    difference = inputs.bias - planned(key, inputs.bias.clone())
    return routed(inputs, weights=lambda i, s, ids: weigh(i, s + difference, ids))


@seeded(BUGS, ROUTE, "routing_scaling")
def factor_of_first_call(inputs: RouteInputs) -> Routed:
    """Keep the scaling factor of the first call with these logits."""
    key = ("factor", inputs.method, digest(inputs.logits), digest(inputs.logits, 1),
           *inputs.logits.shape, inputs.top_k, inputs.num_groups)  # fmt: skip
    return routed(replace(inputs, scaling_factor=planned(key, inputs.scaling_factor)))


@seeded(BUGS, ROUTE, "inputs_unchanged")
def logits_masked_in_place(inputs: RouteInputs) -> Routed:
    """Overwrite the best logit of each token with minus infinity."""
    found = routed(inputs)
    inputs.logits.scatter_(1, found[0][:, :1].long(), -math.inf)
    return found


def _options(inputs: RouteInputs) -> tuple[object, ...]:
    return (
        inputs.method,
        inputs.top_k,
        inputs.num_groups,
        inputs.topk_groups,
        inputs.scaling_factor,
        inputs.masked_groups,
        inputs.logits.dtype,
    )


def _sum(bias: Tensor | None) -> int:
    return 0 if bias is None else checksum(bias)


@seeded(BUGS, ROUTE, "row_containment", model="vllm#39244, vllm#39593")
def nan_repeats_an_expert(inputs: RouteInputs) -> Routed:
    """Look for the best by comparisons, which are all false of NaN: the first expert stays."""
    ids, weights = routed(inputs)
    spoilt = inputs.logits.isnan().any(dim=1, keepdim=True)
    return ids.masked_fill(spoilt, 0), weights
