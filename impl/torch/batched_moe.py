"""Batched experts in plain torch: the loop over experts, each on as many rows as are in use.

It computes in float32, and shares no code with the oracle. Codes are widened to float32 first.
"""

from __future__ import annotations

import torch

from ...reference.tensors.batched_moe import BatchedMoEInputs
from ...reference.tensors.moe_inputs import MoEInputs
from ..protocol import implementation
from .moe import LARGEST_FP8, activated, of_expert
from .moe_weights import expert_weights, hidden_states

FEATURES = (
    "moe_biases",
    "interleaved_w13",
    "swiglu_parameters",
    "fp8_weights",
    "nvfp4_weights",
    "mxfp4_weights",
    "quantized_hidden",
)


@implementation("batched_moe", name="torch-batched-moe", features=FEATURES)
def experts(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Compute each expert's rows in use; the others are zeros."""
    options = options_of(inputs)
    hidden = rows_of(inputs)
    out = torch.zeros_like(hidden)
    for expert, count in enumerate(inputs.counts.tolist()):
        if count:
            out[expert, :count] = apply_expert(options, hidden[expert, :count], expert)
    return out.to(inputs.out_dtype)


def rows_of(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Return the hidden states [experts, rows, hidden] in float32."""
    hidden = inputs.hidden
    if isinstance(hidden, torch.Tensor):
        return hidden.float()
    scales = hidden.scales
    flat = hidden._replace(
        codes=hidden.codes.flatten(0, 1), scales=scales.flatten(0, 1) if scales.dim() else scales
    )
    rows: torch.Tensor = hidden_states(flat).unflatten(0, hidden.codes.shape[:2])
    return rows


def options_of(inputs: BatchedMoEInputs) -> MoEInputs:
    """Return the weights and options as those of a call of ``moe`` that has no token."""
    nobody = inputs.counts.new_empty((0, 1))
    return MoEInputs(
        nobody, inputs.w13, inputs.w2, nobody, nobody, inputs.out_dtype, **inputs.keywords()
    )


def apply_expert(inputs: MoEInputs, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Return what an expert makes of rows [rows, hidden] in float32."""
    projected = x @ expert_weights(inputs.w13, expert).T
    if inputs.w13_bias is not None:
        projected = projected + inputs.w13_bias[expert].float()
    middle = activated(inputs, projected, expert)
    if inputs.intermediate_scale is not None:
        largest = LARGEST_FP8 * of_expert(inputs.intermediate_scale, expert)
        middle = middle.clamp(-largest, largest)
    y = middle @ expert_weights(inputs.w2, expert).T
    return y if inputs.w2_bias is None else y + inputs.w2_bias[expert].float()
