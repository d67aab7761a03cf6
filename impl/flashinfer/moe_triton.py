"""A mixture of experts around FlashInfer's Triton activation, ``silu_and_mul``.

Its products are torch's, expert by expert. The gate is the *first* half here, unlike in
FlashInfer's fused MoE. Without a GPU the activation runs in Triton's interpreter, which rounds
float32 to bfloat16 by dropping bits, so that it stores float32 there.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.tensors.moe_inputs import MoEInputs
from ..targets.optional import require
from ..targets.target import Target
from ..torch.moe_layouts import codes_of, gate_first
from ..torch.moe_rows import combined, of_rows, sorted_rows
from .backends import TRITON
from .triton import unavailable

ACTIVATION = "flashinfer.triton.activation"


def _not_swiglu(problem: MoEProblem, _: Target) -> str | None:
    return None if problem.activation == "swiglu" else "silu_and_mul is SwiGLU alone"


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    dtype = x.dtype if x.is_cuda else torch.float32
    found: torch.Tensor = require(ACTIVATION, "flashinfer").silu_and_mul(x, dtype=dtype)
    return found.to(x.dtype)


@TRITON.adapter(
    "moe",
    "flashinfer-triton-silu-and-mul",
    unavailable(ACTIVATION),
    _not_swiglu,
    features=("moe_biases", "interleaved_w13", "expert_parallel", "duplicate_ids"),
    arithmetic=Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True),
)
def silu_and_mul_moe(inputs: MoEInputs) -> torch.Tensor:
    """Multiply by torch, activate by ``silu_and_mul``, multiply again and add up."""
    rows, outputs = sorted_rows(inputs), []
    hidden, w2 = codes_of(inputs.hidden), codes_of(inputs.w2)
    w13 = gate_first(codes_of(inputs.w13), gated=True, interleaved=inputs.interleaved)
    bias = inputs.w13_bias
    if bias is not None:
        bias = gate_first(bias, gated=True, interleaved=inputs.interleaved)
    bounds = rows.indptr.tolist()
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        x = hidden[rows.tokens[start:stop]]
        projected = x.float() @ w13[expert].float().T
        if bias is not None:
            projected += bias[expert].float()
        middle = _silu_and_mul(projected.to(x.dtype))
        outputs.append(middle.float() @ w2[expert].float().T)
    second = torch.cat(outputs) if outputs else inputs.topk_weights.new_zeros((0, w2.shape[1]))
    return combined(inputs, second + of_rows(inputs.w2_bias, rows), rows)
