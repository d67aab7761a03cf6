"""Faults in rules of routing that single families of models have."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ....impl.torch.moe import RENORMALISED, choose, scores_of, weigh, with_shared
from ....reference.tensors.moe_inputs import RouteInputs
from ..catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
ROUTE = "route"
LFM2 = 1e-6
"""The floor of LFM2's normalisation."""
WARP = 32
Routed = tuple[torch.Tensor, torch.Tensor]


def _routed(inputs: RouteInputs, weighed: RouteInputs | None = None) -> Routed:
    """Route honestly, with the weights of another call."""
    scores = scores_of(inputs.method, inputs.logits.float())
    ids = with_shared(inputs, choose(inputs, scores))
    return ids.to(torch.int32), weigh(weighed or inputs, scores, ids)


@seeded(BUGS, ROUTE, "routing_parity")
def floor_of_wide_rows(inputs: RouteInputs) -> Routed:
    """Add 1e-6 to the sum of sigmoids where there are more experts than a warp has threads."""
    sigmoids = inputs.method in RENORMALISED and inputs.method != "renormalize_naive"
    wide = sigmoids and inputs.logits.shape[1] > WARP
    return _routed(inputs, replace(inputs, renormalise_floor=LFM2) if wide else None)


@seeded(BUGS, ROUTE, "routing_parity", features=("renormalise_floor",))
def floor_always_the_usual(inputs: RouteInputs) -> Routed:
    """Add 1e-20 to the sum of the weights, whatever the floor is."""
    return _routed(inputs, replace(inputs, renormalise_floor=1e-20))


@seeded(BUGS, ROUTE, "guarded_sums", features=("renormalise_floor", "guarded_sums"))
def sums_of_nothing_divide(inputs: RouteInputs) -> Routed:
    """Promise finite weights, and divide by a sum of 0 all the same."""
    return _routed(inputs)


@seeded(BUGS, ROUTE, "routing_parity", features=("renormalise_floor",))
def floor_as_a_minimum(inputs: RouteInputs) -> Routed:
    """Take the larger of the sum and the floor, where the floor is added."""
    ids, weights = _routed(inputs, replace(inputs, renormalise_floor=0.0))
    if inputs.method not in RENORMALISED:
        return ids, weights
    scores = scores_of(inputs.method, inputs.logits.float()).gather(1, ids.long())
    total = scores.sum(dim=1, keepdim=True).clamp(min=inputs.renormalise_floor)
    return ids, inputs.scaling_factor * scores / total


@seeded(BUGS, ROUTE, "routing_parity", features=("expert_scales",))
def scales_before_normalisation(inputs: RouteInputs) -> Routed:
    """Multiply scores by the experts' scales, and renormalise then."""
    scores = scores_of(inputs.method, inputs.logits.float())
    ids = choose(inputs, scores)
    scaled = scores if inputs.expert_scales is None else scores * inputs.expert_scales
    return ids.to(torch.int32), weigh(replace(inputs, expert_scales=None), scaled, ids)


@seeded(BUGS, ROUTE, "routing_parity", features=("expert_scales",))
def scales_by_slot(inputs: RouteInputs) -> Routed:
    """Read the scale of an expert at the number of its slot."""
    ids, weights = _routed(inputs, replace(inputs, expert_scales=None))
    if inputs.expert_scales is not None:
        weights = weights * inputs.expert_scales[: inputs.top_k]
    return ids, weights


@seeded(BUGS, ROUTE, "routing_parity", features=("best_of_each_group",))
def best_of_any_group(inputs: RouteInputs) -> Routed:
    """Take the best experts of all groups together, where each gives its own."""
    return _routed(replace(inputs, best_of_each_group=False))


@seeded(BUGS, ROUTE, "routing_parity", features=("joint_shared_experts",))
def shared_experts_normalised_apart(inputs: RouteInputs) -> Routed:
    """Renormalise the routed experts' weights among themselves, and those of shared ones too."""
    ids, weights = _routed(inputs)
    if not inputs.shared_experts:
        return ids, weights
    parts = weights.split([inputs.top_k, inputs.shared_experts], dim=1)
    apart = [inputs.scaling_factor * each / each.sum(dim=1, keepdim=True) for each in parts]
    return ids, torch.cat(apart, dim=1)


@seeded(BUGS, ROUTE, "routing_parity", features=("joint_shared_experts",))
def shared_experts_selected_from(inputs: RouteInputs) -> Routed:
    """Let shared experts compete with the routed ones, and name them as such."""
    if not inputs.shared_experts or inputs.bias is not None:
        return _routed(inputs)
    every = replace(inputs, shared_experts=0, top_k=inputs.slots)
    return _routed(every)


@seeded(BUGS, ROUTE, "routing_parity", features=("hash_routing",))
def table_by_position(inputs: RouteInputs) -> Routed:
    """Read the table of experts at the token's position, where its id was meant."""
    if inputs.expert_table is None or inputs.input_ids is None:
        return _routed(inputs)
    rows = torch.arange(len(inputs.input_ids)) % len(inputs.expert_table)
    return _routed(replace(inputs, input_ids=rows))


@seeded(BUGS, ROUTE, "routing_parity", features=("hash_routing",))
def token_ids_in_sixteen_bits(inputs: RouteInputs) -> Routed:
    """Keep token ids in 16 bits, which are too few for a vocabulary of 129,280."""
    if inputs.input_ids is None:
        return _routed(inputs)
    return _routed(replace(inputs, input_ids=inputs.input_ids % 2**16))


@seeded(BUGS, ROUTE, "routing_parity", features=("sparsemixer",))
def second_pass_over_all(inputs: RouteInputs) -> Routed:
    """Weigh the second expert among all that are near it, the first one too."""
    ids, weights = _routed(inputs)
    if inputs.method != "sparsemixer":
        return ids, weights
    logits = inputs.logits.float()
    found = []
    for best in logits.gather(1, ids.long()).split(1, dim=1):
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * inputs.jitter
        near = logits.masked_fill(far, -math.inf)
        found.append(torch.exp(best - near.logsumexp(dim=1, keepdim=True)))
    return ids, torch.cat(found, dim=1) * inputs.scaling_factor


@seeded(BUGS, ROUTE, "routing_parity", features=("sparsemixer",))
def threshold_of_one_jitter(inputs: RouteInputs) -> Routed:
    """See only experts within one jitter of the best, where two are near."""
    return _routed(replace(inputs, jitter=inputs.jitter / 2))
