"""Custom masks, spans and biases of problems: what each is, by hash.

All of it is of a request's identity, so that a request keeps it alone and in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..problems import AttentionProblem
from .regimes import numbered
from .values import bell, bits, choose, stream

TILES = (256, 128, 64, 32, 16)
"""Keys of the tiles that kernels take at a time, which a mask may hide whole: as a larger one is
hidden, all smaller ones in it are."""
MOST_SPANS = 4
"""Spans that each request has room for; what is left over is empty."""
IMAGES = 3
BUCKETS, MOST_DISTANCE = 32, 128
"""Buckets of T5's relative bias, and the distance from which on all are in the last."""
REACHES = (1, 2, 5, 16, 40)
"""Distances from which on keys before a row have no bias, where only near ones have."""
BIAS_STEP = 8.0
"""Biases are multiples of its inverse, up to 4: each dtype holds them."""

Place = Callable[[str, int], int]
"""Chooses one of some integers from 0, by a name: hashes of a request and of a head."""
Rows = tuple[torch.Tensor, torch.Tensor]
"""Positions [T, 1] of queries, which may be negative, and [1, S] of keys."""


def mask_values(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Make the custom mask: flat, or [kv_heads, ...] where each head has its own."""
    if not problem.mask_by_head:
        return _mask_of_head(problem, 0, device)
    heads = [_mask_of_head(problem, head, device) for head in range(problem.num_kv_heads)]
    return torch.stack(heads)


def _mask_of_head(problem: AttentionProblem, head: int, device: torch.device) -> torch.Tensor:
    rows = numbered(problem.ids, problem.query_lens).to(device, non_blocking=True)
    name = f"mask {head}" if head else "mask"
    if not problem.mask_pattern:
        # Each row keeps about three quarters of its keys.
        hashes = bits(stream(problem.seed, name), rows, max(problem.seq_lens, default=0))
        keeps = (hashes % 4 != 0).split(list(problem.query_lens))
        masks = [keep[:, :s].flatten() for keep, s in zip(keeps, problem.seq_lens, strict=True)]
        return torch.cat([torch.empty(0, dtype=torch.bool, device=device), *masks])
    masks = [torch.empty(0, dtype=torch.bool, device=device)]
    own = rows.split(list(problem.query_lens))
    for identity, numbers, s in zip(problem.ids, own, problem.seq_lens, strict=True):
        place = _placing(problem, f"{name} {identity}")
        position = torch.arange(s - len(numbers), s, device=device).unsqueeze(1)
        key = torch.arange(s, device=device).unsqueeze(0)
        if problem.mask_pattern in CHOSEN:
            keep = CHOSEN[problem.mask_pattern](stream(problem.seed, name), numbers, s, place)
        else:
            keep = PATTERNS[problem.mask_pattern]((position, key), place)
        masks.append(keep.expand(len(numbers), s).flatten())
    return torch.cat(masks)


def _placing(problem: AttentionProblem, tag: str) -> Place:
    return lambda name, options: choose(problem.seed, f"{tag} {name}", 0, max(options, 1))


def _tile(place: Place, keys: int) -> int:
    """Choose how many keys a hidden tile has: the most that fit half of the time; or else half."""
    fitting = [tile for tile in TILES if tile < keys]
    fitting += fitting[:1] * (len(fitting) - 2)
    return fitting[place("tile", len(fitting))] if fitting else keys // 2


def _leading_tile(rows: Rows, place: Place) -> torch.Tensor:
    """Hide the first tile of keys from every row."""
    key = rows[1]
    return key >= _tile(place, key.shape[1])


def _inner_tile(rows: Rows, place: Place) -> torch.Tensor:
    """Hide one tile of keys, from the second on and not the last, from every row."""
    key = rows[1]
    keys = key.shape[1]
    tile = max(_tile(place, max(keys // 2, 1)), 1)
    number = 1 + place("number", (keys - 1) // tile - 1)
    return (key < number * tile) | (key >= (number + 1) * tile)


def _holes(rows: Rows, place: Place) -> torch.Tensor:
    """Hide one or two ranges of keys, of any length at any place, from every row."""
    key = rows[1]
    keys, keep = key.shape[1], key >= 0
    for number in range(1 + place("holes", 2)):
        start = place(f"start {number}", keys)
        stop = start + 1 + place(f"length {number}", keys - start)
        keep = keep & ((key < start) | (key >= stop))
    return keep


def _documents(rows: Rows, place: Place) -> torch.Tensor:
    """Keep the keys of the row's own document: a request is packed from up to four."""
    position, key = rows
    keys = key.shape[1]
    cuts = [place(f"cut {number}", keys) for number in range(1 + place("documents", 3))]

    def document(where: torch.Tensor) -> torch.Tensor:
        return sum((where >= cut for cut in cuts), torch.zeros_like(where))

    return document(position) == document(key)


def _block_causal(rows: Rows, place: Place) -> torch.Tensor:
    """Keep the keys of the row's own block, both ways, and of all blocks before."""
    position, key = rows
    size = (4, 16, 32, 64, 3)[place("size", 5)]
    return key // size <= position.div(size, rounding_mode="floor")


PATTERNS: dict[str, Callable[[Rows, Place], torch.Tensor]] = {
    "leading_tile": _leading_tile,
    "inner_tile": _inner_tile,
    "holes": _holes,
    "documents": _documents,
    "block_causal": _block_causal,
}
"""Patterns of masks: which keys each row keeps, [T or 1, S]."""


def _blocks(key: int, rows: torch.Tensor, keys: int, place: Place) -> torch.Tensor:
    """Keep some blocks of keys, each row its own, and always the last: a third of them."""
    size = (16, 64, 4)[place("size", 3)]
    count = -(-keys // size)
    kept = bits(key, rows, count) % 3 == 0
    kept[:, count - 1 :] = True
    return kept.repeat_interleave(size, dim=1)[:, :keys]


def _sparse(key: int, rows: torch.Tensor, keys: int, place: Place) -> torch.Tensor:
    """Keep about as many keys as the square root of their number, each row its own."""
    del place
    return bits(key, rows, keys) % max(math.isqrt(keys), 1) == 0


CHOSEN: dict[str, Callable[[int, torch.Tensor, int, Place], torch.Tensor]] = {
    "blocks": _blocks,
    "sparse": _sparse,
}
"""Patterns of which each row has its own, by hash: of a stream, rows' numbers and keys."""


def span_values(problem: AttentionProblem) -> torch.Tensor:
    """Make int32 [R, 4, 2] spans: apart from each other, and around queries where there is room."""
    found = torch.zeros((problem.num_requests, MOST_SPANS, 2), dtype=torch.int32)
    for number, (identity, t, s) in enumerate(
        zip(problem.ids, problem.query_lens, problem.seq_lens, strict=True)
    ):
        place = _placing(problem, f"spans {identity}")
        prefix = problem.spans == "prefix"
        spans = [(0, 1 + place("stop", s))] if prefix else _images(t, s, place)
        for row, span in enumerate(spans):
            found[number, row] = torch.tensor(span)
    return found


def _images(queries: int, keys: int, place: Place) -> list[tuple[int, int]]:
    new = min(queries, keys)
    count = IMAGES - place("fewer", 5) // 2
    # Short enough for all of them among the queries, where there are some.
    longest = min((6, 3, 40, 200)[place("longest", 4)], max(new // count, 2))
    # The first lies among the queries; others mostly too, if there is room for all, or anywhere.
    room = new >= 3 * count
    ranges = [
        new if not number or (room and place(f"near {number}", 3)) else keys
        for number in range(count)
    ]
    middles = sorted(
        keys - size + place(f"middle {number}", size) for number, size in enumerate(ranges)
    )
    spans: list[tuple[int, int]] = []
    end = 0
    for number, middle in enumerate(middles):
        start = max(middle - place(f"before {number}", longest), end)
        stop = min(middle + 2 + place(f"behind {number}", longest), keys)
        if start < stop:
            spans.append((start, stop))
            end = stop
    return spans


def bias_values(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Make the [qo_heads, sum of T_i * S_i] bias in the problem's dtype, which holds it exactly."""
    heads, parts = problem.num_qo_heads, []
    keys = [stream(problem.seed, f"bias {head}") for head in range(heads)]
    rows = numbered(problem.ids, problem.query_lens).to(device, non_blocking=True)
    own = rows.split(list(problem.query_lens))
    for numbers, s in zip(own, problem.seq_lens, strict=True):
        if problem.logits_bias == "relative":
            bias = _relative(problem, len(numbers), s, device)
        else:
            bias = torch.stack([bell(key, numbers, s) for key in keys])
        if problem.logits_bias == "near":
            reach = REACHES[choose(problem.seed, "reach of biases", 0, len(REACHES))]
            bias = torch.where(_distances(len(numbers), s, device).abs() < reach, bias, 0.0)
        parts.append(bias.flatten(1))
    empty = torch.empty((heads, 0), device=device)
    values = torch.cat([empty, *parts], dim=1)
    rounded = torch.round(values * BIAS_STEP) / BIAS_STEP
    return rounded.to(getattr(torch, problem.dtype))


def _relative(
    problem: AttentionProblem, queries: int, keys: int, device: torch.device
) -> torch.Tensor:
    """Look up the head's number of the bucket of each distance, [H, T, S] (T5, both directions)."""
    heads = torch.arange(problem.num_qo_heads, device=device)
    table = bell(stream(problem.seed, "bias"), heads, BUCKETS)
    distance = _distances(queries, keys, device)
    half = BUCKETS // 2
    near = half // 2
    size = distance.abs()
    ratio = torch.log(size.clamp(min=1).double() / near) / math.log(MOST_DISTANCE / near)
    far = (near + (ratio * (half - near)).floor().long()).clamp(max=half - 1)
    bucket = torch.where(size < near, size, far) + half * (distance > 0)
    return table[:, bucket]


def _distances(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return how far each key lies behind each row's own, [T, S]; negative where it is before."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    return torch.arange(keys, device=device).unsqueeze(0) - position
