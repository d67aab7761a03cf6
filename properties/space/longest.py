"""Very long requests of attention: a fault of many splits needs thousands of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...reference import AttentionProblem
from ...reference.formats.cache_elements import FP8
from .attention_axes import attention_example
from .axis_values import Axes

BEHIND_AN_EDGE = 37
"""Keys behind a multiple of every tile: the last tile of a long request is not full."""
KEYS = {"cpu": 2**14, "cuda": 2**17}
"""Fewest keys of the longest request, by device."""
HIDDEN_TILES = ("leading_tile", "inner_tile")
"""Patterns of masks of the requests that hide tiles."""
TILED_KEYS = 2**10 + BEHIND_AN_EDGE
"""Their keys: four tiles of 256, and a last one that is not full."""
TILE_SEEDS = (0, 1)
"""Their seeds, which choose the tile."""
MANY_CHANNELS, SIGNED_KEYS = 96, 200
"""Channels of a head, at least, and keys of requests whose operands have one sign."""
OF_FEW_QUERIES = ("decode", "verify", "chunk")
"""Phases whose requests may have one or two queries, and any number of keys."""
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "phase": ("chunk", "verify", "decode"),
    "caches": tuple((name, "") for name in FP8),
    "regime": ("dominant_key",),
}
"""Values of the second long request, where they may be drawn: first choices come first."""
LAST_KEY = 18
"""Seed with which the dominant key of a request is its last one: among this many keys, another one
that is lost moves the answer by less than its bound."""
FULL_BATCHES = {"64 long requests": (64, 2**11), "512 short requests": (512, 2**6)}
"""Requests of batches that fill a GPU, and the most keys of each."""
MOST_FULL_CHOICES = 128
"""Batches of each kind that are tried before it is given up: nearly all are taken at first."""
OF_LENGTHS = ("phase", "verify")
"""Axes that say how many queries and keys a request has."""
FULL_AXES = (
    "dtype", "causal", "head_dims", "page_size", "num_kv_heads", "group_size",
    "kv_layout", "custom_mask", "window_left", "tree", "sinks", "logits_soft_cap", "caches",
)  # fmt: skip
"""Axes whose values are tried one by one where the plainest batch is refused."""
MOST_WHOLE = 2**8
"""Most keys of their requests where a request has as many queries."""
MOST_FULL_HEADS = 4
"""Most key-value heads of these batches."""
PAGES = (16, 32, 64)
"""Keys a page of a long request, where they may be drawn: single keys need a long page table."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "window_left": (-1,), "window_right": (-1,), "sm_scale": (None,), "custom_mask": (False,),
    "regime": ("iid",), "page_size": PAGES, "dtype": ("float32", "bfloat16", "float16"),
}  # fmt: skip
"""Values that show a lost key of many, where they may be drawn: first choices come first."""


def longest(axes: Axes, device: str = "cpu") -> tuple[AttentionProblem, ...]:
    """Return very long requests on the fewest heads and channels; none where there is no such call.

    The first is plain, and its last tile is not full. The second has as many keys as fill tiles and
    parts of any power of two, several queries and a cache in FP8, where they are allowed, and its
    last key has almost all weight. Both are the same in each run: nothing is drawn.

    Args:
        axes: what may be drawn.
        device: ``"cpu"`` or ``"cuda"``.
    """
    axes = axes.restricted()[0]
    chosen = _of_few_queries(axes)
    if chosen is None:
        return ()
    first = _of_keys(axes, chosen, KEYS[device] + BEHIND_AN_EDGE)
    other = {
        name: each
        for name, values in OTHER_VALUES.items()
        for each in reversed(values)
        if each in axes.allows(name)
    }
    # A multiple of every power of two: all splits are full, which is where a merge of parts that
    # counts one too few or too many shows.
    second = _of_keys(axes, chosen | other, KEYS[device])
    return first, replace(second, seed=LAST_KEY)


def of_hidden_tiles(axes: Axes) -> list[AttentionProblem]:
    """Return long requests whose masks hide a tile of 256 keys, and smaller ones, from all rows.

    Requests that are drawn rarely have two such tiles. They are the same in each run.
    """
    axes = axes.restricted()[0]
    if axes.operation == "append_paged_kv" or True not in axes.allows("custom_mask"):
        return []
    chosen = _of_few_queries(axes)
    patterns = [each for each in HIDDEN_TILES if each in axes.allows("mask_pattern")]
    return (
        []
        if chosen is None
        else [
            replace(_of_keys(axes, {**chosen, "mask_pattern": pattern}, TILED_KEYS), seed=seed)
            for pattern in patterns
            for seed in TILE_SEEDS
        ]
    )


