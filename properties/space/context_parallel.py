"""Drawing problems of context parallelism: page sizes that interleaves divide, lengths by turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from ...reference import ContextParallelProblem
from .attention_strategies import MOST_KEYS, lengths
from .axis_values import Axes
from .strategy_helpers import LARGEST_SEED, sampled

CONTEXT_PARALLEL_AXES: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 2, 3, 4, 8, 16, 64),
    "world": (2, 1, 3, 4, 8),
    "interleave": (1, 2, 3, 4, 16),
    "page_order": (0, 1),
}
WORK_OF_A_DECODED_KEY = ContextParallelProblem((1,), (2,)).work - ContextParallelProblem().work
"""Work that a decode has more for one key more."""
REQUESTS = (1, 2, 3, 4, 6, 0)
"""Requests a batch. The empty batch comes last: a counterexample with one says more."""
QUERIES = (1, 1, 0, 2, 9, MOST_KEYS)
"""Query tokens of a request, where it has as many keys: decodes first, whole prefills last."""


def context_parallel_example(chosen: Mapping[str, Any]) -> ContextParallelProblem:
    """Return the simplest problem with these values; an interleave needs a page it divides."""
    page_size, interleave = chosen["page_size"], chosen["interleave"]
    fits = page_size if page_size % interleave == 0 else interleave
    return ContextParallelProblem((1, 2), (3, 5), **{**chosen, "page_size": fits})


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
