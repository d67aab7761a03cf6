"""A mixture of experts whose two products are FlashInfer's group GEMM, with torch around them.

``SegmentGEMMWrapper`` multiplies segments of rows, here an expert's tokens, by a weight each, in 16
bits or FP8, without scales: they multiply the products, in float32. Its module takes much less to
compile than that of the fused MoE.
"""

from __future__ import annotations

import torch

from ...reference import Arithmetic, MoEProblem, QuantizedMatrix
from ...reference.tensors.moe_inputs import MoEInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from ..torch.moe_layouts import codes_of
from ..torch.moe_rows import Rows, activated, combined, of_rows, sorted_rows
from .backends import Backend, one_module
from .calls import wrapper
from .claims import no_tokens, unavailable
from .libraries import library_named

GROUP_GEMM = Backend(
    "group-gemm",
    Arithmetic(
        projections="inputs",
        intermediate="inputs",
        partial_outputs=True,
        fp8_products="fixed_point",
    ),
    features=(
        "moe_biases",
        "interleaved_w13",
        "expert_parallel",
        "duplicate_ids",
        "fp8_weights",
        "quantized_hidden",
        "swiglu_parameters",
    ),
    compile_key=one_module("group-gemm"),
    library=library_named("gemm_sm90"),
    build_ahead=True,
)
"""``group_gemm_sm90.cuh``: products are stored in 16 bits; FP8 accumulates fast, unpromoted."""
BYTES_ALIGNED = 16
E4M3, LARGEST_E4M3 = torch.float8_e4m3fn, 448.0
Given = torch.Tensor | QuantizedMatrix


def _not_group_gemm(problem: MoEProblem, _: Target) -> str | None:
    codes = bool(problem.quantized)
    per_row = BYTES_ALIGNED // (1 if codes else 2)
    return first_reason(
        (problem.dtype == "float32", "the group GEMM is for 16 bits and FP8"),
        (
            any(size % per_row for size in (problem.hidden, problem.inter)),
            f"CUTLASS needs hidden and inter in multiples of {per_row}",
        ),
        (
            problem.quantized not in ("", "fp8_tensor", "fp8_channel"),
            f"the group GEMM has no scales within a row, as {problem.quantized} has",
        ),
        (codes and not problem.quantized_hidden, "both factors are FP8, or none"),
        (
            codes and problem.dtype != "bfloat16",
            "a product of codes is beyond float16, and is stored in the output's dtype",
        ),
    )


def _gemm(x: torch.Tensor, weights: Given, rows: Rows) -> torch.Tensor:
    """Multiply each expert's rows [rows, columns] by its weights: float32 [rows, n], unscaled."""
    codes = codes_of(weights)
    if not len(x):  # nothing on this rank: nothing is launched
        return x.new_zeros((0, codes.shape[1]), dtype=torch.float32)
    found: torch.Tensor = wrapper("SegmentGEMMWrapper", x.device).run(
        x=x,
        weights=codes,
        batch_size=codes.shape[0],
        weight_column_major=True,
        seg_indptr=rows.indptr,
    )
    return found.float()


def _scales(weights: Given, rows: Rows) -> torch.Tensor | float:
    """Return the scales of weights for each row: [rows, 1], or [rows, n] for one a channel."""
    if isinstance(weights, torch.Tensor):
        return 1.0
    scales = weights.scales[rows.experts]
    return scales if weights.format.scales == "channel" else scales.unsqueeze(1)


def _hidden(inputs: MoEInputs, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the rows' hidden states, or their codes, and their scales."""
    if isinstance(inputs.hidden, torch.Tensor):
        return inputs.hidden[rows.tokens], 1.0
    # Not every index knows FP8: bytes do.
    codes = inputs.hidden.codes.view(torch.uint8)[rows.tokens].view(inputs.hidden.codes.dtype)
    scales = inputs.hidden.scales
    return codes, scales if not scales.dim() else scales[rows.tokens].unsqueeze(1)


def _quantised(
    inputs: MoEInputs, middle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the second product's operand, and its scales."""
    if isinstance(inputs.hidden, torch.Tensor):
        return middle.to(inputs.hidden.dtype), 1.0
    scale = inputs.intermediate_scale
    if scale is None:
        largest = middle.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / LARGEST_E4M3, 1.0)
    codes = (middle / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return codes, scale


@GROUP_GEMM.adapter("moe", "flashinfer-group-gemm-moe", unavailable, _not_group_gemm, no_tokens)
def group_gemm_moe(inputs: MoEInputs) -> torch.Tensor:
    """Sort rows by expert, multiply, activate, multiply, and add up with torch."""
    rows = sorted_rows(inputs)
    x, of_x = _hidden(inputs, rows)
    first = _gemm(x, inputs.w13, rows) * of_x * _scales(inputs.w13, rows)
    middle = activated(inputs, first + of_rows(inputs.w13_bias, rows), rows)
    operand, of_operand = _quantised(inputs, middle)
    second = _gemm(operand, inputs.w2, rows) * of_operand * _scales(inputs.w2, rows)
    return combined(inputs, second + of_rows(inputs.w2_bias, rows), rows)
