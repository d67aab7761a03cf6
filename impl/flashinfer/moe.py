"""FlashInfer's fused MoE by CUTLASS: ``cutlass_fused_moe``, for 16-bit and FP8 weights.

The gate is the second half of ``fc1_expert_weights``' rows; activations go by the name of their
``ActivationType``, and everything by keyword: ``tune_max_num_tokens`` was the 26th parameter in
0.6.13, which is ``use_wfp4afp8_humming`` in 0.7.2.post1. Experts of a rank are those from
ep_rank * (experts on the rank), so that shards are of one size.

FP8 with one scale a tensor takes FP8 hidden states and a scale for the intermediate that is given
beforehand. FP8 with block scales takes 16-bit hidden states and quantises them itself, 128 columns
at a time, which the oracle has no bound for: only hidden states that this leaves as they are are
given to it, those of the exact grid, whose magnitudes are equal.
"""

from __future__ import annotations

from typing import Any

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.tensors.moe_inputs import MoEInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe_layouts import (
    both_biases,
    codes_of,
    numbers_of,
    rows_up_first,
    scales_of,
    swiglu_numbers,
)
from .backends import Backend, one_module
from .calls import flashinfer
from .claims import Refuses, no_tokens, unavailable
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
