"""FlashInfer's paged attention for serving: trtllm-gen on data-centre Blackwell, XQA elsewhere.

``trtllm_batch_decode_with_kv_cache`` and ``trtllm_batch_context_with_kv_cache`` take a block table
and lengths, no plan. Their workspace must be zero before its first use and belong to one backend
alone (vllm-project/vllm#25520); bmm1_scale multiplies the logits, bmm2_scale the output. LSE came
with 0.6.12, in base 2, and XQA has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.formats.cache_elements import FP8, NVFP4
from ...reference.formats.kv_format import stored_head_dim
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gating.rules import version_matches
from ..targets.target import Target
from .backends import TRTLLM_GEN, XQA, xqa_module_key
from .calls import WORKSPACE_BYTES, attention_refusal, draft_words, flashinfer, paged_cache, version
from .claims import (
    Refuses,
    either,
    few_query_tokens,
    no_more_queries_than_keys,
    one_head_dim,
    unavailable,
)
from .triton import to_natural

Result = tuple[torch.Tensor, "torch.Tensor | None"]
WITH_LSE = ">=0.6.12.dev0"
FP8_ON_HOPPER = (
    "XQA on SM90 rounds 16-bit queries to FP8 for an FP8 cache: flashinfer-xqa-decode-fp8 gives it "
    "queries that FP8 holds"
)


@functools.cache
def zeroed_workspace(use: str, device: torch.device) -> torch.Tensor:
    """Return the workspace of one backend and function: zero at first, and never another's."""
    del use  # it tells apart what is cached
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def padded_block_table(inputs: PagedAttentionInputs, keys: int = 1) -> torch.Tensor:
    """Return the block table with stale ids behind each request's pages, as engines leave them.

    Args:
        inputs: the inputs of a call; its table has garbage there, which need not be a page's id.
        keys: number of keys of which a row covers a multiple, and at least that many.
    """
    table = inputs.block_table.remainder(inputs.k_cache.shape[0])
    whole = max(keys // inputs.metadata.page_size, 1)
    # No engine's table is of no columns; XQA launches an empty grid for one.
    added = -table.shape[1] % whole if table.shape[1] else whole
    return torch.nn.functional.pad(table, (0, added)).contiguous()


def natural_or_none(lse: torch.Tensor | None) -> torch.Tensor | None:
    """Return an LSE of base 2 as a natural one."""
    return None if lse is None else to_natural(lse)


def _linear_scales(problem: AttentionProblem, _: Target) -> str | None:
    if problem.kv_cache != NVFP4:
        return None
    return "trtllm-gen reads V's block scales interleaved"


DECODES = few_query_tokens("trtllm_batch_decode_with_kv_cache takes", uniform=False)
XQA_DECODES = few_query_tokens("XQA takes")
ONE_HEAD_DIM = one_head_dim("keys and values have one head_dim")
TRTLLM: tuple[Refuses, ...] = (ONE_HEAD_DIM, _linear_scales, attention_refusal)
"""What trtllm-gen is not called with."""


def _on_hopper(target: Target) -> bool:
    return target.sm == 90  # noqa: PLR2004


def _fp8_on_hopper(problem: AttentionProblem, target: Target) -> str | None:
    return FP8_ON_HOPPER if problem.kv_element in FP8 and _on_hopper(target) else None


ANY_XQA: tuple[Refuses, ...] = (XQA_DECODES, ONE_HEAD_DIM, attention_refusal)
WITHOUT_LENGTHS: tuple[Refuses, ...] = (_fp8_on_hopper, ONE_HEAD_DIM, attention_refusal)
WITH_XQA: tuple[Refuses, ...] = (XQA_DECODES, *WITHOUT_LENGTHS)
"""What XQA is not called with."""


def _wide_queries(problem: AttentionProblem, _: Target) -> str | None:
    return None if problem.q_dtype else "queries that FP8 does not hold are rounded"


def _not_on_hopper(_: AttentionProblem, target: Target) -> str | None:
    return None if _on_hopper(target) else "XQA multiplies in FP8 on SM90 alone"


def chosen_backend(target: Target) -> str:
    """Return the backend that ``backend="auto"`` chooses on a chip."""
    return "trtllm-gen" if (target.sm or 0) // 10 == 10 else "xqa"  # noqa: PLR2004  its major


def _refused_as_chosen(problem: AttentionProblem, target: Target) -> str | None:
    refusals = WITH_XQA if chosen_backend(target) == "xqa" else (DECODES, *TRTLLM)
    return either(*refusals)(problem, target)


def _scales(inputs: PagedAttentionInputs) -> dict[str, float]:
    scale = inputs.sm_scale * float(inputs.q_scale) * float(inputs.k_scale)
    return {"bmm1_scale": scale, "bmm2_scale": float(inputs.v_scale)}


def _cache(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Name the cache as the release does; XQA's block scales never were ``kv_block_scales``."""
    arguments = paged_cache(inputs, "trtllm-gen" if backend != "xqa" else backend)
    pair = arguments.pop("paged_kv_cache")
    if backend == "xqa":
        arguments = dict(zip(("kv_cache_sf",), arguments.values(), strict=False))
    return {"kv_cache": pair, **arguments}


def _shared(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Return the keyword arguments that decode and context share."""
    width = stored_head_dim(inputs.v_cache, inputs.kv_format)
    shape = (*inputs.q.shape[:2], width)
    return {
        "query": inputs.q,
        **_cache(inputs, backend),
        "workspace_buffer": zeroed_workspace(backend, inputs.q.device),
        "block_tables": padded_block_table(inputs),
        "seq_lens": inputs.metadata.seq_lens,
        **_scales(inputs),
        "window_left": inputs.window_left,
        "out": inputs.q.new_empty(shape, dtype=inputs.out_dtype),
        "sinks": inputs.sinks,
        "kv_layout": inputs.kv_layout,
    }


def _finished(result: Any, *, with_lse: bool) -> Result:  # noqa: ANN401  untyped
    if not with_lse:
        return result, None
    out, lse = result
    return out, natural_or_none(lse)


def _tokens(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Return what says how many query tokens each request has, where that is not one.

    XQA masks by bits; its raw entry takes ragged batches. Other kernels mask causally.
    """
    indptr: list[int] = inputs.metadata.qo_indptr.tolist()
    lengths = {stop - start for start, stop in pairwise(indptr)}
    if lengths <= {1}:
        return {}
    ragged, tokens = len(lengths) > 1, max(lengths)
    if ragged and backend != "xqa":
        return {"q_len_per_req": None, "max_q_len": inputs.max_q_len,
                "cum_seq_lens_q": inputs.metadata.qo_indptr}  # fmt: skip
    if backend == "trtllm-gen":
        return {"q_len_per_req": tokens}
    words = draft_words(indptr, inputs.tree_mask, inputs.q.device)
    if ragged:  # one token at most is no draft to it
        return {"q_len_per_req": max(tokens, 2), "q_cu_seq_lens": inputs.metadata.qo_indptr,
                "mask": words}  # fmt: skip
    return {"q_len_per_req": tokens, "mask": words.view(-1, tokens, words.shape[1])}


def prepared(inputs: PagedAttentionInputs, backend: str, **more: Any) -> Callable[[], Any]:  # noqa: ANN401
    """Return a call of ``trtllm_batch_decode_with_kv_cache`` with everything that it is given."""
    return functools.partial(
        flashinfer("flashinfer.decode").trtllm_batch_decode_with_kv_cache,
        **_shared(inputs, backend),
        **_tokens(inputs, backend),
        max_seq_len=inputs.max_kv_len,
        backend=backend,
        **more,
    )


def _decode(inputs: PagedAttentionInputs, backend: str) -> Result:
    with_lse = backend == "trtllm-gen" and version_matches(version(), WITH_LSE)
    result = prepared(inputs, backend, **({"return_lse": True} if with_lse else {}))()
    return _finished(result, with_lse=with_lse)


@TRTLLM_GEN.adapter("paged_attention", "flashinfer-trtllm-decode", DECODES, *TRTLLM, decodes=True)
def trtllm_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by trtllm-gen."""
    return _decode(inputs, "trtllm-gen")


@TRTLLM_GEN.adapter(
    "paged_attention",
    "flashinfer-trtllm-context",
    no_more_queries_than_keys("trtllm_batch_context_with_kv_cache takes"),
    *TRTLLM,
)
def trtllm_context(inputs: PagedAttentionInputs) -> Result:
    """Attend a whole batch, decodes too, in one call of trtllm-gen's context kernels."""
    metadata = inputs.metadata
    with_lse = version_matches(version(), WITH_LSE)
    result = flashinfer("flashinfer.prefill").trtllm_batch_context_with_kv_cache(
        **_shared(inputs, "trtllm-gen"),
        max_q_len=inputs.max_q_len,
        max_kv_len=inputs.max_kv_len,
        batch_size=metadata.num_requests,
        cum_seq_lens_q=metadata.qo_indptr,
        cum_seq_lens_kv=metadata.paged_kv_indptr,  # in pages, whatever its name says (vLLM)
        **({"return_lse": True} if with_lse else {}),
    )
    return _finished(result, with_lse=with_lse)


@XQA.adapter("paged_attention", "flashinfer-xqa-decode", *WITH_XQA)
def xqa_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by XQA; no LSE."""
    return _decode(inputs, "xqa")


@XQA.adapter(
    "paged_attention",
    "flashinfer-xqa-ragged",
    few_query_tokens("XQA takes", uniform=False, least=0),
    *WITHOUT_LENGTHS,
    compile_key=lambda problem: (problem.uniform_queries, xqa_module_key(problem)),
    library=None,  # ragged batches may have another one than uniform ones of the same key
)
def xqa_ragged(inputs: PagedAttentionInputs) -> Result:
    """Decode requests of different numbers of tokens, none too, by the raw entry of XQA; no LSE."""
    decode = flashinfer("flashinfer.decode").xqa_batch_decode_with_kv_cache
    call = {**_shared(inputs, "xqa"), **_tokens(inputs, "xqa")}
    return decode(**call, max_seq_len=inputs.max_kv_len), None


@XQA.adapter(
    "paged_attention",
    "flashinfer-xqa-decode-fp8",
    unavailable,
    _wide_queries,
    *ANY_XQA,
    _not_on_hopper,
    ruled_as={"q_dtype": "", "q_scale": 1.0},  # its queries are given in 16 bits
    arithmetic=replace(XQA.arithmetic, fp8_products="fixed_point"),
    features=("tree", "fp8_kv", "fp8_q", "host_bounds"),
)
def xqa_decode_fp8(inputs: PagedAttentionInputs) -> Result:
    """Decode by XQA from an FP8 cache on SM90, with 16-bit queries that FP8 holds; no LSE.

    Most calls of several query tokens take the generic kernel, which multiplies in 16 bits, from
    0.6.16 on; the bound of products in FP8 holds for it too.
    """
    # Its own rounding of them to FP8 then changes nothing: the oracle is given the same numbers.
    return _decode(replace(inputs, q=inputs.q.to(inputs.out_dtype)), "xqa")


@XQA.adapter(
    "paged_attention",
    "flashinfer-trtllm-decode-auto",
    _refused_as_chosen,
    backend="",
    chosen_backend=chosen_backend,
    decodes=True,
    features=("fp8_kv", "host_bounds"),
)
def auto_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by the backend that FlashInfer chooses; no LSE, which not every choice gives."""
    return _decode(inputs, "auto")
