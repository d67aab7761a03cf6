"""vLLM's Triton kernels that write new keys and values into a cache, as numbers or as codes."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..targets.target import Target
from .claims import as_bytes, by_slots, wrong_here
from .sources import (
    implementation,
    known,
    load,
    missing_file,
    missing_name,
    says,
    source_of,
    unavailable,
)
from .vllm_attention import BY_TOKEN
from .vllm_stubs import stubs

NAME = "ops.triton_reshape_and_cache_flash"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")
DIFFKV = "triton_reshape_and_cache_flash_diffkv"
QUANTISED = "triton_reshape_and_cache_flash_per_token_head_quant"
INT4_FILE = "vllm.v1.attention.ops.int4_per_token_head"
INT4_RUN, INT4_KERNEL = "_run_reshape_kernel", "_reshape_cache_int4_kernel"
"""What ``reshape_and_cache_int4`` calls after it has rotated keys and values by Hadamard matrices,
which is no part of the format: queries are rotated too."""


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
    strides = (problem.strided_q, problem.strided_kv, problem.kv_layout)
    return (
        problem.dtype,
        problem.kv_cache,
        problem.head_dim_qk,
        problem.head_dim_vo,
        problem.num_kv_heads,
        problem.page_size,
        strides if problem.head_dim_qk % 16 or problem.head_dim_vo % 16 else None,
    )


writer = functools.partial(
    implementation,
    "append_paged_kv",
    provider="vllm",
    features=("fp8_kv", "slot_mapping", "large_rows"),
    compile_key=_compile_key,
    build_ahead="cuda",
    build_minutes=0.02,
    build_compilers=1,
)
"""``implementation``, with what the adapters to writers of FP8 and plain caches declare alike."""


def _given(inputs: AppendInputs) -> dict[str, object]:
    """Return the arguments that the writers have in common."""
    return {
        "key": inputs.k,
        "value": inputs.v,
        "slot_mapping": inputs.slot_mapping,
        "kv_cache_dtype": "auto" if inputs.kv_format is None else "fp8",
        "k_scale": inputs.k.new_tensor(inputs.k_scale, dtype=torch.float32),
        "v_scale": inputs.k.new_tensor(inputs.v_scale, dtype=torch.float32),
    }


def _caches(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches to write into: the given ones, or copies."""
    if inputs.in_place:
        return inputs.k_cache, inputs.v_cache
    return inputs.k_cache.clone(), inputs.v_cache.clone()


@writer(
    name="vllm-reshape-and-cache-flash",
    supports=_supports,
    features=("fp8_kv", "slot_mapping", "large_tensors"),
)
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token into the slot that its request's pages give it."""
    caches = _caches(inputs)
    k_cache, v_cache = (by_slots(each, inputs.kv_layout) for each in caches)
    with load(FILE, stubs) as kernels:
        kernels.triton_reshape_and_cache_flash(
            key_cache=k_cache, value_cache=v_cache, **_given(inputs)
        )
    return caches


def _supports_rows(problem: AttentionProblem, target: Target) -> bool | str:
    if not says(FILE, DIFFKV):
        return missing_file(FILE) or "this release has no rows of keys and values"
    if problem.kv_element == "float8_e5m2":
        return "vLLM's Triton caches hold e4m3 where e5m2 is asked for"
    if problem.kv_layout == "HND" and not _rows_have_strides():
        return "this release writes heads that lie one after another only"
    return wrong_here(target, problem.kv_cache) or unavailable(FILE, target) or True


def _rows_have_strides() -> bool:
    """Whether the release's kernel of rows takes the stride of heads, as its others do."""
    file = source_of(FILE)
    signature = r"def reshape_and_cache_kernel_flash_diffkv\([^)]*\bhead_stride\b"
    return file is not None and re.search(signature, file.read_text(encoding="utf-8")) is not None


