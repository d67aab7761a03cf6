"""Kernelproof's own Triton router: every method of the oracle, groups included, in one launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from ...reference import RouteProblem, Routing
from ...reference.tensors.moe_inputs import RouteInputs
from ..features import ALGEBRA, ROUTE_FEATURES, ROUTE_VALUES
from ..targets.optional import require
from ..targets.target import Target
from .support import ceil_div, kernel, next_power_of_two, require_triton, unavailable

KERNEL = "kernelproof.impl.triton.kernels.route"
BUILD_MINUTES = 0.04
ELEMENTS, INTERPRETED_ELEMENTS = 2**11, 2**14
"""Logits a program: few keep a GPU busy, many spare the interpreter programs."""
MOST_EXPERTS = 2048
MASKED = {"-inf": float("-inf"), "zero": 0.0}


class Method(NamedTuple):
    """How a method ranks and weighs, in the words of ``reference.routing_methods``.

    Attributes:
        score: ``"logit"``, ``"softmax"``, ``"sigmoid"`` or ``"sqrt_softplus"``.
        weight: ``"score"``, ``"renormalize"``, ``"softmax"``, ``"sigmoid"`` or
            ``"sparsemixer"``.
        best_of_group: how many of its experts rank a group where there is no bias.
    """

    score: str
    weight: str
    best_of_group: int = 1


METHODS = {
    "default": Method("softmax", "score"),
    "renormalize": Method("logit", "softmax"),
    "renormalize_naive": Method("softmax", "renormalize"),
    "deepseek_v3": Method("sigmoid", "renormalize", 2),
    "minimax2": Method("sigmoid", "renormalize"),
    "llama4": Method("logit", "sigmoid"),
    "topk_sigmoid": Method("logit", "sigmoid"),
    "topk": Method("logit", "score"),
    "sigmoid": Method("sigmoid", "score"),
    "sigmoid_renorm": Method("sigmoid", "renormalize"),
    "deepseek_v4": Method("sqrt_softplus", "renormalize"),
    "sparsemixer": Method("logit", "sparsemixer"),
}


def _supports(problem: RouteProblem, target: Target) -> bool | str:
    if problem.num_experts + problem.shared_experts > MOST_EXPERTS:
        return f"at most {MOST_EXPERTS} experts, not {problem.num_experts}"
    return unavailable(target) or True


def _compile_key(problem: RouteProblem) -> Hashable:
    return (
        problem.dtype, problem.method, problem.bias, problem.top_k, problem.num_groups,
        problem.topk_groups, next_power_of_two(problem.num_experts + problem.shared_experts),
        problem.group_experts > 1, problem.expert_scales, problem.best_of_each_group,
        problem.shared_experts, problem.hash_vocabulary > 0,
        problem.bias_dtype, problem.group_score,
    )  # fmt: skip


@kernel(
    "route",
    name="triton-route",
    features=(*ROUTE_FEATURES, *ROUTE_VALUES, "large_rows", ALGEBRA),
    supports=_supports,
    compile_key=_compile_key,
    build_minutes=BUILD_MINUTES,
)
def route(inputs: RouteInputs) -> Routing:
    """Route tokens to experts in one launch; of equal scores the lowest index comes first.

    Args:
        inputs: logits [tokens, experts] in float32, float16 or bfloat16, strided or not; computed
            in float32.

    Returns:
        topk_ids int32 [tokens, slots], best first, and topk_weights float32 [tokens, slots].
    """
    require_triton()
    logits, method = inputs.logits, METHODS[inputs.method]
    tokens, columns_of_logits = logits.shape
    experts = columns_of_logits - inputs.shared_experts
    ids = torch.empty((tokens, inputs.slots), dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    if tokens == 0:
        return Routing(ids, weights)
    groups = inputs.num_groups or 1
    two = method.best_of_group if inputs.bias is None else 2
    if inputs.group_score:
        two = 2 if inputs.group_score == "two_best" else 1
    columns = next_power_of_two(columns_of_logits)
    rows = max(ELEMENTS // columns, 1)
    if not logits.is_cuda:
        rows = min(max(INTERPRETED_ELEMENTS // columns, 1), next_power_of_two(tokens))
    require(KERNEL, "triton").route[(ceil_div(tokens, rows),)](
        logits=logits,
        bias=inputs.bias,
        ids=ids,
        weights=weights,
        num_tokens=tokens,
        num_experts=experts,
        group_size=experts // groups,
        expert_scales=inputs.expert_scales,
        expert_table=inputs.expert_table,
        input_ids=inputs.input_ids,
        floor=float(inputs.renormalise_floor),
        jitter=float(inputs.jitter),
        scaling_factor=float(inputs.scaling_factor),
        masked=MASKED[inputs.masked_groups],
        logits_token=logits.stride(0),
        logits_expert=logits.stride(1),
        bias_expert=None if inputs.bias is None else inputs.bias.stride(0),
        SCORE=method.score,
        WEIGHT=method.weight,
        TOP_K=inputs.top_k,
        GROUPS=groups,
        TOPK_GROUPS=inputs.topk_groups or 1,
        BEST_OF_GROUP=min(two, experts // groups),
        OF_EACH=inputs.top_k // groups if inputs.best_of_each_group else 0,
        SHARED=inputs.shared_experts,
        TABLE=inputs.expert_table is not None,
        TOKENS=rows,
        EXPERTS=columns,
        SLOTS=next_power_of_two(inputs.slots),
        GROUP_COLUMNS=next_power_of_two(groups),
    )
    return Routing(ids, weights)
