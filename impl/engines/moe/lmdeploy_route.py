"""lmdeploy's Triton routers: DeepSeek's with groups, and one of 192 experts without."""

from __future__ import annotations

from ....reference import RouteProblem, Routing
from ....reference.tensors.moe_inputs import RouteInputs
from ...gpu.autotuning import smallest_configurations
from ...targets.target import Target
from ..lmdeploy_calls import KERNELS, LMDEPLOY, stubs
from ..sources import load, unavailable
from .sglang_route import Answer, bias_of, router, ungrouped

NOAUX, SINGLE = f"{KERNELS}.moe.route_noaux_tc", f"{KERNELS}.moe.route_single_group"
RENORMALISED = ("deepseek_v3", "minimax2", "sigmoid_renorm")
SIGMOID = (*RENORMALISED, "sigmoid")
LEAST_EXPERTS = 32
EXPERTS, TOP_K = 192, 8


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _not_noaux(problem: RouteProblem, target: Target) -> Answer:
    if problem.method not in SIGMOID:
        return f"the method is {' or '.join(SIGMOID)}"
    if problem.num_experts % LEAST_EXPERTS or not _is_power(problem.num_experts):
        return f"experts are a power of two from {LEAST_EXPERTS} on"
    if problem.grouped and problem.masked_groups != "zero":
        return "experts of other groups get a score of zero"
    if problem.grouped and not (problem.bias or problem.method == "deepseek_v3"):
        return "groups are ranked by their two best experts"
    if problem.grouped and problem.group_experts == 1:
        return "a group has two experts or more"
    return unavailable(NOAUX, target) or True


@router(name="lmdeploy-noaux-tc", provider=LMDEPLOY, supports=_not_noaux)
def noaux(inputs: RouteInputs) -> Routing:
    """Call ``fused_noaux_tc_routing``."""
    with load(NOAUX, stubs) as kernels, smallest_configurations(inputs.logits):
        weights, ids = kernels.fused_noaux_tc_routing(
            inputs.logits,
            bias_of(inputs),
            num_experts=inputs.logits.shape[1],
            n_group=inputs.num_groups or 1,
            topk_group=inputs.topk_groups or 1,
            top_k=inputs.top_k,
            renormalize=inputs.method != "sigmoid",
            routed_scaling_factor=inputs.scaling_factor,
        )
    return Routing(ids.int(), weights)


def _not_single(problem: RouteProblem, target: Target) -> Answer:
    refused = ungrouped(problem, *RENORMALISED)
    if refused:
        return refused
    if problem.num_experts != EXPERTS or problem.top_k != TOP_K:
        return f"there are {EXPERTS} experts, and {TOP_K} of a token"
    return unavailable(SINGLE, target) or True


@router(name="lmdeploy-single-group-topk", provider=LMDEPLOY, supports=_not_single)
def single(inputs: RouteInputs) -> Routing:
    """Call ``fused_single_group_topk_router`` on sigmoids, which lmdeploy computes by torch."""
    with load(SINGLE, stubs) as kernels:
        weights, ids = kernels.fused_single_group_topk_router(
            inputs.logits.float().sigmoid(),
            bias_of(inputs),
            num_experts=EXPERTS,
            top_k=TOP_K,
            routed_scaling_factor=inputs.scaling_factor,
        )
    return Routing(ids.int(), weights)
