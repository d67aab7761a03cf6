"""Drawing problems of planning: batches, options of a family of kernels, chips and graphs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ....reference import PlanProblem
from ....reference.problems.plan import DECODE, FA2, FA3, MLA
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .axes import PLAN_AXES

LONGEST = 3000
"""Most keys of a request."""
MOST_ROWS = {FA2: 400, FA3: 400, MLA: 40}
"""Most query tokens of a request."""
MANY_TILES = 16385
"""Query tokens of 128 heads of MLA: as many tiles of 128 rows, and releases have room for fewer."""


@st.composite
def plan_problems(draw: st.DrawFn, axes: Axes) -> PlanProblem:
    """Draw a batch, its options, and a chip."""
    fields = {name: draw(sampled(axes.allows(name))) for name in PLAN_AXES}
    family, page = fields["family"], fields["page_size"]
    lengths = st.one_of(
        st.integers(0, 3),
        st.integers(0, 3 * page + 1),
        st.integers(1, 300),
        st.integers(1, LONGEST),
    )
    most = 12 if family == DECODE else 6
    count = draw(st.integers(1, min(most, axes.max_requests or most)))
    keys = draw(st.lists(lengths, min_size=count, max_size=count))
    if draw(st.integers(0, 3)) == 0:
        # A batch that a graph is filled up to: requests without keys behind those that have some.
        keys = [each if place == 0 else 0 for place, each in enumerate(keys)]
    fields |= _of_family(draw, family)
    packed = 1 if family == FA3 else fields["group_size"]
    queries = [1] * count
    if family != DECODE and not draw(st.booleans()):
        affordable = max(1, axes.max_work // (count * packed))
        rows = st.integers(0, 3) | st.integers(0, min(MOST_ROWS[family], affordable))
        queries = draw(st.lists(rows, min_size=count, max_size=count))
    if family != DECODE and fields["graph"]:
        fields["spare_rows"] = draw(st.sampled_from([0, 1, 100]))
    seed = draw(st.integers(0, LARGEST_SEED))
    return PlanProblem(query_lens=tuple(queries), kv_lens=tuple(keys), **fields, seed=seed)


def _of_family(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draw heads, and the options that a family's plan function has."""
    if family == MLA:
        return {
            "causal": draw(st.booleans()),
            "head_dim": draw(st.sampled_from([512, 256])),
            "group_size": draw(st.sampled_from([16, 128, 8, 1, 3, 64, 20])),
        }
    groups = [1, 4, 8] if family == DECODE else [1, 2, 3, 4, 7, 8, 16]
    found: dict[str, Any] = {
        "num_kv_heads": draw(st.sampled_from([1, 2, 4, 8, 16])),
        "group_size": draw(st.sampled_from(groups)),
        "head_dim": draw(st.sampled_from([128, 64, 256])),
    }
    if family == DECODE:
        kv_bytes, blocks = draw(st.sampled_from([2, 1])), draw(st.sampled_from([1, 2, 8]))
        return {**found, "kv_bytes": kv_bytes, "blocks": blocks}
    found["causal"] = draw(st.booleans())
    if found["head_dim"] != 256:  # noqa: PLR2004  DeepSeek's heads, and others like them
        found["head_dim_qk"] = draw(st.sampled_from([0, 192]))
    if family == FA2:
        found["window_left"] = draw(st.just(-1) | st.integers(0, 64) | st.integers(0, 1000))
        found["kv_bytes"] = draw(st.sampled_from([2, 1]))
        splitting = draw(st.sampled_from(["as it is", "fixed", "never"]))
        found["split"] = splitting != "never"
        if splitting == "fixed":
            found["fixed_split"] = draw(st.integers(1, 64))
    return found


def many_tiles(axes: Axes) -> list[PlanProblem]:
    """Return a batch of MLA with more tiles than a plan of a release has room for."""
    if MLA not in axes.allows("family"):
        return []
    tokens = (MANY_TILES,)
    return [PlanProblem(MLA, tokens, tokens, page_size=64, group_size=128, head_dim=512)]
