"""FlashInfer's references of experts and routing (``flashinfer.trace.templates``, 0.7 and later).

They are pure PyTorch, take the gate from the second half of the rows, compute in float32 and give
bfloat16. Numbers of activations are those of the release's own enum, looked up by name.

Most references of routing are a part of one of the whole MoE: the same function is called with its
experts left out, so that it gives back ids and weights.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch

from ...reference import MoEProblem, RouteProblem
from ...reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe_layouts import bias_up_first, codes_of, rows_up_first, scales_of, swiglu_numbers
from .backends import TRACE
from .claims import Refuses
from .names import activation_member
from .routing import masked_by_zero, routed_by
from .trace import lacking, template

MOE_TEMPLATES = "flashinfer.trace.templates.moe"
SAMPLING = "flashinfer.trace.templates.sampling"
FP8_EXPERTS = "_fp8_moe_run_experts"
REFERENCES = {
    "default": "default",
    "renormalize": "renormalize",
    "renormalize_naive": "renormalize_naive",
    "llama4": "llama4",
    "deepseek_v3": "ds",
}
"""Their names in those of the references. That of ``topk`` gives every expert 1 / top_k, which is
not what the kernel does (docs/moe.md)."""
TWO = 2
Pair = tuple[torch.Tensor, torch.Tensor]


def without_experts(reference: Any) -> Any:  # noqa: ANN401  untyped third-party code
    """Return a reference of the whole MoE that returns (weights, ids) in the place of its output.

    Nothing of theirs is changed: this is another function with the same code, among whose globals
    the function that runs the experts is another.
    """
    plain = inspect.unwrap(reference)

    def handed_back(*arguments: Any, **_: Any) -> Pair:  # noqa: ANN401  as theirs
        weights, ids = arguments[6:8]
        return weights, ids

    made = FunctionType(plain.__code__, {**plain.__globals__, FP8_EXPERTS: handed_back})
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _no_reference(problem: RouteProblem, _: Target) -> str | None:
    deepseek = problem.method == "deepseek_v3"
    return first_reason(
        (problem.method not in REFERENCES, f"no reference is of {problem.method} as kernels are"),
        (problem.bias and not deepseek, "the reference adds the bias to the logits"),
        (problem.grouped and not deepseek, "the reference has no groups"),
        (problem.method == "llama4" and problem.top_k != 1, "it takes one expert a token"),
        (
            deepseek and problem.num_experts // problem.num_groups < TWO,
            "groups are ranked by two experts, and there is one in each",
        ),
    )


@TRACE.adapter(
    "route", "flashinfer-trace-route", lacking(MOE_TEMPLATES), _no_reference, masked_by_zero
)
def trace_route(inputs: RouteInputs) -> Pair:
    """Route as ``_trtllm_fp8_block_scale_moe_*_routing_reference`` does."""
    name = f"_trtllm_fp8_block_scale_moe_{REFERENCES[inputs.method]}_routing_reference"
    bias, deepseek = inputs.bias, inputs.method == "deepseek_v3"
    if deepseek and bias is None:
        bias = inputs.logits.new_zeros(inputs.logits.shape[1], dtype=torch.float32)
    groups = (inputs.num_groups or 1, inputs.topk_groups or 1) if deepseek else ()
    experts = (None,) * 6
    arguments = (inputs.logits, bias, *experts, inputs.top_k, *groups, 0, inputs.scaling_factor)
    weights, ids = without_experts(template(MOE_TEMPLATES, name))(*arguments)
    return ids.to(torch.int32), weights


def _not_deepseek(problem: RouteProblem, _: Target) -> str | None:
    other = problem.method != "deepseek_v3"
    return "a reference of DeepSeek-V3's routing" if other else None


@TRACE.adapter(
    "route",
    "flashinfer-trace-fused-topk-deepseek",
    lacking(SAMPLING),
    _not_deepseek,
    masked_by_zero,
)
def trace_fused_topk_deepseek(inputs: RouteInputs) -> Pair:
    """Route by ``_fused_topk_deepseek_reference``, into float32 weights."""
    function = template(SAMPLING, "_fused_topk_deepseek_reference")
    return routed_by(function, inputs, torch.float32)


CUTLASS, BF16 = "_cutlass_fused_moe_reference", "_moe_bf16_run_experts"
FP4, CUTE_DSL = "_fp4_moe_run_experts", "_cute_dsl_fused_moe_reference"
BLOCK = 128
E4M3 = torch.float8_e4m3fn


def _experts(reference: str, *activations: str) -> tuple[Refuses, ...]:
    """Return what a reference, given by name, does not take, whatever the weights are."""

    def refuses(problem: MoEProblem, _: Target) -> str | None:
        return first_reason(
            (problem.dtype != "bfloat16", "the reference's output is bfloat16"),
            (problem.activation not in activations, f"the reference has no {problem.activation}"),
        )

    return lacking(MOE_TEMPLATES, reference), refuses


def _weights(quantized: str, name: str) -> Refuses:
    """Refuse weights of any other format."""

    def refuses(problem: MoEProblem, _: Target) -> str | None:
        return None if problem.quantized == quantized else f"weights are {name}"

    return refuses


@TRACE.adapter(
    "moe",
    "flashinfer-trace-cutlass-moe",
    *_experts(CUTLASS, "swiglu"),
    features=("interleaved_w13", "duplicate_ids"),
)
def trace_cutlass(inputs: MoEInputs) -> torch.Tensor:
    """Call ``_cutlass_fused_moe_reference``: SwiGLU, no options at all."""
    out: torch.Tensor = template(MOE_TEMPLATES, CUTLASS)(
        inputs.hidden,
        inputs.topk_ids,
        inputs.topk_weights,
        rows_up_first(inputs, codes_of(inputs.w13)),
        inputs.w2,
    )
    return out


def _number(activation: str) -> int:
    # The references take a number: that of the release, by its name.
    name = "swiglu" if activation == "swiglu_oai" else activation
    return int(activation_member(name))


def _clamps(inputs: MoEInputs) -> dict[str, Any]:
    names = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
    return {names[name]: each for name, each in swiglu_numbers(inputs).items()}


def _routed(inputs: MoEInputs) -> tuple[Any, ...]:
    """Return weights, ids, this rank's first expert and the number of all experts."""
    everywhere = inputs.num_experts or codes_of(inputs.w13).shape[0]
    return inputs.topk_weights, inputs.topk_ids.long(), inputs.expert_offset, everywhere


