"""FlashInfer's wrappers of attention to a paged cache: decode, prefill, and batches of both."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem, BatchMetadata, Problem, build_metadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..protocol import implementation
from ..targets.target import Target
from .calls import (
    BUILD_MINUTES,
    CUDA_CORES,
    FA2,
    FA2_WIDE,
    FA3,
    attention_refusal,
    flashinfer,
    module_key,
    wrapper,
)
from .plans import (
    Pair,
    head_dim_vo,
    plan_batch_attention,
    plan_decode,
    plan_prefill,
    run,
    run_batch_attention,
)
from .sessions import DECODE, PREFILL, BatchAttentionSession, decode_session, prefill_session

FA2_FEATURES = ("custom_mask", "fp8_kv", "nvfp4_kv")
FA3_FEATURES = ("fp8_kv", "fp8_q", "per_head_scales")


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


def decode(
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
    *,
    tensor_cores: bool,
) -> Pair:
    """Plan and run ``BatchDecodeWithPagedKVCacheWrapper``."""
    planned = wrapper(
        DECODE,
        inputs.q.device,
        kv_layout=inputs.kv_layout,
        use_tensor_cores=tensor_cores,
        backend="fa2" if tensor_cores else "auto",
    )
    plan_decode(planned, inputs, metadata, backend)
    return run(planned, inputs, backend)


def prefill(inputs: PagedAttentionInputs, metadata: BatchMetadata, backend: str) -> Pair:
    """Plan and run ``BatchPrefillWithPagedKVCacheWrapper``."""
    planned = wrapper(
        PREFILL,
        inputs.q.device,
        kv_layout=inputs.kv_layout,
        backend=backend,
    )
    plan_prefill(planned, inputs, metadata, backend)
    return run(planned, inputs, backend)


@implementation(
    "paged_attention",
    name="flashinfer-decode",
    backend="cuda-core",
    supports=_decodes,
    features=("fp8_kv",),
    arithmetic=CUDA_CORES,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["cuda-core"],
    session=functools.partial(decode_session, tensor_cores=False),
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
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=functools.partial(decode_session, tensor_cores=True),
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
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=functools.partial(prefill_session, "fa2"),
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
    build_minutes=BUILD_MINUTES["fa3"],
    session=functools.partial(prefill_session, "fa3"),
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
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
)
def mixed(inputs: PagedAttentionInputs) -> Pair:
    """Split a batch as vLLM does: decodes to one wrapper, the rest to the other."""
    is_decode = inputs.metadata.qo_indptr.diff() == 1
    out = inputs.q.new_empty((*inputs.q.shape[:2], head_dim_vo(inputs)), dtype=inputs.out_dtype)
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


PERSISTENT = replace(FA2, merged_outputs=2 * 64)
"""``persistent.cuh``: parts of 64 keys or more, merged by two rows of threads with 128 channels."""


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
    arithmetic=PERSISTENT,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=BatchAttentionSession,
)
def batch_attention(inputs: PagedAttentionInputs) -> Pair:
    """Attend a mixed batch in one persistent kernel, ``BatchAttention``."""
    metadata = inputs.metadata
    planned = _batch_attention(inputs.kv_layout, str(inputs.q.device))
    plan_batch_attention(planned, inputs, metadata)
    return run_batch_attention(planned, inputs)


@functools.cache
def _batch_attention(kv_layout: str, device: str) -> Any:  # noqa: ANN401  untyped
    return flashinfer().BatchAttention(kv_layout=kv_layout, device=device)
