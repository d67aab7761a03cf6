"""FlashInfer's Triton cascade kernels, launched directly.

``flashinfer.triton.cascade`` only adds a check for Hopper around them; without a GPU they run in
Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported). Their LSE is base 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...reference.tensors.inputs import MergeInputs
from ..gpu.triton_interpreter import castable_loop_variables, scalars_as_bounds, uninterpreted
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .backends import TRITON
from .claims import Refuses, two_states

KERNELS = "flashinfer.triton.kernels.cascade"


def unavailable(module: str = KERNELS) -> Refuses:
    """Refuse machines where FlashInfer's Triton kernels of a module cannot run."""

    def refuses(_: object, target: Target) -> Refusal | None:
        return uninterpreted(target) or missing("triton", "triton") or missing(module, "flashinfer")

    return refuses


def _kernel(name: str) -> Any:  # noqa: ANN401  a Triton JIT function
    return getattr(require(KERNELS, "flashinfer"), name)


def to_base_2(lse: torch.Tensor) -> torch.Tensor:
    """Turn a natural-log LSE into FlashInfer's base 2, as contiguous float32."""
    return (lse.to(torch.float32) * math.log2(math.e)).contiguous()


def to_natural(lse: torch.Tensor) -> torch.Tensor:
    """Turn FlashInfer's base-2 LSE into natural log."""
    return lse * math.log(2.0)


@TRITON.adapter("merge_state", "flashinfer-triton-merge-state", two_states, unavailable())
def merge_state(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states with ``merge_state_kernel``."""
    v_a, v_b = inputs.states[0].contiguous(), inputs.states[1].contiguous()
    s = to_base_2(inputs.lses)
    tokens, heads, dim = v_a.shape
    merged, lse = torch.empty_like(v_a), s.new_empty((tokens, heads))
    if tokens:
        _kernel("merge_state_kernel")[(tokens,)](
            v_a,
            s[0].contiguous(),
            v_b,
            s[1].contiguous(),
            merged,
            lse,
            heads,
            dim,
            bdx=dim,
            bdy=heads,
        )
    return merged, to_natural(lse)


@TRITON.adapter("merge_state", "flashinfer-triton-merge-states", unavailable())
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


@TRITON.adapter("merge_state", "flashinfer-triton-variable-length-merge-states", unavailable())
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
