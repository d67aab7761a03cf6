"""FlashInfer's fused MoE by other backends: trtllm-gen in FP8 blocks, and CuTe DSL on Hopper.

Both take experts that were chosen before, by global ids. Neither has run for this project: their
calls are bound to the signatures of the releases alone (docs/moe.md).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.tensors.moe_inputs import MoEInputs
from ..gating.rules import version_matches
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe_layouts import codes_of, gate_first, rows_up_first, scales_of, swiglu_numbers
from .backends import Backend, one_module
from .calls import flashinfer
from .claims import needing, no_tokens, offered, unavailable
from .moe import BLOCK, TUNED_TOKENS
from .names import activation_member

FUSED_MOE = "flashinfer.fused_moe"
PAIRS = ">=0.6.18.dev0"
"""Releases that take ids and weights apart; others pack them, and round weights to bfloat16."""
INTERLEAVED_ROWS = 32
"""Rows of up, then as many of gate, in turns."""


TRTLLM = Backend(
    "trtllm-gen",
    Arithmetic(projections="inputs", intermediate="inputs", combine="inputs"),
    features=("expert_parallel", "fp8_weights", "quantized_hidden", "nondeterministic"),
    compile_key=one_module("trtllm-moe"),
    build_ahead=True,
)
"""Binaries: at least what the CUTLASS sources round."""


def _not_trtllm(problem: MoEProblem, target: Target) -> str | None:
    return first_reason(
        (problem.dtype != "bfloat16", "its output is bfloat16"),
        (
            problem.quantized != "fp8_block" or not problem.quantized_hidden,
            "weights and hidden states are FP8 with block scales",
        ),
        (problem.activation != "swiglu", "with DeepSeek's scales its activation is SwiGLU"),
        (
            problem.hidden % BLOCK or problem.inter % BLOCK or problem.interleaved,
            f"whole blocks of {BLOCK} gate rows and of up rows have a scale",
        ),
        (
            not version_matches(target.flashinfer, PAIRS),
            "before 0.6.18 routing weights are packed with their ids, in bfloat16",
        ),
    )


@TRTLLM.adapter("moe", "flashinfer-trtllm-fp8-block-moe", unavailable, _not_trtllm, no_tokens)
def trtllm_fp8_block(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts by ``trtllm_fp8_block_scale_routed_moe``, weights in their plain order."""
    first, second = codes_of(inputs.w13), codes_of(inputs.w2)
    out = torch.empty(
        (inputs.topk_ids.shape[0], second.shape[1]),
        dtype=inputs.out_dtype,
        device=inputs.topk_ids.device,
    )
    flashinfer(FUSED_MOE).trtllm_fp8_block_scale_routed_moe(
        topk_ids=(inputs.topk_ids, inputs.topk_weights),
        routing_bias=None,
        hidden_states=codes_of(inputs.hidden),
        hidden_states_scale=scales_of(inputs.hidden).T.contiguous(),
        gemm1_weights=rows_up_first(inputs, first.view(torch.uint8)).view(first.dtype),
        gemm1_weights_scale=rows_up_first(inputs, scales_of(inputs.w13)),
        gemm2_weights=second,
        gemm2_weights_scale=scales_of(inputs.w2),
        num_experts=inputs.num_experts or first.shape[0],
        top_k=inputs.topk_ids.shape[1],
        n_group=None,
        topk_group=None,
        intermediate_size=second.shape[2],
        local_expert_offset=inputs.expert_offset,
        local_num_experts=first.shape[0],
        routed_scaling_factor=None,
        output=out,
        tune_max_num_tokens=TUNED_TOKENS,
    )
    return out


def _not_cute_dsl(problem: MoEProblem, _: Target) -> str | None:
    rows = INTERLEAVED_ROWS if problem.gated else 8
    return first_reason(
        (problem.quantized, "its weights are of 16 bits"),
        (problem.numbers_of_each, "it takes one alpha, beta and limit for all experts"),
        (problem.hidden % 8, "hidden is a multiple of 8"),
        (problem.inter % rows, f"inter is a multiple of {rows}"),
    )


def alternating(rows: torch.Tensor) -> torch.Tensor:
    """Bring rows [experts, 2 * inter, ...], gates first, into turns of 32 ups and 32 gates."""
    gates, ups = (each.unflatten(1, (-1, INTERLEAVED_ROWS)) for each in rows.chunk(2, dim=1))
    return torch.stack((ups, gates), dim=2).flatten(1, 3)


def _activation(inputs: MoEInputs) -> dict[str, Any]:
    """Name the activation and its numbers where they are not those of plain SwiGLU.

    0.7.0 has that alone, and no such parameters.
    """
    numbers = swiglu_numbers(inputs)
    if inputs.activation == "swiglu" and not numbers:
        return {}
    name = "swiglu" if inputs.activation == "swiglu_oai" else inputs.activation
    return {
        "activation_type": activation_member(name),
        **{f"swiglu_{which}": float(each[0]) for which, each in numbers.items()},
    }


def _compiled(problem: MoEProblem) -> Hashable:
    """Return what the kernels are compiled for."""
    return (
        "cute-dsl-moe",
        problem.dtype,
        problem.activation,
        problem.swiglu_parameters,
        problem.top_k,
    )


CUTE_DSL = Backend(
    "cute-dsl",
    Arithmetic(intermediate="inputs", combine="inputs"),
    features=("interleaved_w13", "expert_parallel", "swiglu_parameters", "nondeterministic"),
    compile_key=_compiled,
    writes_out=True,
)
"""``sm90_contiguous_*.py``: the activation is in the first product's epilogue; the fused finalize
adds up in the output's dtype."""


@CUTE_DSL.adapter(
    "moe",
    "flashinfer-cute-dsl-moe-bf16",
    unavailable,
    _not_cute_dsl,
    needing("cutlass.cute", "nvidia-cutlass-dsl"),
    # FlashInfer goes without it where anything that it imports for it is missing.
    offered(FUSED_MOE, "cute_dsl_fused_moe_bf16"),
)
def cute_dsl_bf16(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts by ``cute_dsl_fused_moe_bf16``, compiled for an activation and a top_k."""
    first = codes_of(inputs.w13)
    if ACTIVATIONS[inputs.activation].gated:
        first = alternating(gate_first(first, gated=True, interleaved=inputs.interleaved))
    out = inputs.out
    if out is None:
        out = torch.empty_like(codes_of(inputs.hidden))
    flashinfer(FUSED_MOE).cute_dsl_fused_moe_bf16(
        x=inputs.hidden,
        token_selected_experts=inputs.topk_ids,
        token_final_scales=inputs.topk_weights,
        w1_weight=first,
        w2_weight=inputs.w2,
        num_experts=inputs.num_experts or first.shape[0],
        top_k=inputs.topk_ids.shape[1],
        num_local_experts=first.shape[0],
        local_expert_offset=inputs.expert_offset,
        moe_output=out,
        **_activation(inputs),
    )
    return out
