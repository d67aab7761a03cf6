"""Drawing problems of turning and appending: decodes and prefills of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ....reference import RopeAppendProblem
from ..attention_strategies import lengths
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .rope_axes import ROPE_AXES, rope_fields

REQUESTS = (1, 2, 3, 5)
"""Requests of a batch."""
MOST_NEW, MOST_KEYS = 40, 150
"""Most new tokens of a request, and most keys that it has beside them."""


@st.composite
def rope_problems(draw: st.DrawFn, axes: Axes) -> RopeAppendProblem:
    """Draw one batch, its heads and channels, and the cache that it is appended to."""
    values = {name: draw(sampled(axes.allows(name))) for name in ROPE_AXES}
    rotary, plain, _ = values["turning"]
    # One token, and the table of turns, are within the work, where the axes have such values.
    costs: dict[str, Callable[[Any], int]] = {
        "head_counts": lambda each: (each[0] + 2 * each[1]) * (rotary + plain),
        "shift": lambda each: each * rotary,
    }
    for name, cost in costs.items():
        if cost(values[name]) > axes.max_work:
            values[name] = min(axes.allows(name), key=cost)
    fields = rope_fields(values)
    heads = fields["num_qo_heads"] + 2 * fields["num_kv_heads"]
    dim = fields["rope_dim"] + fields["plain_dim"]
    count = draw(sampled(REQUESTS))
    if axes.max_requests:
        count = min(count, axes.max_requests)
    most = max(axes.max_work // (count * heads * dim), 1)
    # A part of the work is the cache's.
    of_cache = 4 * axes.max_work // (count * fields["num_kv_heads"] * dim)
    keys = max(min(of_cache, MOST_KEYS), 2)
    # Keys before the new ones, with which these begin or end beside the edge of a page, too.
    older = sampled((0, 1)) | st.integers(0, keys) | lengths(keys, fields["page_size"])
    tokens = sampled((1, 1, 0, 2)) | st.integers(1, min(most, MOST_NEW))
    requests = [(min(draw(tokens), most), draw(older)) for _ in range(count)]
    return RopeAppendProblem(
        tuple(new for new, _ in requests),
        tuple(new + before for new, before in requests),
        **fields,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
