"""FlashInfer's wrappers of attention to a paged cache: decode, prefill, and batches of both."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ..reference import AttentionProblem, BatchMetadata, Problem, build_metadata
from ..reference.inputs import PagedAttentionInputs
from ..reference.kv_format import stored_head_dim
from .flashinfer_calls import (
    CUDA_CORES,
    FA2,
    FA3,
    attention_refusal,
    flashinfer,
    kv_heads_of,
    module_key,
    new_wrapper,
    paged_cache,
    plan_options,
    scales,
    wrapper,
)
from .flashinfer_triton import to_natural
from .protocol import implementation
from .target import Target

Pair = tuple[torch.Tensor, torch.Tensor]
FA2_FEATURES = ("custom_mask", "fp8_kv", "nvfp4_kv")
FA3_FEATURES = ("fp8_kv", "fp8_q", "per_head_scales")


def _heads_of(inputs: PagedAttentionInputs) -> dict[str, int]:
    return {"num_qo_heads": inputs.q.shape[1], "num_kv_heads": kv_heads_of(inputs)}


def _decodes(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and any(t != 1 for t in problem.query_lens):
        return "a decode wrapper takes one query token a request"
    return _mixed(problem, target)


def _prefills(problem: Problem, target: Target) -> bool | str:
    return attention_refusal(problem, target) or True


def _prefills_on_fa3(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and not problem.q_dtype:
        if problem.kv_cache:
            return "FA3 takes queries and keys of one dtype"
        if problem.per_head_scales:
            return "FA3 takes scales of a head with FP8 queries alone"
        if problem.head_dim_qk != problem.head_dim_vo and not problem.strided_kv:
            return "FA3 takes pages of keys and values of one stride"
    return attention_refusal(problem, target) or True


def _plan_decode(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
) -> None:
    planned.plan(
        indptr=metadata.paged_kv_indptr,
        indices=metadata.paged_kv_indices,
        last_page_len=metadata.paged_kv_last_page_len,
        **_heads_of(inputs),
        head_dim=inputs.q.shape[-1],
        page_size=metadata.page_size,
        **plan_options(inputs, paged_cache(inputs, backend)["paged_kv_cache"][0].dtype),
    )


def _plan_prefill(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
) -> None:
    planned.plan(
        qo_indptr=metadata.qo_indptr,
        paged_kv_indptr=metadata.paged_kv_indptr,
        paged_kv_indices=metadata.paged_kv_indices,
        paged_kv_last_page_len=metadata.paged_kv_last_page_len,
        **_heads_of(inputs),
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=_head_dim_vo(inputs),
        page_size=metadata.page_size,
        causal=inputs.causal,
        custom_mask=inputs.custom_mask,
        **plan_options(inputs, paged_cache(inputs, backend)["paged_kv_cache"][0].dtype),
    )


def _run(planned: Any, inputs: PagedAttentionInputs, backend: str) -> Pair:  # noqa: ANN401  untyped
    cache = paged_cache(inputs, backend)
    given, keywords = scales(inputs)
    if inputs.sinks is not None:
        cache["sinks"] = inputs.sinks.float()  # what FlashInfer's kernels read where they do
    out, lse = planned.run(inputs.q, cache.pop("paged_kv_cache"), *given, return_lse=True,
                           **cache, **keywords)  # fmt: skip
    return out, to_natural(lse)


def decode(
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
    *,
    tensor_cores: bool,
) -> Pair:
    """Plan and run ``BatchDecodeWithPagedKVCacheWrapper``."""
    planned = wrapper(
        "BatchDecodeWithPagedKVCacheWrapper",
        inputs.q.device,
        kv_layout=inputs.kv_layout,
        use_tensor_cores=tensor_cores,
        backend="fa2" if tensor_cores else "auto",
    )
    _plan_decode(planned, inputs, metadata, backend)
    return _run(planned, inputs, backend)


def prefill(inputs: PagedAttentionInputs, metadata: BatchMetadata, backend: str) -> Pair:
    """Plan and run ``BatchPrefillWithPagedKVCacheWrapper``."""
    planned = wrapper(
        "BatchPrefillWithPagedKVCacheWrapper",
        inputs.q.device,
        kv_layout=inputs.kv_layout,
        backend=backend,
    )
    _plan_prefill(planned, inputs, metadata, backend)
    return _run(planned, inputs, backend)


class PrefillSession:
    """A prefill wrapper of its own, planned for a batch and run many times."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._planned: Any = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch from metadata on the host, as vLLM does."""
        if self._planned is None:
            self._planned = new_wrapper(
                "BatchPrefillWithPagedKVCacheWrapper",
                inputs.q.device,
                kv_layout=inputs.kv_layout,
                backend=self._backend,
            )
        _plan_prefill(self._planned, inputs, inputs.metadata, self._backend)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the planned batch."""
        return _run(self._planned, inputs, self._backend)


@implementation(
    "paged_attention",
    name="flashinfer-decode",
    backend="cuda-core",
    supports=_decodes,
    features=("fp8_kv",),
    arithmetic=CUDA_CORES,
    compile_key=module_key,
    build_ahead=True,
)
def cuda_core_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode without tensor cores."""
    return decode(inputs, inputs.metadata, "cuda-core", tensor_cores=False)


