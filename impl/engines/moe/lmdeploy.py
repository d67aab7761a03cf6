"""lmdeploy's Triton experts: its sort of pairs, products, activation and weighted sum.

The sum rounds routing weights to the dtype of the outputs and adds up in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from unittest import mock

import torch

from ....reference import Arithmetic, MoEProblem, RouteProblem, Routing
from ....reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ...gpu.autotuning import smallest_configurations
from ...gpu.triton_interpreter import scalar_conditions
from ...targets.refusal import Refusal, first_reason
from ...targets.target import Target
from ...torch.moe_layouts import codes_of, scales_of
from ...torch.moe_rows import Rows, activated
from ..claims import refused_experts, wrong_here
from ..lmdeploy import KERNELS, LMDEPLOY, kernel, stubs
from ..sources import load, unavailable
from .sglang_route import Answer, bias_of, router, ungrouped
from .vllm_formats import GROUP, quantised_rows

FILE = f"{KERNELS}.moe.fused_moe"
BLOCKED, W8A8 = f"{KERNELS}.moe.blocked_fp8", f"{KERNELS}.moe.w8a8"
SWIGLU = "swiglu"
HOPPER = 90
LEAST_BLOCK = 32
"""Channels that ``tl.dot`` multiplies at least where they have 8 bits."""


def _refusal(problem: MoEProblem, target: Target, file: str = FILE) -> Answer:
    return first_reason(
        (not problem.num_tokens, "without tokens lmdeploy launches nothing"),
        (problem.assignment == "masked", "ids are those of experts, never -1"),
    ) or refused_experts(problem, target) or unavailable(file, target) or True  # fmt: skip


def _not_compact(problem: MoEProblem, target: Target) -> Answer:
    if target.sm is not None and target.sm < HOPPER:
        return Refusal("lmdeploy takes these kernels on Hopper and newer", "device", "sm_90")
    return _refusal(problem, target)


def _quantised(problem: MoEProblem, target: Target, file: str, *weights: str) -> Answer:
    if not problem.quantized:
        return "weights are codes, for which this kernel has scales"
    if problem.quantized not in weights:
        return f"weights are {' or '.join(weights)}"
    if not problem.quantized_hidden:
        return "such weights are multiplied by hidden states of their format, which are to be given"
    fp8 = "float8_e4m3fn" if problem.quantized.startswith("fp8") else ""
    return wrong_here(target, fp8) or _refusal(problem, target, file)


def _not_blocked(problem: MoEProblem, target: Target) -> Answer:
    answer = _quantised(problem, target, BLOCKED, "fp8_block")
    first, *others = {-(-size // -(-size // GROUP)) for size in (problem.hidden, problem.inter)}
    uneven = others or first & (first - 1) or problem.hidden % first or problem.inter % first
    if answer is True and (uneven or first < LEAST_BLOCK):
        return f"hidden and inter, each by its scales, are one power of two from {LEAST_BLOCK} on"
    return answer


def _not_w8a8(problem: MoEProblem, target: Target) -> Answer:
    answer = _quantised(problem, target, W8A8, "fp8_channel", "int8_channel")
    return "the activation is SwiGLU" if answer is True and problem.activation != SWIGLU else answer


def _compile_key(problem: MoEProblem) -> Hashable:
    """Name the kernels' constants: sizes are such, and the tokens' next power of two."""
    return (
        problem.dtype, problem.quantized, problem.biases, problem.top_k, problem.activation,
        problem.hidden, problem.inter, problem.num_experts, problem.expert_offset,
        max(64, 1 << (problem.num_tokens - 1).bit_length()),
    )  # fmt: skip


moe = functools.partial(
    kernel,
    "moe",
    compile_key=_compile_key,
    arithmetic=Arithmetic(
        projections="inputs", intermediate="inputs", combine="inputs", partial_outputs=True
    ),
)
quantised = functools.partial(
    moe,
    arithmetic=Arithmetic(
        projections="inputs",
        intermediate="inputs",
        combine="inputs",
        partial_outputs=True,
        fp8_products="fixed_point",
    ),
)
BIASES = ("moe_biases", "expert_parallel")
FP8 = ("expert_parallel", "fp8_weights", "quantized_hidden")


def _stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of lmdeploy, and for what stores FP8, which the interpreter cannot."""
    return {
        **stubs(),
        "lmdeploy.pytorch.envs": {"moe_static_fp8_use_compiled_quant": False},
        f"{KERNELS}.blocked_gemm_fp8": {"quant_fp8": _groups},
        f"{KERNELS}.w8a8_triton_kernels": {
            "per_token_quant_int8": _tokens, "per_tensor_quant_fp8": None,
        },
    }  # fmt: skip


