"""Turning, quantising and appending as a Triton kernel; ``impl.triton.rope_append`` launches it.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl


def _rope_and_append(
    q: tl.tensor,  # [tokens, Q_HEADS, DIM] by strides
    k: tl.tensor,  # [tokens, KV_HEADS, DIM]
    v: tl.tensor,  # the same
    cos_sin: tl.tensor,  # float32 [rows, ROTARY]
    positions: tl.tensor,  # [tokens]
    slots: tl.tensor,  # [tokens]
    q_out: tl.tensor,  # [tokens, Q_HEADS, DIM], contiguous
    k_cache: tl.tensor,  # [pages, page_size, KV_HEADS, DIM] by strides
    v_cache: tl.tensor,  # the same
    page_size: tl.tensor,
    q_token: tl.tensor,
    k_token: tl.tensor,
    v_token: tl.tensor,
    cache_page: tl.tensor,
    cache_slot: tl.tensor,
    cache_head: tl.tensor,
    q_scale: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    Q_LARGEST: tl.constexpr,  # of FP8; 0 where rows keep their dtype
    LARGEST: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,  # rotary channel
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,  # of a block
    Q_BLOCKS: tl.constexpr,  # blocks of queries, then of keys, then of values
    KV_BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Turn some heads of a token's queries, turn and append some of its keys, or append values."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    behind = block - Q_BLOCKS
    what = tl.where(behind < 0, 0, 1 + behind // KV_BLOCKS)  # 0 for queries, 1 keys, 2 values
    block = tl.where(behind < 0, block, behind % KV_BLOCKS)
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    rotary = channel - FIRST
    turns = (rotary >= 0) & (rotary < ROTARY)
    half = ROTARY // 2
    if INTERLEAVED:
        pair, other, is_first = rotary // 2, rotary ^ 1, rotary % 2 == 0
    else:
        pair, is_first = rotary % half, rotary < half
        other = tl.where(is_first, rotary + half, rotary - half)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY
    cos = tl.load(row + pair, mask=turns, other=1.0)
    sin = tl.load(row + half + pair, mask=turns, other=0.0)
    place = head * DIM + channel
    beside = head * DIM + other + FIRST
    if what == 0:
        mask = (head < Q_HEADS) & (channel < DIM)
        x = tl.load(q + token * q_token + place, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(q + token * q_token + beside, mask=mask & turns, other=0.0).to(tl.float32)
        y = tl.where(is_first, -y, y)
        x = tl.where(turns, x * cos + y * sin, x)
        if Q_LARGEST > 0:
            x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + q_scale), -Q_LARGEST, Q_LARGEST)
        target = q_out + token * Q_HEADS * DIM + place
        tl.store(target, x.to(q_out.dtype.element_ty), mask=mask)
    else:
        # A block: a comparison of scalars is no mask to the interpreter.
        index = tl.load(slots + token + tl.zeros((1, 1), tl.int64)).to(tl.int64)
        mask = (head < KV_HEADS) & (channel < DIM) & (index >= 0)
        address = index // page_size * cache_page + index % page_size * cache_slot
        address += head * cache_head + channel
        if what == 1:
            x = tl.load(k + token * k_token + place, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(k + token * k_token + beside, mask=mask & turns, other=0.0).to(tl.float32)
            y = tl.where(is_first, -y, y)
            x = tl.where(turns, x * cos + y * sin, x)
            if LARGEST > 0:
                x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + k_scale), -LARGEST, LARGEST)
            tl.store(k_cache + address, x.to(k_cache.dtype.element_ty), mask=mask)
        else:
            x = tl.load(v + token * v_token + place, mask=mask, other=0.0).to(tl.float32)
            if LARGEST > 0:
                x = tl.clamp(tl.div_rn(x, tl.zeros_like(x) + v_scale), -LARGEST, LARGEST)
            tl.store(v_cache + address, x.to(v_cache.dtype.element_ty), mask=mask)


rope_and_append = triton.jit(
    _rope_and_append,
    do_not_specialize=(
        "page_size", "q_token", "k_token", "v_token", "cache_page", "cache_slot", "cache_head",
        "q_scale", "k_scale", "v_scale",
    ),
)  # fmt: skip
