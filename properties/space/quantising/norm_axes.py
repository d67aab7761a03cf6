"""Axes of problems of norms that quantise, and the simplest problem with one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....reference import NormQuantizeProblem
from ....reference.formats.quantizers import LEAST_NORMAL
from ....reference.problems import DTYPES, QUANTIZE_REGIMES
from ....reference.problems.quantize import SCALE_LAYOUTS
from .axes import GIVEN, fitting

BLOCKS = ((1, 0), (1, 128), (1, 32), (1, 64), (1, 48))
"""Blocks: a token, and groups, also of no power of two."""
CHANNELS = 256
"""Channels of the simplest problem, which all kernels take."""
NORM_AXES: dict[str, tuple[Any, ...]] = {
    "blocks": (*((*each, None) for each in BLOCKS), *((0, 0, scale) for scale in GIVEN)),
    "dtype": ("bfloat16", *(each for each in DTYPES if each != "bfloat16")),
    "scale_format": ("float32", "ue8m0", "e8m0"),
    "scale_layout": SCALE_LAYOUTS,
    "floor": (1e-10, 1e-12, 1e-4, LEAST_NORMAL),
    "spare_channels": (0, 16, 5),
    "residual": (False, True),
    "gamma_offset": (0.0, 1.0),
    "eps": (1e-6, 1e-5),
    "regime": QUANTIZE_REGIMES,
}
"""Values by axis, simplest first."""


def norm_example(chosen: Mapping[str, Any]) -> NormQuantizeProblem:
    """Return the simplest problem with one value of each axis: two rows."""
    values = {name: value for name, value in chosen.items() if name != "blocks"}
    rows, columns, scale = chosen["blocks"]
    if values["scale_layout"] == "swizzled":
        values["scale_format"] = "e8m0"
    values |= fitting(values, rows, scale)
    channels = CHANNELS if not columns or CHANNELS % columns == 0 else 2 * columns
    return NormQuantizeProblem(
        2, channels, block_rows=rows, block_channels=columns, scale=scale, **values
    )
