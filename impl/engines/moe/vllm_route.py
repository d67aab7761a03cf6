"""vLLM's Triton routers: those of DeepSeek V4 and Muse Spark. Its others are CUDA or torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....reference import RouteProblem, Routing
from ....reference.moe.routing_methods import METHODS
from ....reference.tensors.moe_inputs import RouteInputs
from ...features import ALGEBRA
from ...gpu.triton_interpreter import scalars_as_bounds
from ...targets.target import Target
from ..sources import load, unavailable
from ..vllm_stubs import Platform, stubs
from .sglang_route import FLOOR, Answer, bias_of, muse_refusal, router, ungrouped

DEEPSEEK_V4 = "vllm.model_executor.layers.fused_moe.router.dsv4_topk"
MUSE = "vllm.models.muse_spark.common.ops.fused_routing"
EXPERTS, TOP_K = (256, 384), 6


class _Cuda(Platform):
    """A platform whose Triton kernels are defined, without programmatic dependent launch."""

    def is_cuda(self) -> bool:
        """Return True, of the interpreter too."""
        return True

    def is_arch_support_pdl(self) -> bool:
        """Return False: launches do not overlap."""
        return False


def _stubs() -> Mapping[str, Mapping[str, object]]:
    return {**stubs(), "vllm.platforms": {"current_platform": _Cuda()}}


def _not_deepseek_v4(problem: RouteProblem, target: Target) -> Answer:
    refused = ungrouped(problem, "deepseek_v4")
    if refused:
        return refused
    if problem.num_experts not in EXPERTS or problem.top_k != TOP_K:
        return f"there are {' or '.join(map(str, EXPERTS))} experts, and {TOP_K} of a token"
    if problem.dtype != "float32":
        return "logits are float32"
    return unavailable(DEEPSEEK_V4, target) or True


@router(name="vllm-dsv4-topk", provider="vllm", supports=_not_deepseek_v4, features=(ALGEBRA,))
def deepseek_v4(inputs: RouteInputs) -> Routing:
    """Call DeepSeek V4's router."""
    with load(DEEPSEEK_V4, _stubs) as kernels, scalars_as_bounds(inputs.logits):
        weights, ids = kernels.dsv4_topk(
            inputs.logits.contiguous(), bias_of(inputs), torch.int32, inputs.scaling_factor
        )
    return Routing(ids, weights)


def _not_muse(problem: RouteProblem, target: Target) -> Answer:
    return muse_refusal(problem) or unavailable(MUSE, target) or True


@router(
    name="vllm-musespark1x-routing",
    provider="vllm",
    supports=_not_muse,
    features=(*FLOOR, ALGEBRA),
)
def muse(inputs: RouteInputs) -> Routing:
    """Call Muse Spark's router."""
    with load(MUSE, _stubs) as kernels, scalars_as_bounds(inputs.logits):
        weights, ids = kernels.fused_musespark1x_routing(
            inputs.logits,
            bias_of(inputs),
            inputs.top_k,
            inputs.scaling_factor,
            router_score_normalization=METHODS[inputs.method].score,
            router_score_division_eps=inputs.renormalise_floor,
        )
    return Routing(ids, weights)
