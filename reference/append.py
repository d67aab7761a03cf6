"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from .metadata import BatchMetadata
from .validation import check_kv_layout, check_same, check_tensor


def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: BatchMetadata,
    *,
    kv_layout: str = "NHD",
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each request's new keys and values into the last slots of its pages.

    Token i of a request with T new tokens and S keys in all goes to position ``S - T + i``, that
    is slot ``position % page_size`` of page ``position // page_size`` of the request (FlashInfer's
    ``append_paged_kv_cache`` with positions from ``get_batch_indices_positions``). All other slots
    keep their bits. Requests that share a page must not append to it.

    Args:
        k: [tokens, kv_heads, head_dim_qk], the new keys of all requests, by ``qo_indptr``.
        v: [tokens, kv_heads, head_dim_vo].
        k_cache, v_cache: as in ``paged_attention``; k and v are cast to their dtypes.
        metadata: the batch after the append: ``seq_lens`` count the new tokens.
        kv_layout: ``"NHD"`` or ``"HND"``.
        in_place: write into the given caches; otherwise into copies of them.

    Returns:
        (k_cache, v_cache), the given ones if ``in_place``.

    Raises:
        ValueError: shapes that disagree, metadata that contradict themselves or the cache, a
            request with more new tokens than keys; the argument and position are named.
    """
    check_kv_layout(kv_layout)
    check_tensor("k", k, "tokens kv_heads head_dim_qk")
    check_tensor("v", v, "tokens kv_heads head_dim_vo")
    axes = "pages page_size kv_heads" if kv_layout == "NHD" else "pages kv_heads page_size"
    check_tensor("k_cache", k_cache, f"{axes} head_dim_qk")
    check_tensor("v_cache", v_cache, f"{axes} head_dim_vo")
    page_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    check_same("v", "tokens", v.shape[0], "k", k.shape[0])
    for name, cache, new in (("k", k_cache, k), ("v", v_cache, v)):
        check_same(name, "kv_heads", new.shape[1], f"{name}_cache", cache.shape[head_axis])
        check_same(name, "channels", new.shape[2], f"{name}_cache", cache.shape[-1])
        check_same(
            f"{name}_cache", "keys a page", cache.shape[page_axis], "metadata", metadata.page_size
        )
    check_same("v_cache", "pages", v_cache.shape[0], "k_cache", k_cache.shape[0])
    metadata.validate(num_tokens=k.shape[0], num_pages=k_cache.shape[0])
    pages, slots = _addresses(metadata)
    pages, slots = pages.to(k_cache.device), slots.to(k_cache.device)
    if not in_place:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for cache, new in ((k_cache, k), (v_cache, v)):
        by_slot = cache if kv_layout == "NHD" else cache.transpose(1, 2)
        by_slot[pages, slots] = new.to(cache.dtype)
    return k_cache, v_cache


def _addresses(metadata: BatchMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the physical page and the slot in it of every new token."""
    qo_indptr, seq_lens = metadata.qo_indptr.tolist(), metadata.seq_lens.tolist()
    page_indptr, indices = metadata.paged_kv_indptr.tolist(), metadata.paged_kv_indices.tolist()
    pages: list[int] = []
    slots: list[int] = []
    for request, seq_len in enumerate(seq_lens):
        new = qo_indptr[request + 1] - qo_indptr[request]
        if new > seq_len:
            message = (
                f"qo_indptr gives request {request} {new} new tokens, but "
                f"seq_lens[{request}] is {seq_len}"
            )
            raise ValueError(message)
        for position in range(seq_len - new, seq_len):
            pages.append(indices[page_indptr[request] + position // metadata.page_size])
            slots.append(position % metadata.page_size)
    return torch.tensor(pages, dtype=torch.long), torch.tensor(slots, dtype=torch.long)
