"""Axes of problems of quantising, and the simplest problem with one value of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....reference import QuantizeProblem
from ....reference.formats.quantizers import LEAST_NORMAL
from ....reference.problems import DTYPES, QUANTIZE_REGIMES
from ....reference.problems.quantize import SCALE_LAYOUTS

GIVEN = (1.0, 2.0**-7, 0.0372, 3.3e-5, 17.0, 2.0**-126, 2.0**-140, 1e30)
"""Given scales: powers of two, others, the least normal number, a subnormal one, a large one."""
BLOCKS = (
    (1, 0), (0, 0), (1, 128), (1, 64), (1, 32), (1, 16), (1, 256), (1, 48), (1, 100), (1, 3),
    (128, 128), (3, 40), (0, 16),
)  # fmt: skip
"""Blocks: a token, the tensor, groups, also of no power of two, squares, and columns."""
KINDS = (
    ("float8_e4m3fn", True), ("float8_e5m2", True), ("int8", True),
    ("float8_e4m3fn", False), ("float8_e5m2", False),
)  # fmt: skip
"""Codes of eight bits, and whether they saturate."""
FP4 = ("", "e4m3", "e8m0 up", "e8m0 down", "e8m0 rounded")
"""Formats of scales of e2m1 codes, those in e8m0 with their rule; none of codes of eight bits."""
GLOBAL_SCALES = (1.0, 2.0**-7, 0.0372, 3.3e-5, 1.0 / 2688, 17.0, 2.0**-100, 1e30)
"""Global scales of NVFP4: powers of two, others, by which blocks' scales are subnormal or 448."""
FP4_FLOORS = (6 * 2.0**-9, 6e-4)
"""Floors of kernels with e2m1 codes: the least number in e4m3, and 10^-4, times 6."""
FP4_CHANNELS = 128
"""Channels of the simplest problem of e2m1 codes, which all kernels take."""
NO_FIELDS = ("blocks", "kinds", "fp4")
"""Axes whose values stand for several fields."""
QUANTIZE_AXES: dict[str, tuple[Any, ...]] = {
    "blocks": (*((*each, None) for each in BLOCKS), *((0, 0, scale) for scale in GIVEN)),
    "kinds": KINDS,
    "dtype": ("bfloat16", *(each for each in DTYPES if each != "bfloat16")),
    "scale_format": ("float32", "ue8m0", "e8m0"),
    "scale_layout": SCALE_LAYOUTS,
    "floor": (1e-10, 1e-12, 1e-4, 1e-30, LEAST_NORMAL, *FP4_FLOORS),
    "fp4": FP4,
    "global_scale": GLOBAL_SCALES,
    "spare_channels": (0, 16, 5),
    "regime": QUANTIZE_REGIMES,
}
"""Values by axis, simplest first."""


def quantize_example(chosen: Mapping[str, Any]) -> QuantizeProblem:
    """Return the simplest problem with one value of each axis: two rows of two blocks."""
    values = {name: value for name, value in chosen.items() if name not in NO_FIELDS}
    rows, columns, scale = chosen["blocks"]
    codes, saturate = chosen["kinds"]
    if chosen["fp4"]:
        fields = fp4_fields(chosen["fp4"], values, rows)
        return QuantizeProblem(
            2, FP4_CHANNELS, block_rows=rows, block_channels=columns, **{**values, **fields}
        )
    values["global_scale"] = 1.0
    if values["scale_layout"] == "swizzled":
        values["scale_format"] = "e8m0"
    values |= fitting(values, rows, scale)
    return QuantizeProblem(
        2,
        2 * columns or 16,
        codes=codes,
        block_rows=rows,
        block_channels=columns,
        scale=scale,
        saturate=saturate,
        **values,
    )


def fp4_fields(fp4: str, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the fields of e2m1 codes with a format of scales, and with a layout that they have."""
    form, _, rule = fp4.partition(" ")
    swizzled = values["scale_layout"] == "swizzled" and rows == 1
    return {
        "codes": "e2m1",
        "scale_format": form,
        "power_rule": rule or "up",
        "global_scale": values["global_scale"] if form == "e4m3" else 1.0,
        "scale_layout": "swizzled" if swizzled else "rows",
    }


def fitting(values: Mapping[str, Any], rows: int, scale: float | None) -> dict[str, str]:
    """Return a format and a layout of scales that go together, near those that were chosen."""
    form, layout = values["scale_format"], values["scale_layout"]
    if scale is not None:  # what is computed only
        form = "float32"
    if layout == "swizzled" and (form != "e8m0" or rows != 1):
        layout = "rows"
    if form == "e8m0" and layout != "swizzled":
        layout = "rows"
    return {"scale_format": form, "scale_layout": layout}
