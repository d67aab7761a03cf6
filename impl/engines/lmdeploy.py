"""lmdeploy's attention, prefill and cache: adapters to its Triton kernels, and what they share."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import AppendInputs, PagedAttentionInputs, RaggedAttentionInputs
from ..gpu.block_pointers import block_pointers, needs_older_triton
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import LEAST_CHANNELS, by_slots, wrong_here
from .sources import implementation, load, unavailable
from .vllm_stubs import Unused

LMDEPLOY = "lmdeploy"
KERNELS = "lmdeploy.pytorch.kernels.cuda"
LEAST_PAGE = 16
"""Keys that a page has at least: a tile of the decode kernel is a page."""


class QuantPolicy(enum.IntEnum):
    """How a cache is quantised, by lmdeploy's numbers (``lmdeploy/messages.py``)."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


POLICIES = {
    "float8_e4m3fn": QuantPolicy.FP8,
    "float8_e5m2": QuantPolicy.FP8_E5M2,
    "int8_zero_point": QuantPolicy.INT8,
    "int4_zero_point": QuantPolicy.INT4,
}
"""lmdeploy's quantisation policies by the cache's element."""

kernel = functools.partial(
    implementation, provider=LMDEPLOY, build_ahead="cuda", build_minutes=0.05, build_compilers=1
)
"""``implementation``, with what all of lmdeploy's kernels declare alike."""


def _device_props(device: int | None = None) -> dict[str, Any]:
    """Describe the GPU; without one, one that is small: 4 parts of a request, tiles of 32 keys."""
    if not torch.cuda.is_available():
        return {
            "multi_processor_count": 4, "compute_capability": (7, 0), "warps_per_sm": 32,
            "blocks_per_sm": 16,
        }  # fmt: skip
    found = torch.cuda.get_device_properties(device or torch.cuda.current_device())
    warps = found.max_threads_per_multi_processor // 32
    return {
        "multi_processor_count": found.multi_processor_count,
        "compute_capability": (found.major, found.minor), "warps_per_sm": warps,
        "blocks_per_sm": warps // 2,
    }  # fmt: skip


def stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of lmdeploy."""
    return {
        "lmdeploy.messages": {"QuantPolicy": QuantPolicy},
        "lmdeploy.utils": {"get_logger": Unused()},
        f"{KERNELS}.utils": {
            "get_device_props": _device_props, "is_cuda": torch.cuda.is_available,
        },
    }  # fmt: skip


def quantised(
    inputs: PagedAttentionInputs | AppendInputs, like: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Return the caches by slots, as what they hold, and the arguments that say how to read them.

    Scales of the whole tensor become tensors on the device of ``like``.
    """
    caches = [by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache)]
    if inputs.kv_format is None:
        return caches, {}
    scales = [
        like.new_tensor([each], dtype=torch.float32) for each in (inputs.k_scale, inputs.v_scale)
    ]
    if inputs.kv_cache_sf is not None:
        scales = [by_slots(each, inputs.kv_layout) for each in inputs.kv_cache_sf]
    return [inputs.kv_format.view(each) for each in caches], {
        "k_scales_zeros": scales[0],
        "v_scales_zeros": scales[1],
        "quant_policy": POLICIES[inputs.kv_format.element],
    }


def is_page(page_size: int) -> bool:
    """Whether a page is a tile: a power of two that tensor cores multiply."""
    return page_size >= LEAST_PAGE and page_size & (page_size - 1) == 0


FILL = f"{KERNELS}.fill_kv_cache"


def _fills(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (not is_page(problem.page_size), f"pages are powers of two from {LEAST_PAGE} keys on"),
        (problem.most_queries == 1 and not problem.uniform_queries,
         "where no request has two new tokens, each has one"),
    ) or wrong_here(target, problem.kv_cache) or unavailable(FILL, target) or True  # fmt: skip


def _fill_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.head_dim_qk,
        problem.head_dim_vo, problem.page_size, problem.kv_layout, problem.strided_q,
        problem.strided_kv, problem.most_queries == 1,
    )  # fmt: skip


@kernel(
    "append_paged_kv", name="lmdeploy-fill-kv-cache", supports=_fills,
    features=("fp8_kv", "zero_point_kv"), compile_key=_fill_key,
)  # fmt: skip
def append(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each request's new tokens behind its earlier keys."""
    k_cache, v_cache, *scales = (
        each if inputs.in_place else each.clone() for each in inputs.written
    )
    given = replace(
        inputs,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_cache_sf=(scales[0], scales[1]) if scales else None,
    )
    paged, more = quantised(given, inputs.k)
    metadata = inputs.metadata
    queries = metadata.qo_indptr.diff()
    with load(FILL, stubs) as kernels, scalars_as_bounds(inputs.k):
        kernels.fill_kv_cache(
            k_states=inputs.k,
            v_states=inputs.v,
            k_caches=paged[0],
            v_caches=paged[1],
            q_start_loc=metadata.qo_indptr[:-1],
            q_seq_length=queries,
            kv_seq_length=metadata.seq_lens,
            max_q_seq_length=int(queries.max()),
            block_offsets=_table(inputs),
            **more,
        )
    return given.written


def _table(inputs: AppendInputs) -> torch.Tensor:
    """Return the pages of each request, [requests, pages] int32."""
    metadata = inputs.metadata
    counts = metadata.paged_kv_indptr.diff()
    table = metadata.paged_kv_indices.new_zeros(len(counts), int(counts.max()))
    kept = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    table[kept] = metadata.paged_kv_indices[: int(counts.sum())]
    return table


DECODE, PREFILL = f"{KERNELS}.pagedattention", f"{KERNELS}.flashattention"


def _refusal(problem: AttentionProblem, file: str, target: Target) -> Refusal | str | None:
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (problem.empty_requests, "a request without keys is not written: the new token is one"),
        (min(problem.head_dim_qk, problem.head_dim_vo) < LEAST_CHANNELS,
         f"tl.dot takes {LEAST_CHANNELS} channels or more"),
        ((not problem.kv_cache or problem.cache_entry.scaled)
         and (problem.k_scale != 1 or problem.v_scale != 1),
         "scales of a whole tensor belong to FP8 caches"),
        (problem.scale < 0, "the largest logit is taken before the scale"),
        (target.device != "cpu" and problem.dtype == "float32",
         "its blocks are made for 16 bits: a GPU's shared memory has no room for float32"),
    ) or wrong_here(target, problem.kv_cache) or unavailable(file, target)  # fmt: skip


