"""Kernelproof's own Triton kernel for turning, quantising and appending new rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ...reference import RopeAppendProblem
from ...reference.tensors.rope_append import RopeAppendInputs
from ..gpu.triton_interpreter import hasten, scalars_as_bounds
from ..targets.optional import require
from .support import kernel, next_power_of_two, require_triton

KERNEL = "kernelproof.impl.triton.kernels.rope_append"
"""The module of the kernel."""
MOST_NUMBERS = 8192
"""Numbers of a program's block: those of 128 heads of MLA would not fit into registers."""
BUILD_MINUTES = 0.03
"""Minutes of one core that Triton compiles it for."""


def _compile_key(problem: RopeAppendProblem) -> Hashable:
    how = problem.codes, problem.quantised_q, problem.latent, problem.interleaved
    heads = problem.num_qo_heads, problem.num_kv_heads
    return problem.dtype, problem.index_dtype, *how, *heads, problem.rope_dim, problem.plain_dim


@kernel(
    "rope_and_append",
    name="triton-rope-append",
    features=("large_rows",),
    compile_key=_compile_key,
    build_minutes=BUILD_MINUTES,
)
def rope_and_append(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn and quantise in float32, by divisions of IEEE 754, in one launch.

    Args:
        inputs: rows whose tokens may lie apart, caches of FP8 or of the rows' dtype, NHD or HND.

    Returns:
        The queries; the caches are written in place.
    """
    require_triton()
    q, k = inputs.q, inputs.k
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=inputs.q_dtype, device=q.device)
    if not tokens:
        return out
    if not q.is_cuda:
        hasten()  # the interpreter's own casts round neither to FP8 nor to bfloat16
    page, slot, head = _strides(inputs)
    kv_heads, channels = k.shape[1], next_power_of_two(dim)
    together = next_power_of_two(max(heads, kv_heads))  # in one block
    together = min(together, max(1, MOST_NUMBERS // channels))
    q_blocks, kv_blocks = -(-heads // together), -(-kv_heads // together)
    v, v_cache = (k, inputs.k_cache) if inputs.v is None else (inputs.v, inputs.v_cache)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cos_sin": inputs.cos_sin, "positions": inputs.positions,
        "slots": inputs.slots, "q_out": out, "k_cache": inputs.k_cache, "v_cache": v_cache,
        "page_size": inputs.page_size, "q_token": q.stride(0), "k_token": k.stride(0),
        "v_token": v.stride(0), "cache_page": page, "cache_slot": slot, "cache_head": head,
        "q_scale": inputs.q_scale, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale,
        "Q_LARGEST": _largest(out), "LARGEST": _largest(inputs.k_cache), "Q_HEADS": heads,
        "KV_HEADS": kv_heads, "DIM": dim, "FIRST": inputs.rotary.start or 0,
        "ROTARY": inputs.rope_dim, "INTERLEAVED": inputs.interleaved,
        "HEADS": together, "CHANNELS": channels, "Q_BLOCKS": q_blocks, "KV_BLOCKS": kv_blocks,
    }  # fmt: skip
    with scalars_as_bounds(q):
        grid = tokens, q_blocks + kv_blocks * (1 if inputs.v is None else 2)
        require(KERNEL, "triton").rope_and_append[grid](**arguments)
    return out


def _strides(inputs: RopeAppendInputs) -> tuple[int, int, int]:
    """Return the strides of pages, slots and heads."""
    page, second, third, _ = inputs.k_cache.stride()
    return (page, second, third) if inputs.kv_layout == "NHD" else (page, third, second)


def _largest(stored: torch.Tensor) -> float:
    """Return the largest number of FP8; 0 of rows that keep their dtype."""
    return torch.finfo(stored.dtype).max if stored.element_size() == 1 else 0.0
