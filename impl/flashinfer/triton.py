"""FlashInfer's Triton cascade kernels, launched directly.

``flashinfer.triton.cascade`` only adds a check for Hopper around them; without a GPU they run in
Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported). Their LSE is base 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...reference import MergeProblem, Problem
from ...reference.tensors.inputs import MergeInputs
from ..gpu.triton_interpreter import castable_loop_variables, scalars_as_bounds, uninterpreted
from ..protocol import implementation
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target

KERNELS = "flashinfer.triton.kernels.cascade"


def unavailable(target: Target, module: str = KERNELS) -> Refusal | None:
    """Return why FlashInfer's Triton kernels cannot run there; None if they can."""
    return uninterpreted(target) or missing("triton", "triton") or missing(module, "flashinfer")


def _supports_two(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, MergeProblem) and problem.num_states != 2:  # noqa: PLR2004
        return f"merge_state merges 2 states, not {problem.num_states}"
    return unavailable(target) or True


def _supports_any(problem: Problem, target: Target) -> bool | str:
    del problem
    return unavailable(target) or True


def _kernel(name: str) -> Any:  # noqa: ANN401  a Triton JIT function
    return getattr(require(KERNELS, "flashinfer"), name)


def to_base_2(lse: torch.Tensor) -> torch.Tensor:
    """Turn a natural-log LSE into FlashInfer's base 2, as contiguous float32."""
    return (lse.to(torch.float32) * math.log2(math.e)).contiguous()


def to_natural(lse: torch.Tensor) -> torch.Tensor:
    """Turn FlashInfer's base-2 LSE into natural log."""
    return lse * math.log(2.0)


@implementation(
    "merge_state",
    name="flashinfer-triton-merge-state",
    backend="flashinfer-triton",
    supports=_supports_two,
)
def merge_state(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states with ``merge_state_kernel``."""
    v_a, v_b = inputs.outs[0].contiguous(), inputs.outs[1].contiguous()
    s = to_base_2(inputs.lses)
    tokens, heads, dim = v_a.shape
    merged, lse = torch.empty_like(v_a), s.new_empty((tokens, heads))
    if tokens:
        _kernel("merge_state_kernel")[(tokens,)](
            v_a, s[0].contiguous(), v_b, s[1].contiguous(), merged, lse, heads, dim,
            bdx=dim, bdy=heads,
        )  # fmt: skip
    return merged, to_natural(lse)


@implementation(
    "merge_state",
    name="flashinfer-triton-merge-states",
    backend="flashinfer-triton",
    supports=_supports_any,
)
def merge_states(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge any number of states with ``merge_states_kernel``, states next to each other."""
    v = inputs.outs.transpose(0, 1).contiguous()
    s = to_base_2(inputs.lses.transpose(0, 1))
    tokens, states, heads, dim = v.shape
    merged, lse = v.new_empty((tokens, heads, dim)), s.new_empty((tokens, heads))
    if tokens:
        with scalars_as_bounds(v):
            _kernel("merge_states_kernel")[(tokens,)](
                v, s, merged, lse, states, heads, dim, bdx=dim, bdy=heads
            )
    return merged, to_natural(lse)


@implementation(
    "merge_state",
    name="flashinfer-triton-variable-length-merge-states",
    backend="flashinfer-triton",
    supports=_supports_any,
)
def variable_length_merge_states(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge with ``variable_length_merge_states_kernel``, every row of the same length."""
    states, tokens, heads, dim = inputs.outs.shape
    v = inputs.outs.transpose(0, 1).reshape(tokens * states, heads, dim).contiguous()
    s = to_base_2(inputs.lses.transpose(0, 1).reshape(tokens * states, heads))
    indptr = torch.arange(tokens + 1, device=v.device, dtype=torch.int32) * states
    merged, lse = v.new_empty((tokens, heads, dim)), s.new_empty((tokens, heads))
    if tokens:
        with castable_loop_variables(v), scalars_as_bounds(v):
            _kernel("variable_length_merge_states_kernel")[(tokens,)](
                v, s, indptr, merged, lse, heads, dim, bdx=dim, bdy=heads
            )
    return merged, to_natural(lse)