@TRACE.adapter(
    "moe",
    "flashinfer-trace-bf16-moe",
    *_experts(BF16, "swiglu", "swiglu_oai", "geglu_tanh", "relu2"),
    features=("interleaved_w13", "expert_parallel", "duplicate_ids", "swiglu_parameters"),
)
def trace_bf16(inputs: MoEInputs) -> torch.Tensor:
    """Call ``_moe_bf16_run_experts``, the experts of ``_trtllm_bf16_moe_reference``."""
    out: torch.Tensor = template(MOE_TEMPLATES, BF16)(
        inputs.hidden,
        rows_up_first(inputs, codes_of(inputs.w13)),
        inputs.w2,
        *_routed(inputs),
        activation_type=_number(inputs.activation),
        **_clamps(inputs),
    )
    return out


def _other_blocks(problem: MoEProblem, _: Target) -> str | None:
    return first_reason(
        (
            problem.quantized != "fp8_block" or not problem.quantized_hidden,
            "weights and hidden states are FP8 with block scales",
        ),
        (
            problem.hidden % BLOCK or problem.inter % BLOCK,
            f"the reference takes whole blocks of {BLOCK}",
        ),
        (
            problem.interleaved,
            "a block's scale is not of gate or up rows alone where they are interleaved",
        ),
    )


