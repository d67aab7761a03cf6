"""Merging attention states as a Triton kernel; ``triton_merge`` launches it.

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


def _merge(
    outs: tl.tensor,  # [states, tokens, heads, DIM]
    lses: tl.tensor,  # [states, tokens, heads]
    out: tl.tensor,  # [tokens, heads, DIM]
    lse: tl.tensor,  # [tokens, heads] float32
    num_states: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    in_factor: tl.tensor,
    out_factor: tl.tensor,
    outs_state: tl.tensor,
    outs_token: tl.tensor,
    outs_head: tl.tensor,
    outs_dim: tl.tensor,
    lses_state: tl.tensor,
    lses_token: tl.tensor,
    lses_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_dim: tl.tensor,
    lse_token: tl.tensor,
    lse_head: tl.tensor,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STATES_AT_ONCE: tl.constexpr,
) -> None:
    """Merge BLOCK_ROWS rows, a row being a token and a head.

    Differences of lses times ``in_factor`` are in base 2; the largest lse times ``out_factor`` is
    in base e. A state with an lse of -inf is not read: its out may hold anything. Strides of
    states, tokens and heads in ``outs`` and ``out`` come in units of UNIT elements: see
    ``triton_units``.
    """
    outs_state, outs_token = in_elements(outs_state, UNIT), in_elements(outs_token, UNIT)
    outs_head, out_head = in_elements(outs_head, UNIT), in_elements(out_head, UNIT)
    out_token = in_elements(out_token, UNIT)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // num_heads).to(tl.int64)
    head = row % num_heads
    is_row = token < num_tokens
    channel = tl.arange(0, BLOCK_DIM)
    lses_row = token * lses_token + head * lses_head
    outs_row = token * outs_token + head * outs_head
    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    for first in range(0, num_states, STATES_AT_ONCE):
        state = first + tl.arange(0, STATES_AT_ONCE)
        state_lses = tl.load(
            lses + state.to(tl.int64)[:, None] * lses_state + lses_row[None, :],
            mask=(state < num_states)[:, None] & is_row[None, :],
            other=float("-inf"),
        )
        largest = tl.maximum(largest, tl.max(state_lses.to(tl.float32), axis=0))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    merged = tl.full((BLOCK_ROWS, BLOCK_DIM), 0.0, tl.float32)
    for first in range(0, num_states, STATES_AT_ONCE):
        state = first + tl.arange(0, STATES_AT_ONCE)
        place = state.to(tl.int64)[:, None]
        state_lses = tl.load(
            lses + place * lses_state + lses_row[None, :],
            mask=(state < num_states)[:, None] & is_row[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        weight = tl.exp2((state_lses - base[None, :]) * in_factor)
        state_rows = place * outs_state + outs_row[None, :]
        state_outs = tl.load(
            outs + state_rows[:, :, None] + channel[None, None, :] * outs_dim,
            mask=(state_lses > float("-inf"))[:, :, None] & (channel < DIM)[None, None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(weight, axis=0)
        merged += tl.sum(weight[:, :, None] * state_outs, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    out_row = token * out_token + head * out_head
    tl.store(
        out + out_row[:, None] + channel[None, :] * out_dim,
        (merged / divisor[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & (channel < DIM)[None, :],
    )
    merged_lse = largest * out_factor + tl.log2(divisor) * 0.6931471805599453
    tl.store(lse + token * lse_token + head * lse_head, merged_lse, mask=is_row)


merge = triton.jit(
    _merge,
    do_not_specialize=(
        "num_states", "num_tokens", "num_heads", "outs_state", "outs_token", "outs_head",
        "lses_state", "lses_token", "lses_head", "out_token", "out_head", "lse_token",
    ),
)  # fmt: skip