def _groups(x: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return quantised_rows(x, dtype=dtype, group=size)


def _tokens(
    x: torch.Tensor, _: float, quant_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = quantised_rows(x.flatten(0, -2), dtype=quant_dtype)
    return codes.view(x.shape), scales.view(*x.shape[:-1], 1)


@moe(name="lmdeploy-fused-moe", supports=_refusal, features=BIASES)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Multiply numbers, expert by expert."""
    return _numbers(inputs, compact=False)


@moe(name="lmdeploy-fused-moe-compact", supports=_not_compact, features=BIASES)
def compact(inputs: MoEInputs) -> torch.Tensor:
    """Multiply numbers, block by block, as lmdeploy does where experts have many tokens."""
    return _numbers(inputs, compact=True)


@quantised(
    name="lmdeploy-fused-moe-fp8-block", supports=_not_blocked, features=(*FP8, "moe_biases")
)
def blocked(inputs: MoEInputs) -> torch.Tensor:
    """Multiply FP8 by FP8, with scales of 128 by 128."""
    hidden = codes_of(inputs.hidden)
    with load(BLOCKED, _stubs) as kernels, scalar_conditions(hidden):
        out: torch.Tensor = kernels.fused_moe_blocked_fp8(
            hidden,
            scales_of(inputs.hidden),
            codes_of(inputs.w13),
            scales_of(inputs.w13),
            codes_of(inputs.w2),
            scales_of(inputs.w2),
            w1_bias=inputs.w13_bias,
            w2_bias=inputs.w2_bias,
            act_func=_activation(inputs),
            out_dtype=inputs.out_dtype,
            **_routing(inputs),
        )
    return out


@quantised(name="lmdeploy-fused-moe-w8a8", supports=_not_w8a8, features=(*FP8, "int8_weights"))
def of_channels(inputs: MoEInputs) -> torch.Tensor:
    """Multiply FP8 by FP8, or int8 by int8, with scales of tokens and of channels."""
    hidden = codes_of(inputs.hidden)
    with load(W8A8, _stubs) as kernels, smallest_configurations(hidden):
        out: torch.Tensor = kernels.fused_moe_w8a8(
            hidden,
            scales_of(inputs.hidden),
            codes_of(inputs.w13),
            scales_of(inputs.w13),
            codes_of(inputs.w2),
            scales_of(inputs.w2),
            out_dtype=inputs.out_dtype,
            quant_dtype=hidden.dtype,
            **_routing(inputs),
        )
    return out


def _numbers(inputs: MoEInputs, *, compact: bool) -> torch.Tensor:
    hidden = codes_of(inputs.hidden)
    with (
        load(FILE, _stubs) as kernels,
        smallest_configurations(hidden),
        mock.patch.object(kernels, "_should_use_compact_moe", return_value=compact),
    ):
        out: torch.Tensor = kernels.fused_moe(
            hidden,
            inputs.w13,
            inputs.w2,
            w1_bias=inputs.w13_bias,
            w2_bias=inputs.w2_bias,
            act_func=_activation(inputs),
            **_routing(inputs),
        )
    return out


def _routing(inputs: MoEInputs) -> dict[str, object]:
    return {
        "topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids,
        "topk": inputs.topk_ids.shape[1], "expert_offset": inputs.expert_offset,
        "num_experts": inputs.num_experts,
    }  # fmt: skip


def _activation(inputs: MoEInputs) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return an activation that lmdeploy does not have; None for its own."""
    if inputs.activation == SWIGLU:
        return None
    ids, weights = inputs.topk_ids, inputs.topk_weights
    rows = Rows(ids, ids, ids.flatten(), weights, ids)
    return lambda x: activated(inputs, x.float(), rows).to(x.dtype)


NOAUX, SINGLE = f"{KERNELS}.moe.route_noaux_tc", f"{KERNELS}.moe.route_single_group"
RENORMALISED = ("deepseek_v3", "minimax2", "sigmoid_renorm")
SIGMOID = (*RENORMALISED, "sigmoid")
LEAST_EXPERTS = 32
SINGLE_EXPERTS, SINGLE_TOP_K = 192, 8


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _not_noaux(problem: RouteProblem, target: Target) -> Answer:
    return first_reason(
        (problem.method not in SIGMOID, f"the method is {' or '.join(SIGMOID)}"),
        (problem.num_experts % LEAST_EXPERTS or not _is_power(problem.num_experts),
         f"experts are a power of two from {LEAST_EXPERTS} on"),
        (problem.grouped and problem.masked_groups != "zero",
         "experts of other groups get a score of zero"),
        (problem.grouped and not (problem.bias or problem.method == "deepseek_v3"),
         "groups are ranked by their two best experts"),
        (problem.grouped and problem.group_experts == 1, "a group has two experts or more"),
    ) or unavailable(NOAUX, target) or True  # fmt: skip


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
    if problem.num_experts != SINGLE_EXPERTS or problem.top_k != SINGLE_TOP_K:
        return f"there are {SINGLE_EXPERTS} experts, and {SINGLE_TOP_K} of a token"
    return unavailable(SINGLE, target) or True


@router(name="lmdeploy-single-group-topk", provider=LMDEPLOY, supports=_not_single)
def single(inputs: RouteInputs) -> Routing:
    """Call ``fused_single_group_topk_router`` on sigmoids, which lmdeploy computes by torch."""
    with load(SINGLE, stubs) as kernels:
        weights, ids = kernels.fused_single_group_topk_router(
            inputs.logits.float().sigmoid(),
            bias_of(inputs),
            num_experts=SINGLE_EXPERTS,
            top_k=SINGLE_TOP_K,
            routed_scaling_factor=inputs.scaling_factor,
        )
    return Routing(ids.int(), weights)
