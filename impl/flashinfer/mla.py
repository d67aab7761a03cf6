"""FlashInfer's multi-head latent attention: one cache, whose first channels are the values.

``BatchMLAPagedAttentionWrapper`` takes the compressed and the rotary channels as tensors of their
own, which are views of the one cache here, as in vLLM. Its plan was given its metadata one by one
before 0.7.0 and takes a record of them since.

On Blackwell, CUTLASS is a backend of it that has no plan before 0.7.0; trtllm-gen and XQA are
``trtllm_batch_decode_with_kv_cache_mla``. All take a block table of a multiple of 128 keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.problems.base import is_power_of_two
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gating.rules import version_matches
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import FA2, FA3, TRTLLM_GEN, XQA, Backend, one_module
from .calls import WORKSPACE_BYTES, attention_refusal, flashinfer, shared_workspace, version
from .claims import Refuses, few_query_tokens, one_query_token, unavailable
from .libraries import attention_library
from .sessions import PlannedSession
from .triton import to_natural
from .trtllm import WITH_LSE, natural_or_none, padded_block_table, zeroed_workspace

Pair = tuple[torch.Tensor, torch.Tensor]
FEATURES = ("mla", "fp8_kv")
MLA_FA2 = replace(
    FA2,
    arithmetic=replace(FA2.arithmetic, exponent="fused", merged_outputs=0),
    wide_arithmetic=(),
    features=FEATURES,
    library=attention_library("batch_mla", "fa2"),
    split=0,
)
"""``mla.cuh``: exp2(s c - (m c)), sums by m16k16_rowsum_f16f16f32, parts in the output's dtype that
are merged in float32."""
MLA_FA3 = replace(
    FA3,
    arithmetic=Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused"),
    features=FEATURES,
    library=attention_library("batch_mla", "fa3"),
    tile=0,
    hidden_keys="any",  # it has no windows
)
"""``mla_hopper.cuh``: row sums before the rounding, parts in the output's dtype."""
RECORDS = ">=0.7.0.dev0"
"""``plan`` takes ``MLAPlanMetadata``; flat tensors are deprecated."""
TILES_REFUSED = ">=0.7.1.dev0"
"""Refuses causal batches of which a tile of query rows loses a key; earlier releases lose it."""
TILE = 64
"""Query rows of a tile in FA2 and FA3; two tiles where a request has more rows on average."""


def latent_refusal(problem: AttentionProblem, target: Target) -> str | None:
    """Return the reason why no MLA kernel takes a problem."""
    said = attention_refusal(problem, target)
    if said is None and not problem.values_in_keys:
        return "latent attention reads values from the keys (values_in_keys)"
    return said


def _unwrapped(problem: AttentionProblem, target: Target) -> str | None:
    one_scale = problem.k_scale == problem.v_scale and is_power_of_two(problem.k_scale)
    return first_reason(
        (
            problem.kv_cache and not one_scale,
            "an FP8 latent cache has one scale, which is rounded to the queries' dtype",
        ),
        (
            not problem.kv_cache and problem.v_scale != 1,
            "BatchMLAPagedAttentionWrapper has no v_scale",
        ),
        (
            version_matches(target.flashinfer, TILES_REFUSED) and _tile_ends_in_a_query(problem),
            "FlashInfer refuses causal tiles that end inside a query token, from 0.7.1 on",
        ),
    )


