"""Drawing problems of context parallelism and slot mapping: pages that interleaves divide."""

from __future__ import annotations

from hypothesis import strategies as st

from ....reference import ContextParallelProblem, SlotsProblem
from ..attention_strategies import MOST_KEYS, lengths
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled

WORK_OF_A_DECODED_KEY = ContextParallelProblem((1,), (2,)).work - ContextParallelProblem().work
"""Work that a decode has more for one key more."""
REQUESTS = (1, 2, 3, 4, 6, 0)
"""Requests a batch. The empty batch comes last: a counterexample with one says more."""
QUERIES = (1, 1, 0, 2, 9, MOST_KEYS)
"""Query tokens of a request, where it has as many keys: decodes first, whole prefills last."""


@st.composite
def context_parallel_problems(draw: st.DrawFn, axes: Axes) -> ContextParallelProblem:
    """Draw a batch of decodes, prefills and chunks, and one rank of a group."""
    interleave, world = (draw(sampled(axes.allows(name))) for name in ("interleave", "world"))
    sizes = [size for size in axes.allows("page_size") if size % interleave == 0] or [interleave]
    page_size = draw(sampled(sizes))
    count = draw(sampled(REQUESTS))
    per_request = axes.max_work // max(count, 1)
    cap = min(max(per_request // WORK_OF_A_DECODED_KEY, 2), MOST_KEYS)
    seq_len = st.integers(0, 1) | lengths(cap, interleave * world) | lengths(cap, page_size * world)
    requests: list[tuple[int, int]] = []
    # An empty batch draws a request all the same: it is not to be simpler than a batch of one.
    for _ in range(max(count, 1)):
        keys, queries = draw(seq_len), draw(sampled(QUERIES))
        affordable = max(1, per_request // (WORK_OF_A_DECODED_KEY * max(keys, 1)))
        requests.append((min(keys, queries, affordable), keys))
    return ContextParallelProblem(
        query_lens=tuple(t for t, _ in requests[:count]),
        seq_lens=tuple(s for _, s in requests[:count]),
        page_size=page_size,
        world=world,
        rank=draw(st.integers(0, world - 1)),
        interleave=interleave,
        page_order=draw(sampled(axes.allows("page_order"))),
        seed=draw(st.integers(0, LARGEST_SEED)),
    )


MOST_SLOTS_KEYS = 1300
"""Most keys of a request: a prefill of that many has more tokens than a block of the kernels."""
NEW_TOKENS = (1, 1, 2, 9, MOST_SLOTS_KEYS)
"""Query tokens of a request, where it has as many keys: decodes first, whole prefills last."""
MOST_REQUESTS = 6


@st.composite
def slots_problems(draw: st.DrawFn, axes: Axes) -> SlotsProblem:
    """Draw a sequence of batches of decodes, prefills, chunks and padding for one rank."""
    interleave, world = (draw(sampled(axes.allows(name))) for name in ("interleave", "world"))
    sizes = [size for size in axes.allows("page_size") if size % interleave == 0] or [interleave]
    page_size = draw(sampled(sizes))
    per_request = max(axes.max_work // (4 * MOST_REQUESTS), 2)
    cap = min(per_request, MOST_SLOTS_KEYS)
    keys = st.integers(1, 2) | lengths(cap, page_size * world) | lengths(cap, interleave * world)
    request = st.tuples(sampled(NEW_TOKENS), keys).map(lambda pair: (min(pair), pair[1]))
    # Requests of no keys fill up a CUDA graph's batch; some engines give each a token.
    padding = st.lists(st.tuples(st.integers(0, 1), st.just(0)), max_size=2)
    step = st.builds(list.__add__, st.lists(request, max_size=MOST_REQUESTS), padding)
    steps = draw(st.lists(step, min_size=1, max_size=4))
    return SlotsProblem(
        steps=tuple((tuple(t for t, _ in step), tuple(s for _, s in step)) for step in steps),
        page_size=page_size,
        world=world,
        rank=draw(st.integers(0, world - 1)),
        interleave=interleave,
        spare_rows=draw(st.integers(0, 3)),
        spare_columns=draw(st.integers(0, 3)),
        spare_slots=draw(sampled(axes.allows("spare_slots"))),
        first_page=draw(sampled(axes.allows("first_page"))),
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
