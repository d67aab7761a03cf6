"""vLLM's Triton kernels that write new keys and values into a cache, as numbers or as codes."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..targets.target import Target
from .claims import by_slots, wrong_here
from .sources import implementation, load, says, unavailable
from .vllm_attention import BY_TOKEN
from .vllm_stubs import stubs

NAME = "ops.triton_reshape_and_cache_flash"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    if problem.head_dim_qk != problem.head_dim_vo:
        return "keys and values have one head dim"
    if problem.kv_element == "float8_e5m2":
        return "vLLM's Triton caches hold e4m3 where e5m2 is asked for"
    # 0.11 asserts it; 0.19 takes a stride of heads and writes `tgt_base` plus a place of all heads.
    dense = says(FILE, "tgt_base") or not says(FILE, "USE_HEAD_MAJOR_LAYOUT")
    if problem.kv_layout == "HND" and dense and says(FILE, "head_stride"):
        return "this release writes heads that lie one after another only"
    if target.device == "cpu" and not (says(FILE, "is_xpu") or not says(FILE, "num_stages")):
        return "this release asks CUDA for the GPU before it launches the kernel"
    return wrong_here(target, problem.kv_cache) or unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    strides = (problem.strided_kv, problem.kv_layout)
    return (
        problem.dtype,
        problem.kv_cache,
        problem.head_dim_qk,
        problem.num_kv_heads,
        problem.page_size,
        strides if problem.head_dim_qk % 16 else None,
    )


@implementation(
    "append_paged_kv",
    name="vllm-reshape-and-cache-flash",
    provider="vllm",
    supports=_supports,
    features=("fp8_kv", "slot_mapping"),
    compile_key=_compile_key,
    build_ahead="cuda",
    build_minutes=0.02,
    build_compilers=1,
)
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token into the slot that its request's pages give it."""
    caches = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    k_cache, v_cache = (by_slots(each, inputs.kv_layout) for each in caches)
    with load(FILE, stubs) as kernels:
        kernels.triton_reshape_and_cache_flash(
            key=inputs.k,
            value=inputs.v,
            key_cache=k_cache,
            value_cache=v_cache,
            slot_mapping=inputs.slot_mapping,
            kv_cache_dtype="auto" if inputs.kv_format is None else "fp8",
            k_scale=inputs.k.new_tensor(inputs.k_scale, dtype=torch.float32),
            v_scale=inputs.k.new_tensor(inputs.v_scale, dtype=torch.float32),
        )
    return caches


QUANTISED = "triton_reshape_and_cache_flash_per_token_head_quant"


def _quantises(problem: AttentionProblem, target: Target) -> bool | str:
    if not problem.cache_entry.scaled_by_token:
        return "caches with a scale for each token and head only"
    if missing := unavailable(FILE, target):
        return missing
    if not says(FILE, QUANTISED):
        return "this release has no scales of tokens and heads"
    in_fp8 = "" if problem.cache_entry.dtype == torch.int8 else problem.kv_cache
    return wrong_here(target, in_fp8) or True


def _token_key(problem: AttentionProblem) -> Hashable:
    strides = (problem.strided_kv, problem.kv_layout, problem.num_kv_heads)
    dims = problem.head_dim_qk, problem.head_dim_vo
    return problem.dtype, problem.kv_cache, *dims, problem.page_size, *strides


@implementation(
    "append_paged_kv", name="vllm-reshape-and-cache-per-token-head", provider="vllm",
    supports=_quantises, features=("per_token_head_kv", "slot_mapping"), compile_key=_token_key,
    build_ahead="cuda", build_minutes=0.02, build_compilers=1,
)  # fmt: skip
def append_tokens(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each token's codes and scales into the slot that its request's pages give it."""
    caches = tuple(each if inputs.in_place else each.clone() for each in inputs.written)
    k_cache, v_cache, k_scales, v_scales = (by_slots(each, inputs.kv_layout) for each in caches)
    # The kernel reads a slot for every row: vLLM's runner fills up its mapping with -1, too.
    slots, rows = inputs.slot_mapping, len(inputs.k)
    slots = torch.nn.functional.pad(slots, (0, rows - len(slots)), value=-1)
    with load(FILE, stubs) as kernels:
        getattr(kernels, QUANTISED)(
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