def _tile_ends_in_a_query(problem: AttentionProblem) -> bool:
    """Whether a causal tile of query rows may end between two heads of one query token.

    FlashInfer loses a key there, if that key is the first of a tile of keys (``_fa_common.py`` of
    0.7.1, ``_validate_fa_causal_tile_bound``).
    """
    heads, requests = problem.num_qo_heads, max(len(problem.query_lens), 1)
    tile = TILE * (2 if problem.num_tokens * heads // requests > TILE else 1)
    return problem.causal and bool(tile % heads) and max(problem.query_lens) * heads > tile


def latent_pages(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Return the cache without its axis of one head: [pages, page_size, head_dim_qk], a view."""
    return inputs.k_cache.squeeze(2 if inputs.kv_layout == "NHD" else 1)


def typed_pages(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Return the pages in the dtype of what they hold."""
    pages = latent_pages(inputs)
    return pages if inputs.kv_format is None else inputs.kv_format.view(pages)


def _new_wrapper(workspace: torch.Tensor, backend: str) -> Any:  # noqa: ANN401  untyped third-party code
    made = flashinfer("flashinfer.mla").BatchMLAPagedAttentionWrapper
    return made(float_workspace_buffer=workspace, backend=backend)


@functools.cache
def mla_wrapper(device: torch.device, backend: str) -> Any:  # noqa: ANN401  untyped
    """Return the same wrapper for the same backend, as ``calls.wrapper``."""
    return _new_wrapper(shared_workspace(device), backend)


def _session_wrapper(device: torch.device, backend: str) -> Any:  # noqa: ANN401  untyped
    # With a workspace of its own, its launches may overtake those of other sessions.
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _new_wrapper(workspace, backend)


def plan_latent(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    sm_scale: float,
    **form: Any,  # noqa: ANN401
) -> None:
    """Call ``plan`` with a batch in the form that backend and release take."""
    compressed = inputs.v_cache.shape[-1]
    planned.plan(
        num_heads=inputs.q.shape[1],
        head_dim_ckv=compressed,
        head_dim_kpe=inputs.q.shape[-1] - compressed,
        page_size=inputs.metadata.page_size,
        causal=inputs.causal,
        sm_scale=sm_scale,
        q_data_type=inputs.q.dtype,
        kv_data_type=typed_pages(inputs).dtype,
        **form,
    )


def _plan_split(planned: Any, inputs: PagedAttentionInputs) -> None:  # noqa: ANN401  untyped
    """Plan FA2 or FA3, with the compressed and the rotary channels apart."""
    metadata = inputs.metadata
    csr = {
        "qo_indptr": metadata.qo_indptr,
        "kv_indptr": metadata.paged_kv_indptr,
        "kv_indices": metadata.paged_kv_indices,
        "kv_len_arr": metadata.seq_lens,
    }
    # The scale of a plain cache goes into the softmax's; that of an FP8 one is the values' too.
    sm_scale = inputs.sm_scale * (float(inputs.k_scale) if inputs.kv_format is None else 1.0)
    if not version_matches(version(), RECORDS):
        plan_latent(planned, inputs, sm_scale, **csr)
        return
    records = flashinfer("flashinfer.mla").MLAPlanMetadata.csr(**csr)
    plan_latent(
        planned,
        inputs,
        sm_scale,
        metadata=records,
        query_layout="split",
        kv_cache_layout="split",
        lse_mode="base2",
    )


def _run_split(planned: Any, inputs: PagedAttentionInputs) -> Pair:  # noqa: ANN401  untyped
    compressed, pages = inputs.v_cache.shape[-1], typed_pages(inputs)
    queries = inputs.q[..., :compressed], inputs.q[..., compressed:]
    caches = pages[..., :compressed], pages[..., compressed:]
    scale = float(inputs.k_scale)
    scales = {} if inputs.kv_format is None else {"ckv_scale": scale, "kpe_scale": scale}
    if version_matches(version(), RECORDS):
        out, lse = planned.run(query=queries, kv_cache=caches, return_lse=True, **scales)
    else:
        out, lse = planned.run(
            q_nope=queries[0],
            q_pe=queries[1],
            ckv_cache=caches[0],
            kpe_cache=caches[1],
            return_lse=True,
            **scales,
        )
    return out, to_natural(lse)


def _attend(inputs: PagedAttentionInputs, backend: str) -> Pair:
    planned = mla_wrapper(inputs.q.device, backend)
    _plan_split(planned, inputs)
    return _run_split(planned, inputs)


def latent_session(backend: str) -> PlannedSession:
    """Make a session of the wrapper."""
    return PlannedSession(
        lambda inputs: _session_wrapper(inputs.q.device, backend), _plan_split, _run_split
    )


@MLA_FA2.adapter(
    "paged_attention",
    "flashinfer-mla-fa2",
    latent_refusal,
    _unwrapped,
    session=functools.partial(latent_session, "fa2"),
)
def mla_fa2(inputs: PagedAttentionInputs) -> Pair:
    """Attend to a latent cache by ``BatchMLAPagedAttentionWrapper`` with FA2."""
    return _attend(inputs, "fa2")


@MLA_FA3.adapter(
    "paged_attention",
    "flashinfer-mla-fa3",
    latent_refusal,
    _unwrapped,
    session=functools.partial(latent_session, "fa3"),
)
def mla_fa3(inputs: PagedAttentionInputs) -> Pair:
    """Attend to a latent cache by ``BatchMLAPagedAttentionWrapper`` with FA3."""
    return _attend(inputs, "fa3")


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
