"""Draws problems of planning."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .problems import CHIPS, DECODE, FA2, FA3, MLA, PlanProblem

MANY_TILES = 16385
"""Query tokens of 128 heads of MLA: as many tiles of 128 rows, and a plan has room for fewer."""
LONGEST = 3000


@st.composite
def plan_problems(draw: st.DrawFn, kind: str) -> PlanProblem:
    """Draw a batch, its options, and a chip."""
    page = draw(st.sampled_from([1, 16, 64] if kind != DECODE else [1, 8, 16, 64, 128]))
    lengths = st.one_of(
        st.integers(0, 3),
        st.integers(0, 3 * page + 1),
        st.integers(1, 300),
        st.integers(1, LONGEST),
    )
    count = draw(st.integers(1, 6) if kind != DECODE else st.integers(1, 12))
    keys = draw(st.lists(lengths, min_size=count, max_size=count))
    if draw(st.integers(0, 3)) == 0:
        # A batch that a graph is filled up to: requests without keys behind those that have some.
        keys = [each if place == 0 else 0 for place, each in enumerate(keys)]
    decode = kind == DECODE or draw(st.booleans())
    most = {FA2: 400, FA3: 400, MLA: 40}.get(kind, 1)
    queries = [1] * count
    if not decode:
        rows = st.one_of(st.integers(0, 3), st.integers(0, most))
        queries = draw(st.lists(rows, min_size=count, max_size=count))
    chips = st.one_of(st.sampled_from(sorted(CHIPS.values())), st.integers(8, 200))
    fields: dict[str, Any] = {
        "query_lens": tuple(queries),
        "kv_lens": tuple(keys),
        "page_size": page,
        "multiprocessors": draw(chips),
        "graph": draw(st.booleans()),
    }
    if kind != DECODE and fields["graph"]:
        fields["spare_rows"] = draw(st.sampled_from([0, 1, 100]))
    if kind == MLA:
        return _latent(draw, fields)
    groups = [1, 4, 8] if kind == DECODE else [1, 2, 3, 4, 7, 8, 16]
    fields |= {
        "num_kv_heads": draw(st.sampled_from([1, 2, 4, 8, 16])),
        "group_size": draw(st.sampled_from(groups)),
        "head_dim": draw(st.sampled_from([128, 64, 256])),
    }
    if kind == DECODE:
        fields |= {"kv_bytes": draw(st.sampled_from([2, 1]))}
        fields |= {"blocks": draw(st.sampled_from([1, 2, 8]))}
        return PlanProblem(DECODE, **fields, causal=False)
    fields["causal"] = draw(st.booleans())
    if fields["head_dim"] != 256:  # noqa: PLR2004  DeepSeek's heads, and others like them
        fields["head_dim_qk"] = draw(st.sampled_from([0, 192]))
    if kind == FA3:
        return PlanProblem(FA3, **fields)
    fields["window_left"] = draw(st.one_of(st.just(-1), st.integers(0, 64), st.integers(0, 1000)))
    fields["kv_bytes"] = draw(st.sampled_from([2, 1]))
    splitting = draw(st.sampled_from(["as it is", "fixed", "never"]))
    if splitting == "fixed":
        fields["fixed_split"] = draw(st.integers(1, 64))
    return PlanProblem(FA2, **fields, split=splitting != "never")


def _latent(draw: st.DrawFn, fields: dict[str, Any]) -> PlanProblem:
    """Draw a problem of MLA; a few have more tiles than a plan has room for."""
    fields |= {"causal": draw(st.booleans()), "head_dim": draw(st.sampled_from([512, 256]))}
    if draw(st.integers(0, 60)) == 60:  # noqa: PLR2004  one in sixty
        tokens = draw(st.integers(MANY_TILES - 2, MANY_TILES + 200))
        fields |= {"query_lens": (tokens,), "kv_lens": (tokens,), "page_size": 64}
        return PlanProblem(MLA, **fields, group_size=128)
    heads = draw(st.sampled_from([16, 128, 8, 1, 3, 64, 20]))
    return PlanProblem(MLA, **fields, group_size=heads)
