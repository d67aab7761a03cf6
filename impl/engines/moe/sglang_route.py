"""SGLang's Triton routers: its general one, and those of four families of models."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch

from ....reference import RouteProblem, Routing
from ....reference.moe.routing_methods import METHODS
from ....reference.tensors.moe_inputs import RouteInputs
from ...features import ALGEBRA
from ...gpu.triton_interpreter import scalars_as_bounds
from ...targets.refusal import Refusal, first_reason
from ...targets.target import Target
from ..sglang_calls import SGLANG, stubs
from ..sources import implementation, load, unavailable
from ..vllm_stubs import Unused

HOME = "sglang.kernels.ops.moe"
GATE, GEMMA4 = f"{HOME}.moe_fused_gate", f"{HOME}.gemma4_routing"
INKLING, MUSE = f"{HOME}.sigmoid_gate_topk_renorm", f"{HOME}.muse_spark_routing"
HASH = f"{HOME}.triton_hash_topk"
SCORES = {"sigmoid": "sigmoid", "sqrt_softplus": "sqrtsoftplus", "softmax": "softmax"}
"""Scoring functions of ``moe_fused_gate``, by what experts are ranked by."""
SOFTMAX = ("default", "renormalize", "renormalize_naive")
INKLING_TOP_K = 32
INKLING_TILES = (128, 768, 1024)
"""Most tokens that each of its sizes of tiles is for."""
GEMMA4_EXPERTS = 1024
Answer = bool | str | Refusal


def compile_key(problem: RouteProblem) -> tuple[Hashable, ...]:
    """Name the kernels' constants, and what Triton compiles for."""
    return (
        problem.dtype, problem.method, problem.bias, problem.top_k, problem.num_groups,
        problem.topk_groups, problem.num_experts, problem.num_tokens == 1,
        problem.num_tokens % 16 == 0,
    )  # fmt: skip


router = functools.partial(
    implementation,
    "route",
    compile_key=compile_key,
    build_ahead="cuda",
    build_minutes=0.05,
    build_compilers=1,
)
"""``implementation``, with what all engines' routers declare alike."""


def ungrouped(problem: RouteProblem, *methods: str) -> str | None:
    """Return why a problem's method is none of these, or has groups; None if it has none."""
    if problem.method not in methods:
        return f"the method is {' or '.join(methods)}"
    return "there are no groups of experts" if problem.grouped else None


def _not_the_gate(problem: RouteProblem, target: Target) -> Answer:
    how = METHODS[problem.method]
    softmax = problem.method in SOFTMAX
    weighed = how.score in SCORES and how.weight in ("score", "renormalize")
    return first_reason(
        (not softmax and not weighed, "weights are scores, renormalised or not"),
        (softmax and (problem.bias or problem.grouped),
         "a bias of a softmax is a bias of its logits, and so are groups ranked"),
        (problem.grouped and problem.masked_groups != "-inf",
         "experts of other groups are never chosen"),
        (problem.grouped and not (problem.bias or how.two_best),
         "groups are ranked by their two best experts"),
        (problem.grouped and problem.group_experts == 1, "a group has two experts or more"),
    ) or unavailable(GATE, target) or True  # fmt: skip


def _stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of SGLang; no CUDA kernel is taken instead of a Triton one."""
    off = Unused()
    environment = type("Environment", (), {"__getattr__": lambda *_: off})()
    off.__dict__["get"] = lambda: False
    usual = stubs()["sglang.srt.utils"]
    return {
        "sglang.kernels.fused_op": {"BaseFusedOp": object},
        "sglang.kernels.jit.utils": {
            "get_jit_cuda_arch": Unused(), "is_arch_support_pdl": lambda: False,
        },
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda function: function},
        f"{HOME}.moe_route_radix": {"covered": lambda *_: False},
        f"{HOME}.inkling_gate_topk_renorm": {"inkling_gate_topk_renorm_v2": Unused()},
        "sglang.kernels.spec": {"CapabilityRequirement": Unused(), "KernelBackend": Unused()},
        "sglang.srt.environ": {"envs": environment},
        "sglang.srt.utils": {**usual, "fast_topk": Unused()},
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_: lambda function: function},
    }  # fmt: skip


def bias_of(inputs: RouteInputs) -> torch.Tensor:
    """Return a call's bias, or zeros."""
    if inputs.bias is not None:
        return inputs.bias
    experts = inputs.logits.shape[1] - inputs.shared_experts
    return torch.zeros(experts, device=inputs.logits.device)


FLOOR = ("renormalise_floor",)


@router(
    name="sglang-moe-fused-gate",
    provider=SGLANG,
    supports=_not_the_gate,
    features=(*FLOOR, "guarded_sums", ALGEBRA),
)
def gate(inputs: RouteInputs) -> Routing:
    """Call the general router, ``moe_fused_gate``."""
    softmax = inputs.method in SOFTMAX
    how = METHODS[inputs.method]
    with load(GATE, _stubs) as kernels, scalars_as_bounds(inputs.logits):
        weights, ids = kernels.moe_fused_gate(
            inputs.logits,
            None if softmax else bias_of(inputs),
            inputs.top_k,
            scoring_func="softmax" if softmax else SCORES[how.score],
            renormalize=how.weight != "score",
            routed_scaling_factor=inputs.scaling_factor,
            apply_routed_scaling_factor_on_output=True,
            num_expert_group=inputs.num_groups or 1,
            topk_group=inputs.topk_groups or 1,
            renormalize_epsilon=inputs.renormalise_floor,
        )
    return Routing(ids, weights)


