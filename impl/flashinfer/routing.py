"""FlashInfer's routing kernels: DeepSeek-V3's fused one, trtllm-gen's, top-k of torch's scores.

Routing methods go by the name of their ``RoutingMethodType``, everything by keyword.
"""

from __future__ import annotations

from typing import Any

import torch

from ...reference import Arithmetic, RouteProblem
from ...reference.tensors.moe_inputs import RouteInputs
from ..gating.rules import version_matches
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe import scores_of, weigh
from .backends import CUDA, Backend, one_module
from .calls import flashinfer
from .claims import Refuses, no_tokens, unavailable
from .libraries import library_named
from .names import ROUTING_MEMBERS, routing_member

Pair = tuple[torch.Tensor, torch.Tensor]

BY_TANH = Arithmetic(sigmoid="tanh")
"""``noAuxTcKernels.cu`` and trtllm-gen's kernels: sigmoid_accurate is 0.5 tanh(0.5 x) + 0.5."""
DETERMINISTIC = ">=0.6.8.dev0"
MOST_EXPERTS, MOST_CHOSEN = 384, 8
MOST_OF_GROUP, MOST_IN_GROUPS = 32, 128
WITH_BIAS = ("deepseek_v3", "minimax2")


def masked_by_zero(problem: RouteProblem, _: Target) -> str | None:
    """Refuse a mask that FlashInfer has not."""
    if problem.grouped and problem.masked_groups != "-inf":
        return "experts of groups that were not chosen get minus infinity"
    return None


CALLS: tuple[Refuses, ...] = (unavailable, masked_by_zero, no_tokens)


def _not_deepseek(problem: RouteProblem, _: Target) -> str | None:
    of_group = problem.num_experts // problem.num_groups
    return first_reason(
        (problem.method != "deepseek_v3", "for DeepSeek-V3's routing alone"),
        (problem.top_k > MOST_CHOSEN, f"top_k is at most {MOST_CHOSEN}"),
        (
            problem.grouped and of_group > MOST_OF_GROUP,
            f"a group has at most {MOST_OF_GROUP} experts",
        ),
        (
            problem.grouped and of_group * problem.topk_groups > MOST_IN_GROUPS,
            f"the groups that are chosen have at most {MOST_IN_GROUPS} experts",
        ),
        (
            problem.grouped and problem.topk_groups * problem.num_groups < problem.top_k,
            "topk_groups * num_groups is at least top_k",
        ),
        # Its documentation has one group with up to 8 of 384 experts, its check refuses them.
        (
            not problem.grouped and problem.top_k > 1,
            "without groups FlashInfer's check lets top_k of 1 pass alone (topk_group * n_group)",
        ),
        (
            not problem.grouped and problem.num_experts > MOST_EXPERTS,
            f"there are at most {MOST_EXPERTS} experts",
        ),
    )


@CUDA.adapter(
    "route",
    "flashinfer-fused-topk-deepseek",
    *CALLS,
    _not_deepseek,
    arithmetic=BY_TANH,
    compile_key=one_module("dsv3-fused-routing"),
    library=library_named("dsv3_fused_routing"),
    build_ahead=True,
)
def fused_topk_deepseek(inputs: RouteInputs) -> Pair:
    """Route as DeepSeek-V3 by ``fused_topk_deepseek``; weights are of the logits' dtype."""
    function = flashinfer("flashinfer.fused_moe").fused_topk_deepseek
    return routed_by(function, inputs, inputs.logits.dtype)


def routed_by(function: Any, inputs: RouteInputs, dtype: torch.dtype) -> Pair:  # noqa: ANN401  untyped
    """Route by a function with the parameters of ``fused_topk_deepseek``, weights of a dtype."""
    tokens, experts = inputs.logits.shape
    weights = inputs.logits.new_empty((tokens, inputs.top_k), dtype=dtype)
    ids = weights.new_empty(weights.shape, dtype=torch.int32)
    bias = inputs.bias
    if bias is None:
        bias = weights.new_zeros(experts, dtype=torch.float32)
    function(
        scores=inputs.logits,
        bias=bias,
        n_group=inputs.num_groups or 1,
        topk_group=inputs.topk_groups or 1,
        topk=inputs.top_k,
        routed_scaling_factor=inputs.scaling_factor,
        topk_values=weights,
        topk_indices=ids,
    )
    return ids, weights


def _not_trtllm_gen(problem: RouteProblem, _: Target) -> str | None:
    return first_reason(
        (problem.method not in ROUTING_MEMBERS, "FlashInfer has no such method"),
        (problem.grouped and problem.method != "deepseek_v3", "groups are DeepSeek-V3's alone"),
        (problem.bias and problem.method not in WITH_BIAS, "the kernels ignore the bias there"),
        (
            problem.scaling_factor != 1 and problem.method not in WITH_BIAS,
            "the kernels ignore the scaling factor there",
        ),
        (problem.method == "llama4" and problem.top_k != 1, "Llama 4 takes one expert a token"),
    )


TRTLLM_GEN = Backend(
    "trtllm-gen",
    BY_TANH,
    compile_key=one_module("trtllm-gen-routing"),
    build_ahead=True,
)


@TRTLLM_GEN.adapter("route", "flashinfer-trtllm-gen-routing", *CALLS, _not_trtllm_gen)
def trtllm_gen_routing(inputs: RouteInputs) -> Pair:
    """Route by ``trtllm_gen_routing``, the first stage of the trtllm-gen MoE; bfloat16 weights."""
    result = flashinfer("flashinfer.fused_moe").trtllm_gen_routing(
        routing_logits=inputs.logits,
        routing_bias=inputs.bias,
        routing_method=routing_member(inputs.method),
        top_k=inputs.top_k,
        n_group=inputs.num_groups or 0,
        topk_group=inputs.topk_groups or 0,
        routed_scaling_factor=inputs.scaling_factor,
    )
    return result.topk_ids, result.topk_weights


def _not_top_k(problem: RouteProblem, target: Target) -> str | None:
    return first_reason(
        (
            not version_matches(target.flashinfer, DETERMINISTIC),
            "top_k has deterministic=True from flashinfer-python 0.6.8 on",
        ),
        (problem.method == "deepseek_v3", "DeepSeek-V3's routing has a kernel of its own"),
        (problem.grouped, "there is one group"),
    )


@CUDA.adapter(
    "route",
    "flashinfer-top-k-route",
    *CALLS,
    _not_top_k,
    compile_key=one_module("topk"),
    library=library_named("topk"),
    build_ahead=True,
    build_minutes=60.0,  # more than 10 by the clock: one source, on one core, was not yet done
    build_compilers=1,
)
def top_k_route(inputs: RouteInputs) -> Pair:
    """Choose by ``flashinfer.top_k`` among float32 scores of torch, which weighs them too."""
    scores = scores_of(inputs.method, inputs.logits.float())
    ranking = scores if inputs.bias is None else scores + inputs.bias
    # Without it, calls on equal scores differ from one another.
    _, ids = flashinfer().top_k(input=ranking, k=inputs.top_k, sorted=True, deterministic=True)
    return ids.to(torch.int32), weigh(inputs, scores, ids)
