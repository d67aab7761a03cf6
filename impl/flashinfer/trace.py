"""FlashInfer's own published references (``flashinfer.trace.templates``, 0.7 and later).

FlashInfer writes them next to recorded calls as the definition of what its kernels compute; other
projects compare kernels with them. They are pure PyTorch and run anywhere. LSE is base 2.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import (
    AppendInputs,
    MergeInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..targets.optional import missing, require
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .backends import TRACE
from .claims import (
    Refuses,
    either,
    offered,
    one_head_dim,
    one_query_token,
    two_states,
)
from .triton import to_base_2, to_natural

ATTENTION = "flashinfer.trace.templates.attention"
CASCADE = "flashinfer.trace.templates.cascade"
PAGE = "flashinfer.trace.templates.page"


def lacking(module: str, *names: str) -> Refuses:
    """Refuse machines where a module of references cannot be used, or lacks one of these names."""

    def refuses(*machine: Any) -> str | None:  # noqa: ANN401  a problem of any operation, and it
        unusable = missing("flashinfer", "flashinfer")
        if unusable is not None:
            return unusable
        if missing(module, "flashinfer") is not None:
            reason = f"{module} came with flashinfer-python 0.7.0; the installed version lacks it"
            return Refusal(reason, "package", module)
        return either(*(offered(module, name) for name in names))(*machine)

    return refuses


def template(module: str, name: str) -> Any:  # noqa: ANN401  untyped third-party code
    """Return a published reference by name."""
    return getattr(require(module, "flashinfer"), name)


def _options(problem: AttentionProblem, _: Target) -> str | None:
    """Refuse options that the templates of paged and ragged attention have no parameter for."""
    return first_reason(
        *(
            (getattr(problem, name) != default, f"the template has no {name}")
            for name, default in (
                ("window_left", -1),
                ("logits_soft_cap", 0.0),
                ("sinks", False),
                ("k_scale", 1.0),
                ("v_scale", 1.0),
            )
        )
    )


def _not_causal(problem: AttentionProblem, _: Target) -> str | None:
    """Refuse what a causal mask would make a difference to."""
    differs = not problem.causal and any(length > 1 for length in problem.query_lens)
    return "the template is for causal=True only" if differs else None


ONE_HEAD_DIM = one_head_dim("the template has one head_dim for q, k and v")
RAGGED: tuple[Refuses, ...] = (_not_causal, _options, ONE_HEAD_DIM, lacking(ATTENTION))


def _not_bfloat16(problem: AttentionProblem, _: Target) -> str | None:
    return "the template's q and output are bfloat16" if problem.dtype != "bfloat16" else None


def _not_nhd(problem: AttentionProblem, _: Target) -> str | None:
    return "the template's cache layout is NHD" if problem.kv_layout != "NHD" else None


PAGED = replace(TRACE, features=("fp8_kv",))


@PAGED.adapter(
    "paged_attention",
    "flashinfer-trace-paged-decode",
    _not_bfloat16,
    _not_nhd,
    one_query_token("a decode template takes"),
    *RAGGED,
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


@PAGED.adapter(
    "paged_attention", "flashinfer-trace-paged-prefill", _not_bfloat16, _not_nhd, *RAGGED
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


@TRACE.adapter("ragged_attention", "flashinfer-trace-ragged-prefill", _not_bfloat16, *RAGGED)
def ragged_prefill(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_gqa_ragged_prefill_reference``."""
    out, lse = template(ATTENTION, "_gqa_ragged_prefill_reference")(
        inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr, inputs.sm_scale
    )
    return out, to_natural(lse)


def _scaled_options(problem: AttentionProblem, target: Target) -> str | None:
    """Refuse what ``_options`` refuses, except for scales, which these references have."""
    return _options(replace(problem, k_scale=1.0, v_scale=1.0), target)


TRTLLM_DECODE: tuple[Refuses, ...] = (
    one_query_token("the decode reference is taken with"),
    _scaled_options,
    ONE_HEAD_DIM,
    lacking(ATTENTION),
)


def _not_hnd(problem: AttentionProblem, _: Target) -> str | None:
    wrong = problem.kv_layout != "HND"
    return "the context reference reads HND whatever the call said" if wrong else None


def _caches(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as FlashInfer is to read them: FP8 that is stored as bytes as FP8."""
    if inputs.kv_format is None:
        return inputs.k_cache, inputs.v_cache
    return inputs.kv_format.view(inputs.k_cache), inputs.kv_format.view(inputs.v_cache)


def _trtllm_cache(inputs: PagedAttentionInputs) -> torch.Tensor:
    return torch.stack(_caches(inputs), dim=1)


@PAGED.adapter(
    "paged_attention",
    "flashinfer-trace-trtllm-context",
    _not_hnd,
    _not_causal,
    _scaled_options,
    ONE_HEAD_DIM,
    lacking(ATTENTION),
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


@PAGED.adapter("paged_attention", "flashinfer-trace-trtllm-decode", *TRTLLM_DECODE)
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


def _no_xqa(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (problem.kv_layout != "NHD", "the reference reads NHD"),
        (problem.v_scale != 1 and not problem.kv_cache, "XQA scales FP8 caches alone"),
    )


@PAGED.adapter("paged_attention", "flashinfer-trace-xqa", _no_xqa, *TRTLLM_DECODE)
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


@TRACE.adapter("merge_state", "flashinfer-trace-merge-state", two_states, lacking(CASCADE))
def merge_state(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_merge_state_reference``."""
    s = to_base_2(inputs.lses)
    out, lse = template(CASCADE, "_merge_state_reference")(
        inputs.states[0], s[0], inputs.states[1], s[1]
    )
    return out, to_natural(lse)


@TRACE.adapter("merge_state", "flashinfer-trace-merge-states", lacking(CASCADE))
def merge_states(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_merge_states_reference``, states on the second axis."""
    out, lse = template(CASCADE, "_merge_states_reference")(
        inputs.outs.transpose(0, 1), to_base_2(inputs.lses.transpose(0, 1))
    )
    return out, to_natural(lse)


@TRACE.adapter("append_paged_kv", "flashinfer-trace-append", lacking(PAGE))
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``_append_paged_kv_cache_reference`` with positions at the end of each request."""
    metadata = inputs.metadata
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    counts = metadata.qo_indptr.diff().long()
    device = counts.device
    requests = torch.repeat_interleave(torch.arange(metadata.num_requests, device=device), counts)
    tokens = torch.arange(int(counts.sum()), device=device)
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
