"""SGLang's merge of two attention states, by Triton: where its CUDA kernel cannot."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ...reference import AttentionOutput, MergeProblem
from ...reference.tensors.inputs import MergeInputs
from ..features import ALGEBRA
from ..targets.refusal import Refusal
from ..targets.target import Target
from .sglang_calls import file_of, kernel, stubs
from .sources import load, unavailable

FILE = file_of("merge_state")
STATES = 2
ROWS = (1, 2, 4)
"""Tokens of a head with which the second state begins at every alignment."""


def _supports(problem: MergeProblem, target: Target) -> Refusal | str | bool:
    if problem.num_states != STATES:
        return f"it merges 2 states, not {problem.num_states}"
    return unavailable(FILE, target) or True


def _compile_key(problem: MergeProblem) -> Hashable:
    rows = problem.num_tokens * problem.num_heads
    return problem.dtype, problem.head_dim, min(rows & -rows, ROWS[-1])


def _kernels(problem: MergeProblem) -> list[MergeProblem]:
    return [replace(problem, num_tokens=rows, num_heads=1) for rows in ROWS]


@kernel(
    "merge_state",
    name="sglang-merge-state",
    features=("inf_marks_empty", ALGEBRA),
    supports=_supports,
    compile_key=_compile_key,
    kernels=_kernels,
)
def merge(inputs: MergeInputs) -> AttentionOutput:
    """Merge a prefix's state with a suffix's by ``merge_state_triton``."""
    with load(FILE, stubs) as kernels:
        out, lse = kernels.merge_state_triton(
            prefix_output=inputs.states[0],
            prefix_lse=inputs.lses[0],
            suffix_output=inputs.states[1],
            suffix_lse=inputs.lses[1],
            output=inputs.out,
            output_lse=inputs.lse,
        )
    return AttentionOutput(out, lse)