@implementation(
    "paged_attention",
    name="flashinfer-decode-fa2",
    backend="fa2",
    supports=_decodes,
    features=("fp8_kv", "nvfp4_kv"),
    arithmetic=FA2,
    compile_key=module_key,
    build_ahead=True,
)
def tensor_core_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores: FA2's prefill kernel."""
    return decode(inputs, inputs.metadata, "fa2", tensor_cores=True)


@implementation(
    "paged_attention",
    name="flashinfer-prefill-fa2",
    backend="fa2",
    supports=_prefills,
    features=FA2_FEATURES,
    arithmetic=FA2,
    compile_key=module_key,
    build_ahead=True,
    session=functools.partial(PrefillSession, "fa2"),
)
def prefill_fa2(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch, decodes too, in one prefill call of FA2."""
    return prefill(inputs, inputs.metadata, "fa2")


@implementation(
    "paged_attention",
    name="flashinfer-prefill-fa3",
    backend="fa3",
    supports=_prefills_on_fa3,
    features=FA3_FEATURES,
    arithmetic=FA3,
    compile_key=module_key,
    build_ahead=True,
    session=functools.partial(PrefillSession, "fa3"),
)
def prefill_fa3(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch in one prefill call of FA3."""
    return prefill(inputs, inputs.metadata, "fa3")


def _mixed(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        if problem.custom_mask:
            return "a decode wrapper takes no mask"
        if problem.head_dim_qk != problem.head_dim_vo:
            return "a decode wrapper has one head_dim"
    return attention_refusal(problem, target) or True


@implementation(
    "paged_attention",
    name="flashinfer-mixed-fa2",
    backend="fa2",
    supports=_mixed,
    features=("fp8_kv", "nvfp4_kv"),
    arithmetic=FA2,
    compile_key=module_key,
    build_ahead=True,
)
def mixed(inputs: PagedAttentionInputs) -> Pair:
    """Split a batch as vLLM does: decodes to one wrapper, the rest to the other."""
    is_decode = inputs.metadata.qo_indptr.diff() == 1
    out = inputs.q.new_empty((*inputs.q.shape[:2], _head_dim_vo(inputs)), dtype=inputs.out_dtype)
    lse = inputs.q.new_empty(inputs.q.shape[:2], dtype=torch.float32)
    for chosen in (is_decode, ~is_decode):
        part, tokens = _requests(inputs, chosen)
        if not tokens.numel():
            continue
        some = replace(inputs, q=inputs.q[tokens])
        if chosen is is_decode:
            out[tokens], lse[tokens] = decode(some, part, "fa2", tensor_cores=True)
        else:
            out[tokens], lse[tokens] = prefill(some, part, "fa2")
    return out, lse


def _head_dim_vo(inputs: PagedAttentionInputs) -> int:
    return stored_head_dim(inputs.v_cache, inputs.kv_format)


def _requests(
    inputs: PagedAttentionInputs, chosen: torch.Tensor
) -> tuple[BatchMetadata, torch.Tensor]:
    """Give the metadata of some requests, and which query tokens are theirs."""
    metadata = inputs.metadata
    query_lens = metadata.qo_indptr.diff()
    request = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), query_lens)
    part = build_metadata(
        query_lens[chosen], metadata.seq_lens[chosen], inputs.block_table[chosen],
        metadata.page_size,
    )  # fmt: skip
    return part.to(inputs.q.device), chosen[request].nonzero().squeeze(-1)


def _persistent(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        if problem.window_left >= 0 or problem.custom_mask or problem.sinks:
            return "BatchAttention has no window, no mask and no sinks"
        if problem.kv_cache or problem.k_scale != 1 or problem.v_scale != 1:
            return "BatchAttention's scales are tensors of the kernel's own; they are not given"
        if problem.head_dim_qk != problem.head_dim_vo:
            return "BatchAttention has one head_dim"
    return attention_refusal(problem, target) or True


@implementation(
    "paged_attention",
    name="flashinfer-batch-attention",
    backend="fa2",
    supports=_persistent,
    arithmetic=FA2,
    compile_key=module_key,
    build_ahead=True,
)
def batch_attention(inputs: PagedAttentionInputs) -> Pair:
    """Attend a mixed batch in one persistent kernel, ``BatchAttention``."""
    metadata = inputs.metadata
    planned = _batch_attention(inputs.kv_layout, str(inputs.q.device))
    planned.plan(
        qo_indptr=metadata.qo_indptr,
        kv_indptr=metadata.paged_kv_indptr,
        kv_indices=metadata.paged_kv_indices,
        kv_len_arr=metadata.seq_lens,
        **_heads_of(inputs),
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=inputs.v_cache.shape[-1],
        page_size=metadata.page_size,
        causal=inputs.causal,
        sm_scale=inputs.sm_scale,
        logits_soft_cap=inputs.logits_soft_cap,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k_cache.dtype,
    )
    out, lse = planned.run(
        inputs.q, (inputs.k_cache, inputs.v_cache), logits_soft_cap=inputs.logits_soft_cap
    )
    return out, to_natural(lse)


@functools.cache
def _batch_attention(kv_layout: str, device: str) -> Any:  # noqa: ANN401  untyped
    return flashinfer().BatchAttention(kv_layout=kv_layout, device=device)
