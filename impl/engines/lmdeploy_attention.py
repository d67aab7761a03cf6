"""lmdeploy's attention: decoding over pages, split, and prefill over keys that were gathered."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..gpu.block_pointers import block_pointers, needs_older_triton
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from .claims import wrong_here
from .lmdeploy_calls import KERNELS, LEAST_PAGE, is_page, kernel, quantised, stubs
from .sources import load, unavailable

DECODE, PREFILL = f"{KERNELS}.pagedattention", f"{KERNELS}.flashattention"
LEAST_CHANNELS = 16
"""Channels of a product of tensor cores."""


def _refusal(problem: AttentionProblem, file: str, target: Target) -> Refusal | str | None:
    for holds, why in (
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
    ):  # fmt: skip
        if holds:
            return why
    wrong = wrong_here(target, problem.kv_cache)
    return wrong or unavailable(file, target)


def _decodes(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    several = problem.most_queries > 1
    for holds, why in (
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
    ):  # fmt: skip
        if holds:
            return why
    return _refusal(problem, DECODE, target) or True


def _one_tile(problem: AttentionProblem) -> bool:
    """Whether the largest power of two of a key's channels holds the values."""
    keys = 1 << (problem.head_dim_qk.bit_length() - 1)
    return keys == 1 << (problem.head_dim_vo - 1).bit_length()


def _prefills(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.more_queries_than_keys:
        return "every query is one of the keys: a request has no more queries than keys"
    if problem.window_left >= 0 and not problem.causal:
        return "engines have windows under a causal mask"
    if problem.alibi and not problem.causal:
        return "slopes multiply distances, as far behind a query as before it"
    return _refusal(problem, PREFILL, target) or needs_older_triton(target) or True


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
