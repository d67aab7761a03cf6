"""Hypothesis strategies over attention, merging and metadata: specifications, never tensors.

They shrink towards one request, one token, one page, one head and no feature: every choice lists
the simplest value first, and lengths are integers before they are edges.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from ...reference import AttentionProblem, MergeProblem, MetadataProblem
from ...reference.formats.cache_elements import RECORDS
from ...reference.problems.base import is_power_of_two
from ...reference.problems.cache_names import cache_fits, has_tensor_scales
from ...reference.problems.mask_fields import NO_MASK
from .attention_axes import (
    ATTENTION_AXES,
    FEW_HEADS,
    MANY_TO_ONE,
    MOST_DRAFTS,
    PAIR,
    PHASES,
    RAGGED,
    head_fields,
    with_what_it_needs,
)
from .axis_values import Axes
from .given_lengths import given
from .real_drawing import affords, heads_of, mask_of, page_of, real_rows, row_of
from .strategy_helpers import LARGEST_SEED, features, one_of, sampled

REQUESTS = (1, 2, 3, 4, 6, 1, 2, 3, 4, 6, 2, 0)
"""Requests a batch. The empty batch is rare and comes last: a counterexample with one says more."""
FEW_REQUESTS = (1, 1, 1, 1, 3)
"""Most requests of batches whose work has room for a single one: of heads that are dear, say."""
MOST_DEARER = 40
"""Times the work of a problem that such a batch has at most."""
KEYS_TO_AFFORD = (4, 4, 300)
"""Keys that a request must be able to have: any heads will do for the first, few for the last."""
MUCH_WORK, MORE_KEYS_TO_AFFORD = 10_000_000, (4, 300, 600)
"""Work in multiply-adds from which on requests must be able to have these numbers of keys (a GPU's
profiles)."""
LENGTH_EDGES = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257,
                511, 512, 513, 1024, 1025, 2048, 4096, 8192, 16384)  # fmt: skip
MOST_KEYS = 2**12
"""Keys of a request at most, see ``longest`` and ``MOST_VERIFIED`` for others."""
MOST_VERIFIED = 2**15
"""Keys of a verify at most, where a GPU has the work: some kernels reduce such a one in several
passes."""
TILE_OF_HEADS = 16
"""Rows of the smallest product of tensor cores: larger groups fill several tiles of heads."""
SMALL_PAGE, LARGE_PAGE = 4, 256
"""Keys a page beyond which some of the requests have two pages whatever the work, which others
rarely have within it: half of them beyond the second number. Pages up to it are three times as
usual."""
PHASES_OF_PAGES = ("decode", "chunk")
"""Phases of such requests: they may have many keys and few queries."""
KEYS_A_DRAFT = 4
"""Keys that a verify must be able to have for each of its query tokens."""
EACH_ITS_OWN = 3
"""Batches whose requests have phases of their own for each one that is verified as a whole."""
MOST_SURPLUS = 5
"""Query tokens more than keys, at most."""
SHORT, LONG = 32, 256
"""Caps on keys: if the cap exceeds SHORT, its upper half is also drawn from; if it exceeds LONG,
also everything from LONG to the cap."""
MORE_HEADS, LESS_WORK = 32, 4
"""Query heads beyond which a batch has only a part of the work: each row of each head has its costs
besides, which are most of a call where channels are few."""
LONGER, LONGER_OF_OTHERS = 16, 4
"""Times the work of a slow implementation's problems that its long ones may have, and of one that
is not slow: their calls take about a second, and about a quarter."""
MANY_HEADS = (16, 32, 64, 128)
"""Heads of merged states besides a few, as models have them."""
USUAL_TILE, MOST_TILES = 64, 4
"""Keys of a tile where an implementation names none, and most multiples of one to end around."""
FEW = {
    "num_kv_heads": 2, "group_size": 3, "logits_soft_cap": 1, "sm_scale": 1, "k_scale": 1,
    "v_scale": 1, "per_head_scales": 1, "strided_q": 1, "strided_kv": 1,
    "different_kv_strides": 1, "kv_views": 1, "window_right": 2, "causal_by_request": 1, "real": 1,
}  # fmt: skip
"""Values of an axis, the simplest first, that long requests are drawn with: what hides keys matters
at an edge, other features are judged on short requests. An output's scale is not among them:
kernels apply it where they merge the parts of a long request."""
FEATURES = (
    "window_left",
    "logits_soft_cap",
    "sm_scale",
    "k_scale",
    "v_scale",
    "sinks",
    "custom_mask",
    "per_head_scales",
    "strided_q",
    "strided_kv",
    "different_kv_strides",
    "window_right",
    "alibi",
    "causal_by_request",
    "output_scale",
    "mask_pattern",
    "mask_by_head",
    "spans",
    "chunk",
    "window_dilation",
    "sink_tokens",
    "logits_bias",
    "alibi_function",
    "kv_views",
    "output_divisor",
    "two_sided_window",
    "spans_in_window",
)
DECODES = ("decode", "no_query")
"""Phases of a batch of decodes to append, some of whose requests have no new token."""
MOST_FEATURES, MOST_FEATURES_LONG = 5, 2
MANY_FEATURES = 10
"""Features of long requests from which on half of them are drawn at a time, too."""
OF_TILES = ("leading_tile", "inner_tile", "holes")
"""Patterns of masks that hide tiles of keys: of long requests only, whole ones."""
OF_WINDOWS = ("sink_tokens", "two_sided_window", "spans_in_window")
"""Features that are nothing without a window."""
NARROW = 3
"""The narrowest windows, of which more come where a window has two sides."""
OFF = AttentionProblem()
PLAIN = ("", "")
"""A cache in the queries' dtype, which is theirs."""


