"""Kernelproof's own Triton MoE: sorting, two grouped products, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..reference import Arithmetic, MoEProblem, Problem
from ..reference.moe_inputs import MoEInputs
from .gating.rules import version_matches
from .protocol import implementation
from .target import Target
from .triton_moe_blocks import block_rows
from .triton_moe_call import run_experts
from .triton_support import unavailable

ARITHMETIC = Arithmetic(
    accumulate="float32",
    intermediate="inputs",
    partial_outputs=True,
    fp8_products="fixed_point",
)
"""The intermediate is stored in the dtype of the hidden states (FP8 ones: with a scale for each
tile of a row), each slot's output in that of the result. (Not so in the interpreter, for bfloat16.)
Where both operands are FP8, Hopper's tensor cores sum in fixed point."""
WITH_GATHER = ">=3.3.dev0"
FEATURES = (
    "moe_biases",
    "interleaved_w13",
    "expert_parallel",
    "weights_on_input",
    "shared_experts",
    "duplicate_ids",
    "fp8_weights",
    "quantized_hidden",
    "swiglu_parameters",
    "strided_hidden",
    "large_weights",
)


def _supports(problem: Problem, target: Target) -> bool | str:
    del problem
    absent = unavailable(target)
    if absent is None and target.triton and not version_matches(target.triton, WITH_GATHER):
        return f"sorting needs tl.gather, which Triton has from 3.3 on; this is {target.triton}"
    return absent or True


def _compile_key(problem: Problem) -> Hashable:
    """Name the compiled kernels: compile-time constants, and what alignments are guessed from."""
    if not isinstance(problem, MoEProblem):
        return None
    divides = [
        size % number == 0
        for size in (problem.hidden, problem.inter)
        for number in (16, 32, 64, 128)
    ]
    return (
        problem.dtype, problem.activation, problem.quantized, problem.quantized_hidden,
        problem.biases, problem.weights_on_input, problem.shared_experts > 0,
        problem.swiglu_parameters == "each", problem.top_k, *divides,
        # Sorting has a place for each expert; offsets beyond int32 are passed as int64.
        problem.num_experts.bit_length(), problem.here * problem.hidden * problem.inter >= 2**30,
        block_rows(problem.num_tokens * problem.top_k / problem.num_experts),
    )  # fmt: skip


@implementation(
    "moe",
    name="triton-moe",
    backend="triton",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=_compile_key,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts to tokens in four or five launches, twice as many where some are shared.

    None of them waits for the host.

    Args:
        inputs: the arguments of ``reference.moe``; float32, float16 or bfloat16, strided or not;
            e4m3 weights with scales by tensor, row or block of 128, and hidden states likewise.
            Where hidden states are FP8, so is the intermediate.

    Returns:
        [tokens, hidden] in ``out_dtype``: ``out`` where it is given.
    """
    return run_experts(inputs)
