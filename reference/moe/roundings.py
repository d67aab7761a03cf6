"""What an MoE kernel rounds where: its ``Arithmetic``, looked up for the dtypes of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.error_terms import FIXED_POINT, SIGMOID, TANH
from ..formats.arithmetic import (
    SMALLEST_SUBNORMAL,
    UE8M0,
    UNIT_ROUNDOFF,
    Arithmetic,
    dtype_name,
    unit_roundoff,
)

SIGMOID_BY_TANH = 4.0
"""Absolute error, in units of u, of a sigmoid that is computed from tanh."""

SCALED: dict[str, tuple[float, float]] = {
    "float8_e4m3fn": (2.0**-4, 2.0**-10 / 448),
    "float8_e5m2": (2.0**-3, 2.0**-17 / 57344),
    "nvfp4": (2.0**-2, (1 + 2.0**-4) / 24),
    "mxfp8": (2.0**-3, 2.0**-9 / 448),
    "mxfp4": (2.0**-2, 2.0**-4),
    UE8M0: (2.0**-4, 2.0**-9 / 448),
    "int8": (0.0, (1 + 2.0**-10) / 254),
}
"""Formats with a scale that follows the data: unit roundoff, saturation at the largest element
included, and what the smallest numbers lose, as a share of the largest in the row. A scale of
FP8 that is given beforehand is ``intermediate_scale`` of the call; a global scale of nvfp4 under
which block scales saturate or become subnormal is not covered. int8 has equal steps, of which half
is lost everywhere; scales and quotients are rounded, too. Scales that are rounded up to powers of
two may be twice as large."""


class MoERoundings(NamedTuple):
    """Unit roundoffs of an MoE kernel; 0 where nothing is rounded."""

    accumulate: float
    projections: float
    projections_floor: float
    intermediate: float
    intermediate_floor: float
    intermediate_share: float  # of the row's largest
    combine: float
    combine_floor: float
    partial: float
    out: float
    out_floor: float
    tanh: float
    tanh_absolute: float  # of a soft cap, beside the relative one
    sigmoid: float
    first_products: float  # in fixed point
    second_products: float
    weights: float  # where codes become numbers of the hidden states' format
    routing: float  # where the call takes a softmax of logits

    @property
    def of_factor(self) -> float:
        """What a factor on a sum rounds, as a share of the sum."""
        return 2 * self.accumulate + self.combine

    @classmethod
    def of(cls, arithmetic: Arithmetic, inputs: str, out_dtype: torch.dtype) -> MoERoundings:
        """Look up the roundings of a kernel on hidden states of the format ``inputs``."""
        u = UNIT_ROUNDOFF[arithmetic.accumulate]
        out = dtype_name(out_dtype)

        def rounding(chosen: str | None, same: str) -> tuple[float, float, float]:
            name = same if chosen == "inputs" else chosen
            if name in SCALED:
                roundoff, share = SCALED[name]
                return roundoff, 0.0, share
            if name is None or UNIT_ROUNDOFF[name] <= u:
                return 0.0, 0.0, 0.0
            return UNIT_ROUNDOFF[name], SMALLEST_SUBNORMAL[name] / 2, 0.0

        # What quantised hidden states become in between, before they are quantised again.
        wide = out if inputs in SCALED else inputs
        projections = rounding(arithmetic.projections, wide)
        intermediate = rounding(arithmetic.intermediate, inputs)
        fixed_point = FIXED_POINT if arithmetic.fp8_products == "fixed_point" else 0.0
        partial = arithmetic.partial_outputs
        return cls(
            u,
            *projections[:2],
            *intermediate,
            *rounding(arithmetic.combine, out)[:2],
            unit_roundoff(out_dtype) if partial else 0.0,
            unit_roundoff(out_dtype),
            SMALLEST_SUBNORMAL[out] / 2,
            TANH if arithmetic.tanh == "approximate" else 0.0,
            SIGMOID * u if arithmetic.tanh == "sigmoid" else 0.0,
            SIGMOID_BY_TANH * u if arithmetic.sigmoid == "tanh" else 0.0,
            fixed_point if inputs.startswith("float8") else 0.0,
            fixed_point if intermediate[2] else 0.0,
            rounding("inputs", wide)[0] if arithmetic.dequantized == "inputs" else 0.0,
            u if arithmetic.routing == "accumulate" else 0.0,
        )
