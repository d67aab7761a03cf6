"""Arguments of an attention call, checked and cut into requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..formats.cache_elements import element_of, stored_dtypes
from ..formats.kv_format import KVCacheFormat, checked_cache
from ..validation import (
    KVLayout,
    check_indptr,
    check_kv_layout,
    check_same,
    check_tensor,
    host_integers_of,
)
from .batches import Call, Request
from .metadata import BatchMetadata, check_metadata
from .options import Options, causal_flags, check_options, spans_of


def paged_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: BatchMetadata,
    kv_layout: KVLayout,
    options: Options,
) -> Call:
    """Check the arguments, and say which queries and pages belong to which request."""
    check_tensor("q", q, "tokens qo_heads head_dim_qk")
    check_kv_layout(kv_layout)
    axes = "pages page_size kv_heads" if kv_layout == "NHD" else "pages kv_heads page_size"
    check_tensor("k_cache", k_cache, f"{axes} head_dim_qk", codes=stored_dtypes())
    check_tensor("v_cache", v_cache, f"{axes} head_dim_vo", codes=stored_dtypes())
    for axis, name in enumerate(axes.split()):
        check_same("v_cache", name, v_cache.shape[axis], "k_cache", k_cache.shape[axis])
    cache = checked_cache(k_cache, v_cache, kv_layout, options.kv_format, options.kv_cache_sf)
    check_same("k_cache", "head_dim_qk", cache.head_dim_qk, "q", q.shape[-1])
    check_metadata(metadata)
    page_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    found = k_cache.shape[page_axis]
    if found != metadata.page_size:
        message = (
            f"k_cache has pages of {found} keys in layout {kv_layout}, "
            f"but metadata.page_size is {metadata.page_size}"
        )
        raise ValueError(message)
    lists = metadata.checked(num_tokens=q.shape[0], num_pages=k_cache.shape[0])
    page_ends, page_ids = lists["paged_kv_indptr"], lists["paged_kv_indices"]
    pages = [page_ids[a:b] for a, b in itertools.pairwise(page_ends)]
    requests = _requests(lists["qo_indptr"], lists["seq_lens"], pages, options)
    check_options(q, k_cache.shape[head_axis], requests[-1].mask_end if requests else 0, options)
    return Call(
        q,
        cache.k,
        cache.v,
        [request for request in requests if request.num_queries],
        kv_layout,
        metadata.page_size,
        cache.k_scales,
        cache.v_scales,
        cache.kv_format,
    )


def ragged_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    options: Options,
) -> Call:
    """Check the arguments, and say which queries and keys belong to which request."""
    check_tensor("q", q, "tokens qo_heads head_dim_qk")
    check_tensor("k", k, "keys kv_heads head_dim_qk")
    check_tensor("v", v, "keys kv_heads head_dim_vo")
    check_same("v", "keys", v.shape[0], "k", k.shape[0])
    check_same("v", "kv_heads", v.shape[1], "k", k.shape[1])
    check_same("k", "head_dim_qk", k.shape[-1], "q", q.shape[-1])
    if torch.float8_e4m3fn.itemsize in {k.dtype.itemsize, v.dtype.itemsize} and k.dtype != v.dtype:
        message = f"v is {v.dtype}, but k is {k.dtype}: codes are of one dtype"
        raise ValueError(message)
    lists = host_integers_of({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr})
    q_ends, kv_ends = lists["qo_indptr"], lists["kv_indptr"]
    check_indptr("qo_indptr", q_ends, q.shape[0], "query tokens")
    check_indptr("kv_indptr", kv_ends, k.shape[0], "keys")
    if len(q_ends) != len(kv_ends):
        message = f"qo_indptr has {len(q_ends)} entries, but kv_indptr has {len(kv_ends)}"
        raise ValueError(message)
    keys = [range(a, b) for a, b in itertools.pairwise(kv_ends)]
    requests = _requests(q_ends, [len(each) for each in keys], keys, options)
    check_options(q, k.shape[1], requests[-1].mask_end if requests else 0, options)
    with_queries = [request for request in requests if request.num_queries]
    # Keys and values in FP8 say by their dtype what they hold.
    kv_format = KVCacheFormat(element_of(k).name) if k.dtype.itemsize == 1 else None
    return Call(q, k.unsqueeze(1), v.unsqueeze(1), with_queries, kv_format=kv_format)


def _requests(
    qo_indptr: list[int], num_keys: list[int], pages: Sequence[Sequence[int]], options: Options
) -> list[Request]:
    """Number the requests' rows; their flat masks lie one after another."""
    found: list[Request] = []
    flags = causal_flags(options, len(num_keys))
    spans = spans_of(options, len(num_keys))
    for start, end, keys, of_request, causal, own in zip(
        qo_indptr, qo_indptr[1:], num_keys, pages, flags, spans, strict=False
    ):
        mask_start = found[-1].mask_end if found else 0
        found.append(Request(range(start, end), keys, of_request, mask_start, causal, own))
    return found
