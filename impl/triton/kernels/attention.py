"""Attention to paged or ragged keys as one Triton kernel; ``triton_attention`` launches it.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen, and memory read in pieces of two bytes.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .device_functions import in_elements, load_rows, place_of, quotient, soft_capped
from .kv_formats import load_nvfp4, widen_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
REQUESTS_AT_ONCE = tl.constexpr(256)


def _attention(  # noqa: C901, PLR0912, PLR0915  in one piece: it shares most of its names
    q: tl.tensor,  # [tokens, qo_heads, HEAD_DIM_QK]
    k: tl.tensor,  # [pages, slots, kv_heads, HEAD_DIM_QK] by strides, whatever the layout
    v: tl.tensor,  # [pages, slots, kv_heads, HEAD_DIM_VO]
    k_sf: tl.tensor | None,  # [pages, slots, kv_heads, HEAD_DIM_QK / 16] e4m3 as uint8 of nvfp4
    v_sf: tl.tensor | None,  # [pages, slots, kv_heads, HEAD_DIM_VO / 16] likewise
    out: tl.tensor,  # [splits, tokens, qo_heads, HEAD_DIM_VO]
    lse: tl.tensor,  # [splits, tokens, qo_heads] float32
    sinks: tl.tensor,  # [qo_heads] float32, read if has_sinks
    k_scales: tl.tensor,  # [kv_heads] float32, read if has_k_scales
    v_scales: tl.tensor,  # [kv_heads] float32, read if has_v_scales
    custom_mask: tl.tensor,  # [sum of query_len * seq_len] uint8, read if CUSTOM_MASK
    qo_indptr: tl.tensor,  # [requests + 1]
    kv_indptr: tl.tensor,  # [requests + 1], of pages if PAGED, else of keys
    seq_lens: tl.tensor,  # [requests], read if PAGED
    page_ids: tl.tensor,  # [pages of the batch], read if PAGED
    num_requests: tl.tensor,
    group_size: tl.tensor,
    page_size: tl.tensor,
    page_shift: tl.tensor,
    page_inverse: tl.tensor,
    group_inverse: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    soft_cap: tl.tensor,
    lse_factor: tl.tensor,
    has_sinks: tl.tensor,
    has_k_scales: tl.tensor,
    has_v_scales: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    q_dim: tl.tensor,
    k_page: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    k_dim: tl.tensor,
    v_page: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    v_dim: tl.tensor,
    k_sf_page: tl.tensor | None,
    k_sf_slot: tl.tensor | None,
    k_sf_head: tl.tensor | None,
    k_sf_block: tl.tensor | None,
    v_sf_page: tl.tensor | None,
    v_sf_slot: tl.tensor | None,
    v_sf_head: tl.tensor | None,
    v_sf_block: tl.tensor | None,
    out_split: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_dim: tl.tensor,
    lse_split: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    PAGED: tl.constexpr,
    SHIFTS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CUSTOM_MASK: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    SF_UNIT: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Attend BLOCK_M rows, a row being a query token and one of the heads that share keys.

    The grid is (tiles, kv_heads, splits). Tiles of a request begin at ``qo_indptr * group_size //
    BLOCK_M + request``, which leaves each request enough of them; the host knows an upper bound of
    their number without knowing any length. ``left`` and ``right`` say how far from its own
    position a query sees; 2**30 is everywhere. ``page_inverse`` is 2**30 / page_size, rounded up;
    it divides exactly while keys * page_size < 2**30; ``group_inverse`` is 2**30 / group_size
    likewise. SHIFTS says that page_size is 2**page_shift, and nothing is divided. Logits
    are in base 2: ``scale`` holds log2(e) or, where there is a soft cap, its inverse, and
    ``soft_cap`` then holds log2(e).

    Strides come in units of UNIT elements, those of block scales of SF_UNIT, but for channels,
    splits and ``lse``: see ``triton_units``.
    """
    q_token, q_head = in_elements(q_token, UNIT), in_elements(q_head, UNIT)
    k_page, v_page = in_elements(k_page, UNIT), in_elements(v_page, UNIT)
    k_slot, v_slot = in_elements(k_slot, UNIT), in_elements(v_slot, UNIT)
    k_head, v_head = in_elements(k_head, UNIT), in_elements(v_head, UNIT)
    out_token, out_head = in_elements(out_token, UNIT), in_elements(out_head, UNIT)
    if KV_FORMAT == "nvfp4":
        k_sf_page, v_sf_page = (
            in_elements(k_sf_page, SF_UNIT),
            in_elements(v_sf_page, SF_UNIT),
        )
        k_sf_slot, v_sf_slot = (
            in_elements(k_sf_slot, SF_UNIT),
            in_elements(v_sf_slot, SF_UNIT),
        )
        k_sf_head, v_sf_head = (
            in_elements(k_sf_head, SF_UNIT),
            in_elements(v_sf_head, SF_UNIT),
        )
    # The heads of a tile run together, and late tiles first: of a causal request they see the most
    # keys, so that the short ones fill the gaps at the end.
    kv_heads = tl.num_programs(1)
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tile = tl.num_programs(0) - 1 - number // kv_heads
    kv_head = number % kv_heads
    split = tl.program_id(2)

    request = -1
    for first in range(0, num_requests, REQUESTS_AT_ONCE):
        index = first + tl.arange(0, REQUESTS_AT_ONCE)
        start = tl.load(qo_indptr + index, mask=index < num_requests, other=0)
        first_tile = start * group_size // BLOCK_M + index
        begun = (index < num_requests) & (first_tile <= tile)
        request += tl.sum(begun.to(tl.int32), axis=0)
    first_token = tl.load(qo_indptr + request)
    num_queries = tl.load(qo_indptr + request + 1) - first_token
    first_row = (tile - first_token * group_size // BLOCK_M - request) * BLOCK_M
    num_rows = num_queries * group_size
    if first_row >= num_rows:
        return
    kv_start = tl.load(kv_indptr + request)
    num_keys = tl.load(seq_lens + request) if PAGED else tl.load(kv_indptr + request + 1) - kv_start

    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    query = quotient(row, group_inverse)
    head = (kv_head - query) * group_size + row
    token = (first_token + query).to(tl.int64)
    offset = num_keys - num_queries
    position = offset + query
    first_position = offset + first_row // group_size
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    last_position = offset + last_row // group_size

    # Keys that any row sees, and of these the share of this split, in whole blocks.
    low = tl.maximum(first_position - left, 0)
    high = tl.minimum(last_position + right + 1, num_keys)
    splits_in_keys = tl.num_programs(2) * BLOCK_N
    share = (tl.maximum(high - low, 0) + splits_in_keys - 1) // splits_in_keys * BLOCK_N
    low += split * share
    high = tl.minimum(high, low + share)
    # Blocks that every row sees in full come first, and need no mask; then those at both edges.
    inner = tl.maximum(last_position - left, low)
    blocks = tl.maximum(tl.minimum(first_position + right + 1, high) - inner, 0) // BLOCK_N
    if CUSTOM_MASK:
        mask_start = tl.full((), 0, tl.int64)
        blocks = blocks * 0
        for first in range(0, request, REQUESTS_AT_ONCE):
            index = first + tl.arange(0, REQUESTS_AT_ONCE)
            before = index < request
            start = tl.load(qo_indptr + index, mask=before, other=0)
            length = tl.load(qo_indptr + index + 1, mask=before, other=0) - start
            if PAGED:
                keys = tl.load(seq_lens + index, mask=before, other=0)
            else:
                keys = tl.load(kv_indptr + index + 1, mask=before, other=0)
                keys -= tl.load(kv_indptr + index, mask=before, other=0)
            mask_start += tl.sum(length.to(tl.int64) * keys, axis=0)
    inner = tl.where(blocks > 0, inner, low)
    inner_end = inner + blocks * BLOCK_N
    left_blocks = (inner - low + BLOCK_N - 1) // BLOCK_N
    edge_blocks = left_blocks + (tl.maximum(high - inner_end, 0) + BLOCK_N - 1) // BLOCK_N

    value_channel = tl.arange(0, BLOCK_VO)
    is_value = value_channel < HEAD_DIM_VO
    q_offset = token * q_token + head * q_head
    q_tile = load_rows(q + q_offset, q_dim, is_row, HEAD_DIM_QK, BLOCK_QK)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k_scale = tl.load(k_scales + kv_head, mask=has_k_scales != 0, other=1.0)
    v_scale *= tl.load(v_scales + kv_head, mask=has_v_scales != 0, other=1.0)
    scale *= k_scale
    k_base = k + kv_head.to(tl.int64) * k_head
    v_base = v + kv_head.to(tl.int64) * v_head
    if KV_FORMAT == "nvfp4":
        k_sf += kv_head.to(tl.int64) * k_sf_head
        v_sf += kv_head.to(tl.int64) * v_sf_head

    # A sink is a key of value 0, and the first split's. (The condition goes into a number: spread
    # over a block, a scalar condition is no mask to the interpreter.)
    rows_with_sink = tl.where((has_sinks != 0) & (split == 0), num_rows, 0)
    largest = tl.load(sinks + head, mask=row < rows_with_sink, other=float("-inf")) * LOG2_E
    total = tl.where(largest == float("-inf"), 0.0, 1.0)
    attended = tl.full((BLOCK_M, BLOCK_VO), 0.0, tl.float32)
    pages = page_ids + kv_start
    last_place = place_of(num_keys - 1, page_shift, page_inverse, SHIFTS)
    for at_edge in tl.static_range(2):
        if PAGED and not at_edge:
            # Page ids come a block ahead: keys and values would have to wait for their own.
            place = place_of(inner + tl.arange(0, BLOCK_N), page_shift, page_inverse, SHIFTS)
            next_page = tl.load(pages + place, mask=place <= last_place, other=0)
        for block in range(edge_blocks if at_edge else blocks):
            if at_edge:
                on_left = block < left_blocks
                first_key = tl.where(
                    on_left, low + block * BLOCK_N, inner_end + (block - left_blocks) * BLOCK_N
                )
                end = tl.where(on_left, inner, high)
            else:
                first_key = inner + block * BLOCK_N
            key = first_key + tl.arange(0, BLOCK_N)
            if at_edge:
                is_key = key < end
            present = is_key if at_edge else None
            if PAGED:
                place = place_of(key, page_shift, page_inverse, SHIFTS)
                if at_edge:
                    page = tl.load(pages + place, mask=present, other=0).to(tl.int64)
                else:
                    page = next_page.to(tl.int64)
                    next_place = place_of(key + BLOCK_N, page_shift, page_inverse, SHIFTS)
                    next_page = tl.load(pages + tl.minimum(next_place, last_place))
                slot = key & (page_size - 1) if SHIFTS else key - place * page_size
                k_offset = page * k_page + slot * k_slot
                v_offset = page * v_page + slot * v_slot
            else:
                slot = (kv_start + key).to(tl.int64)
                k_offset = slot * k_slot
                v_offset = slot * v_slot
            if KV_FORMAT == "nvfp4":
                k_tile = load_nvfp4(
                    k_base + k_offset,
                    k_dim,
                    k_sf + page * k_sf_page + slot * k_sf_slot,
                    k_sf_block,
                    present,
                    HEAD_DIM_QK,
                    BLOCK_QK,
                    BLOCK_N,
                    q_tile.dtype,
                    CONVERTS,
                )
                v_tile = load_nvfp4(
                    v_base + v_offset,
                    v_dim,
                    v_sf + page * v_sf_page + slot * v_sf_slot,
                    v_sf_block,
                    present,
                    HEAD_DIM_VO,
                    BLOCK_VO,
                    BLOCK_N,
                    q_tile.dtype,
                    CONVERTS,
                )
            else:
                k_tile = load_rows(k_base + k_offset, k_dim, present, HEAD_DIM_QK, BLOCK_QK)
                v_tile = load_rows(v_base + v_offset, v_dim, present, HEAD_DIM_VO, BLOCK_VO)
                if KV_FORMAT != "":
                    k_tile = widen_fp8(k_tile, KV_FORMAT, q_tile.dtype, CONVERTS)
                    v_tile = widen_fp8(v_tile, KV_FORMAT, q_tile.dtype, CONVERTS)
            if UPCAST:
                k_tile = k_tile.to(tl.float32)
                v_tile = v_tile.to(tl.float32)
            # ieee: TensorFloat-32 would give float32 inputs the mantissa of float16.
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            if SOFT_CAP:
                logits = soft_capped(logits, soft_cap)
            if at_edge:
                distance = key[None, :] - position[:, None]
                sees = is_key[None, :] & (distance >= -left) & (distance <= right)
                if CUSTOM_MASK:
                    mask_row = mask_start + query.to(tl.int64) * num_keys
                    kept = tl.load(
                        custom_mask + mask_row[:, None] + key[None, :],
                        mask=sees & is_row[:, None],
                        other=0,
                    )
                    sees = sees & (kept != 0)
                logits = tl.where(sees, logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, axis=1))
            # A row that has seen nothing yet has no largest logit: -inf - -inf would be NaN.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(logits - base[:, None])
            fading = tl.exp2(largest - base)
            total = total * fading + tl.sum(weights, axis=1)
            attended = tl.dot(
                weights.to(v_tile.dtype),
                v_tile,
                attended * fading[:, None],
                input_precision="ieee",
            )
            largest = new_largest

    divisor = tl.where(total == 0.0, 1.0, total)
    attended = attended * (v_scale / divisor)[:, None]
    out_offset = split.to(tl.int64) * out_split + token * out_token + head * out_head
    tl.store(
        out + out_offset[:, None] + value_channel[None, :] * out_dim,
        attended.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_value[None, :],
    )
    lse_offset = split.to(tl.int64) * lse_split + token * lse_token + head * lse_head
    tl.store(lse + lse_offset, (largest + tl.log2(divisor)) * lse_factor, mask=is_row)


# Lengths, windows and counts change with every batch: a compiled kernel of its own for each that
# happens to be 1, or a multiple of 16, would cost more than it saves.
attention = triton.jit(
    _attention,
    do_not_specialize=(
        "num_requests", "group_size", "page_size", "page_shift", "page_inverse", "group_inverse",
        "left", "right", "has_sinks", "has_k_scales", "has_v_scales", "q_token", "q_head",
        "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "k_sf_page", "k_sf_slot",
        "k_sf_head", "v_sf_page", "v_sf_slot", "v_sf_head", "out_split", "out_token", "out_head",
        "lse_split", "lse_token",
    ),
)  # fmt: skip
