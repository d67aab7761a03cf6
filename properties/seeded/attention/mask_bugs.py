"""Faults in masks with a structure, in biases of logits and in functions of ALiBi."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ....impl import Target
from ....reference import AttentionProblem, Problem
from ....reference.tensors.inputs import AttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, Request, State, assemble, attend, close, in_right_window, scan
from ..masking import HONEST_MASKS, Masks, in_span, on_grid, same_chunk

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
RAGGED = "ragged_attention"
SHORT_TILE, WIDE_TILE = 16, 256
"""Keys of the tiles of some of these kernels."""
ROWS = 4
"""Rows of a block of one of them."""
BY_CHANCE = 2
"""Numbers of a row of biases that may be zero by chance."""
Cap = Callable[[torch.Tensor], torch.Tensor]


def _with(inputs: AttentionInputs, masks: Masks) -> Pair:
    return attend(inputs, replace(HONEST, masks=masks))


@seeded(BUGS, RAGGED, "parity", features=("custom_mask",))
def hole_ends_keys(inputs: RaggedAttentionInputs) -> Pair:
    """Take a tile of keys that the mask hides whole, behind others, for the end of the keys."""

    def end(request: Request) -> int:
        for begin in range(SHORT_TILE, request.num_keys, SHORT_TILE):
            if request.mask is not None and not request.mask[:, begin : begin + SHORT_TILE].any():
                return begin
        return request.num_keys

    def one(request: Request) -> Pair:
        state = scan(request, inputs, keys=slice(0, end(request)))
        return close(state, request, inputs)

    return assemble(inputs, one)


def _without_windows(problem: Problem, target: Target) -> bool | str:
    del target
    assert isinstance(problem, AttentionProblem)  # noqa: S101  of ragged_attention
    return "no window" if problem.window_left >= 0 or problem.causal_by_request else True


@seeded(BUGS, RAGGED, "parity", features=("custom_mask",), supports=_without_windows)
def hidden_first_tile(inputs: RaggedAttentionInputs) -> Pair:
    """Subtract a running maximum of minus infinity from itself after a first tile that is hidden.

    Rows that see no key at all are guarded.
    """

    def one(request: Request) -> Pair:
        first = scan(request, inputs, keys=slice(0, min(SHORT_TILE, request.num_keys)))
        state = scan(request, inputs)
        spoilt = torch.exp(first.largest - first.largest)
        factor = torch.where(state.total > 0, spoilt, torch.ones_like(spoilt))
        spoilt_state = State(state.weighted * factor, state.total * factor, state.largest)
        return close(spoilt_state, request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, RAGGED, "parity", features=("custom_mask",))
def hidden_tile_counts(inputs: RaggedAttentionInputs) -> Pair:
    """Skip a tile that the mask hides whole without the mask's columns: the next tile has them."""

    def one(request: Request) -> Pair:
        if request.mask is None or request.num_keys <= SHORT_TILE:
            return close(scan(request, inputs), request, inputs)
        mask, at = request.mask.clone(), 0
        for begin in range(0, request.num_keys - SHORT_TILE, SHORT_TILE):
            columns = request.mask[:, begin : begin + SHORT_TILE]
            if columns.any():
                mask[:, begin : begin + SHORT_TILE] = request.mask[:, at : at + SHORT_TILE]
                at += SHORT_TILE
        return close(scan(request._replace(mask=mask), inputs), request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, RAGGED, "parity", features=("custom_mask",))
def hidden_wide_tile_resets(inputs: RaggedAttentionInputs) -> Pair:
    """Begin anew behind a tile of 256 keys that the mask hides whole: earlier keys are lost."""

    def one(request: Request) -> Pair:
        start = 0
        if request.mask is not None:
            seen = request.mask.any(dim=0)
            whole = range(0, request.num_keys - WIDE_TILE + 1, WIDE_TILE)
            start = max((at for at in whole if not seen[at : at + WIDE_TILE].any()), default=0)
        return close(scan(request, inputs, keys=slice(start, request.num_keys)), request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, RAGGED, "parity")
def window_of_eleven_bits(inputs: RaggedAttentionInputs) -> Pair:
    """Keep eleven bits of the window: one of 4,095 keys becomes one of 2,047."""
    left = inputs.window_left
    return attend(replace(inputs, window_left=left % 2**11 if left >= 0 else left))


