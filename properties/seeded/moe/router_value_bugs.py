"""Faults in routing that counts of experts and slots, biases or signs of logits of models show."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....impl.torch.moe import RENORMALISED, choose, scores_of, weigh
from ....reference import Arithmetic
from ....reference.tensors.moe_inputs import RouteInputs
from ..catalogue import SeededBug, seeded
from .routing_bugs import SIGMOID, Routed, routed

BUGS: list[SeededBug] = []
ROUTE = "route"
MOST_EXPERTS, MOST_SLOTS, MOST_SCORE, LEAST_SCORE = 512, 8, 4.0, 9e-7
Tensor = torch.Tensor


@seeded(BUGS, ROUTE, "routing_parity")
def experts_beyond_512(inputs: RouteInputs) -> Routed:
    """Rank only the first 512 experts."""
    scores = scores_of(inputs.method, inputs.logits.float())
    if scores.shape[1] <= MOST_EXPERTS or inputs.num_groups:
        return routed(inputs, scores=scores)
    few = scores.clone()
    few[:, MOST_EXPERTS:] = -torch.inf
    return routed(inputs, scores=scores, ids=choose(inputs, few))


@seeded(BUGS, ROUTE, "routing_parity")
def ids_in_nine_bits(inputs: RouteInputs) -> Routed:
    """Keep ids beside scores in words that have nine bits for them."""
    ids, weights = routed(inputs)
    return ids % MOST_EXPERTS, weights


@seeded(BUGS, ROUTE, "routing_parity")
def sum_of_eight_slots(inputs: RouteInputs) -> Routed:
    """Divide by the sum of the first eight selected scores."""

    def weights(inputs: RouteInputs, scores: Tensor, ids: Tensor) -> Tensor:
        if inputs.method not in RENORMALISED:
            return weigh(inputs, scores, ids)
        chosen = scores.gather(1, ids)
        total = chosen[:, :MOST_SLOTS].sum(dim=1, keepdim=True)
        return inputs.scaling_factor * chosen / (total + 1e-20)

    return routed(inputs, weights=weights)


@seeded(BUGS, ROUTE, "routing_parity")
def biased_scores_up_to_four(inputs: RouteInputs) -> Routed:
    """Rank biased sigmoids as fixed-point numbers that end at 4."""
    if inputs.bias is None or inputs.method not in SIGMOID:
        return routed(inputs)
    scores = scores_of(inputs.method, inputs.logits.float())
    biased = (scores + inputs.bias).clamp(max=MOST_SCORE)
    ranking = replace(inputs, bias=torch.zeros_like(inputs.bias))
    return routed(inputs, scores=scores, ids=choose(ranking, biased))


@seeded(BUGS, ROUTE, "routing_parity")
def bias_of_zeros_is_none(inputs: RouteInputs) -> Routed:
    """Take a bias of zeros for none, by which groups are ranked by their best expert."""
    zeros = inputs.bias is not None and not inputs.bias.any()
    return routed(replace(inputs, bias=None) if zeros else inputs)


@seeded(BUGS, ROUTE, "routing_bias_shift", features=("group_score",))
def groups_by_whether_there_is_a_bias(inputs: RouteInputs) -> Routed:
    """Rank groups by their two best experts where there is a bias, whatever was asked for."""
    if inputs.bias is None:
        return routed(inputs)
    return routed(replace(inputs, group_score="two_best" if inputs.num_groups else None))


@seeded(BUGS, ROUTE, "routing_parity", features=("bf16_bias",))
def bias_of_bfloat16_added_as_it_is(inputs: RouteInputs) -> Routed:
    """Add a bias of bfloat16 to the scores in bfloat16."""
    if inputs.bias is None or inputs.bias.dtype == torch.float32:
        return routed(inputs)
    scores = scores_of(inputs.method, inputs.logits.float())
    biased = (scores.to(inputs.bias.dtype) + inputs.bias).float()
    ranking = replace(inputs, bias=torch.zeros_like(inputs.bias))
    return routed(inputs, scores=scores, ids=choose(ranking, biased))


@seeded(BUGS, ROUTE, "routing_parity", arithmetic=Arithmetic(sigmoid="tanh"))
def low_sigmoids_give_zeros(inputs: RouteInputs) -> Routed:
    """Return weights of 0 where no sigmoid is above 9e-7, of which a tanh loses half."""

    def weights(inputs: RouteInputs, scores: Tensor, ids: Tensor) -> Tensor:
        found = weigh(inputs, scores, ids)
        if inputs.method not in RENORMALISED:
            return found
        low = scores.gather(1, ids).amax(dim=1, keepdim=True) < LEAST_SCORE
        return found.masked_fill(low, 0.0)

    return routed(inputs, weights=weights)


@seeded(BUGS, ROUTE, "routing_parity")
def equal_weights_where_scores_vanish(inputs: RouteInputs) -> Routed:
    """Return equal weights for the selected experts where the sum of their scores is 0."""

    def weights(inputs: RouteInputs, scores: Tensor, ids: Tensor) -> Tensor:
        found = weigh(inputs, scores, ids)
        if inputs.method != "deepseek_v4":
            return found
        nothing = scores.gather(1, ids).sum(dim=1, keepdim=True) == 0
        return found.masked_fill(nothing, inputs.scaling_factor / ids.shape[1])

    return routed(inputs, weights=weights)
