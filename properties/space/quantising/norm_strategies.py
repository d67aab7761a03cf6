"""Drawing problems of norms that quantise: few rows, as wide as models' and narrower."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ....reference import NormQuantizeProblem
from ....reference.formats.quantizers import LEAST_NORMAL
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .axes import fitting
from .norm_axes import NORM_AXES

WIDTHS = (256, 128, 512, 1024, 16, 48, 100, 1536, 7168)
"""Channels of rows."""
MOST_TOKENS = 140
MOST_GROUPS = 9
"""Most groups across a row."""


@st.composite
def norm_problems(draw: st.DrawFn, axes: Axes) -> NormQuantizeProblem:
    """Draw one matrix, what is added to it, its gains, and what it becomes."""
    drawn = (name for name in NORM_AXES if name not in ("blocks", "floor"))
    values: dict[str, Any] = {name: draw(sampled(axes.allows(name))) for name in drawn}
    floors = axes.allows("floor")
    if values["scale_format"] != "e8m0":  # kernels without a floor have scales of bytes
        floors = tuple(each for each in floors if each != LEAST_NORMAL) or floors
    values["floor"] = draw(sampled(floors))
    kinds: dict[Any, list[Any]] = {}  # first what has a scale, then which
    for rows, columns, scale in axes.allows("blocks"):
        kinds.setdefault((columns > 0, scale is None), []).append((rows, columns, scale))
    rows, columns, scale = draw(sampled(draw(sampled(tuple(map(tuple, kinds.values()))))))
    if values["scale_layout"] == "swizzled" and scale is None and draw(st.booleans()):
        values["scale_format"] = draw(sampled(axes.allows("scale_format")))
    values |= fitting(values, rows, scale)
    most = max(axes.max_work // (1 + values["residual"]), 16)
    widths = [each for each in WIDTHS if each <= most] or [16]
    channels = draw(sampled(widths))
    if columns:
        fits = max(1, min(most // columns, MOST_GROUPS))
        groups = draw(st.integers(1, fits))
        if groups > 1 and draw(st.booleans()):  # some kernels take whole vectors of 256 only
            groups -= groups % 2
        channels = groups * columns
    elif draw(sampled((*[False] * 3, True))):
        channels = draw(st.integers(1, min(300, most)))
    tokens = max(1, min(most // channels, MOST_TOKENS))
    tokens = draw(st.integers(1, tokens) | st.integers(1, min(tokens, 4)))
    return NormQuantizeProblem(
        num_tokens=tokens * draw(sampled((*[1] * 9, 0))),
        num_channels=channels,
        block_rows=rows,
        block_channels=columns,
        scale=scale,
        **values,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )
