"""FlashInfer's own published references (``flashinfer.trace.templates``, 0.7 and later).

FlashInfer writes them next to recorded calls as the definition of what its kernels compute; other
projects compare kernels with them. They are pure PyTorch and run anywhere. LSE is base 2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem, MergeProblem, Problem
from ...reference.tensors.inputs import (
    AppendInputs,
    MergeInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..protocol import Supports, implementation
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .triton import to_base_2, to_natural

ATTENTION = "flashinfer.trace.templates.attention"
CASCADE = "flashinfer.trace.templates.cascade"
PAGE = "flashinfer.trace.templates.page"


def available(module: str) -> bool | str:
    """Return True, or why a module of references cannot be used."""
    absent = missing("flashinfer", "flashinfer")
    if absent is None and missing(module, "flashinfer") is not None:
        reason = f"{module} came with flashinfer-python 0.7.0; the installed version lacks it"
        absent = Refusal(reason, "package", module)
    return absent or True


def template(module: str, name: str) -> Any:  # noqa: ANN401  untyped third-party code
    """Give a published reference by name."""
    return getattr(require(module, "flashinfer"), name)


def _no_options(problem: AttentionProblem, *, causal: bool) -> str | None:
    """Say which option the templates of paged and ragged attention have no parameter for."""
    if problem.causal != causal and any(length > 1 for length in problem.query_lens):
        return f"the template is for causal={causal} only"
    for name, default in (
        ("window_left", -1),
        ("logits_soft_cap", 0.0),
        ("sinks", False),
        ("k_scale", 1.0),
        ("v_scale", 1.0),
    ):
        if getattr(problem, name) != default:
            return f"the template has no {name}"
    if problem.head_dim_qk != problem.head_dim_vo:
        return "the template has one head_dim for q, k and v"
    return None


def _gqa_supports(*, decode: bool, paged: bool) -> Supports:
    def supports(problem: Problem, target: Target) -> bool | str:
        del target
        if not isinstance(problem, AttentionProblem):
            return "an attention template"
        if problem.dtype != "bfloat16":
            return "the template's q and output are bfloat16"
        if paged and problem.kv_layout != "NHD":
            return "the template's cache layout is NHD"
        if decode and any(length != 1 for length in problem.query_lens):
            return "a decode template takes one query token a request"
        return _no_options(problem, causal=True) or available(ATTENTION)

    return supports


@implementation(
    "paged_attention",
    name="flashinfer-trace-paged-decode",
    backend="flashinfer-trace",
    features=("fp8_kv",),
    supports=_gqa_supports(decode=True, paged=True),
)
def paged_decode(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_gqa_paged_decode_reference``, which is given no last_page_len."""
    out, lse = template(ATTENTION, "_gqa_paged_decode_reference")(
        inputs.q,
        *_caches(inputs),
        inputs.metadata.paged_kv_indptr,
        inputs.metadata.paged_kv_indices,
        inputs.sm_scale,
    )
    return out, to_natural(lse)