@st.composite
def attention_problems(draw: st.DrawFn, axes: Axes) -> AttentionProblem:
    """Draw one call of attention or append: a mixed batch of decodes, prefills and chunks.

    A third of the batches is long: heads and channels are then chosen small enough to leave work
    for requests of several tiles.
    """
    # The order of the draws matters: Hypothesis shrinks a problem by making its choices smaller in
    # place, so a choice that comes and goes with an earlier one would shift all behind it.
    axes = _with_dims_of_records(axes)
    fields: dict[str, Any] = {
        name: draw(sampled(axes.allows(name))) for name in ("dtype", "kv_layout", "page_order")
    }
    fields["page_size"] = draw(_page_size(axes))
    # What a row has replaces what is drawn, so that the choices behind it keep their places.
    real = row_of(axes, draw(real_rows(axes)))
    fields["page_size"] = page_of(axes, real) or fields["page_size"]
    # Heads are chosen after this number of keys, so that they leave room for it: with heads first,
    # a budget of work would be spent on them, and nearly all requests would end within a tile.
    to_afford = MORE_KEYS_TO_AFFORD if axes.max_work >= MUCH_WORK else KEYS_TO_AFFORD
    # A third of the long requests has several tiles of queries, the others have as many keys.
    square = _all_keys_are_new(axes) or (
        bool(axes.edges and _of_many(axes)) and draw(sampled((False, False, True)))
    )
    keys = draw(sampled(axes.edges[: 1 if square else None][-1:] or to_afford))
    least = draw(_two_pages(axes, fields["page_size"]))
    wanted = given(axes.values).get("seq_lens", ())
    if least or wanted:
        keys, square = max(keys, least, *wanted), False
    # The page of a row stays, its heads may be too dear for two such pages.
    real = real if real is None or affords(axes, real, least) else None
    # Features come after heads and work are known: which windows can hide a key depends on them.
    heads = draw(_heads(axes, keys, square=square))
    heads = heads_of(axes, real, heads, least)
    count, per_request = _batch(draw, axes, heads, keys, least)
    fields |= heads
    windowed = _with_windows_that_hide(_without_lone_masks(axes), heads, per_request)
    if square and axes.edges and draw(st.booleans()):
        windowed = _with_windows_only(windowed)
    fields |= draw(features(windowed, FEATURES, OFF, _most_features(windowed)))
    fields |= draw(_masks(windowed, fields, room=keys > KEYS_TO_AFFORD[0]))
    fields["causal"] = draw(_causal(axes, fields))
    fields |= mask_of(axes, real, heads)
    fields |= {"kv_views": ""} if fields.get("values_in_keys") else {}
    fields |= draw(_cache(axes, fields))
    fields["regime"] = draw(_regime(axes, fields))
    verify = draw(_verify(axes, fields, per_request))
    if verify and (tree := draw(_tree(axes, fields))):
        fields |= {"tree": tree, **NO_MASK, "spans": "", "spans_in_window": False}
    if axes.operation == "append_paged_kv" and count > 1 and draw(sampled((False, True))):
        axes = _of_decodes(axes)
    # An empty batch draws a request all the same: it is not to be simpler than a batch of one.
    if verify:
        one = _verified(axes, fields, per_request, verify, least)
    else:
        one = _request(axes, fields, per_request, square=square, least=least)
    lengths = [draw(one) for _ in range(max(count, 1))][:count]
    if len(lengths) > 1 and axes.operation == "paged_attention":
        shared = draw(sampled(axes.allows("shared_prefix_pages")))
        fields["shared_prefix_pages"] = shared
    return AttentionProblem(
        operation=axes.operation,
        query_lens=tuple(t for t, _ in lengths),
        seq_lens=tuple(s for _, s in lengths),
        seed=draw(st.integers(0, LARGEST_SEED)),
        **fields,
    )


