"""Blocks of query rows of a batch: which keys each row sees, and where its answer belongs."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch

from .alibi import ALIBI_FUNCTIONS
from .batches import Batch, Request, on_device
from .masks import seen, structured
from .options import Options


class Block(NamedTuple):
    """The same rows of each request of a batch, where it has them, and the keys they may see."""

    rows: slice  # of each request's queries
    keys: slice  # entries of the batch's k and v
    num_keys: list[int]  # how many of these entries are for each request
    padding: torch.Tensor | None  # [N, S'], True at the other entries; None if there are none
    hidden: torch.Tensor | None  # [N, 1 or K, rows or 1, S'], True where masked; None: nothing
    tokens: torch.Tensor  # [tokens of the block] int64, rows of q
    places: torch.Tensor  # the same tokens among the [N * rows] of the block
    lengths: torch.Tensor  # [N, 1, 1] int64, keys of each request
    distances: torch.Tensor | None  # [N, rows, S'], what ALiBi's slopes multiply
    bias: torch.Tensor | None = None  # [N, H, rows, S'], added to logits

    def put(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write values [N, K, rows * G, X] to the block's tokens in a target [tokens, H, X]."""
        flat = ungroup(values, self.rows.stop - self.rows.start).flatten(0, 1)
        if len(self.places) < len(flat):
            flat = flat.index_select(0, self.places)
        target.index_copy_(0, self.tokens, flat)


class _Part(NamedTuple):
    """What one request has in a block; entries are of its row of k and v."""

    tokens: range  # rows of q
    begin: int  # entry of the first key that these rows may see
    end: int  # entry after the last
    offset: int  # entry at which query row 0 stands
    last: int  # entry of the last key that query row 0 may see, were it for ``causal`` only
    mask: int  # number, in the flat custom mask, of entry 0 for query row 0
    num_keys: int  # of the request: the mask's row length
    first: int  # position of entry 0
    causal: int


def block_of(batch: Batch, options: Options, rows: slice) -> Block:
    """Take these rows of each request."""
    parts = [
        _part(request, first, options, rows)
        for request, first in zip(batch.requests, batch.first, strict=True)
    ]
    seeing = [part for part in parts if part.begin < part.end]
    keys = slice(
        min((part.begin for part in seeing), default=0),
        max((part.end for part in seeing), default=0),
    )
    width = rows.stop - rows.start
    *numbers, tokens, places = on_device(
        batch.q.device,
        *zip(*((part.begin, part.end, part.offset, part.last, part.mask, part.num_keys,
                part.first, part.causal) for part in parts), strict=True),
        [token for part in parts for token in part.tokens],
        [n * width + row for n, part in enumerate(parts) for row in range(len(part.tokens))],
    )  # fmt: skip
    begin, end, offset, last, mask, num_keys, first, causal = (
        each.view(-1, 1, 1) for each in numbers
    )
    entry = torch.arange(keys.start, keys.stop, device=batch.q.device)  # [S']
    row = torch.arange(rows.start, rows.stop, device=batch.q.device).unsqueeze(1)  # [rows, 1]
    hidden: list[torch.Tensor] = []
    if any(part.end != keys.stop for part in parts):
        hidden.append(entry >= end)
    if any(part.begin != keys.start for part in parts):
        hidden.append(entry < begin)
    padding = functools.reduce(operator.or_, hidden).squeeze(1) if hidden else None
    if structured(options):
        spans = _spans_of(batch)
        hidden.append(~seen(options, row + offset + first, entry + first, causal > 0, spans))
    else:
        hidden += _outside(options, rows, parts, (entry, row, offset, last))
    hides = functools.reduce(operator.or_, hidden).unsqueeze(1) if hidden else None
    bias = None
    if options.custom_mask is not None or options.logits_bias is not None:
        number = mask + row * num_keys + entry
        if options.custom_mask is not None:
            masked = ~_numbered(options.custom_mask, number)
            hides = masked if hides is None else hides | masked
        if options.logits_bias is not None:
            bias = _numbered(options.logits_bias, number).to(options.compute_dtype)
    return Block(
        rows,
        keys,
        [part.end - part.begin for part in parts],
        padding,
        hides,
        tokens,
        places,
        num_keys,
        None
        if options.alibi_slopes is None
        else ALIBI_FUNCTIONS[options.alibi_function](entry - (row + offset)),
        bias,
    )


def _outside(
    options: Options, rows: slice, parts: list[_Part], places: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Return what causal and windows hide of these entries, where each hides any."""
    entry, row, offset, last = places
    seeing = [part for part in parts if part.begin < part.end]
    hidden: list[torch.Tensor] = []
    if any(rows.start + part.last < part.end - 1 for part in seeing):
        hidden.append(entry > row + last)
    right = options.window_right
    if right >= 0 and any(rows.start + part.offset + right < part.end - 1 for part in seeing):
        hidden.append(entry > row + (offset + right))
    window = options.window_left
    if window >= 0 and any(
        rows.start + len(part.tokens) - 1 + part.offset - window > part.begin for part in seeing
    ):
        hidden.append(entry < row + (offset - window))
    return hidden


def _spans_of(batch: Batch) -> torch.Tensor | None:
    """Return the spans of a batch's requests, [N, n, 2]; None where there are none."""
    most = max(len(request.spans) for request in batch.requests)
    if not most:
        return None
    padded = [
        [*request.spans, *[(0, 0)] * (most - len(request.spans))] for request in batch.requests
    ]
    return torch.tensor(padded, dtype=torch.int64).to(batch.q.device, non_blocking=True)


def _numbered(flat: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return entries of a flat mask or bias, [X] or [heads, X], as [N, 1 or heads, rows, S']."""
    by_head = flat.to(number.device)
    by_head = by_head.unsqueeze(0) if by_head.dim() == 1 else by_head
    chosen = by_head[:, number.clamp(min=0, max=max(by_head.shape[1] - 1, 0))]
    return chosen.transpose(0, 1)


def _part(request: Request, first: int, options: Options, rows: slice) -> _Part:
    own = slice(min(rows.start, request.num_queries), min(rows.stop, request.num_queries))
    keys = request.key_range(options, own)
    start = request.tokens.start
    return _Part(
        range(start + own.start, start + own.stop),
        keys.start - first,
        keys.stop - first,
        request.offset - first,
        (request.offset if request.causal else request.num_keys) - first,
        request.mask_start + first,
        request.num_keys,
        first,
        int(request.causal),
    )


def group(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Reorder [..., T, H, X] to [..., K, T * G, X]: rows that share a key-value head together."""
    *batch, tokens, heads, width = rows.shape
    by_head = rows.reshape(*batch, tokens, num_kv_heads, heads // num_kv_heads, width)
    return by_head.transpose(-4, -3).reshape(*batch, num_kv_heads, -1, width)


def ungroup(grouped: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reorder [..., K, T * G, X] back to [..., T, H, X]."""
    *batch, num_kv_heads, _, width = grouped.shape
    by_head = grouped.reshape(*batch, num_kv_heads, num_rows, -1, width)
    return by_head.transpose(-4, -3).reshape(*batch, num_rows, -1, width)
