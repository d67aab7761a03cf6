"""Drawing problems of quantising and of layouts: matrices of few rows, in blocks of every shape."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ....reference import QuantizeProblem, RearrangeProblem
from ....reference.formats.quantizers import LEAST_NORMAL
from ..axis_values import Axes
from ..strategy_helpers import LARGEST_SEED, sampled
from .axes import FP4_CHANNELS, FP4_FLOORS, QUANTIZE_AXES, fitting, fp4_fields
from .rearrange_axes import REARRANGE_AXES, fields_of, step_of

WIDTHS = (16, 32, 64, 128, 256, 48, 192, 512, 1024, 7168)
"""Channels of rows whose block is as wide as they are."""
EIGHT_BITS = ("blocks", "kinds", "fp4", "global_scale")
"""Axes that are not drawn as they are for codes of a byte."""
MOST_TOKENS = 140
MOST_GROUPS = 9
"""Most blocks across a row."""
SEVERAL_ROWS, SEVERAL_COLUMNS = 129, 5
"""Rows and columns of scales that fill several tiles."""

TILES_DOWN, TILES_ACROSS = (1, 2, 3, 4, 9, 33), (*range(1, 10), 17, 65)
"""Tiles of a layout, down and across, as far as work allows them."""
ODD = (1, 2, 3, 5, 31, 33, 96, 127, 128, 129, 200, 256, 260, 520, 1025)
"""Rows and columns of scales that no tile needs to divide."""


def _floors(axes: Axes, form: str) -> tuple[float, ...]:
    """Return the floors to draw from: e8m0 scales of kernels without one, too, as its least."""
    allowed = tuple(each for each in axes.allows("floor") if each not in FP4_FLOORS)
    some = tuple(each for each in allowed if each != LEAST_NORMAL or form == "e8m0")
    return some or allowed or axes.allows("floor")


def quantize_problems(axes: Axes) -> st.SearchStrategy[QuantizeProblem]:
    """Draw one matrix, its blocks and what it becomes."""
    formats = tuple(each for each in axes.allows("fp4") if each)
    if not formats:
        return _of_eight_bits(axes)
    of_fp4 = _of_four_bits(axes, formats)
    return of_fp4 if len(formats) == len(axes.allows("fp4")) else of_fp4 | _of_eight_bits(axes)


@st.composite
def _of_four_bits(draw: st.DrawFn, axes: Axes, formats: tuple[str, ...]) -> QuantizeProblem:
    """Draw one matrix that becomes e2m1 codes."""
    fp4 = draw(sampled(formats))
    names = ("dtype", "scale_layout", "floor", "spare_channels", "regime")
    values: dict[str, Any] = {name: draw(sampled(axes.allows(name))) for name in names}
    if LEAST_NORMAL in axes.allows("floor") and draw(st.booleans()):  # of kernels without one
        values["floor"] = LEAST_NORMAL
    values["global_scale"] = draw(sampled(axes.allows("global_scale"))) if fp4 == "e4m3" else 1.0
    given = tuple(each for each in axes.allows("blocks") if each[2] is None)
    usual = (1, 16, None) if fp4 == "e4m3" else (1, 32, None)
    blocks = (usual,) if usual in given and draw(st.booleans()) else given
    rows, columns, _ = draw(sampled(blocks))
    values |= fp4_fields(fp4, values, rows)
    fits = max(1, axes.max_work // FP4_CHANNELS)
    channels = FP4_CHANNELS * draw(st.integers(1, min(fits, 3)))
    if draw(sampled((*[False] * 2, True))):  # any even number; engines refuse most
        channels = 2 * draw(st.integers(1, max(1, min(axes.max_work, 300) // 2)))
    most = max(1, min(axes.max_work // channels, MOST_TOKENS))
    tokens = draw(st.integers(1, most) | st.integers(1, min(most, 4)))
    if values["scale_layout"] == "swizzled" and draw(st.booleans()):  # several tiles
        tokens = max(tokens, min(axes.max_work // channels, SEVERAL_ROWS))
    return QuantizeProblem(
        num_tokens=tokens * draw(sampled((*[1] * 9, 0))),
        num_channels=channels,
        block_rows=rows,
        block_channels=columns,
        **values,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )


@st.composite
def _of_eight_bits(draw: st.DrawFn, axes: Axes) -> QuantizeProblem:
    """Draw one matrix that becomes codes of a byte each."""
    values: dict[str, Any] = {}
    for name in QUANTIZE_AXES:
        if name == "floor":
            values[name] = draw(sampled(_floors(axes, values["scale_format"])))
        elif name not in EIGHT_BITS:
            values[name] = draw(sampled(axes.allows(name)))
    # First what has a scale, then which: there are more groups and given scales than others.
    kinds: dict[Any, list[Any]] = {}
    for rows, columns, scale in axes.allows("blocks"):
        kind = rows, columns > 0, scale is None
        kinds.setdefault(kind, []).append((rows, columns, scale))
    if values["scale_layout"] == "swizzled":  # of blocks of one row each
        kinds = {kind: each for kind, each in kinds.items() if kind[0] == 1} or kinds
    *block, scale = draw(sampled(draw(sampled(tuple(map(tuple, kinds.values()))))))
    codes, saturate = draw(sampled(axes.allows("kinds")))
    values |= fitting(values, block[0], scale)
    if block[1]:
        fits = max(1, min(axes.max_work // block[1], MOST_GROUPS))
        # The last block may be smaller: often of squares, seldom of groups, which engines refuse.
        may_cut = block[0] > 1 or draw(sampled((*[False] * 3, True)))
        cut = draw(st.integers(0, block[1] - 1)) if may_cut else 0
        channels = max(1, draw(st.integers(1, fits)) * block[1] - cut)
    else:
        widths = [each for each in WIDTHS if each <= max(axes.max_work, WIDTHS[0])]
        channels = draw(sampled(widths) | st.integers(1, min(300, widths[-1])))
    several = values["scale_layout"] == "swizzled" and draw(st.booleans())
    if several and block[1] and axes.max_work >= SEVERAL_ROWS * SEVERAL_COLUMNS * block[1]:
        channels = max(channels, SEVERAL_COLUMNS * block[1])
    most = max(1, min(axes.max_work // channels, MOST_TOKENS))
    tokens = draw(st.integers(1, most) | st.integers(1, min(most, 4)))
    if block[0] > 1 and draw(st.booleans()):  # several blocks down, where work allows it
        tokens = max(tokens, min(axes.max_work // channels, 2 * block[0] + 1))
    if several:  # tiles of scales, in rows and in columns, where work allows it
        tokens = max(tokens, min(axes.max_work // channels, SEVERAL_ROWS))
    tokens *= draw(sampled((*[1] * 9, 0)))
    return QuantizeProblem(
        num_tokens=tokens,
        num_channels=channels,
        codes=codes,
        block_rows=block[0],
        block_channels=block[1],
        scale=scale,
        saturate=saturate,
        **values,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )


@st.composite
def rearrange_problems(draw: st.DrawFn, axes: Axes) -> RearrangeProblem:
    """Draw one matrix, or one for each expert, and the order that it is to have."""
    fields = fields_of({name: draw(sampled(axes.allows(name))) for name in REARRANGE_AXES})
    rows, columns = step_of(fields)
    most = max(axes.max_work // max(fields["matrices"], 1), rows * columns)
    whole = fields["arrangement"].endswith("128x4")  # tiles, of 4 columns
    down = rows * draw(
        sampled(_fitting(ODD if rows == 1 else TILES_DOWN, most // (rows * columns)))
    )
    if whole:
        down = min(down, max(most // (4 * 128), 1) * 128)
    across = most // (columns * (-(-down // 128) * 128 if whole else down))
    count = draw(sampled(_fitting(ODD if columns == 1 else TILES_ACROSS, across)))
    return RearrangeProblem(
        rows=down,
        columns=columns * count,
        **fields,
        seed=draw(st.integers(0, LARGEST_SEED)),
    )


def _fitting(counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the counts that are small enough; the first of all."""
    return tuple(each for each in counts if each <= max(most, counts[0]))
