"""FlashInfer's multi-head latent attention: one cache, whose first channels are the values.

``BatchMLAPagedAttentionWrapper`` takes the compressed and the rotary channels as tensors of their
own, which are views of the one cache here, as in vLLM. Its plan was given its metadata one by one
before 0.7.0 and takes a record of them since.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ..reference import Arithmetic, AttentionProblem, Problem
from ..reference.inputs import PagedAttentionInputs
from ..reference.problems import is_power_of_two
from .flashinfer_calls import (
    FA2,
    WORKSPACE_BYTES,
    attention_refusal,
    flashinfer,
    module_key,
    version,
)
from .flashinfer_triton import to_natural
from .flashinfer_trtllm import (
    WITH_LSE,
    natural_or_none,
    padded_block_table,
    xqa_module_key,
    zeroed_workspace,
)
from .gating.rules import version_matches
from .protocol import implementation
from .target import Target

Pair = tuple[torch.Tensor, torch.Tensor]
MLA_FA2 = replace(FA2, exponent="fused")
"""``mla.cuh``: exp2(s c - (m c)), sums by m16k16_rowsum_f16f16f32, parts in the output's dtype."""
MLA_FA3 = Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused")
"""``mla_hopper.cuh``: row sums before the rounding, parts in the output's dtype."""
BLACKWELL = Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused")
"""CUTLASS, trtllm-gen and XQA: what is known of their sources, and at most that of the others."""
RECORDS = ">=0.7.0.dev0"
"""``plan`` takes ``MLAPlanMetadata``; flat tensors are deprecated."""
TILES_REFUSED = ">=0.7.1.dev0"
"""Refuses causal batches of which a tile of query rows loses a key; earlier releases lose it."""
TABLE_OF_KEYS = 128
"""Block tables cover a multiple of so many keys."""
NOPE_HEAD_DIM = 128
"""Channels without rotary positions of DeepSeek's heads before the projections were absorbed."""
CUTLASS_SCALE = 1.0 / math.sqrt(128 + 64)
TILE = 64
"""Query rows of a tile in FA2 and FA3; two tiles where a request has more rows on average."""


def _latent(problem: Problem, target: Target) -> str | None:
    """Say why no MLA kernel takes a problem."""
    if isinstance(problem, AttentionProblem) and not problem.values_in_keys:
        return "latent attention reads values from the keys (values_in_keys)"
    return attention_refusal(problem, target)


