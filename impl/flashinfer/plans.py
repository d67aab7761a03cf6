"""Plans and runs of FlashInfer's wrappers of attention to a paged cache, for calls and sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...reference import BatchMetadata, build_metadata
from ...reference.formats.kv_format import stored_head_dim
from ...reference.tensors.inputs import PagedAttentionInputs
from .calls import flashinfer, kv_heads_of, packed_bytes, paged_cache, plan_options, scales
from .triton import to_natural

Pair = tuple[torch.Tensor, torch.Tensor]


def heads_of(inputs: PagedAttentionInputs) -> dict[str, int]:
    """Return the numbers of heads as every plan takes them."""
    return {"num_qo_heads": inputs.q.shape[1], "num_kv_heads": kv_heads_of(inputs)}


def plan_decode(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
    **more: Any,  # noqa: ANN401  options of the plan
) -> None:
    """Plan ``BatchDecodeWithPagedKVCacheWrapper``; the metadata are on the host or the device."""
    tokens = tokens_a_request(metadata)
    planned.plan(
        indptr=metadata.paged_kv_indptr,
        indices=metadata.paged_kv_indices,
        last_page_len=metadata.paged_kv_last_page_len,
        head_dim=inputs.q.shape[-1],
        **({"q_len_per_req": tokens} if tokens > 1 else {}),
        **_shared(inputs, metadata, backend),
        **more,
    )


def replan_decode(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
) -> None:
    """Plan the same wrapper by ``fast_decode_plan`` after a ``plan`` of another batch, as SGLang.

    SGLang plans a batch of shortest requests when it captures a graph, and replays plan by this
    function: what a kernel reads lies on the device, where the engine wrote it, and where requests
    begin is known on the host too.
    """
    tokens, device = tokens_a_request(metadata), inputs.q.device
    in_a_graph = planned.is_cuda_graph_enabled
    if not (in_a_graph and hasattr(planned, "_cached_module")):
        plan_decode(planned, inputs, _shortest(metadata, tokens), backend)
    pages = {name: getattr(metadata, name).to(device) for name in PAGES}
    if in_a_graph:
        for name, tensor in pages.items():
            pages[name] = getattr(planned, f"_{name}_buf")
            pages[name][: len(tensor)].copy_(tensor)
    indptr, indices, last_page_len = pages.values()
    shared = _shared(inputs, metadata, backend)
    del shared["o_data_type"]  # the first plan's
    flashinfer().fast_decode_plan(
        planned,
        indptr=indptr,
        indices=indices,
        last_page_len=last_page_len,
        head_dim=inputs.q.shape[-1],
        q_len_per_req=max(tokens, 1),
        non_blocking=True,
        global_override_indptr_cpu=metadata.paged_kv_indptr.cpu(),
        **shared,
    )


def _shortest(metadata: BatchMetadata, tokens: int) -> BatchMetadata:
    """Return a batch of as many requests and query tokens, with no other keys than theirs."""
    query_lens = metadata.qo_indptr.diff().cpu()
    keys, size = query_lens.clamp(min=1), metadata.page_size
    table = torch.zeros((len(keys), -(-max(tokens, 1) // size)), dtype=torch.int32)
    return build_metadata(query_lens, keys, table, size)


def plan_prefill(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    backend: str,
    *,
    packed: bool = False,
    uniform: bool = False,
    **more: Any,  # noqa: ANN401  options of the plan
) -> None:
    """Plan ``BatchPrefillWithPagedKVCacheWrapper``; the metadata are on the host or the device.

    ``packed``: give a draft tree's mask as bits, not as bools. ``uniform``: say that all requests
    have equally many query tokens.
    """
    if uniform:
        more["uniform_q_len"] = tokens_a_request(metadata)
    planned.plan(
        qo_indptr=metadata.qo_indptr,
        paged_kv_indptr=metadata.paged_kv_indptr,
        paged_kv_indices=metadata.paged_kv_indices,
        paged_kv_last_page_len=metadata.paged_kv_last_page_len,
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=head_dim_vo(inputs),
        causal=inputs.causal,
        **_mask_of(inputs, metadata, packed=packed),
        **_shared(inputs, metadata, backend),
        **more,
    )


def tokens_a_request(metadata: BatchMetadata) -> int:
    """Return how many query tokens each request has, where all have equally many."""
    return int(metadata.qo_indptr[-1]) // max(metadata.num_requests, 1)


def _mask_of(
    inputs: PagedAttentionInputs, metadata: BatchMetadata, *, packed: bool
) -> dict[str, Any]:
    if inputs.custom_mask is None or not packed:
        return {"custom_mask": inputs.custom_mask}
    bits = (metadata.qo_indptr.diff() * metadata.seq_lens).tolist()
    return {"packed_custom_mask": packed_bytes(inputs.custom_mask, bits)}


def _shared(inputs: PagedAttentionInputs, metadata: BatchMetadata, backend: str) -> dict[str, Any]:
    cache, _ = paged_cache(inputs, backend)["paged_kv_cache"]
    return {
        **heads_of(inputs),
        "page_size": metadata.page_size,
        **plan_options(inputs, cache.dtype),
    }


@dataclass(frozen=True)
class Kind:
    """One of FlashInfer's wrappers of attention to a paged cache, with one of its backends.

    Attributes:
        name: the name of FlashInfer's class.
        plan: calls its ``plan`` with inputs, their metadata and the backend.
        backend: the backend's name in the support rules.
        options: arguments of the class.
        buffers: arguments that hold the metadata of CUDA graphs, by field of ``BatchMetadata``.
        uniform: whether its plan, or each graph of it, is of one number of query tokens a request.
        masks: whether its class keeps custom masks for CUDA graphs.
    """

    name: str
    plan: Callable[[Any, PagedAttentionInputs, BatchMetadata, str], None]
    backend: str
    options: Mapping[str, Any]
    buffers: Mapping[str, str]
    uniform: bool = False
    masks: bool = False

    @property
    def takes_queries(self) -> bool:
        """Whether its plan says how many query tokens each request has."""
        return "qo_indptr" in self.buffers


def _decode(backend: str, /, **options: Any) -> Kind:  # noqa: ANN401  of FlashInfer's class
    buffers = {name: f"{name}_buffer" for name in PAGES}
    name = "BatchDecodeWithPagedKVCacheWrapper"
    return Kind(name, plan_decode, backend, options, buffers, uniform=True)


def _prefill(backend: str) -> Kind:
    buffers = {name: f"{name}_buf" for name in ("qo_indptr", *PAGES)}
    name = "BatchPrefillWithPagedKVCacheWrapper"
    options = {"backend": backend}
    return Kind(name, plan_prefill, backend, options, buffers, masks=backend == "fa2")


PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
"""Fields of ``BatchMetadata`` that every wrapper keeps."""
DECODE = _decode("cuda-core", use_tensor_cores=False, backend="auto")
DECODE_FA2 = _decode("fa2", use_tensor_cores=True, backend="fa2")
PREFILL_FA2, PREFILL_FA3 = _prefill("fa2"), _prefill("fa3")


FIXED_SPLIT = 8
"""Pages of a part, where a plan fixes it: several parts in most requests of more than a page."""
UNSPLIT: dict[str, Any] = {"disable_split_kv": True, "non_blocking": False}
DECODE_FIXED = replace(
    DECODE_FA2, plan=functools.partial(plan_decode, fixed_split_size=FIXED_SPLIT)
)
DECODE_UNSPLIT = replace(DECODE_FA2, plan=functools.partial(plan_decode, **UNSPLIT))
DECODE_FAST = replace(DECODE_FA2, plan=replan_decode)
PREFILL_UNSPLIT = replace(PREFILL_FA2, plan=functools.partial(plan_prefill, packed=True, **UNSPLIT))
PREFILL_UNIFORM = replace(
    PREFILL_FA2, plan=functools.partial(plan_prefill, uniform=True), uniform=True
)
WITH_LSE_BASE = ">=0.7.1.dev0"
"""Releases whose prefill wrapper takes ``lse_base``."""


def run(
    planned: Any,  # noqa: ANN401  untyped
    inputs: PagedAttentionInputs,
    backend: str,
    **more: Any,  # noqa: ANN401  options of the run
) -> Pair:
    """Run either wrapper as planned; the LSE is natural."""
    out, lse = run_without_lse(planned, inputs, backend, return_lse=True, **more)
    return out, lse if more.get("lse_base") == "ln" else to_natural(lse)


def run_without_lse(
    planned: Any,  # noqa: ANN401  untyped
    inputs: PagedAttentionInputs,
    backend: str,
    **more: Any,  # noqa: ANN401  options of the run
) -> Any:  # noqa: ANN401  untyped
    """Run either wrapper as planned."""
    cache = paged_cache(inputs, backend)
    given, keywords = scales(inputs)
    if inputs.sinks is not None:
        cache["sinks"] = inputs.sinks.float()  # what FlashInfer's kernels read where they do
    pair = cache.pop("paged_kv_cache")
    return planned.run(inputs.q, pair, *given, **cache, **keywords, **more)


def head_dim_vo(inputs: PagedAttentionInputs) -> int:
    """Return the channels of the values."""
    return stored_head_dim(inputs.v_cache, inputs.kv_format)


def plan_batch_attention(
    planned: Any,  # noqa: ANN401  untyped third-party code
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
) -> None:
    """Plan ``BatchAttention``, which keeps the page indices themselves: they are on the device."""
    planned.plan(
        qo_indptr=metadata.qo_indptr,
        kv_indptr=metadata.paged_kv_indptr,
        kv_indices=metadata.paged_kv_indices,
        kv_len_arr=metadata.seq_lens,
        **heads_of(inputs),
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=inputs.v_cache.shape[-1],
        page_size=metadata.page_size,
        causal=inputs.causal,
        sm_scale=inputs.sm_scale,
        logits_soft_cap=inputs.logits_soft_cap,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k_cache.dtype,
    )


def run_batch_attention(planned: Any, inputs: PagedAttentionInputs) -> Pair:  # noqa: ANN401  untyped
    """Run ``BatchAttention`` as planned."""
    out, lse = planned.run(
        inputs.q, (inputs.k_cache, inputs.v_cache), logits_soft_cap=inputs.logits_soft_cap
    )
    return out, to_natural(lse)
