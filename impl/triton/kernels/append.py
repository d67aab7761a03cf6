"""Writing new keys and values into a paged cache as a Triton kernel; ``triton_append`` launches it.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen, and memory read in pieces of two bytes.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .device_functions import in_elements

REQUESTS_AT_ONCE = tl.constexpr(64)


def _append(
    k: tl.tensor,  # [tokens, kv_heads, DIM_QK]
    v: tl.tensor,  # [tokens, kv_heads, DIM_VO]
    k_cache: tl.tensor,  # [pages, slots, kv_heads, DIM_QK] by strides, whatever the layout
    v_cache: tl.tensor,  # [pages, slots, kv_heads, DIM_VO]
    qo_indptr: tl.tensor,  # [requests + 1]
    kv_indptr: tl.tensor,  # [requests + 1], of pages
    seq_lens: tl.tensor,  # [requests]
    page_ids: tl.tensor,  # [pages of the batch]
    num_requests: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    page_size: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    k_dim: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    k_cache_page: tl.tensor,
    k_cache_slot: tl.tensor,
    k_cache_head: tl.tensor,
    k_cache_dim: tl.tensor,
    v_cache_page: tl.tensor,
    v_cache_slot: tl.tensor,
    v_cache_head: tl.tensor,
    v_cache_dim: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    LARGEST: tl.constexpr,  # number of an FP8 cache; 0 where rows are copied
    UNIT: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
) -> None:
    """Copy BLOCK_CHANNELS channels, of all heads together, of BLOCK_TOKENS new keys and values.

    Strides of tokens, heads, pages and slots come in units of UNIT elements: see ``triton_units``.
    """
    k_token, v_token = in_elements(k_token, UNIT), in_elements(v_token, UNIT)
    k_head, v_head = in_elements(k_head, UNIT), in_elements(v_head, UNIT)
    k_cache_page, v_cache_page = in_elements(k_cache_page, UNIT), in_elements(v_cache_page, UNIT)
    k_cache_slot, v_cache_slot = in_elements(k_cache_slot, UNIT), in_elements(v_cache_slot, UNIT)
    k_cache_head, v_cache_head = in_elements(k_cache_head, UNIT), in_elements(v_cache_head, UNIT)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    request = tl.full((BLOCK_TOKENS,), -1, tl.int32)
    for first in range(0, num_requests, REQUESTS_AT_ONCE):
        index = first + tl.arange(0, REQUESTS_AT_ONCE)
        # Past the last request starts no token: the number of tokens is no token.
        start = tl.load(qo_indptr + index, mask=index < num_requests, other=num_tokens)
        begun = start[None, :] <= tl.minimum(token, num_tokens - 1)[:, None]
        request += tl.sum(begun.to(tl.int32), axis=1)
    is_token = token < num_tokens
    num_queries = tl.load(qo_indptr + request + 1) - tl.load(qo_indptr + request)
    position = tl.load(seq_lens + request) - num_queries + token - tl.load(qo_indptr + request)
    page = tl.load(
        page_ids + tl.load(kv_indptr + request) + position // page_size, mask=is_token, other=0
    ).to(tl.int64)
    slot = position % page_size
    source = token.to(tl.int64)

    element = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    head, channel = element // DIM_QK, element % DIM_QK
    copied = is_token[:, None] & (head < num_heads)[None, :]
    value = tl.load(
        k + (source * k_token)[:, None] + (head * k_head + channel * k_dim)[None, :], mask=copied
    )
    if LARGEST > 0:  # a bare float is no condition to the compiler
        value = tl.clamp(tl.div_rn(value.to(tl.float32), k_scale), -LARGEST, LARGEST)
    target = (page * k_cache_page + slot * k_cache_slot)[:, None]
    tl.store(
        k_cache + target + (head * k_cache_head + channel * k_cache_dim)[None, :],
        value.to(k_cache.dtype.element_ty),
        mask=copied,
    )

    head, channel = element // DIM_VO, element % DIM_VO
    copied = is_token[:, None] & (head < num_heads)[None, :]
    value = tl.load(
        v + (source * v_token)[:, None] + (head * v_head + channel * v_dim)[None, :], mask=copied
    )
    if LARGEST > 0:
        value = tl.clamp(tl.div_rn(value.to(tl.float32), v_scale), -LARGEST, LARGEST)
    target = (page * v_cache_page + slot * v_cache_slot)[:, None]
    tl.store(
        v_cache + target + (head * v_cache_head + channel * v_cache_dim)[None, :],
        value.to(v_cache.dtype.element_ty),
        mask=copied,
    )


append = triton.jit(
    _append,
    do_not_specialize=(
        "num_requests", "num_tokens", "num_heads", "page_size", "k_token", "k_head", "v_token",
        "v_head", "k_cache_page", "k_cache_slot", "k_cache_head", "v_cache_page", "v_cache_slot",
        "v_cache_head",
    ),
)  # fmt: skip