def _wrapped(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        if problem.kv_cache:
            if problem.k_scale != problem.v_scale or not is_power_of_two(problem.k_scale):
                return "an FP8 latent cache has one scale, which is rounded to the queries' dtype"
        elif problem.v_scale != 1:
            return "BatchMLAPagedAttentionWrapper has no v_scale"
        if version_matches(target.flashinfer, TILES_REFUSED) and _tile_ends_in_a_query(problem):
            return "FlashInfer refuses causal tiles that end inside a query token, from 0.7.1 on"
    return _latent(problem, target) or True


def _tile_ends_in_a_query(problem: AttentionProblem) -> bool:
    """Tell whether a causal tile of query rows may end between two heads of one query token.

    FlashInfer loses a key there, if that key is the first of a tile of keys (``_fa_common.py`` of
    0.7.1, ``_validate_fa_causal_tile_bound``).
    """
    heads, requests = problem.num_qo_heads, max(len(problem.query_lens), 1)
    tile = TILE * (2 if problem.num_tokens * heads // requests > TILE else 1)
    return problem.causal and bool(tile % heads) and max(problem.query_lens) * heads > tile


def _decodes(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and any(t != 1 for t in problem.query_lens):
        return "decoding takes one query token a request"
    return _latent(problem, target) or True


def _decodes_with_cutlass(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        if not math.isclose(problem.scale * problem.k_scale, CUTLASS_SCALE, rel_tol=1e-6):
            return "CUTLASS has the scale of 192 channels compiled in"
        if problem.v_scale != 1:
            return "BatchMLAPagedAttentionWrapper has no v_scale"
        if problem.strided_q or problem.strided_kv:
            return "CUTLASS takes contiguous queries and caches"
    return _decodes(problem, target)


def latent_pages(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Give the cache without its axis of one head: [pages, page_size, head_dim_qk], a view."""
    return inputs.k_cache.squeeze(2 if inputs.kv_layout == "NHD" else 1)


def _typed_pages(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Give the pages in the dtype of what they hold."""
    pages = latent_pages(inputs)
    return pages if inputs.kv_format is None else inputs.kv_format.view(pages)


@functools.cache
def _wrapper(device: torch.device, backend: str) -> Any:  # noqa: ANN401  untyped third-party code
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    made = flashinfer("flashinfer.mla").BatchMLAPagedAttentionWrapper
    return made(float_workspace_buffer=workspace, backend=backend)


def _plan(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    sm_scale: float,
    **form: Any,  # noqa: ANN401
) -> None:
    compressed = inputs.v_cache.shape[-1]
    planned.plan(
        num_heads=inputs.q.shape[1],
        head_dim_ckv=compressed,
        head_dim_kpe=inputs.q.shape[-1] - compressed,
        page_size=inputs.metadata.page_size,
        causal=inputs.causal,
        sm_scale=sm_scale,
        q_data_type=inputs.q.dtype,
        kv_data_type=_typed_pages(inputs).dtype,
        **form,
    )


def _attend(inputs: PagedAttentionInputs, backend: str) -> Pair:
    """Plan and run FA2 or FA3, with the compressed and the rotary channels apart."""
    planned = _wrapper(inputs.q.device, backend)
    metadata, compressed = inputs.metadata, inputs.v_cache.shape[-1]
    csr = {
        "qo_indptr": metadata.qo_indptr,
        "kv_indptr": metadata.paged_kv_indptr,
        "kv_indices": metadata.paged_kv_indices,
        "kv_len_arr": metadata.seq_lens,
    }
    quantised = inputs.kv_format is not None
    # Scales of a plain cache go into the softmax's; of an FP8 one they are the values' too.
    sm_scale = inputs.sm_scale * (1.0 if quantised else float(inputs.k_scale))
    q, pages = inputs.q, _typed_pages(inputs)
    queries = q[..., :compressed], q[..., compressed:]
    caches = pages[..., :compressed], pages[..., compressed:]
    scale = float(inputs.k_scale)
    scales = {"ckv_scale": scale, "kpe_scale": scale} if quantised else {}
    if version_matches(version(), RECORDS):
        records = flashinfer("flashinfer.mla").MLAPlanMetadata.csr(**csr)
        _plan(planned, inputs, sm_scale, metadata=records, query_layout="split",
              kv_cache_layout="split", lse_mode="base2")  # fmt: skip
        out, lse = planned.run(query=queries, kv_cache=caches, return_lse=True, **scales)
    else:
        _plan(planned, inputs, sm_scale, **csr)
        out, lse = planned.run(q_nope=queries[0], q_pe=queries[1], ckv_cache=caches[0],
                               kpe_cache=caches[1], return_lse=True, **scales)  # fmt: skip
    return out, to_natural(lse)


@implementation(
    "paged_attention",
    name="flashinfer-mla-fa2",
    backend="fa2",
    supports=_wrapped,
    features=("mla", "fp8_kv"),
    arithmetic=MLA_FA2,
    compile_key=module_key,
    build_ahead=True,
)
def mla_fa2(inputs: PagedAttentionInputs) -> Pair:
    """Attend to a latent cache by ``BatchMLAPagedAttentionWrapper`` with FA2."""
    return _attend(inputs, "fa2")


@implementation(
    "paged_attention",
    name="flashinfer-mla-fa3",
    backend="fa3",
    supports=_wrapped,
    features=("mla", "fp8_kv"),
    arithmetic=MLA_FA3,
    compile_key=module_key,
    build_ahead=True,
)
def mla_fa3(inputs: PagedAttentionInputs) -> Pair:
    """Attend to a latent cache by ``BatchMLAPagedAttentionWrapper`` with FA3."""
    return _attend(inputs, "fa3")


@implementation(
    "paged_attention",
    name="flashinfer-mla-cutlass",
    backend="cutlass",
    supports=_decodes_with_cutlass,
    features=("mla",),
    arithmetic=BLACKWELL,
    compile_key=lambda _: "mla",
)
def mla_cutlass(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Decode from a latent cache by ``BatchMLAPagedAttentionWrapper`` with CUTLASS; no LSE."""
    planned = _wrapper(inputs.q.device, "cutlass")
    compressed = inputs.v_cache.shape[-1]
    q, pages = inputs.q, latent_pages(inputs)
    table = padded_block_table(inputs, TABLE_OF_KEYS)
    seq_lens = inputs.metadata.seq_lens
    if version_matches(version(), RECORDS):
        records = flashinfer("flashinfer.mla").MLAPlanMetadata.dense(
            cum_seq_lens_q=inputs.metadata.qo_indptr, block_tables=table, seq_lens=seq_lens,
            max_q_len=1,
        )  # fmt: skip
        _plan(planned, inputs, inputs.sm_scale * float(inputs.k_scale), metadata=records)
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


def _decode(inputs: PagedAttentionInputs, backend: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call ``trtllm_batch_decode_with_kv_cache_mla``; with the LSE where there is one."""
    compressed = inputs.v_cache.shape[-1]
    out = inputs.q.new_empty((*inputs.q.shape[:2], compressed), dtype=inputs.out_dtype)
    with_lse = backend == "trtllm-gen" and version_matches(version(), WITH_LSE)
    result = flashinfer("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla(
        query=inputs.q.unsqueeze(1),
        kv_cache=_typed_pages(inputs),
        workspace_buffer=zeroed_workspace(f"mla-{backend}", inputs.q.device),
        qk_nope_head_dim=NOPE_HEAD_DIM,
        kv_lora_rank=compressed,
        qk_rope_head_dim=inputs.q.shape[-1] - compressed,
        block_tables=padded_block_table(inputs, TABLE_OF_KEYS),
        seq_lens=inputs.metadata.seq_lens,
        max_seq_len=int(inputs.metadata.seq_lens.max()),
        out=out.unsqueeze(1),
        bmm1_scale=inputs.sm_scale * float(inputs.q_scale) * float(inputs.k_scale),
        bmm2_scale=float(inputs.v_scale),
        backend=backend,
        **({"return_lse": True} if with_lse else {}),
    )
    return out, natural_or_none(result[1].reshape(out.shape[:2]) if with_lse else None)


@implementation(
    "paged_attention",
    name="flashinfer-mla-trtllm",
    backend="trtllm-gen",
    supports=_decodes,
    features=("mla", "fp8_kv", "fp8_q"),
    arithmetic=BLACKWELL,
    compile_key=lambda _: "trtllm-gen",
)
def mla_trtllm(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode from a latent cache by trtllm-gen."""
    return _decode(inputs, "trtllm-gen")


@implementation(
    "paged_attention",
    name="flashinfer-mla-xqa",
    backend="xqa",
    supports=_decodes,
    features=("mla", "fp8_kv", "fp8_q"),
    arithmetic=BLACKWELL,
    compile_key=xqa_module_key,
    build_ahead=True,
)
def mla_xqa(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode from a latent cache by XQA; no LSE."""
    return _decode(inputs, "xqa")
