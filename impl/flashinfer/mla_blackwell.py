"""FlashInfer's decoding from a latent cache on Blackwell: CUTLASS, trtllm-gen and XQA.

CUTLASS is a backend of ``BatchMLAPagedAttentionWrapper`` that has no plan before 0.7.0; the others
are ``trtllm_batch_decode_with_kv_cache_mla``. All take a block table of a multiple of 128 keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gating.rules import version_matches
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import TRTLLM_GEN, XQA, Backend, one_module
from .calls import flashinfer, version
from .claims import Refuses, few_query_tokens, one_query_token, unavailable
from .mla import RECORDS, latent_pages, latent_refusal, mla_wrapper, plan_latent, typed_pages
from .trtllm import WITH_LSE, natural_or_none, padded_block_table, zeroed_workspace

Result = tuple[torch.Tensor, "torch.Tensor | None"]
# CUTLASS rounds what trtllm-gen and XQA do: what is known of their sources, and at most that.
CUTLASS = Backend("cutlass", TRTLLM_GEN.arithmetic, (), ("mla",), one_module("mla"))
QUANTISED = ("mla", "fp8_kv", "fp8_q", "host_bounds")
TABLE_OF_KEYS = 128
"""Number of keys of which a block table covers a multiple."""
NOPE_HEAD_DIM = 128
"""Channels without rotary positions of DeepSeek's heads before the projections were absorbed."""
CUTLASS_SCALE = 1.0 / math.sqrt(128 + 64)


DECODES: tuple[Refuses, ...] = (one_query_token("decoding takes"), latent_refusal)
VERIFIES: tuple[Refuses, ...] = (few_query_tokens("decoding takes"), latent_refusal)
RAGGED: tuple[Refuses, ...] = (few_query_tokens("decoding takes", uniform=False), latent_refusal)


def _not_cutlass(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (
            not math.isclose(problem.scale * problem.k_scale, CUTLASS_SCALE, rel_tol=1e-6),
            "CUTLASS has the scale of 192 channels compiled in",
        ),
        (problem.v_scale != 1, "BatchMLAPagedAttentionWrapper has no v_scale"),
        (
            problem.strided_q or problem.strided_kv,
            "CUTLASS takes contiguous queries and caches",
        ),
    )


@CUTLASS.adapter("paged_attention", "flashinfer-mla-cutlass", unavailable, _not_cutlass, *DECODES)
def mla_cutlass(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Decode from a latent cache by ``BatchMLAPagedAttentionWrapper`` with CUTLASS; no LSE."""
    planned = mla_wrapper(inputs.q.device, "cutlass")
    compressed = inputs.v_cache.shape[-1]
    q, pages = inputs.q, latent_pages(inputs)
    table = padded_block_table(inputs, TABLE_OF_KEYS)
    seq_lens = inputs.metadata.seq_lens
    if version_matches(version(), RECORDS):
        records = flashinfer("flashinfer.mla").MLAPlanMetadata.dense(
            cum_seq_lens_q=inputs.metadata.qo_indptr,
            block_tables=table,
            seq_lens=seq_lens,
            max_q_len=1,
        )
        plan_latent(planned, inputs, inputs.sm_scale * float(inputs.k_scale), metadata=records)
        return planned.run(query=q, kv_cache=pages), None
    out = planned.run(
        q_nope=q[..., :compressed],
        q_pe=q[..., compressed:],
        ckv_cache=pages[..., :compressed],
        kpe_cache=pages[..., compressed:],
        kv_len=seq_lens,
        page_table=table,
    )
    return out, None


def _decode(inputs: PagedAttentionInputs, backend: str) -> Result:
    """Call ``trtllm_batch_decode_with_kv_cache_mla``; with the LSE where there is one."""
    compressed = inputs.v_cache.shape[-1]
    out = inputs.q.new_empty((*inputs.q.shape[:2], compressed), dtype=inputs.out_dtype)
    with_lse = backend == "trtllm-gen" and version_matches(version(), WITH_LSE)
    requests, indptr = inputs.metadata.num_requests, inputs.metadata.qo_indptr
    lengths: dict[str, Any] = {}
    if len(indptr.diff().unique()) > 1:
        lengths = {"cum_seq_lens_q": indptr, "max_q_len": inputs.max_q_len}

    def shaped(rows: torch.Tensor) -> torch.Tensor:
        return rows if lengths else rows.unflatten(0, (requests, -1))

    result = flashinfer("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
        query=shaped(inputs.q),
        kv_cache=typed_pages(inputs),
        workspace_buffer=zeroed_workspace(f"mla-{backend}", inputs.q.device),
        qk_nope_head_dim=NOPE_HEAD_DIM,
        kv_lora_rank=compressed,
        qk_rope_head_dim=inputs.q.shape[-1] - compressed,
        block_tables=padded_block_table(inputs, TABLE_OF_KEYS),
        seq_lens=inputs.metadata.seq_lens,
        max_seq_len=inputs.max_kv_len,
        out=shaped(out),
        bmm1_scale=inputs.sm_scale * float(inputs.q_scale) * float(inputs.k_scale),
        bmm2_scale=float(inputs.v_scale),
        backend=backend,
        **lengths,
        **({"return_lse": True} if with_lse else {}),
    )
    return out, natural_or_none(result[1].reshape(out.shape[:2]) if with_lse else None)


@TRTLLM_GEN.adapter("paged_attention", "flashinfer-mla-trtllm", *RAGGED, features=QUANTISED)
def mla_trtllm(inputs: PagedAttentionInputs) -> Result:
    """Decode from a latent cache by trtllm-gen."""
    return _decode(inputs, "trtllm-gen")


@XQA.adapter(
    "paged_attention",
    "flashinfer-mla-xqa",
    *VERIFIES,
    features=QUANTISED,
    hidden_keys="any",  # it has no windows
)
def mla_xqa(inputs: PagedAttentionInputs) -> Result:
    """Decode from a latent cache by XQA; no LSE."""
    return _decode(inputs, "xqa")