def _batch(
    draw: st.DrawFn, axes: Axes, heads: dict[str, Any], keys: int, least: int
) -> tuple[int, float]:
    """Draw the number of requests, and return it with the work that each may take."""
    # Long requests come alone, or two or three at a time: the work of a batch is shared by all.
    requests = REQUESTS if keys == KEYS_TO_AFFORD[0] else REQUESTS[: 1 if axes.edges else 3]
    most = max(1, axes.max_work // (max(KEYS_TO_AFFORD[0], least) * _work_of_a_key(heads)))
    query_heads = heads["num_kv_heads"] * heads["group_size"]
    if axes.max_heads:
        most = max(1, min(most, axes.max_heads // query_heads))
    # The model of work counts multiplications only. With many heads the cost of a row itself is
    # larger than they are, so that such a batch is given a fraction of the budget.
    cheap = most > 1 and query_heads > MORE_HEADS and axes.max_work < MUCH_WORK
    less = LESS_WORK if cheap else 1
    if most == 1 and _few_requests(axes, max(KEYS_TO_AFFORD[0], least) * _work_of_a_key(heads)):
        most = draw(sampled(FEW_REQUESTS))  # it takes what it takes
    most = min(most, max(2, most // less))
    if axes.max_requests:
        requests = tuple(range(1, axes.max_requests + 1))
    # The list repeats its usual numbers, so that an empty batch is one draw in twelve.
    count = draw(one_of([number for number in requests if number <= most]))
    return count, axes.max_work / (less * max(count, 1))


def _most_features(axes: Axes) -> int:
    """Return most features of one problem: where there are many, half of them at a time."""
    # A kernel with a few features has each in every second problem. With many, a fixed number would
    # leave each of them in one problem of ten, too few for a pair of them to meet.
    several = sum(len(axes.allows(name)) > 1 for name in FEATURES)
    if axes.edges:
        return MOST_FEATURES_LONG if several <= MANY_FEATURES else several // 2
    return max(MOST_FEATURES, (several + 1) // 2)


def _page_size(axes: Axes) -> st.SearchStrategy[int]:
    """Draw a page size: one beyond ``LARGE_PAGE`` a third as often as one up to it."""
    values = axes.allows("page_size")
    usual = tuple(each for each in values if each <= LARGE_PAGE)
    return sampled((*values, *usual, *usual))


@st.composite
def _two_pages(draw: st.DrawFn, axes: Axes, page_size: int) -> int:
    """Draw the fewest keys of each request: those of two large pages, or else 0.

    It takes what it takes: no limit of work may leave a page size without a second page.
    """
    # Drawn in any case: the choices behind it keep their places when a page shrinks.
    wanted = draw(sampled((0, 0, 0, 1, 1, 2))) if axes.operation != "ragged_attention" else 0
    if axes.edges or not set(PHASES_OF_PAGES) & set(axes.allows("phase")):
        return 0
    enough = 1 if page_size > LARGE_PAGE else 2
    return page_size + 1 if page_size > SMALL_PAGE and wanted >= enough else 0


def long_axes(axes: Axes, tile: int, split: int, *, slow: bool = True) -> Axes | None:
    """Return the axes of one long request on few heads; None where other problems are long enough.

    Args:
        axes: the axes of its other problems.
        tile: keys of one iteration, 0 if unknown.
        split: keys of the shortest part of a request, 0 if there are none.
        slow: whether the implementation counts as slow: it is given some in any case.
    """
    rows, keys = _most_rows(axes), _most_keys(axes)
    # Others have several tiles of keys, and rows of two tiles where they may have as many of them.
    if not slow and max(tile, split) < keys and (2 * tile <= rows or not _of_many(axes)):
        return None
    # Long requests are dear and few. What is judged as well on short ones keeps one or two values
    # here, so that the lengths themselves get the problems.
    values = {name: each[: FEW.get(name)] for name, each in axes.values.items()}
    # A window that ends within a tile leaves none to be seen in full, a wide one hides no key.
    tall = tile or USUAL_TILE
    # Windows from half a tile to one and a half: some tiles are seen in full, some in part, some
    # not.
    wide = tuple(each for each in values["window_left"] if each < 0 or tall <= 2 * each < 3 * tall)
    values["window_left"] = wide or values["window_left"]
    steps = (tall, split)
    edges = {number * step for step in steps for number in range(1, MOST_TILES + 1) if step}
    work = axes.max_work * (LONGER if slow else LONGER_OF_OTHERS)
    return replace(axes, values=values, max_work=work, edges=tuple(sorted(edges)))


def _most_rows(axes: Axes) -> int:
    """Return most queries of as many keys within the work, on the fewest heads and channels."""
    heads = axes.allows("num_kv_heads")[0] * axes.allows("group_size")[0]
    return math.isqrt(axes.max_work // (heads * sum(axes.allows("head_dims")[0][:2])))


def _most_keys(axes: Axes) -> int:
    """Return most keys of a request within the work, on the fewest heads and channels."""
    if _all_keys_are_new(axes):
        return _most_rows(axes)
    heads = {name: axes.allows(name)[0] for name in ("num_kv_heads", "group_size")}
    return axes.max_work // _work_of_a_key(heads | head_fields(axes.allows("head_dims")[0]))


def _all_keys_are_new(axes: Axes) -> bool:
    """Whether a request has as many queries as keys, so that its work grows with their square."""
    return not {"decode", "chunk"} & set(axes.allows("phase"))


def _of_many(axes: Axes) -> list[str]:
    """Return the phases of which a request may have as many queries as keys, or nearly."""
    return [each for each in axes.allows("phase") if each in ("prefill", "chunk", "surplus")]


@st.composite
def _heads(draw: st.DrawFn, axes: Axes, keys: int, *, square: bool) -> dict[str, Any]:
    """Draw head dims and head counts at which a decode of this many keys is within the work.

    Of a ``square`` long request, as many queries as keys are. One group in ten is one that fills
    more than a tile of heads, on the fewest channels, whatever it costs.
    """
    # Head dims, key-value heads and groups are drawn one after another, each from what the choices
    # before it leave affordable. The dearest combinations are therefore rarer than their share.
    dims_of_any = [dims for dims in axes.allows("head_dims") if _least_group(dims) == 1]
    large = tuple(size for size in axes.allows("group_size") if size > TILE_OF_HEADS)
    # One choice, so that those behind it keep their places when it shrinks.
    wide = draw(sampled((*(0,) * (9 * len(large)), *large) or (0,)))

    def affordable(name: str, work: Callable[[Any], int], heads: int = 0) -> tuple[Any, ...]:
        values = axes.allows(name)
        few = axes.max_heads if heads else 0
        return (
            tuple(
                value
                for value in values
                if keys * work(value) <= axes.max_work and not (few and heads * value > few)
            )
            or values[:1]
        )

    # With much work to spend, a prefill of as many tokens is to be affordable, not just a decode.
    prefill = axes.max_work >= MUCH_WORK and "prefill" in axes.allows("phase")
    prefill |= bool(axes.edges) and square
    rows = keys if prefill and keys > KEYS_TO_AFFORD[0] else 1
    dims = draw(
        one_of(
            affordable("head_dims", lambda dims: (rows * _least_group(dims) + 8) * sum(dims[:2]))
        )
    )
    channels = sum(dims[:2])
    counts = affordable(
        "num_kv_heads", lambda heads: (rows + 8) * heads * channels, _least_group(dims)
    )
    # Many heads are rarer, for they leave less work for keys.
    # Small counts stand four times in the list, larger ones once.
    few = tuple(count for count in counts if count <= FEW_HEADS)
    kv_heads = draw(one_of(counts + 3 * few))
    groups = affordable(
        "group_size", lambda size: (rows * size + 8) * kv_heads * channels, kv_heads
    )
    # Latent attention has many query heads, most other layers few.
    many = len(dims) > PAIR
    groups += tuple(size for size in groups if (size >= MANY_TO_ONE[0]) == many)
    drawn = {"num_kv_heads": kv_heads, "group_size": draw(one_of(groups))}
    if wide and dims_of_any and not axes.edges and keys == KEYS_TO_AFFORD[0]:
        dims = min(dims_of_any, key=lambda dims: sum(dims[:2]))
        drawn = {"num_kv_heads": axes.allows("num_kv_heads")[0], "group_size": wide}
    return drawn | head_fields(dims)


def _with_dims_of_records(axes: Axes) -> Axes:
    """Leave out the head dims that no cache has, where all caches are records of latent heads."""
    names = [pair[0] for pair in axes.allows("caches")]
    if not all(name in RECORDS for name in names):
        return axes
    fitting = tuple(
        dims
        for dims in axes.allows("head_dims")
        if any(cache_fits(name, head_fields(dims)) for name in names)
    )
    return replace(axes, values={**axes.values, "head_dims": fitting}) if fitting else axes


def _few_requests(axes: Axes, work: int) -> bool:
    """Whether no heads leave room for two requests, though several of this work may be drawn."""
    cheapest = {"num_kv_heads": axes.allows("num_kv_heads")[0],
                "group_size": min(axes.allows("group_size"))}  # fmt: skip
    dims = min(
        (head_fields(each) for each in axes.allows("head_dims")),
        key=lambda each: int(each["head_dim_qk"] + each["head_dim_vo"]),
    )
    least = 2 * KEYS_TO_AFFORD[0] * _work_of_a_key(cheapest | dims)
    affordable = FEW_REQUESTS[-1] * work <= MOST_DEARER * axes.max_work
    return least > axes.max_work and affordable and not axes.edges


def _work_of_a_key(fields: Mapping[str, Any], tokens: int = 1) -> int:
    """Count the work of one key in a request of this many query tokens."""
    channels: int = fields["head_dim_qk"] + fields["head_dim_vo"]
    work: int = fields["num_kv_heads"] * channels * (tokens * fields["group_size"] + 8)
    return work


def _with_windows_that_hide(axes: Axes, heads: Mapping[str, Any], work: float) -> Axes:
    """Leave out windows, chunks and first keys that hide no key of any request of this work.

    They stay where no other is left.
    """
    # A window wider than every request is no window: it would be counted as one, and judge nothing.
    longest = min(work / _work_of_a_key(heads), MOST_KEYS)
    hiding: dict[str, tuple[Any, ...]] = {}
    for name, more in (("window_left", 2), ("window_right", 2), ("chunk", 1), ("sink_tokens", 2)):
        short = tuple(value for value in axes.allows(name) if value + more <= longest)
        on = any(value != getattr(OFF, name) for value in short)
        hiding |= {name: short} if on else {}
    return replace(axes, values={**axes.values, **hiding}) if hiding else axes


def _without_lone_masks(axes: Axes) -> Axes:
    """Leave out patterns of masks and functions of ALiBi where there is no mask, or no ALiBi."""
    left = {
        name: axes.allows(name)[:1]
        for name, of in (("mask_pattern", "custom_mask"), ("mask_by_head", "custom_mask"),
                         ("alibi_function", "alibi"))
        if True not in axes.allows(of) and getattr(OFF, name) in axes.allows(name)
    }  # fmt: skip
    return replace(axes, values={**axes.values, **left}) if left else axes


def _with_windows_only(axes: Axes) -> Axes:
    """Leave out that there is no window, if one is allowed."""
    windows = tuple(each for each in axes.allows("window_left") if each >= 0)
    return replace(axes, values={**axes.values, "window_left": windows}) if windows else axes


def _of_decodes(axes: Axes) -> Axes:
    """Leave decodes only, and requests without a new token among them, if both are allowed."""
    phases = tuple(each for each in axes.allows("phase") if each in DECODES)
    return replace(axes, values={**axes.values, "phase": phases}) if len(phases) > 1 else axes


def _least_group(dims: Sequence[int]) -> int:
    fewest: int = head_fields(dims).get("group_size", 1)
    return fewest


def _regime(axes: Axes, fields: dict[str, Any]) -> st.SearchStrategy[str]:
    return sampled(_regimes(axes, fields))


def _regimes(axes: Axes, fields: dict[str, Any]) -> list[str]:
    regimes = list(axes.allows("regime"))
    if exact_grid_allowed(fields):
        return regimes
    return [regime for regime in regimes if regime != "exact_grid"] or ["iid"]


@st.composite
def _cache(draw: st.DrawFn, axes: Axes, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the cache's format, and its queries': quantised half of the time, where supported."""
    # A law may ask for quantised caches alone, none of which fits these channels.
    formats = [pair for pair in axes.allows("caches") if cache_fits(pair[0], fields)] or [PLAIN]
    # Plain caches are repeated until they are as many as the quantised ones.
    plain = [pair for pair in formats if not pair[0]]
    kv_cache, q_dtype = draw(sampled([*plain * max(0, len(formats) - 2), *formats]))
    found: dict[str, Any] = {"kv_cache": kv_cache, "q_dtype": q_dtype}
    if q_dtype:
        found["q_scale"] = draw(sampled(axes.allows("q_scale")))
        # FA3's scales of FP8 queries are one a head, always.
        found["per_head_scales"] = draw(sampled(axes.allows("per_head_scales")))
    if axes.operation == "append_paged_kv" and not has_tensor_scales(kv_cache):
        found |= {"k_scale": 1.0, "v_scale": 1.0}
    if axes.operation == "append_paged_kv" and fields.get("values_in_keys"):
        found["v_scale"] = found.get("k_scale", fields.get("k_scale", 1.0))
    return found


@st.composite
def _masks(draw: st.DrawFn, axes: Axes, fields: Mapping[str, Any], *, room: bool) -> dict[str, Any]:
    """Draw what masks and ALiBi need besides: a pattern for most masks, a window for first keys.

    Half of the spans get a window too, which they reach back beyond, and all that are within it.

    Where there is ``room`` for long requests, a third of them has a mask that hides tiles whole.
    """
    found = with_what_it_needs(fields)
    given, patterns = {**fields, **found}, axes.allows("mask_pattern")
    of_tiles = tuple(each for each in patterns if each in OF_TILES) if room else ()
    if of_tiles and not given.get("custom_mask") and draw(sampled((False, False, True))):
        found["custom_mask"] = given["custom_mask"] = True
    if given.get("custom_mask") and not given.get("mask_pattern") and len(patterns) > 1:
        found["mask_pattern"] = draw(sampled(of_tiles or patterns))
    # Of masks by head too few come otherwise: each feature is one of many.
    if given.get("custom_mask") and len(axes.allows("mask_by_head")) > 1:
        found["mask_by_head"] = given.get("mask_by_head", False) or draw(
            sampled((False, False, True))
        )
    windows = tuple(each for each in axes.allows("window_left") if each >= 0)
    behind = fields.get("chunk") or fields.get("window_left", -1) >= 0
    if (
        windows
        and not behind
        and (
            any(fields.get(name) for name in OF_WINDOWS)
            or (fields.get("spans") and draw(st.booleans()))
        )
    ):
        # Behind a wide window's right side lie keys of long requests only.
        narrow = sorted(windows)[:NARROW] if fields.get("two_sided_window") else []
        found["window_left"] = draw(sampled((*narrow, *windows)))
    return found


def _causal(axes: Axes, fields: Mapping[str, Any]) -> st.SearchStrategy[bool]:
    """Draw whether a call is causal: where masks and spans would show nothing, mostly otherwise."""
    values = axes.allows("causal")
    if fields.get("two_sided_window"):
        return sampled(values[:1] * 2 + values)  # a causal one has no right side
    if fields.get("mask_pattern") == "block_causal" and False in values:
        return sampled((False,))  # under a causal mask it would hide nothing
    # Where nothing else hides keys, spans show none.
    return sampled(values + (values[-1:] if fields.get("spans") else ()))


def exact_grid_allowed(fields: dict[str, Any]) -> bool:
    """Whether the exact grid stays exact with these options."""
    bent = any(fields.get(name) for name in ("logits_soft_cap", "alibi", "logits_bias"))
    return not bent and is_power_of_two(fields.get("v_scale", 1.0))


@st.composite
def _request(
    draw: st.DrawFn,
    axes: Axes,
    fields: dict[str, Any],
    work: float,
    *,
    square: bool,
    least: int = 0,
) -> tuple[int, int]:
    """Draw (query_len, seq_len) of one request within its share of the work.

    Requests that lack queries or keys, to which most features mean nothing, are half as frequent.
    A ``square`` long one has several tiles of queries; one with ``least`` has that many keys or
    more, and few queries.
    """
    channels = fields["head_dim_qk"] + fields["head_dim_vo"]
    kv_heads, group = fields["num_kv_heads"], fields["group_size"]
    phases = axes.allows("phase")
    # Verifies come by the axis ``verify``, too.
    whole = [each for each in phases if all(PHASES[each]) and (each != "verify" or axes.edges)]
    square = square and bool(axes.edges and _of_many(axes))
    whole = _of_many(axes) if square else whole
    # A row before the first key sees none under a causal mask only.
    whole += ["surplus"] if fields["causal"] and "surplus" in whole else []
    # Phases with queries and keys stand twice in the list, once in each part.
    phase = draw(sampled((*phases, *whole) if not (axes.edges and whole) else whole))
    if least and phase not in PHASES_OF_PAGES:
        phase = next(each for each in reversed(PHASES_OF_PAGES) if each in phases)
    right = _keys_seen_after(fields)
    phase = draw(_phase_of_window(phase, whole)) if right >= 0 else phase
    if phase == "verify":
        return draw(_verified(axes, fields, work, RAGGED))
    decode_cap = int(work / _work_of_a_key(fields))
    square_cap = int(math.sqrt(work / (kv_heads * group * channels)))
    if square:
        square_cap = max(square_cap, axes.edges[0] + 1)  # it takes what it takes
    elif axes.edges and square_cap <= axes.edges[0] and "chunk" in whole and phase != "decode":
        phase = "chunk"  # a prefill within the work would have no second tile
    cap = square_cap if square or phase not in ("decode", "no_query", "chunk") else decode_cap
    most = MOST_KEYS - MOST_SURPLUS if phase == "surplus" else MOST_KEYS
    cap = min(max(cap, 2), most)
    if phase == "no_keys":
        several = {"prefill", "chunk"} & set(axes.allows("phase"))
        return draw(lengths(4, 1)) if several else 1, 0
    if axes.edges:
        seq_len = draw(_beyond(cap, axes.edges) if square else _long_lengths(cap, axes.edges))
    else:
        seq_len = draw(_from(least) if least else _lengths_within(fields, cap))
    if phase in ("decode", "no_query"):
        return PHASES[phase][0], seq_len
    if phase == "prefill":
        return seq_len, seq_len
    if phase == "surplus":
        # Queries beyond the keys see nothing, and still cost their row.
        tokens = int(work / (8 * kv_heads * group * channels))  # see ``AttentionProblem.work``
        more = min(MOST_SURPLUS, max(1, tokens - seq_len))
        return seq_len + draw(st.integers(1, more)), seq_len
    largest = min(seq_len, max(1, int(work / (kv_heads * group * channels * max(seq_len, 1)))))
    some = st.integers(min(largest, right + 2), largest)
    return min(seq_len, draw(_beyond(seq_len, axes.edges) if square else some)), seq_len


def _phase_of_window(phase: str, phases: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw a phase: half are chunks, of others few have keys behind the right side of a window."""
    return sampled((phase, "chunk")) if "chunk" in phases else st.just(phase)


def _keys_seen_after(fields: Mapping[str, Any]) -> int:
    """Return how many keys some queries see behind their own at most; -1 for none, and for any."""
    if fields["causal"] and not fields.get("causal_by_request"):
        return -1
    right: int = fields.get("window_left" if fields.get("two_sided_window") else "window_right", -1)
    return right


@st.composite
def _lengths_within(draw: st.DrawFn, fields: Mapping[str, Any], cap: int) -> int:
    """Draw a length up to cap: half of those with a mask of tiles have room for whole ones."""
    if fields.get("mask_pattern") in OF_TILES and cap > SHORT and draw(st.booleans()):
        return draw(st.integers(min(LONG, cap // 2 + 1), cap))
    return draw(lengths(cap, fields["page_size"], _keys_seen(fields)))


def _keys_seen(fields: Mapping[str, Any]) -> int:
    """Return how many keys a query may have before it without one that is hidden; -1 for any.

    Of a window, or of chunks, besides first keys that are always seen.
    """
    chunk = fields.get("chunk", 0)
    limits = [each for each in (fields.get("window_left", -1), chunk - 1) if each >= 0]
    return min(limits) + fields.get("sink_tokens", 0) if limits else -1


def _verify(axes: Axes, fields: Mapping[str, Any], work: float) -> st.SearchStrategy[int]:
    """Draw the axis ``verify``: mostly 0. Where only trees are allowed, a value of its own."""
    values = axes.allows("verify")
    # Three batches in four have a phase of each request's own, one is a verify of all.
    several = tuple(value for value in values if value)
    # Of more tokens than these, requests would be little longer than their tokens.
    others = tuple(t for t in several if KEYS_A_DRAFT * t * _work_of_a_key(fields, t) <= work)
    others = others or several[:1]
    # Half of them ragged, where some are.
    others += tuple(t for t in others if t == RAGGED) * (len(others) - 2)
    if 0 not in values or (others and 0 not in axes.allows("tree")):
        return sampled(others)
    return sampled((*(0,) * max(1, EACH_ITS_OWN * len(others)), *others))


def _tree(axes: Axes, fields: Mapping[str, Any]) -> st.SearchStrategy[int]:
    """Draw the number of a draft tree: none half of the time, and none besides a mask."""
    values = axes.allows("tree")
    if fields.get("custom_mask") and 0 in values:
        return st.just(0)
    return sampled((*(0,) * (len(values) - 2), *values) if 0 in values else values)


@st.composite
def _verified(
    draw: st.DrawFn,
    axes: Axes,
    fields: Mapping[str, Any],
    work: float,
    tokens: int,
    least: int = 0,
) -> tuple[int, int]:
    """Draw (query_len, seq_len) of a request of which this many, or some, tokens are verified."""
    if tokens == RAGGED:
        affordable = (
            t
            for t in range(3, MOST_DRAFTS + 1)
            if KEYS_A_DRAFT * t * _work_of_a_key(fields, t) <= work
        )
        tokens = draw(st.integers(1, max(affordable, default=2)))
    cap = min(max(int(work / _work_of_a_key(fields, tokens)), tokens + 1), MOST_VERIFIED)
    # Half of them are as long as they may be.
    of_any = lengths(cap, fields["page_size"], _keys_seen(fields))
    several = st.integers(cap // 2, cap) if draw(st.booleans()) else of_any
    seq_len = draw(_long_lengths(cap, axes.edges) if axes.edges else several)
    return tokens, max(tokens, _at_least(least, seq_len))


@functools.lru_cache(maxsize=64)
def _from(least: int) -> st.SearchStrategy[int]:
    """Draw a length of two pages: an integer first, which ``lengths`` then takes for the same."""
    return st.integers(least, 2 * least) | one_of([least, 2 * least - 2, 2 * least - 1])


def _at_least(least: int, seq_len: int) -> int:
    """Return a length of at least ``least`` keys: another one for another ``seq_len``."""
    return seq_len if seq_len >= least else min(least + seq_len - 1, 2 * least)


@functools.lru_cache(maxsize=4096)
def lengths(cap: int, page_size: int, seen: int = -1) -> st.SearchStrategy[int]:
    """Draw a length from 1 to cap: anything, or an edge of pages and tiles, or of what is seen."""
    # Integers come first: Hypothesis shrinks towards the first alternative, and a length must be
    # able to become any smaller one, not only the next edge.
    page_edges = {page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1}
    chosen = (
        st.integers(1, cap)
        | one_of(_within(cap, {1, *page_edges}))
        | one_of(_within(cap, set(LENGTH_EDGES)))
    )
    if cap > SHORT:
        # Several tiles, where there is room for them: most edges are within the first.
        chosen |= st.integers(min(LONG, cap // 2), cap)
    if seen >= 0:
        window = seen + 1
        # One key more than is seen, a tile of 64 more, and several windows: kernels that skip tiles
        # in front of a window begin at another tile in each of these.
        window_edges = {window - 1, window, window + 1, window + 65, 2 * window, 3 * window + 64}
        chosen |= one_of(_within(cap, {1, *window_edges}))
        if cap > window:
            chosen |= st.integers(window + 1, cap)  # the first of these keys is hidden
    return chosen


@functools.lru_cache(maxsize=256)
def _long_lengths(cap: int, edges: tuple[int, ...]) -> st.SearchStrategy[int]:
    """Draw a length around one of some edges, or any beyond the first of them, up to cap."""
    tile = edges[0]
    cap = min(cap, edges[-1] + tile)
    # Lengths just behind an edge stand in two lists: a last tile with a single key is where masks
    # of a tile's rest go wrong most often.
    around = _within(cap, {edge + more for edge in edges for more in (-1, 0, 1)})
    behind = [each for each in around if each - 1 in edges]
    chosen = one_of(around or [cap]) | one_of(behind or around or [cap])
    return chosen | st.integers(tile + 1, cap) if cap > tile + 1 else chosen


def _beyond(cap: int, edges: tuple[int, ...]) -> st.SearchStrategy[int]:
    """Draw a length behind one of some edges, or any beyond the first of them, up to cap."""
    behind = _within(cap, {edge + 1 for edge in edges})
    return one_of(behind) | st.integers(edges[0] + 1, cap) if behind else st.just(cap)


def _within(cap: int, edges: set[int]) -> list[int]:
    return sorted(edge for edge in edges if 1 <= edge <= cap)


@st.composite
def merge_problems(draw: st.DrawFn, axes: Axes) -> MergeProblem:
    """Draw one merge."""
    fields: dict[str, Any] = {
        name: draw(sampled(axes.allows(name)))
        for name in (
            "num_states",
            "dtype",
            "empty",
            "regime",
            "strides",
            "context",
            "lse_layout",
            "inf_marks_empty",
        )
    }
    dense, *scales = axes.allows("output_scale")
    fields["output_scale"] = draw(sampled((*[dense] * max(1, len(scales)), *scales)))
    # A merge costs about eight operations for each number of each state.
    room = axes.max_work // (8 * fields["num_states"])
    dims = [dim for dim in axes.allows("head_dim") if dim < room] or [axes.allows("head_dim")[0]]
    fields["head_dim"] = draw(sampled(dims))
    rows = max(1, room // (fields["head_dim"] + 1))
    # Few heads are the simplest; models have up to 128.
    many = [heads for heads in MANY_HEADS if heads <= rows]
    # Heads first, then tokens of what the work leaves: models have many of either.
    fields["num_heads"] = draw(st.integers(1, min(rows, 8)) | sampled(many or (1,)))
    # Where work leaves room for a token or two, half of all merges would have none.
    most = max(1, min(rows // fields["num_heads"], 64))
    fields["num_tokens"] = draw(st.integers(1, most)) * draw(sampled((0, *[1] * 5)))
    return MergeProblem(**fields, seed=draw(st.integers(0, LARGEST_SEED)))


@st.composite
def metadata_problems(draw: st.DrawFn, axes: Axes) -> MetadataProblem:
    """Draw a sequence of batches that shrink and grow."""
    del axes
    page_size = draw(sampled(ATTENTION_AXES["page_size"]))
    threshold = draw(sampled((1, 2, 4)))
    # Three pages and one slot: what a stale buffer leaves behind shows once a later batch is
    # shorter.
    seq_len = st.integers(0, 3 * page_size + 1) | lengths(600, page_size)
    request = st.tuples(st.integers(0, 9), seq_len)
    # Speculative decoding gives every request the same few tokens; a CUDA graph's batch is padded.
    decode = st.tuples(st.just(threshold), seq_len)
    padding = st.lists(st.just((0, 0)), max_size=3)
    step = st.builds(list.__add__, st.lists(decode | request, max_size=8), padding)
    steps = draw(st.lists(step, min_size=1, max_size=4))
    return MetadataProblem(
        steps=tuple((tuple(t for t, _ in step), tuple(s for _, s in step)) for step in steps),
        page_size=page_size,
        spare_columns=draw(st.integers(0, 4)),
        decode_threshold=threshold,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )


def exact_where_allowed(problem: AttentionProblem, axes: Axes) -> list[str]:
    """Return the value regimes that a problem of attention may have."""
    return _regimes(axes, vars(problem))