@TRACE.adapter(
    "moe",
    "flashinfer-trace-fp8-block-moe",
    *_experts(FP8_EXPERTS, "swiglu", "swiglu_oai"),
    _other_blocks,
    features=(
        "interleaved_w13",
        "expert_parallel",
        "duplicate_ids",
        "fp8_weights",
        "quantized_hidden",
        "swiglu_parameters",
    ),
)
def trace_fp8_block(inputs: MoEInputs) -> torch.Tensor:
    """Call ``_fp8_moe_run_experts``; scales of the hidden states are [hidden / 128, tokens]."""
    out: torch.Tensor = template(MOE_TEMPLATES, FP8_EXPERTS)(
        codes_of(inputs.hidden),
        scales_of(inputs.hidden).T,
        rows_up_first(inputs, codes_of(inputs.w13).view(torch.uint8)).view(E4M3),
        rows_up_first(inputs, scales_of(inputs.w13)),
        codes_of(inputs.w2),
        scales_of(inputs.w2),
        *_routed(inputs),
        **_clamps(inputs),
    )
    return out


@TRACE.adapter(
    "moe",
    "flashinfer-trace-mxfp4-moe",
    *_experts(FP4, "swiglu"),
    _weights("mxfp4", "MXFP4"),
    features=(
        "moe_biases",
        "interleaved_w13",
        "expert_parallel",
        "duplicate_ids",
        "mxfp4_weights",
    ),
)
def trace_mxfp4(inputs: MoEInputs) -> torch.Tensor:
    """Call ``_fp4_moe_run_experts`` on MXFP4 weights, whose scales it takes as bytes."""
    out: torch.Tensor = template(MOE_TEMPLATES, FP4)(
        inputs.hidden,
        None,
        rows_up_first(inputs, codes_of(inputs.w13)),
        rows_up_first(inputs, scales_of(inputs.w13).view(torch.uint8)),
        codes_of(inputs.w2),
        scales_of(inputs.w2).view(torch.uint8),
        bias_up_first(inputs),
        inputs.w2_bias,
        *_routed(inputs),
    )
    return out


@TRACE.adapter(
    "moe",
    "flashinfer-trace-nvfp4-moe",
    *_experts(CUTE_DSL, "swiglu", "geglu_tanh", "relu2"),
    _weights("nvfp4", "NVFP4"),
    features=("interleaved_w13", "duplicate_ids", "nvfp4_weights"),
)
def trace_nvfp4(inputs: MoEInputs) -> torch.Tensor:
    """Call ``_cute_dsl_fused_moe_reference`` with 16-bit hidden states and NVFP4 weights."""
    experts = codes_of(inputs.w13).shape[0]
    out: torch.Tensor = template(MOE_TEMPLATES, CUTE_DSL)(
        x=inputs.hidden,
        x_sf=None,
        token_selected_experts=inputs.topk_ids,
        token_final_scales=inputs.topk_weights,
        w1_weight=rows_up_first(inputs, codes_of(inputs.w13)),
        w1_weight_sf=rows_up_first(inputs, scales_of(inputs.w13).view(torch.uint8)).view(E4M3),
        w1_alpha=_global_scale(inputs.w13),
        fc2_input_scale=None,
        w2_weight=codes_of(inputs.w2),
        w2_weight_sf=scales_of(inputs.w2),
        w2_alpha=_global_scale(inputs.w2),
        num_experts=experts,
        top_k=inputs.topk_ids.shape[1],
        activation_type=_number(inputs.activation),
        quant_mode="w4a16",
    )
    return out


def _global_scale(matrix: Any) -> torch.Tensor:  # noqa: ANN401  a QuantizedMatrix
    codes = matrix.codes
    scale = torch.as_tensor(matrix.global_scale, dtype=torch.float32, device=codes.device)
    return scale.expand(codes.shape[0])
