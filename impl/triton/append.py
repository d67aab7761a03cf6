"""Kernelproof's own Triton kernel for appending keys and values to a paged cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..gpu.triton_interpreter import hasten, scalars_as_bounds
from ..targets.optional import require
from .support import ceil_div, kernel, next_power_of_two, require_triton
from .units import alignment_of, in_every_alignment, in_units, strides, unit_of

KERNEL = "kernelproof.impl.triton.kernels.append"
BUILD_MINUTES = 0.03
SEEDS = 8
"""Number of seeds among which some ask for writing in place, and some for a copy."""
BLOCK_CHANNELS = 1024
BLOCK_TOKENS, INTERPRETED_BLOCK_TOKENS = 4, 64
"""Tokens a program: few keep a GPU busy, many spare the interpreter programs."""


def _compile_key(problem: AttentionProblem) -> Hashable:
    aligned = all(alignment_of(problem))
    # Where a cache is copied first, by the seed, its copy is aligned.
    which = (problem.kv_element, aligned, None if aligned else problem.seed)
    return problem.dtype, problem.head_dim_qk, problem.head_dim_vo, *which


def _kernels(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    names = ("operation", "dtype", "head_dim_qk", "head_dim_vo", "values_in_keys", "kv_cache")
    fields = {name: getattr(problem, name) for name in names}
    least = AttentionProblem(**fields | ({"num_kv_heads": 1} if problem.values_in_keys else {}))
    for each in in_every_alignment(least):
        # One of several seeds asks for the given cache to be written, whose alignment counts.
        seeds = range(1 if each is least else SEEDS)
        yield from (replace(each, seed=seed) for seed in seeds)


@kernel(
    "append_paged_kv",
    name="triton-append",
    features=("fp8_kv", "mla", "large_tensors"),
    compile_key=_compile_key,
    kernels=_kernels,
    build_minutes=BUILD_MINUTES,
)
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values, both in one launch, into the last slots of their requests' pages.

    Args:
        inputs: k [tokens, kv_heads, head_dim_qk], v [tokens, kv_heads, head_dim_vo] and both
            caches, NHD or HND, strided or not, of any dtype; each token's request is found on the
            device. FP8 is scaled in float32 and saturates. Latent caches are written twice where
            their values lie, with equal numbers.

    Returns:
        (k_cache, v_cache), the given ones if ``in_place``, else copies.
    """
    require_triton()
    caches = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    tokens, heads, dim_qk = inputs.k.shape
    dim_vo = inputs.v.shape[2]
    if not (tokens and heads):
        return caches
    to_slots = (0, 1, 2, 3) if inputs.kv_layout == "NHD" else (0, 2, 1, 3)
    k_slots, v_slots = (cache.permute(to_slots) for cache in caches)
    k, v, largest = inputs.k, inputs.v, 0.0
    if inputs.kv_format is not None:
        k_slots, v_slots = inputs.kv_format.view(k_slots), inputs.kv_format.view(v_slots)
        largest = torch.finfo(k_slots.dtype).max
    most = heads * max(dim_qk, dim_vo)
    channels, block = BLOCK_CHANNELS, BLOCK_TOKENS
    if not k.is_cuda:
        hasten()  # the interpreter's own casts round neither to bfloat16 nor to FP8
        channels, block = min(next_power_of_two(most), channels), INTERPRETED_BLOCK_TOKENS
    metadata = inputs.metadata
    steps = {
        **strides("k", k, "token head"), **strides("v", v, "token head"),
        **strides("k_cache", k_slots, "page slot head"),
        **strides("v_cache", v_slots, "page slot head"),
    }  # fmt: skip
    unit = unit_of(*steps.values())
    arguments: dict[str, Any] = {
        "k": k, "v": v, "k_cache": k_slots, "v_cache": v_slots,
        "qo_indptr": metadata.qo_indptr, "kv_indptr": metadata.paged_kv_indptr,
        "seq_lens": metadata.seq_lens, "page_ids": metadata.paged_kv_indices,
        "num_requests": metadata.num_requests, "num_tokens": tokens, "num_heads": heads,
        "page_size": metadata.page_size, **in_units(steps, unit),
        "k_dim": k.stride(2), "v_dim": v.stride(2),
        "k_cache_dim": k_slots.stride(3), "v_cache_dim": v_slots.stride(3),
        "k_scale": float(inputs.k_scale), "v_scale": float(inputs.v_scale), "LARGEST": largest,
        "UNIT": unit, "DIM_QK": dim_qk, "DIM_VO": dim_vo, "BLOCK_TOKENS": block,
        "BLOCK_CHANNELS": channels,
    }  # fmt: skip
    with scalars_as_bounds(k):
        require(KERNEL, "triton").append[(ceil_div(tokens, block), ceil_div(most, channels))](
            **arguments
        )
    return caches
