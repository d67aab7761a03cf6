"""vLLM's Triton kernel that quantises new keys and values by a scale of each token and head."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..targets.target import Target
from .claims import by_slots, wrong_here
from .sources import implementation, load, says, unavailable
from .vllm_append import FILE
from .vllm_attention import BY_TOKEN
from .vllm_stubs import stubs

NAME = "triton_reshape_and_cache_flash_per_token_head_quant"


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    if not problem.cache_entry.scaled_by_token:
        return "caches with a scale for each token and head only"
    if missing := unavailable(FILE, target):
        return missing
    if not says(FILE, NAME):
        return "this release has no scales of tokens and heads"
    in_fp8 = "" if problem.cache_entry.dtype == torch.int8 else problem.kv_cache
    return wrong_here(target, in_fp8) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    strides = (problem.strided_kv, problem.kv_layout, problem.num_kv_heads)
    dims = problem.head_dim_qk, problem.head_dim_vo
    return problem.dtype, problem.kv_cache, *dims, problem.page_size, *strides


@implementation(
    "append_paged_kv", name="vllm-reshape-and-cache-per-token-head", provider="vllm",
    supports=_supports, features=("per_token_head_kv", "slot_mapping"), compile_key=_compile_key,
    build_ahead="cuda", build_minutes=0.02, build_compilers=1,
)  # fmt: skip
def append(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each token's codes and scales into the slot that its request's pages give it."""
    caches = tuple(each if inputs.in_place else each.clone() for each in inputs.written)
    k_cache, v_cache, k_scales, v_scales = (by_slots(each, inputs.kv_layout) for each in caches)
    # The kernel reads a slot for every row: vLLM's runner fills up its mapping with -1, too.
    slots, rows = inputs.slot_mapping, len(inputs.k)
    slots = torch.nn.functional.pad(slots, (0, rows - len(slots)), value=-1)
    with load(FILE, stubs) as kernels:
        getattr(kernels, NAME)(
            key=inputs.k,
            value=inputs.v,
            key_cache=k_cache,
            value_cache=v_cache,
            k_scale_cache=k_scales[..., 0],
            v_scale_cache=v_scales[..., 0],
            slot_mapping=slots,
            kv_quant_mode=BY_TOKEN[k_cache.dtype],
        )
    return caches