@writer(name="vllm-reshape-and-cache-diffkv", supports=_supports_rows)
def append_rows(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token into a cache of rows that hold a head's key and its value behind it."""
    caches = _caches(inputs)
    rows = torch.cat([as_bytes(each) for each in caches], dim=3).view(caches[0].dtype)
    with load(FILE, stubs) as kernels:
        getattr(kernels, DIFFKV)(kv_cache=by_slots(rows, inputs.kv_layout), **_given(inputs))
    for cache, written in zip(
        caches, rows.split([each.shape[3] for each in caches], 3), strict=True
    ):
        cache.copy_(written)
    return caches


def _supports_head_major(problem: AttentionProblem, target: Target) -> bool | str:
    if not says(FILE, "USE_HEAD_MAJOR_LAYOUT"):
        return missing_file(FILE) or "this release has no head-major layout"
    if target.device != "cpu":
        return "vLLM writes head-major caches on AMD only"
    if problem.head_dim_qk % _packed(problem):
        return f"channels of keys are packed by {_packed(problem)}"
    return _supports(replace(problem, kv_layout="NHD"), target)


def _supports_interleaved(problem: AttentionProblem, target: Target) -> bool | str:
    if not says(FILE, "INTERLEAVED_V_PACK_FACTOR"):
        return missing_file(FILE) or "this release never interleaves values"
    return _supports_head_major(problem, target)


def _packed(problem: AttentionProblem) -> int:
    """Return the elements of 16 bytes."""
    return 16 // problem.cache_entry.dtype.itemsize


@writer(name="vllm-reshape-and-cache-head-major", supports=_supports_head_major)
def append_head_major(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write into keys [pages, heads, dim / x, slots, x] and values [pages, heads, dim, slots]."""
    return _append_head_major(inputs, interleaved=False)


@writer(name="vllm-reshape-and-cache-interleaved", supports=_supports_interleaved)
def append_interleaved(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same with values [pages, heads, slots / x, dim, x]."""
    return _append_head_major(inputs, interleaved=True)


def _append_head_major(
    inputs: AppendInputs, *, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write into copies of the caches, in pages of keys and of values by turns, as hybrid ones."""
    caches = _caches(inputs)
    k_cache, v_cache = (by_slots(each, inputs.kv_layout) for each in caches)
    pages, slots, heads, dim = k_cache.shape
    x = 16 // k_cache.element_size()
    room = -(-slots // x) * x if interleaved else slots
    both = k_cache.new_empty((pages, 2, heads, dim * room))
    keys = both[:, 0, :, : dim * slots].unflatten(2, (dim // x, slots, x))
    values = both[:, 1, :, : dim * slots].unflatten(2, (dim, slots))
    k_view = keys.permute(0, 3, 1, 2, 4)
    v_view = values.permute(0, 3, 1, 2).unsqueeze(2)
    if interleaved:
        v_view = both[:, 1].unflatten(2, (room // x, dim, x)).permute(0, 2, 4, 1, 3)
    k_cache = k_cache.unflatten(3, (dim // x, x))
    k_view.copy_(k_cache)
    whole = torch.nn.functional.pad(v_cache, (0, 0, 0, 0, 0, room - slots))
    v_view.copy_(whole.view(v_view.shape))
    with load(FILE, stubs) as kernels:
        write = kernels.triton_reshape_and_cache_flash
        more = known(write, interleaved_v_pack_factor=x * interleaved)
        write(key_cache=keys, value_cache=values, **_given(inputs), **more)
    k_cache.copy_(k_view)
    v_cache.copy_(v_view.flatten(1, 2)[:, :slots])
    return caches


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
    strides = (
        problem.strided_q,
        problem.strided_kv,
        problem.kv_layout,
        problem.num_kv_heads,
    )
    dims = problem.head_dim_qk, problem.head_dim_vo
    return problem.dtype, problem.kv_cache, *dims, problem.page_size, *strides


@implementation(
    "append_paged_kv", name="vllm-reshape-and-cache-per-token-head", provider="vllm",
    supports=_quantises, features=("per_token_head_kv", "slot_mapping", "large_rows"),
    compile_key=_token_key,
    build_ahead="cuda", build_minutes=0.02, build_compilers=1,
)  # fmt: skip
def append_tokens(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each token's codes and scales into the slot that its request's pages give it."""
    caches, given = _with_scales(inputs)
    with load(FILE, stubs) as kernels:
        getattr(kernels, QUANTISED)(**given, kv_quant_mode=BY_TOKEN[inputs.k_cache.dtype])
    return caches


def _with_scales(
    inputs: AppendInputs,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Return caches and scales to write into, and the arguments of writers with such scales."""
    caches = tuple(each if inputs.in_place else each.clone() for each in inputs.written)
    k_cache, v_cache, k_scales, v_scales = (by_slots(each, inputs.kv_layout) for each in caches)
    # The kernels read a slot for every row: vLLM's runner fills up its mapping with -1, too.
    slots, rows = inputs.slot_mapping, len(inputs.k)
    return caches, {
        "key": inputs.k,
        "value": inputs.v,
        "key_cache": k_cache,
        "value_cache": v_cache,
        "k_scale_cache": k_scales[..., 0],
        "v_scale_cache": v_scales[..., 0],
        "slot_mapping": torch.nn.functional.pad(slots, (0, rows - len(slots)), value=-1),
    }


def _writes_int4(problem: AttentionProblem, target: Target) -> bool | str:
    if problem.kv_element != "int4_per_token_head":
        return "caches of four bits with zero points in their scales only"
    if missing := missing_file(INT4_FILE) or missing_name(INT4_FILE, INT4_RUN):
        return missing
    return wrong_here(target, "") or unavailable(INT4_FILE, target) or True


@implementation(
    "append_paged_kv", name="vllm-reshape-and-cache-int4", provider="vllm",
    supports=_writes_int4, features=("int4_kv", "slot_mapping", "large_rows"),
    compile_key=_token_key, build_ahead="cuda", build_minutes=0.02, build_compilers=1,
)  # fmt: skip
def append_int4(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each token's codes of four bits, and its scales with the zero points in them."""
    caches, given = _with_scales(inputs)
    with load(INT4_FILE, stubs) as kernels:
        kernel = getattr(kernels, INT4_KERNEL)
        getattr(kernels, INT4_RUN)(kernel, **given, packing_factor=2)
    return caches
