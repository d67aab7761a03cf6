"""vLLM's Triton kernel that merges two states of attention, ``merge_attn_states``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch

from ...reference import MergeProblem
from ...reference.tensors.inputs import MergeInputs
from ..features import ALGEBRA
from ..targets.refusal import first_reason
from ..targets.target import Target
from .claims import wrong_here
from .sources import implementation, known, load, says, unavailable
from .vllm_stubs import stubs

NAME = "ops.triton_merge_attn_states"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")
STATES = 2


def _supports(problem: MergeProblem, target: Target) -> bool | str:
    narrow = "" if problem.output_scale is None else "an output"
    return first_reason(
        (problem.num_states != STATES, "it merges two states"),
        (problem.strides and not says(FILE, "prefix_head_stride"),
         "this release reads states as dense"),
        (problem.context != "all" and not says(FILE, "prefill_tokens_with_context"),
         "this release merges all tokens with a prefix"),
        (narrow and not says(FILE, "output_scale"), "this release writes no outputs in FP8"),
    ) or wrong_here(target, narrow) or unavailable(FILE, target) or True  # fmt: skip


def _compile_key(problem: MergeProblem) -> Hashable:
    return (
        problem.dtype,
        problem.head_dim,
        problem.num_heads % 16 == 0,
        problem.num_heads == 1,
        problem.output_scale is not None,
    )


def _kernels(problem: MergeProblem) -> Iterator[MergeProblem]:
    """Yield batches of 1, of 2 and of 16 tokens: Triton compiles for 1 and multiples of 16."""
    for tokens in (1, 2, 16):
        yield replace(problem, num_tokens=tokens)


@implementation(
    "merge_state",
    name="vllm-merge-attn-states",
    provider="vllm",
    supports=_supports,
    # One head stride is read of both: vLLM's own merge_attn_states refuses others before it.
    features=("padded_states", "context_tokens", "inf_marks_empty", "output_scale", ALGEBRA),
    writes_out=True,
    compile_key=_compile_key,
    kernels=_kernels,
    build_ahead="cuda",
    build_minutes=0.02,
    build_compilers=1,
)
def merge(inputs: MergeInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Merge a prefix, maybe of the first tokens only, and a suffix.

    Their LSEs are [heads, tokens], views where strides are read.
    """
    lses = [lse.T for lse in inputs.lses]
    merged = None if inputs.lse is None else inputs.lse.T
    if not says(FILE, "prefix_lse_head_stride"):
        lses = [each.contiguous() for each in lses]
        merged = torch.full_like(lses[0], torch.nan)
    out, scale = inputs.out, None
    if inputs.output_scale is not None and out is not None:
        scale = inputs.lses.new_tensor([inputs.output_scale])
    with load(FILE, stubs) as kernels:
        merge_states = kernels.merge_attn_states
        merge_states(
            output=out,
            output_lse=merged,
            prefix_output=inputs.states[0],
            prefix_lse=lses[0],
            suffix_output=inputs.states[1],
            suffix_lse=lses[1],
            **known(
                merge_states,
                prefill_tokens_with_context=inputs.context_tokens,
                output_scale=scale,
            ),
        )
    if inputs.lse is not None and merged is not None:
        inputs.lse.copy_(merged.T)
    return inputs.out, inputs.lse
