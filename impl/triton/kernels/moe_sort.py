"""Sorting pairs of a token and a slot by expert, in Triton; ``triton_moe_call`` launches it.

An expert's pairs fill whole blocks of rows, in the order of their tokens: nothing here depends on
which program is first, and the host is not asked how many there are.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen, and memory read in pieces of two bytes.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

from .device_functions import device_function

COUNTED = tl.constexpr(4096)
"""Counts that are added up at once."""
COMPARED = tl.constexpr(16)
"""Pairs, or blocks, that are compared at once with all others: more would not fit in registers."""


def _experts_of(
    pair: tl.tensor,
    num_pairs: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    top_k: tl.tensor,
    ids_token: tl.tensor,
    ids_slot: tl.tensor,
    weights_token: tl.tensor,
    weights_slot: tl.tensor,
    expert_offset: tl.tensor,
    num_experts: tl.tensor,
    ON_INPUT: tl.constexpr,
) -> tl.tensor:
    """Return the expert of each pair, an index into the weights; -1 where nothing is computed."""
    is_pair = pair < num_pairs
    token, slot = (pair // top_k).to(tl.int64), pair % top_k
    expert = tl.load(ids + token * ids_token + slot * ids_slot, mask=is_pair, other=-1)
    local = expert - expert_offset
    is_here = is_pair & (expert >= 0) & (local >= 0) & (local < num_experts)
    if not ON_INPUT:
        weight = tl.load(
            weights + token * weights_token + slot * weights_slot, mask=is_pair, other=0.0
        )
        is_here = is_here & (weight != 0.0)
    return tl.where(is_here, local, -1).to(tl.int32)


experts_of = device_function(_experts_of)


def _place(
    pair: tl.tensor,
    expert: tl.tensor,
    rank: tl.tensor,
    before: tl.tensor,
    total: tl.tensor,
    pairs: tl.tensor,
    block_experts: tl.tensor,
    block_rows: tl.tensor,
    most_blocks: tl.tensor,
    blocks_each: tl.tensor,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Store where pairs are, and this program's share of the blocks.

    Args:
        pair, expert, rank: the chunk's pairs, their experts and their ranks.
        before: [EXPERTS], how many pairs of earlier chunks each expert has.
        total: [EXPERTS], how many it has.
        pairs, block_experts, block_rows, most_blocks, blocks_each: the same as in ``_sort_pairs``.
        BLOCK_M, EXPERTS: likewise.
    """
    blocks = (total + BLOCK_M - 1) // BLOCK_M
    end = tl.cumsum(blocks, axis=0)
    start = end - blocks
    is_here = expert >= 0
    row = tl.gather(start * BLOCK_M + before, tl.maximum(expert, 0), axis=0) + rank
    tl.store(pairs + row, pair, mask=is_here)

    for first in range(0, blocks_each, COMPARED):
        number = first + tl.arange(0, COMPARED)
        block = tl.program_id(0) * blocks_each + number
        described = (number < blocks_each) & (block < most_blocks)
        ended = (end[:, None] <= block[None, :]).to(tl.int32)
        of_block = tl.minimum(tl.sum(ended, axis=0), EXPERTS - 1)
        earlier = (block - tl.gather(start, of_block, axis=0)) * BLOCK_M
        rows = tl.minimum(tl.maximum(tl.gather(total, of_block, axis=0) - earlier, 0), BLOCK_M)
        tl.store(block_experts + block, of_block, mask=described)
        tl.store(block_rows + block, rows, mask=described)


place = device_function(_place)


def _sort_pairs(
    ids: tl.tensor,  # [tokens, top_k]
    weights: tl.tensor,  # [tokens, top_k]
    pairs: tl.tensor,  # [most_blocks * BLOCK_M] int32: token * top_k + slot by row
    block_experts: tl.tensor,  # [most_blocks] int32
    block_rows: tl.tensor,  # [most_blocks] int32: rows that are pairs; 0 past the last block
    counts: tl.tensor,  # [chunks, num_experts] int32
    ranks: tl.tensor,  # [num_pairs] int32
    num_pairs: tl.tensor,
    num_chunks: tl.tensor,
    most_blocks: tl.tensor,
    blocks_each: tl.tensor,
    top_k: tl.tensor,
    expert_offset: tl.tensor,
    num_experts: tl.tensor,
    ids_token: tl.tensor,
    ids_slot: tl.tensor,
    weights_token: tl.tensor,
    weights_slot: tl.tensor,
    ON_INPUT: tl.constexpr,
    COUNTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Sort, of which each program does a chunk of pairs.

    A launch that COUNTS is followed by one that PLACES; one program alone does both at once.
    EXPERTS is num_experts rounded up to a power of two; ``blocks_each`` how many blocks a program
    describes.
    """
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = experts_of(
        pair,
        num_pairs,
        ids,
        weights,
        top_k,
        ids_token,
        ids_slot,
        weights_token,
        weights_slot,
        expert_offset,
        num_experts,
        ON_INPUT,
    )
    number = tl.arange(0, EXPERTS)
    is_expert = number < num_experts
    if COUNTS:
        # How many pairs before each one have the same expert, and how many each expert has.
        rank = tl.full((CHUNK,), 0, tl.int32)
        count = tl.full((EXPERTS,), 0, tl.int32)
        at_once: tl.constexpr = COMPARED if CHUNK > COMPARED else CHUNK  # noqa: FURB136
        for first in range(0, CHUNK, at_once):
            other = chunk * CHUNK + first + tl.arange(0, at_once)
            other_expert = experts_of(
                other,
                num_pairs,
                ids,
                weights,
                top_k,
                ids_token,
                ids_slot,
                weights_token,
                weights_slot,
                expert_offset,
                num_experts,
                ON_INPUT,
            )
            before = other[:, None] < pair[None, :]
            same = before & (other_expert[:, None] == expert[None, :])
            rank += tl.sum(same.to(tl.int32), axis=0)
            of_number = other_expert[:, None] == number[None, :]
            count += tl.sum(of_number.to(tl.int32), axis=0)
        if PLACES:
            place(
                pair,
                expert,
                rank,
                count * 0,
                count,
                pairs,
                block_experts,
                block_rows,
                most_blocks,
                blocks_each,
                BLOCK_M,
                EXPERTS,
            )
        else:
            tl.store(ranks + pair, rank, mask=pair < num_pairs)
            tl.store(counts + chunk * num_experts + number, count, mask=is_expert)
    else:
        rank = tl.load(ranks + pair, mask=pair < num_pairs, other=0)
        earlier = tl.full((EXPERTS,), 0, tl.int32)
        total = tl.full((EXPERTS,), 0, tl.int32)
        rows: tl.constexpr = COUNTED // EXPERTS if EXPERTS < COUNTED else 1
        for first in range(0, num_chunks, rows):
            other = first + tl.arange(0, rows)
            count = tl.load(
                counts + (other * num_experts)[:, None] + number[None, :],
                mask=(other < num_chunks)[:, None] & is_expert[None, :],
                other=0,
            )
            total += tl.sum(count, axis=0)
            earlier += tl.sum(tl.where((other < chunk)[:, None], count, 0), axis=0)
        place(
            pair,
            expert,
            rank,
            earlier,
            total,
            pairs,
            block_experts,
            block_rows,
            most_blocks,
            blocks_each,
            BLOCK_M,
            EXPERTS,
        )


sort_pairs = triton.jit(
    _sort_pairs,
    do_not_specialize=(
        "num_pairs", "num_chunks", "most_blocks", "blocks_each", "top_k", "expert_offset",
        "num_experts", "ids_token", "weights_token",
    ),
)  # fmt: skip