def _decodes(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    several = problem.most_queries > 1
    return first_reason(
        (not problem.uniform_queries, "all requests have the same number of queries"),
        (several and (problem.causal or problem.causal_by_request),
         "several queries of a request all see its last key"),
        (several and problem.window_left >= 0, "several queries of a request have one window"),
        (several and problem.kv_cache, "a quantised cache has one query a request"),
        (several and problem.alibi, "several queries of a request have one distance"),
        (problem.alibi and problem.sinks, "distances begin with 1, which sinks know nothing of"),
        (problem.values_in_keys and not _one_tile(problem),
         "the first tile of a key's channels are the values"),
        (not is_page(problem.page_size), f"pages are powers of two from {LEAST_PAGE} keys on"),
    ) or _refusal(problem, DECODE, target) or True  # fmt: skip


def _one_tile(problem: AttentionProblem) -> bool:
    """Whether the largest power of two of a key's channels holds the values."""
    keys = 1 << (problem.head_dim_qk.bit_length() - 1)
    return keys == 1 << (problem.head_dim_vo - 1).bit_length()


def _prefills(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    return first_reason(
        (problem.more_queries_than_keys,
         "every query is one of the keys: a request has no more queries than keys"),
        (problem.window_left >= 0 and not problem.causal,
         "engines have windows under a causal mask"),
        (problem.alibi and not problem.causal,
         "slopes multiply distances, as far behind a query as before it"),
    ) or _refusal(problem, PREFILL, target) or needs_older_triton(target) or True  # fmt: skip


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.group_size,
        problem.head_dim_qk, problem.head_dim_vo, problem.values_in_keys, problem.page_size,
        problem.kv_layout, problem.strided_q, problem.strided_kv, problem.different_kv_strides,
        problem.window_left, problem.logits_soft_cap, problem.sinks, problem.alibi,
        problem.causal, problem.sm_scale, problem.uniform_queries and problem.most_queries,
    )  # fmt: skip


@kernel(
    "paged_attention", name="lmdeploy-decode", supports=_decodes,
    features=("fp8_kv", "zero_point_kv", "mla", "alibi", "different_kv_strides"),
    compile_key=_compile_key,
    # A scale of the tensor multiplies logits and probabilities: codes are exact in 16 bits.
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", row_scales="steps"),
    tile=LEAST_PAGE, split=LEAST_PAGE,
)  # fmt: skip
def decode(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Attend with ``flash_attn_with_kvcache``: at least four parts of each request."""
    caches, more = quantised(inputs, inputs.q)
    with load(DECODE, stubs) as kernels, scalars_as_bounds(inputs.q):
        out = kernels.flash_attn_with_kvcache(
            q=inputs.q,
            k_cache=caches[0],
            v_cache=caches[1],
            cache_seqlens=inputs.metadata.seq_lens,
            page_table=inputs.block_table,
            softmax_scale=inputs.sm_scale,
            window_size=_window(inputs),
            softcap=inputs.logits_soft_cap,
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks,
            **more,
        )
    return out, None


@kernel(
    "ragged_attention", name="lmdeploy-prefill", supports=_prefills,
    features=("host_bounds", "alibi"), compile_key=_compile_key,
    # A logit is scaled and the largest subtracted by one instruction.
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", exponent="fused"), tile=32,
)  # fmt: skip
def prefill(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Attend with ``flash_attn_varlen_func``."""
    with load(PREFILL, stubs) as kernels, scalars_as_bounds(inputs.q), block_pointers(inputs.q):
        out = kernels.flash_attn_varlen_func(
            q=inputs.q,
            k=inputs.k.transpose(0, 1),
            v=inputs.v.transpose(0, 1),
            cu_seqlens_q=inputs.qo_indptr,
            cu_seqlens_k=inputs.kv_indptr,
            max_seqlen_q=inputs.max_q_len,
            softmax_scale=inputs.sm_scale,
            causal=inputs.causal,
            window_size=_window(inputs),
            softcap=inputs.logits_soft_cap,
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks,
            kv_layout="hsd",
        )
    return out, None


def _window(inputs: PagedAttentionInputs | RaggedAttentionInputs) -> tuple[int, int]:
    """Return a window as lmdeploy hands it on: a model's ``sliding_window``, its own key included.

    No layer of it takes one off (``_normalize_sliding_window``, backends/cuda/attention).
    """
    keys = inputs.window_left + 1 if inputs.window_left >= 0 else -1
    return keys, keys
