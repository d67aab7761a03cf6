"""Kernelproof's own Triton kernel for merging attention states, of any number in one launch."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from ...reference import AttentionOutput, MergeProblem
from ...reference.tensors.inputs import MergeInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.optional import require
from .support import ceil_div, finish, kernel, next_power_of_two, require_triton, stored
from .units import in_units, strides, unit_of

KERNEL = "kernelproof.impl.triton.kernels.merge"
ELEMENTS, INTERPRETED_ELEMENTS = 2**7, 2**14
"""Elements of out a program: few keep a GPU busy, many spare the interpreter programs."""
BUILD_MINUTES = 0.04
FEW_STATES, MANY_STATES = 2, 8
"""States whose loads are under way together: merging 16 one by one takes longer than attention."""


def _kernels(problem: MergeProblem) -> list[MergeProblem]:
    return [
        MergeProblem(num_states=states, dtype=problem.dtype, head_dim=problem.head_dim)
        for states in (FEW_STATES, MANY_STATES)
    ]


def _compile_key(problem: MergeProblem) -> Hashable:
    return problem.dtype, problem.head_dim, problem.num_states > FEW_STATES


@kernel(
    "merge_state",
    name="triton-merge-state",
    writes_out=True,
    features=("padded_states", "lse_views", "large_rows", ALGEBRA),
    compile_key=_compile_key,
    kernels=_kernels,
    build_minutes=BUILD_MINUTES,
)
def merge_state(inputs: MergeInputs) -> AttentionOutput:
    """Merge states in one launch.

    Args:
        inputs: outs [states, tokens, heads, dim] and their natural-log lses [states, tokens,
            heads]; (0, -inf) is a state of no keys, and its out is never read.

    Returns:
        out [tokens, heads, dim] in ``out_dtype`` and the natural-log lse [tokens, heads] in
        float32; 0 and -inf where every state is empty.
    """
    out, lse = inputs.out, inputs.lse
    if out is None:
        out = inputs.outs.new_empty(inputs.outs.shape[1:], dtype=inputs.out_dtype)
    if lse is None:
        lse = inputs.lses.new_empty(inputs.lses.shape[1:], dtype=torch.float32)
    result = AttentionOutput(out, lse)
    merge(inputs.outs, inputs.lses, result)
    return result


def merge(
    outs: torch.Tensor, lses: torch.Tensor, result: AttentionOutput, *, base_2: bool = False
) -> None:
    """Merge states into a given result.

    Args:
        outs: [states, tokens, heads, dim], any floating dtype, strided or not.
        lses: [states, tokens, heads].
        result: out [tokens, heads, dim] and lse [tokens, heads] float32, in natural log.
        base_2: whether ``lses`` are in base 2; they are natural otherwise.
    """
    require_triton()
    out, lse = result
    states, tokens, heads, dim = outs.shape
    if not (tokens and heads):
        return
    block_dim = next_power_of_two(dim)
    block_rows = max(ELEMENTS // block_dim, 1)
    if not out.is_cuda:
        block_rows = min(
            max(INTERPRETED_ELEMENTS // block_dim, 1), next_power_of_two(tokens * heads)
        )
    at_once = FEW_STATES if states <= FEW_STATES else MANY_STATES
    written = stored(out)
    steps = {
        **strides("outs", outs, "state token head"), **strides("out", written, "token head")
    }  # fmt: skip
    unit = unit_of(*steps.values())
    arguments: dict[str, Any] = {
        "outs": outs, "lses": lses, "out": written, "lse": lse,
        "num_states": states, "num_tokens": tokens, "num_heads": heads,
        "in_factor": 1.0 if base_2 else math.log2(math.e),
        "out_factor": math.log(2.0) if base_2 else 1.0,
        **in_units(steps, unit), "outs_dim": outs.stride(3), "out_dim": written.stride(2),
        **strides("lses", lses, "state token head"), **strides("lse", lse, "token head"),
        "UNIT": unit, "DIM": dim, "BLOCK_DIM": block_dim, "BLOCK_ROWS": block_rows,
        "STATES_AT_ONCE": at_once,
    }  # fmt: skip
    with scalars_as_bounds(out):
        require(KERNEL, "triton").merge[(ceil_div(tokens * heads, block_rows),)](
            **arguments, **({"num_warps": 1} if out.is_cuda else {})
        )
    finish(out, written)
