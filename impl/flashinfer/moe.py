"""FlashInfer's fused MoE: by CUTLASS (``cutlass_fused_moe``), trtllm-gen and CuTe DSL.

The gate is the second half of ``fc1_expert_weights``' rows; activations go by the name of their
``ActivationType``, and everything by keyword: ``tune_max_num_tokens`` was the 26th parameter in
0.6.13, which is ``use_wfp4afp8_humming`` in 0.7.2.post1. Experts of a rank are those from
ep_rank * (experts on the rank), so that shards are of one size.

FP8 with one scale a tensor takes FP8 hidden states and a scale for the intermediate that is given
beforehand. FP8 with block scales takes 16-bit hidden states and quantises them itself, 128 columns
at a time, which the oracle has no bound for: only hidden states that this leaves as they are are
given to it, those of the exact grid, whose magnitudes are equal.

trtllm-gen (FP8 in blocks) and CuTe DSL (on Hopper) take experts that were chosen before, by global
ids. Neither has run for this project: their calls are bound to the signatures of the releases
alone (docs/moe.md).
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
from ..torch.moe_layouts import (
    both_biases,
    codes_of,
    gate_first,
    numbers_of,
    rows_up_first,
    scales_of,
    swiglu_numbers,
)
from .backends import Backend, one_module
from .calls import flashinfer
from .claims import Refuses, needing, no_tokens, offered, unavailable
from .libraries import library_named
from .names import ACTIVATION_NAMES, activation_member

TUNED_TOKENS = 8192
BYTES_ALIGNED = 16
BLOCK = 128
CUTLASS = Backend(
    "cutlass",
    Arithmetic(
        projections="inputs", intermediate="inputs", combine="inputs", fp8_products="fixed_point"
    ),
    features=(
        "moe_biases",
        "interleaved_w13",
        "expert_parallel",
        "fp8_weights",
        "quantized_hidden",
        "swiglu_parameters",
        "nondeterministic",
    ),
    # One module of a chip, whatever the dtypes and activations.
    compile_key=one_module("cutlass-moe"),
    library=library_named("fused_moe_{sm}"),
    build_ahead=True,
    build_minutes=432.0,  # 27 minutes on 16 cores, measured for SM90
    writes_out=True,
)
"""``cutlass_fused_moe_kernels.cuh``: the first product is stored in the output's dtype, the
activation's results in that of the hidden states, and the fused finalize adds up in the output's
dtype, by atomics."""


def _not_cutlass(problem: MoEProblem, _: Target) -> str | None:
    """Return the reason why ``cutlass_fused_moe`` does not take a problem, whatever its weights."""
    per_row = BYTES_ALIGNED // (1 if problem.quantized else 2)
    return first_reason(
        (problem.dtype == "float32", "FlashInfer's modules for float32 are not looked at"),
        (problem.activation not in ACTIVATION_NAMES, "FlashInfer has no such activation"),
        (
            any(size % per_row for size in (problem.hidden, problem.inter)),
            f"TMA needs hidden and inter in multiples of {per_row}",
        ),
        (
            problem.num_experts % problem.here or problem.expert_offset % problem.here,
            "ep_size and ep_rank say that all ranks have as many experts",
        ),
        (
            problem.quantized and not problem.quantized_hidden,
            "FP8 weights are multiplied by FP8 hidden states, which are to be given",
        ),
    )


CALLS: tuple[Refuses, ...] = (unavailable, _not_cutlass, no_tokens)


def _other_weights(problem: MoEProblem, _: Target) -> str | None:
    known = problem.quantized in ("", "fp8_tensor")
    return None if known else f"not for weights in {problem.quantized}"


def _other_blocks(problem: MoEProblem, _: Target) -> str | None:
    return first_reason(
        (problem.quantized != "fp8_block", "for weights in FP8 with block scales"),
        (problem.dtype != "bfloat16", "the kernel's hidden states and outputs are bfloat16"),
        (
            problem.regime != "exact_grid",
            "the kernel quantises hidden states itself: only what that leaves as it is",
        ),
        (
            any(size % BLOCK for size in (problem.hidden, problem.inter)),
            f"blocks of {BLOCK} rows are whole",
        ),
        (
            problem.interleaved,
            "a block's scale is not of gate or up rows alone where they are interleaved",
        ),
    )


def _weights(inputs: MoEInputs) -> dict[str, Any]:
    """Return weights, hidden states and scales, in the form of their quantisation."""
    found: dict[str, Any] = {
        "input": codes_of(inputs.hidden),
        "fc1_expert_weights": rows_up_first(inputs, codes_of(inputs.w13)),
        "fc2_expert_weights": codes_of(inputs.w2),
        "quant_scales": None,
    }
    if isinstance(inputs.w13, torch.Tensor):
        return found
    first, second = scales_of(inputs.w13), scales_of(inputs.w2)
    if inputs.w13.format.scales == "block":
        return {
            **found,
            "input": numbers_of(inputs.hidden, inputs.out_dtype),
            "quant_scales": [rows_up_first(inputs, first), second],
            "use_deepseek_fp8_block_scale": True,
        }
    states = scales_of(inputs.hidden)
    middle = torch.as_tensor(inputs.intermediate_scale, dtype=torch.float32, device=first.device)
    scales = [first * states, middle.reciprocal(), second * middle, states]
    return {**found, "quant_scales": scales}


def _apply(inputs: MoEInputs) -> torch.Tensor:
    """Call ``cutlass_fused_moe``, all of whose kernels are one module of a chip."""
    here = codes_of(inputs.w13).shape[0]
    shape = (inputs.topk_ids.shape[0], codes_of(inputs.w2).shape[1])
    first_bias, second_bias = both_biases(inputs)
    out = inputs.out
    if out is None:
        out = torch.empty(shape, dtype=inputs.out_dtype, device=inputs.topk_ids.device)
    flashinfer("flashinfer.fused_moe").cutlass_fused_moe(
        **_weights(inputs),
        token_selected_experts=inputs.topk_ids,
        token_final_scales=inputs.topk_weights,
        output_dtype=inputs.out_dtype,
        fc1_expert_biases=first_bias,
        fc2_expert_biases=second_bias,
        **{f"swiglu_{name}": each for name, each in swiglu_numbers(inputs).items()},
        ep_size=(inputs.num_experts or here) // here,
        ep_rank=inputs.expert_offset // here,
        output=out,
        tune_max_num_tokens=TUNED_TOKENS,
        # With its numbers given Swiglu becomes SwigluBias, as engines call swiglu_oai.
        activation_type=activation_member(
            "swiglu" if inputs.activation == "swiglu_oai" else inputs.activation
        ),
    )
    return out


@CUTLASS.adapter("moe", "flashinfer-cutlass-moe", *CALLS, _other_weights)
def cutlass_moe(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts of 16 bits, or of FP8 with one scale a tensor."""
    return _apply(inputs)


@CUTLASS.adapter("moe", "flashinfer-cutlass-moe-fp8-block", *CALLS, _other_blocks)
def cutlass_moe_fp8_block(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts of FP8 with block scales to hidden states that FP8 holds."""
    return _apply(inputs)


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
