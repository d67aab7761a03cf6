"""Drawing problems of layouts: few tiles, whole ones and others, with and without experts."""

from __future__ import annotations

from hypothesis import strategies as st

from ....reference import RearrangeProblem
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .rearrange_axes import REARRANGE_AXES, fields_of, step_of

MOST_ROWS, MOST_COLUMNS = 4, 9
"""Most steps of rows and columns."""
ODD = (1, 2, 3, 5, 31, 33, 96, 127, 128, 129, 200, 256, 260)
"""Rows where any number is allowed, and columns."""


@st.composite
def rearrange_problems(draw: st.DrawFn, axes: Axes) -> RearrangeProblem:
    """Draw one matrix, or one for each expert, and the order that it is to have."""
    fields = fields_of({name: draw(sampled(axes.allows(name))) for name in REARRANGE_AXES})
    rows, columns = step_of(fields)
    most = max(axes.max_work // max(fields["matrices"], 1), 1)
    down = rows * draw(sampled(ODD if rows == 1 else tuple(range(1, MOST_ROWS + 1))))
    if fields["arrangement"].endswith("128x4"):  # whole tiles
        down = min(down, max(most // (4 * 128), 1) * 128)
    across = max(1, min(most // (columns * max(down, 128)), 260))
    counts = [each for each in ODD if each <= across] if columns == 1 else []
    count = draw(sampled(tuple(counts) or tuple(range(1, min(across, MOST_COLUMNS) + 1))))
    return RearrangeProblem(
        rows=down,
        columns=columns * count,
        **fields,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