def of_one_sign(axes: Axes) -> list[AttentionProblem]:
    """Return requests of FP8 queries and keys of one sign, where a kernel multiplies them as such.

    What is cut off adds up over many channels and whole tiles of keys, of which few are drawn in
    that regime. They are the same in each run.
    """
    if axes.operation == "append_paged_kv" or "one_sign" not in axes.allows("regime"):
        return []
    for part in axes.restricted():
        pairs = [(name, name) for name in FP8 if (name, name) in part.allows("caches")]
        dims = [each for each in part.allows("head_dims") if min(each) >= MANY_CHANNELS]
        chosen = _of_few_queries(part)
        if chosen is not None and pairs and dims:
            values = {"caches": pairs[0], "head_dims": min(dims), "regime": "one_sign"}
            problem = _of_keys(part, {**chosen, **values}, SIGNED_KEYS)
            return [replace(problem, seed=seed) for seed in TILE_SEEDS]
    return []


def full_batches(axes: Axes) -> dict[str, list[AttentionProblem]]:
    """Return batches of 64 long requests and of 512 short ones on several heads, by what they are.

    They fill a GPU, as batches that are drawn do not: kernels split and schedule them otherwise.
    Of each kind the plainest comes first, and others follow for an implementation that refuses it:
    other modules, other lengths, and each other value of an axis by itself. Where requests must
    have as many queries as keys, long ones have fewer. All are the same in each run.
    """
    if axes.operation == "append_paged_kv":
        return {}
    found: dict[str, list[AttentionProblem]] = {}
    for name, (count, keys) in FULL_BATCHES.items():
        if axes.max_requests and axes.max_requests < count:
            found[name] = []
            continue
        choices = itertools.islice(_full_choices(axes, count, keys), MOST_FULL_CHOICES)
        found[name] = list(dict.fromkeys(choices))
    return found


def _full_choices(axes: Axes, count: int, keys: int) -> Iterator[AttentionProblem]:
    """Yield batches of a number of requests, the plainest first; the ways to differ take turns."""
    first, *others = axes.restricted()
    yield from _of_count(first, {}, count, keys)
    # What the implementation was first seen to take, whatever shows a lost key best.
    known = {
        name: value
        for name, value in first.simplest.items()
        if name not in OF_LENGTHS and value in first.values.get(name, ())
    }
    yield from _of_count(first, known, count, keys)
    values = ({name: value} for name in FULL_AXES for value in first.values.get(name, ()))
    # Modules and single values take turns: a kernel that refuses all modules but one is met early,
    # and so is one that refuses a dtype or a page size.
    differing = itertools.zip_longest(
        (_of_count(part, {}, count, keys) for part in others),
        (_of_count(first, value, count, keys) for value in values),
        fillvalue=iter(()),
    )
    for batches in itertools.chain.from_iterable(differing):
        yield from itertools.islice(batches, 1)


def _of_count(
    axes: Axes, given: Mapping[str, Any], count: int, keys: int
) -> Iterator[AttentionProblem]:
    """Yield the plainest batches with these values: few queries a request, then all of them.

    Of each, one of lengths that differ, and end in the middle of a tile, and one of equal lengths.
    """
    few, whole = _of_few_queries(axes), "prefill" in axes.allows("phase")
    plain = {name: _plainest(axes, name) for name in axes.values if axes.values[name]}
    heads = [each for each in axes.allows("num_kv_heads") if each <= MOST_FULL_HEADS]
    more = {"num_kv_heads": max(heads)} if heads else {}
    for chosen in (few, {**plain, "phase": "prefill"} if whole else None):
        if chosen is None:
            continue
        problem = attention_example(axes.operation, {**chosen, **more, **given})
        most = keys if chosen is few else min(keys, MOST_WHOLE)
        # Lengths that differ come first: equal ones hide a request that is read with another's
        # length.
        for step in (BEHIND_AN_EDGE, 0):
            # Between half of the most keys and all of them, in steps that no tile divides.
            lengths = tuple(most - step * i % (most // 2) for i in range(count))
            queries = (problem.query_lens[0],) * count if chosen is few else lengths
            yield replace(problem, query_lens=queries, seq_lens=lengths)


def _of_few_queries(axes: Axes) -> dict[str, Any] | None:
    """Return the plainest values of a request of one or two queries; None if there is no such."""
    phases = [each for each in OF_FEW_QUERIES if each in axes.allows("phase")]
    # A kernel of draft trees has no phases but those of a verify.
    verifies = [tokens for tokens in axes.allows("verify") if tokens > 0]
    if not phases and (not verifies or 0 in axes.allows("verify")):
        return None
    chosen = {name: _plainest(axes, name) for name in axes.values if axes.values[name]}
    return chosen | {"phase": phases[0] if phases else "decode"}


def _of_keys(axes: Axes, chosen: Mapping[str, Any], keys: int) -> AttentionProblem:
    problem = attention_example(axes.operation, chosen)
    return replace(problem, query_lens=problem.query_lens[:1], seq_lens=(keys,))


def _plainest(axes: Axes, name: str) -> Any:  # noqa: ANN401  a value of any axis
    values = axes.allows(name)
    plain = next((each for each in PLAIN.get(name, ()) if each in values), None)
    if plain is not None or name in PLAIN:
        return plain if plain in values else values[0]
    simplest = axes.simplest.get(name)
    return simplest if simplest in values else values[0]
