"""Axes of problems of layouts, and the simplest problem with one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....reference import RearrangeProblem
from ....reference.formats.rearrange import ARRANGEMENTS

TILES, GROUPS = (128, 64, 256, 16), (32, 16, 64, 128)
"""Rows of a tile of the kernel, and weights that share a scale."""
REARRANGE_AXES: dict[str, tuple[Any, ...]] = {
    "arrangement": ARRANGEMENTS,
    "matrices": (0, 1, 2, 3, 9),
    "dtype": ("uint8", "bfloat16"),
    "tile": TILES,
    "group": GROUPS,
}
"""Values by axis, simplest first."""


def fields_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of axes as one problem can have them together."""
    found = dict(chosen)
    arrangement = found["arrangement"]
    if arrangement.startswith("rows"):
        found["matrices"] = 0
    elif arrangement != "scales_128x4":
        found["matrices"] = max(found["matrices"], 1)
    if arrangement == "int4_mixed":
        found["dtype"] = "uint8"
    return found


def rearrange_example(chosen: Mapping[str, Any]) -> RearrangeProblem:
    """Return the simplest problem with one value of each axis: one tile."""
    fields = fields_of(chosen)
    rows, columns = step_of(fields)
    return RearrangeProblem(rows=rows, columns=columns, **fields)


def step_of(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return what rows and columns are multiples of."""
    return RearrangeProblem(rows=128, columns=128, **fields).step  # sizes that all have