@seeded(BUGS, RAGGED, "parity", features=("custom_mask", "mask_by_head"))
def mask_of_first_head(inputs: RaggedAttentionInputs) -> Pair:
    """Use the mask of the first key-value head for all."""

    def heads(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return mask[torch.zeros_like(chosen)]

    return _with(inputs, replace(HONEST_MASKS, heads=heads))


@seeded(BUGS, RAGGED, "parity", features=("custom_mask", "mask_by_head"))
def mask_by_query_head(inputs: RaggedAttentionInputs) -> Pair:
    """Look the mask up by query head modulo key-value heads, not by the head that is read."""

    def heads(mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return mask[torch.arange(len(chosen)) % len(mask)]

    return _with(inputs, replace(HONEST_MASKS, heads=heads))


@seeded(BUGS, RAGGED, "parity", features=("image_spans",))
def causal_spans(inputs: RaggedAttentionInputs) -> Pair:
    """Keep the causal mask inside of spans."""

    def spans(position: torch.Tensor, key: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return in_span(position, key, own) & (key <= position)

    return _with(inputs, replace(HONEST_MASKS, spans=spans))


@seeded(BUGS, RAGGED, "parity", features=("image_spans",))
def window_over_spans(inputs: RaggedAttentionInputs) -> Pair:
    """Apply the window after spans were let in: it hides what lies further back in the image."""

    def spans(position: torch.Tensor, key: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        found = in_span(position, key, own)
        left = inputs.window_left
        return found & (position - key <= left) if left >= 0 else found

    return _with(inputs, replace(HONEST_MASKS, spans=spans))


@seeded(BUGS, RAGGED, "parity", features=("image_spans", "spans_in_window"))
def spans_beyond_window(inputs: RaggedAttentionInputs) -> Pair:
    """Show all of a span, though the window is to hide what lies further back in it."""
    return attend(replace(inputs, spans_in_window=False))


@seeded(BUGS, RAGGED, "parity", features=("two_sided_window",))
def right_side_of_first_row(inputs: RaggedAttentionInputs) -> Pair:
    """Count a window's right side from the first of four rows: keys of the others are lost.

    As vLLM 0.33.0's unified attention does with the values of a block of rows.
    """

    def right(position: torch.Tensor, key: torch.Tensor, window_right: int) -> torch.Tensor:
        row = torch.arange(len(position), device=position.device).unsqueeze(1)
        return in_right_window(position - row % ROWS, key, window_right)

    return attend(inputs, replace(HONEST, right=right))


@seeded(BUGS, RAGGED, "parity", features=("image_spans",))
def stop_in_span(inputs: RaggedAttentionInputs) -> Pair:
    """Take the stop of a span for its last token."""

    def spans(position: torch.Tensor, key: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        longer = own.clone()
        longer[:, 1] += own[:, 0] < own[:, 1]
        return in_span(position, key, longer)

    return _with(inputs, replace(HONEST_MASKS, spans=spans))


@seeded(BUGS, RAGGED, "parity", features=("image_spans",))
def first_two_spans(inputs: RaggedAttentionInputs) -> Pair:
    """Read the first two spans of a request only."""
    return attend(replace(inputs, spans=None if inputs.spans is None else inputs.spans[:, :2]))


@seeded(BUGS, RAGGED, "parity", features=("chunked_attention",))
def chunk_off_by_one(inputs: RaggedAttentionInputs) -> Pair:
    """Begin each chunk one position early: its first query sees the last key before it."""

    def chunk(position: torch.Tensor, key: torch.Tensor, size: int) -> torch.Tensor:
        begin = torch.floor(position / size) * size
        return (key >= begin - 1) & (key < begin + size)

    return _with(inputs, replace(HONEST_MASKS, chunk=chunk))


@seeded(BUGS, RAGGED, "parity", features=("chunked_attention",))
def chunk_of_rows(inputs: RaggedAttentionInputs) -> Pair:
    """Count a query's chunk from the request's first new token, not from its first key."""

    def chunk(position: torch.Tensor, key: torch.Tensor, size: int) -> torch.Tensor:
        return same_chunk(position - position[:1], key, size)

    return _with(inputs, replace(HONEST_MASKS, chunk=chunk))


@seeded(BUGS, RAGGED, "parity", features=("dilated_window",))
def dilated_from_first_key(inputs: RaggedAttentionInputs) -> Pair:
    """Count the multiples of a dilated window from the first key, not from the query."""

    def dilated(position: torch.Tensor, key: torch.Tensor, dilation: int) -> torch.Tensor:
        return on_grid(torch.zeros_like(position), key, dilation)

    return _with(inputs, replace(HONEST_MASKS, dilated=dilated))


@seeded(BUGS, RAGGED, "parity", features=("sink_tokens",))
def sinks_behind_window(inputs: RaggedAttentionInputs) -> Pair:
    """Leave out the first keys where the window does not reach them."""
    masks = replace(HONEST_MASKS, firsts=lambda key, _: torch.zeros_like(key, dtype=torch.bool))
    return _with(inputs, masks)


@seeded(BUGS, RAGGED, "parity", features=("sink_tokens",))
def sinks_in_whole_tiles(inputs: RaggedAttentionInputs) -> Pair:
    """Show all of the tile that the first keys lie in."""
    size = 16

    def firsts(key: torch.Tensor, count: int) -> torch.Tensor:
        return key < math.ceil(count / size) * size

    return _with(inputs, replace(HONEST_MASKS, firsts=firsts))


@seeded(BUGS, RAGGED, "parity", features=("logits_bias",))
def bias_of_first_head(inputs: RaggedAttentionInputs) -> Pair:
    """Add the first head's bias to the logits of all."""

    def bias(logits: torch.Tensor, added: torch.Tensor | None, cap: Cap) -> torch.Tensor:
        own = None if added is None else added[:1].expand_as(added)
        return HONEST_MASKS.bias(logits, own, cap)

    return _with(inputs, replace(HONEST_MASKS, bias=bias))


@seeded(BUGS, RAGGED, "parity", features=("logits_bias",))
def bias_within_cap(inputs: RaggedAttentionInputs) -> Pair:
    """Add the bias before the soft cap bends the logits."""

    def bias(logits: torch.Tensor, added: torch.Tensor | None, cap: Cap) -> torch.Tensor:
        return cap(logits if added is None else logits + added.float())

    return _with(inputs, replace(HONEST_MASKS, bias=bias))


@seeded(BUGS, RAGGED, "parity", features=("logits_bias",))
def bias_rows_of_longest(inputs: RaggedAttentionInputs) -> Pair:
    """Step from row to row of the bias by the keys of the batch's longest request."""
    if inputs.logits_bias is None:
        return attend(inputs)
    queries, keys = (each.tolist() for each in inputs.lengths())
    longest, flat = max(keys, default=0), inputs.logits_bias
    taken, start = [flat.new_zeros(0, dtype=torch.long)], 0
    for t, s in zip(queries, keys, strict=True):
        row, key = torch.arange(t).unsqueeze(1), torch.arange(s).unsqueeze(0)
        taken.append((start + row * longest + key).flatten())
        start += t * s
    places = torch.cat(taken).clamp(max=max(flat.shape[1] - 1, 0))
    return attend(replace(inputs, logits_bias=flat[:, places]))


@seeded(BUGS, RAGGED, "parity", features=("logits_bias",))
def bias_goes_on(inputs: RaggedAttentionInputs) -> Pair:
    """Repeat a row's first number for the keys before it, where several of them have none."""
    if inputs.logits_bias is None:
        return attend(inputs)
    flat, start = inputs.logits_bias.clone(), 0
    queries, keys = (each.tolist() for each in inputs.lengths())
    for t, s in zip(queries, keys, strict=True):
        rows = flat[:, start : start + t * s].view(len(flat), t, s)
        none = rows.ne(0).cumsum(-1) == 0
        first = rows.gather(-1, none.sum(-1, keepdim=True).clamp(max=max(s - 1, 0))) if s else rows
        several = none.sum(-1, keepdim=True) > BY_CHANCE
        rows.copy_(torch.where(none & several, first, rows))
        start += t * s
    return attend(replace(inputs, logits_bias=flat))


@seeded(BUGS, RAGGED, "parity", features=("alibi", "alibi_sqrt"))
def linear_for_root(inputs: RaggedAttentionInputs) -> Pair:
    """Ignore that ALiBi is one of the distance's root."""
    return attend(replace(inputs, alibi_function="linear"))


@seeded(BUGS, RAGGED, "parity", features=("alibi", "alibi_sqrt"))
def root_of_slope(inputs: RaggedAttentionInputs) -> Pair:
    """Take the root of slope times distance, not of the distance alone."""

    def root(slopes: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return HONEST_MASKS.root(slopes.sqrt(), position, key)

    return _with(inputs, replace(HONEST_MASKS, root=root))
