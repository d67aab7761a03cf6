"""Experts as Triton kernels: both products, and the sum over slots; ``triton_moe_call`` launches.

    project    middle[row] = activation(w13[expert] hidden[token of row] + bias)
    contract   partial[pair of row] = w2[expert] middle[row] + bias
    combine    out[token] = sum over slots, in their order, of weight * partial[token, slot]

Rows are pairs of a token and a slot, sorted by expert; see ``triton_moe_sort_kernel``.

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
from .moe_functions import LARGEST_E4M3, activated, product, rounded_to_e4m3, tile_of

SCALE_ROWS = tl.constexpr(128)
"""Rows of weights that a block of scales is for."""


def _project(  # noqa: C901, PLR0915  in one piece: it shares most of its names
    hidden: tl.tensor,  # [tokens, columns]
    hidden_scales: tl.tensor | None,  # [tokens, blocks] float32 by strides, of codes
    w13: tl.tensor,  # [experts, rows, columns]
    w13_scales: tl.tensor | None,  # [experts, rows or blocks of them, blocks] float32 by strides
    w13_bias: tl.tensor | None,  # [experts, rows]
    weights: tl.tensor | None,  # [tokens, top_k], where they multiply the hidden states
    pairs: tl.tensor,
    block_experts: tl.tensor,
    block_rows: tl.tensor,
    middle: tl.tensor,  # [blocks of rows, inter]
    middle_scales: tl.tensor | None,  # [blocks of rows, tiles] float32, where codes are stored
    alphas: tl.tensor | None,  # [experts], where each has its own
    betas: tl.tensor | None,
    limits: tl.tensor | None,
    given_scales: tl.tensor | None,  # [experts], of the intermediate
    alpha: tl.tensor,
    beta: tl.tensor,
    limit: tl.tensor,
    most_blocks: tl.tensor,
    top_k: tl.tensor,
    columns: tl.tensor,
    inter: tl.tensor,
    row_step: tl.tensor,
    half_step: tl.tensor,
    hidden_token: tl.tensor,
    hidden_column: tl.tensor,
    hidden_scales_token: tl.tensor | None,
    hidden_scales_block: tl.tensor | None,
    w13_expert: tl.tensor,
    w13_row: tl.tensor,
    w13_column: tl.tensor,
    w13_scales_expert: tl.tensor | None,
    w13_scales_row: tl.tensor | None,
    w13_scales_block: tl.tensor | None,
    w13_bias_expert: tl.tensor | None,
    w13_bias_row: tl.tensor | None,
    weights_token: tl.tensor | None,
    weights_slot: tl.tensor | None,
    middle_row: tl.tensor,
    HIDDEN_FORMAT: tl.constexpr,
    W13_FORMAT: tl.constexpr,
    HIDDEN_SCALED: tl.constexpr,
    W13_SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROUNDS: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Make BLOCK_M rows of BLOCK_N / 2 (GATED) or BLOCK_N columns of the intermediate.

    Gate and up rows take turns in a tile, so that both of a column end in one thread: of column j
    they are ``j * row_step`` and ``half_step`` more. HIDDEN_SCALED and W13_SCALED say how many
    columns share a scale; 0: all do. ROUNDS to e4m3, with the given scale or one for each row of
    the tile. Strides of rows and experts come in units of UNIT elements: see ``triton_units``.
    """
    hidden_token, middle_row = in_elements(hidden_token, UNIT), in_elements(middle_row, UNIT)
    w13_expert, w13_row = in_elements(w13_expert, UNIT), in_elements(w13_row, UNIT)
    OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # noqa: N806  a constant
    tiles = (inter + OUT - 1) // OUT
    block, tile = tile_of(tl.program_id(0), most_blocks, tiles, GROUP)
    # Together, so that their latencies are one.
    place = tl.arange(0, BLOCK_M)
    num_rows = tl.load(block_rows + block)
    expert = tl.load(block_experts + block).to(tl.int64)
    pair = tl.load(pairs + block * BLOCK_M + place)
    if num_rows == 0:
        return
    is_row = place < num_rows
    # Rows that are no pairs compute what the first token's would be, and are not stored.
    pair = tl.where(is_row, pair, 0)
    token = (pair // top_k).to(tl.int64)

    number = tl.arange(0, BLOCK_N)
    if GATED:
        w_row = tl.minimum(tile * OUT + number // 2, inter - 1) * row_step + number % 2 * half_step
    else:
        w_row = tl.minimum(tile * OUT + number, inter - 1)
    w_row = w_row.to(tl.int64)
    a_scales = None
    if hidden_scales is not None:
        a_scales = hidden_scales + token * hidden_scales_token
    b_scales = None
    if w13_scales is not None:
        of_row = w_row // SCALE_ROWS if W13_SCALED > 0 else w_row
        b_scales = w13_scales + expert * w13_scales_expert + of_row * w13_scales_row
    x = product(
        hidden + token * hidden_token,
        hidden_column,
        a_scales,
        hidden_scales_block,
        w13 + expert * w13_expert + w_row * w13_row,
        w13_column,
        b_scales,
        w13_scales_block,
        columns,
        HIDDEN_FORMAT,
        W13_FORMAT,
        HIDDEN_SCALED,
        W13_SCALED,
        DTYPE,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if hidden_scales is not None and HIDDEN_SCALED == 0:
        x *= tl.load(a_scales)[:, None]
    if w13_scales is not None and W13_SCALED == 0:
        x *= tl.load(b_scales)[None, :]
    if weights is not None:
        x *= tl.load(weights + token * weights_token + (pair % top_k) * weights_slot).to(
            tl.float32
        )[:, None]
    if w13_bias is not None:
        bias = tl.load(w13_bias + expert * w13_bias_expert + w_row * w13_bias_row)
        x += bias.to(tl.float32)[None, :]
    y = activated(
        x,
        expert,
        alphas,
        betas,
        limits,
        alpha,
        beta,
        limit,
        ACTIVATION,
        GATED,
        NUMBERS,
        BLOCK_M,
        OUT,
    )

    channel = tile * OUT + tl.arange(0, OUT)
    is_stored = is_row[:, None] & (channel < inter)[None, :]
    row = (block * BLOCK_M + place).to(tl.int64)
    if given_scales is not None:
        scale = tl.load(given_scales + expert) + tl.full((BLOCK_M,), 0.0, tl.float32)
        most = (scale * LARGEST_E4M3)[:, None]
        y = tl.where(y > most, most, tl.where(y < -most, -most, y))
    elif ROUNDS:
        largest = tl.max(tl.where(is_stored, tl.abs(y), 0.0), axis=1)
        scale = tl.where(largest == 0.0, 1.0, largest * (1.0 / LARGEST_E4M3))
    if ROUNDS:
        y = tl.div_rn(y, tl.broadcast_to(scale[:, None], (BLOCK_M, OUT)))
        y = tl.where(y > LARGEST_E4M3, LARGEST_E4M3, tl.where(y < -LARGEST_E4M3, -LARGEST_E4M3, y))
        y = rounded_to_e4m3(y)
        tl.store(middle_scales + row * tiles + tile, scale, mask=is_row)
    tl.store(
        middle + row[:, None] * middle_row + channel[None, :],
        y.to(middle.dtype.element_ty),
        mask=is_stored,
    )


def _contract(
    middle: tl.tensor,  # [blocks of rows, columns]
    middle_scales: tl.tensor | None,  # [blocks of rows, tiles] float32, of codes
    w2: tl.tensor,  # [experts, rows, columns]
    w2_scales: tl.tensor | None,  # [experts, rows or blocks of them, blocks] float32 by strides
    w2_bias: tl.tensor | None,  # [experts, rows]
    pairs: tl.tensor,
    block_experts: tl.tensor,
    block_rows: tl.tensor,
    partial: tl.tensor,  # [pairs, rows]
    most_blocks: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    middle_row: tl.tensor,
    middle_scales_row: tl.tensor | None,
    w2_expert: tl.tensor,
    w2_row: tl.tensor,
    w2_column: tl.tensor,
    w2_scales_expert: tl.tensor | None,
    w2_scales_row: tl.tensor | None,
    w2_scales_block: tl.tensor | None,
    w2_bias_expert: tl.tensor | None,
    w2_bias_row: tl.tensor | None,
    partial_row: tl.tensor,
    MIDDLE_FORMAT: tl.constexpr,
    W2_FORMAT: tl.constexpr,
    MIDDLE_SCALED: tl.constexpr,
    W2_SCALED: tl.constexpr,
    UNIT: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Make BLOCK_N channels of the outputs of BLOCK_M rows; the names are those of ``_project``."""
    w2_expert, w2_row = in_elements(w2_expert, UNIT), in_elements(w2_row, UNIT)
    middle_row, partial_row = in_elements(middle_row, UNIT), in_elements(partial_row, UNIT)
    tiles = (rows + BLOCK_N - 1) // BLOCK_N
    block, tile = tile_of(tl.program_id(0), most_blocks, tiles, GROUP)
    num_rows = tl.load(block_rows + block)
    expert = tl.load(block_experts + block).to(tl.int64)
    if num_rows == 0:
        return
    place = tl.arange(0, BLOCK_M)
    is_row = place < num_rows
    row = (block * BLOCK_M + place).to(tl.int64)
    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(channel, rows - 1).to(tl.int64)
    a_scales = None
    if middle_scales is not None:
        a_scales = middle_scales + row * middle_scales_row
    b_scales = None
    if w2_scales is not None:
        of_row = w_row // SCALE_ROWS if W2_SCALED > 0 else w_row
        b_scales = w2_scales + expert * w2_scales_expert + of_row * w2_scales_row
    y = product(
        middle + row * middle_row,
        1,
        a_scales,
        1,
        w2 + expert * w2_expert + w_row * w2_row,
        w2_column,
        b_scales,
        w2_scales_block,
        columns,
        MIDDLE_FORMAT,
        W2_FORMAT,
        MIDDLE_SCALED,
        W2_SCALED,
        DTYPE,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if w2_scales is not None and W2_SCALED == 0:
        y *= tl.load(b_scales)[None, :]
    if w2_bias is not None:
        bias = tl.load(w2_bias + expert * w2_bias_expert + w_row * w2_bias_row)
        y += bias.to(tl.float32)[None, :]
    pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
    tl.store(
        partial + pair[:, None] * partial_row + channel[None, :],
        y.to(partial.dtype.element_ty),
        mask=is_row[:, None] & (channel < rows)[None, :],
    )


def _combine(
    partial: tl.tensor,  # [pairs, channels]
    added: tl.tensor | None,  # [tokens, channels] float32, contiguous
    ids: tl.tensor,  # [tokens, top_k]
    weights: tl.tensor,  # [tokens, top_k]
    out: tl.tensor,  # [tokens, channels]
    channels: tl.tensor,
    factor: tl.tensor,
    expert_offset: tl.tensor,
    num_experts: tl.tensor,
    partial_row: tl.tensor,
    ids_token: tl.tensor,
    ids_slot: tl.tensor,
    weights_token: tl.tensor,
    weights_slot: tl.tensor,
    out_token: tl.tensor,
    out_channel: tl.tensor,
    ON_INPUT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add BLOCK channels of a token's expert outputs, times a factor; no more is read."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < channels
    if added is not None:
        total = tl.load(added + token * channels + channel, mask=is_channel, other=0.0)
    else:
        total = tl.full((BLOCK,), 0.0, tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(ids + token * ids_token + slot * ids_slot)
        local = expert - expert_offset
        is_here = (expert >= 0) & (local >= 0) & (local < num_experts)
        if ON_INPUT:
            weight = factor
        else:
            weight = tl.load(weights + token * weights_token + slot * weights_slot).to(tl.float32)
            is_here = is_here & (weight != 0.0)
            weight *= factor
        # A number and not a condition: spread over a block, a scalar condition is no mask to the
        # interpreter.
        last = tl.where(is_here, channels, 0)
        y = tl.load(
            partial + (token * TOP_K + slot) * partial_row + channel, mask=channel < last, other=0.0
        )
        # Where nothing was read, a NaN of a weight counts for nothing.
        total += tl.where(channel < last, y.to(tl.float32) * weight, 0.0)
    tl.store(
        out + token * out_token + channel * out_channel,
        total.to(out.dtype.element_ty),
        mask=is_channel,
    )


project = triton.jit(
    _project,
    do_not_specialize=(
        "most_blocks", "top_k", "row_step", "half_step", "hidden_token", "hidden_scales_token",
        "w13_expert", "w13_row", "w13_scales_expert", "w13_scales_row", "w13_bias_expert",
        "weights_token", "middle_row",
    ),
)  # fmt: skip
contract = triton.jit(
    _contract,
    do_not_specialize=(
        "most_blocks", "middle_row", "middle_scales_row", "w2_expert", "w2_row",
        "w2_scales_expert", "w2_scales_row", "w2_bias_expert", "partial_row",
    ),
)  # fmt: skip
combine = triton.jit(
    _combine,
    do_not_specialize=("expert_offset", "num_experts", "ids_token", "weights_token"),
)