def _not_gemma4(problem: RouteProblem, target: Target) -> Answer:
    if problem.bias:
        return "there is no bias"
    if problem.num_experts > GEMMA4_EXPERTS:
        return f"at most {GEMMA4_EXPERTS} experts"
    return ungrouped(problem, "renormalize") or unavailable(GEMMA4, target) or True


@router(
    name="sglang-gemma4-routing",
    provider=SGLANG,
    supports=_not_gemma4,
    features=("expert_scales", ALGEBRA),
)
def gemma4(inputs: RouteInputs) -> Routing:
    """Call Gemma 4's router; every expert's scale has the scaling factor."""
    logits = inputs.logits
    scales = torch.full((logits.shape[1],), inputs.scaling_factor, device=logits.device)
    if inputs.expert_scales is not None:
        scales = scales * inputs.expert_scales
    with load(GEMMA4, _stubs) as kernels, scalars_as_bounds(logits):
        weights, ids = kernels.gemma4_fused_routing(logits, scales, inputs.top_k)
    return Routing(ids, weights)


def _inkling_key(problem: RouteProblem) -> Hashable:
    tiles = sum(problem.num_tokens > most for most in INKLING_TILES)
    return (*compile_key(problem), tiles, problem.shared_experts)


def _not_inkling(problem: RouteProblem, target: Target) -> Answer:
    methods = ("deepseek_v3", "minimax2", "sigmoid_renorm")
    return first_reason(
        (problem.dtype != "float32", "weights have the dtype of the logits"),
        (problem.top_k > INKLING_TOP_K, f"at most {INKLING_TOP_K} experts a token"),
        (not problem.num_tokens, "without tokens SGLang launches nothing"),
        (problem.renormalise_floor, "the sum of the weights has no floor"),
        ((problem.slots - 1).bit_length() != (problem.top_k - 1).bit_length(),
         "the next power of two is one for experts with shared ones and without"),
    ) or ungrouped(problem, *methods) or unavailable(INKLING, target) or True  # fmt: skip


@router(
    name="sglang-sigmoid-gate-topk-renorm",
    provider=SGLANG,
    supports=_not_inkling,
    compile_key=_inkling_key,
    features=("joint_shared_experts", *FLOOR),
)
def inkling(inputs: RouteInputs) -> Routing:
    """Call Inkling's router; shared experts come last.

    It sorts the bits of scores, which are float32: ``float64_algebra`` has nothing to judge.
    """
    logits, shared = inputs.logits, inputs.shared_experts
    one = torch.ones(1, device=logits.device)
    with load(INKLING, _stubs) as kernels, scalars_as_bounds(logits):
        weights, ids, of_shared, _ = kernels.sigmoid_gate_topk_renorm(
            logits, inputs.top_k, shared, inputs.scaling_factor, one, bias_of(inputs)
        )
    last = torch.arange(logits.shape[1] - shared, logits.shape[1], device=logits.device)
    ids = torch.cat((ids, last.int().expand(len(ids), shared)), dim=1)
    return Routing(ids, torch.cat((weights, of_shared), dim=1))


def _not_hashed(problem: RouteProblem, target: Target) -> Answer:
    return first_reason(
        (problem.method != "deepseek_v4", "the method is deepseek_v4"),
        (not problem.hash_vocabulary, "experts are those of a table"),
        (problem.renormalise_floor, "the sum of the weights has no floor"),
    ) or unavailable(HASH, target) or True  # fmt: skip


@router(
    name="sglang-hash-topk",
    provider=SGLANG,
    supports=_not_hashed,
    features=("hash_routing", *FLOOR, ALGEBRA),
)
def hashed(inputs: RouteInputs) -> Routing:
    """Call the router of DeepSeek V4's first layers, whose caller scales the weights."""
    with load(HASH, _stubs) as kernels, scalars_as_bounds(inputs.logits):
        weights, ids = kernels.hash_topk_triton(
            inputs.logits.contiguous(),
            inputs.input_ids,
            inputs.expert_table,
            0,
            1.0,
            "sqrtsoftplus",
        )
    return Routing(ids, weights * inputs.scaling_factor)


MUSE_METHODS = ("deepseek_v3", "minimax2", "sigmoid_renorm", "renormalize_naive")


def muse_refusal(problem: RouteProblem) -> str | None:
    """Return why Muse Spark's router, SGLang's or vLLM's, does not take a problem."""
    if problem.dtype != "float32":
        return "scores are computed in the dtype of the logits"
    if not problem.num_tokens:
        return "without tokens nothing is launched"
    return ungrouped(problem, *MUSE_METHODS)


def _not_muse(problem: RouteProblem, target: Target) -> Answer:
    return muse_refusal(problem) or unavailable(MUSE, target) or True


@router(
    name="sglang-muse-spark-routing",
    provider=SGLANG,
    supports=_not_muse,
    features=(*FLOOR, ALGEBRA),
)
def muse(inputs: RouteInputs) -> Routing:
    """Call Muse Spark's router, which is unrolled for eight experts a token."""
    with load(MUSE, _stubs) as kernels, scalars_as_bounds(inputs.logits):
        weights, ids, _ = kernels.fused_muse_spark_routing(
            inputs.logits.contiguous(),
            bias_of(inputs),
            inputs.top_k,
            inputs.scaling_factor,
            router_score_normalization=METHODS[inputs.method].score,
            router_score_division_eps=inputs.renormalise_floor,
        )
    return Routing(ids, weights)