@implementation(
    "paged_attention",
    name="flashinfer-trace-paged-prefill",
    backend="flashinfer-trace",
    features=("fp8_kv",),
    supports=_gqa_supports(decode=False, paged=True),
)
def paged_prefill(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_gqa_paged_prefill_reference``, which is given no last_page_len."""
    out, lse = template(ATTENTION, "_gqa_paged_prefill_reference")(
        inputs.q,
        *_caches(inputs),
        inputs.metadata.qo_indptr,
        inputs.metadata.paged_kv_indptr,
        inputs.metadata.paged_kv_indices,
        inputs.sm_scale,
    )
    return out, to_natural(lse)


@implementation(
    "ragged_attention",
    name="flashinfer-trace-ragged-prefill",
    backend="flashinfer-trace",
    supports=_gqa_supports(decode=False, paged=False),
)
def ragged_prefill(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_gqa_ragged_prefill_reference``."""
    out, lse = template(ATTENTION, "_gqa_ragged_prefill_reference")(
        inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr, inputs.sm_scale
    )
    return out, to_natural(lse)


def _supports_trtllm(*, decode: bool) -> Supports:
    def supports(problem: Problem, target: Target) -> bool | str:
        del target
        if not isinstance(problem, AttentionProblem):
            return "an attention template"
        if decode and any(length != 1 for length in problem.query_lens):
            return "the decode reference is taken with one query token a request"
        if not decode and problem.kv_layout != "HND":
            return "the context reference reads HND whatever the call said"
        unscaled = replace(problem, k_scale=1.0, v_scale=1.0)
        return _no_options(unscaled, causal=not decode) or available(ATTENTION)

    return supports


def _caches(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the caches as FlashInfer is to read them: FP8 that is stored as bytes as FP8."""
    if inputs.kv_format is None:
        return inputs.k_cache, inputs.v_cache
    return inputs.kv_format.view(inputs.k_cache), inputs.kv_format.view(inputs.v_cache)


def _trtllm_cache(inputs: PagedAttentionInputs) -> torch.Tensor:
    return torch.stack(_caches(inputs), dim=1)


@implementation(
    "paged_attention",
    name="flashinfer-trace-trtllm-context",
    backend="flashinfer-trace",
    features=("fp8_kv",),
    supports=_supports_trtllm(decode=False),
)
def trtllm_context(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Call ``_trtllm_batch_context_reference``; it gives no LSE."""
    metadata = inputs.metadata
    out = template(ATTENTION, "_trtllm_batch_context_reference")(
        query=inputs.q,
        kv_cache=_trtllm_cache(inputs),
        workspace_buffer=None,
        block_tables=inputs.block_table,
        seq_lens=metadata.seq_lens,
        max_q_len=None,
        max_kv_len=None,
        bmm1_scale=inputs.sm_scale * float(inputs.k_scale),
        bmm2_scale=float(inputs.v_scale),
        batch_size=metadata.num_requests,
        cum_seq_lens_q=metadata.cum_seq_lens_q,
        cum_seq_lens_kv=metadata.cum_pages_kv,
    )
    return out, None


@implementation(
    "paged_attention",
    name="flashinfer-trace-trtllm-decode",
    backend="flashinfer-trace",
    features=("fp8_kv",),
    supports=_supports_trtllm(decode=True),
)
def trtllm_decode(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Call ``_trtllm_batch_decode_reference``; it gives no LSE."""
    out = template(ATTENTION, "_trtllm_batch_decode_reference")(
        query=inputs.q,
        kv_cache=_trtllm_cache(inputs),
        workspace_buffer=None,
        block_tables=inputs.block_table,
        seq_lens=inputs.metadata.seq_lens,
        max_seq_len=None,
        bmm1_scale=inputs.sm_scale * float(inputs.k_scale),
        bmm2_scale=float(inputs.v_scale),
        kv_layout=inputs.kv_layout,
    )
    return out, None


def _supports_xqa(problem: Problem, target: Target) -> bool | str:
    if not isinstance(problem, AttentionProblem):
        return "an attention template"
    if problem.kv_layout != "NHD":
        return "the reference reads NHD"
    if problem.v_scale != 1 and not problem.kv_cache:
        return "XQA scales FP8 caches alone"
    return _supports_trtllm(decode=True)(problem, target)


@implementation(
    "paged_attention",
    name="flashinfer-trace-xqa",
    backend="flashinfer-trace",
    features=("fp8_kv",),
    supports=_supports_xqa,
)
def xqa(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Call ``_xqa_reference`` as ``trtllm_batch_decode_with_kv_cache`` calls XQA; no LSE.

    XQA has one scale for K and V, and multiplies logits by 1 / sqrt(head_dim) besides: q_scale
    makes up for both.
    """
    v_scale = float(inputs.v_scale)
    logits_scale = inputs.sm_scale * float(inputs.k_scale) * math.sqrt(inputs.q.shape[-1])
    k_cache, v_cache = _caches(inputs)
    out = template(PAGE, "_xqa_reference")(
        inputs.q,
        k_cache,
        v_cache,
        inputs.block_table,
        inputs.metadata.seq_lens,
        q_scale=logits_scale / v_scale,
        kv_scale=v_scale,
    )
    return out, None


def _supports_two(problem: Problem, target: Target) -> bool | str:
    del target
    if isinstance(problem, MergeProblem) and problem.num_states != 2:  # noqa: PLR2004
        return f"merge_state merges 2 states, not {problem.num_states}"
    return available(CASCADE)


def _supports_any(problem: Problem, target: Target) -> bool | str:
    del problem, target
    return available(CASCADE)


@implementation(
    "merge_state",
    name="flashinfer-trace-merge-state",
    backend="flashinfer-trace",
    supports=_supports_two,
)
def merge_state(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_merge_state_reference``."""
    s = to_base_2(inputs.lses)
    out, lse = template(CASCADE, "_merge_state_reference")(
        inputs.outs[0], s[0], inputs.outs[1], s[1]
    )
    return out, to_natural(lse)


@implementation(
    "merge_state",
    name="flashinfer-trace-merge-states",
    backend="flashinfer-trace",
    supports=_supports_any,
)
def merge_states(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_merge_states_reference``, states on the second axis."""
    out, lse = template(CASCADE, "_merge_states_reference")(
        inputs.outs.transpose(0, 1), to_base_2(inputs.lses.transpose(0, 1))
    )
    return out, to_natural(lse)


def _supports_append(problem: Problem, target: Target) -> bool | str:
    del problem, target
    return available(PAGE)


@implementation(
    "append_paged_kv",
    name="flashinfer-trace-append",
    backend="flashinfer-trace",
    supports=_supports_append,
)
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_append_paged_kv_cache_reference`` with positions at the end of each request."""
    metadata = inputs.metadata
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    counts = metadata.qo_indptr.diff().long()
    requests = torch.repeat_interleave(torch.arange(metadata.num_requests), counts)
    tokens = torch.arange(int(counts.sum()))
    ends = metadata.qo_indptr[1:].long()[requests]
    positions = metadata.seq_lens.long()[requests] - ends + tokens
    template(PAGE, "_append_paged_kv_cache_reference")(
        inputs.k,
        inputs.v,
        requests,
        positions,
        (k_cache, v_cache),
        metadata.paged_kv_indices,
        metadata.paged_kv_indptr,
        metadata.paged_kv_last_page_len,
        kv_layout=inputs.kv_layout,
    )
    return k_cache, v_cache
