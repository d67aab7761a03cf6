"""The problem of quantising: a matrix, and the codes and scales that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..formats.quantizers import (
    FP4_SCALES,
    LARGEST_NUMBER,
    LEAST_NORMAL,
    POWER_RULES,
    SCALE_FORMATS,
)
from .base import DTYPES, BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types

CODES = ("float8_e4m3fn", "float8_e5m2", "int8", "e2m1")
LEAST_NUMBERS = {"scale": 2.0**-149, "floor": LEAST_NORMAL, "global_scale": LEAST_NORMAL}
"""Least values: a positive float32, and a normal one, a share of which is no 0."""
SCALE_LAYOUTS = ("rows", "columns", "padded_columns", "swizzled")
"""Orders of computed scales: row after row; column after column; the same with columns padded to 4
rows, as TMA loads them; in tiles of 128 rows and 4 columns, as tensor cores read scales of a
byte."""
QUANTIZE_REGIMES = ("iid", "ties", "outliers", "faint", "large", "zeros")


@dataclass(frozen=True)
class QuantizeProblem(BaseProblem):
    """One call of quantize.

    Attributes:
        num_tokens: rows of the matrix.
        num_channels: its columns.
        dtype: its dtype.
        codes: the dtype of the codes, one of ``CODES``.
        block_rows: rows of a block that shares a scale; 0 is all of them.
        block_channels: its channels, alike: 0 and 0 is one scale for the tensor, 1 and 0 one a
            token, 1 and 128 one a group.
        scale: the given scale of a whole tensor; null: each block's own is computed.
        scale_format: ``float32``; ``ue8m0``: powers of two; ``e8m0``: their codes, bytes; or, with
            e2m1 codes, ``e4m3``.
        power_rule: what scales in e8m0 of e2m1 codes are, see ``POWER_RULES``.
        global_scale: what multiplies scales in e4m3 when codes are read.
        scale_layout: how computed scales lie, one of ``SCALE_LAYOUTS``.
        floor: what the largest magnitude of a block counts at least.
        saturate: whether what exceeds the largest number becomes it, see ``QuantizedFormat``.
        spare_channels: channels by which rows lie further apart than they are wide.
        regime: how values are made: ``iid``; ``ties``: halfway between two codes, or next to it, of
            scales that are powers of two, and beyond the largest; ``outliers``; ``faint``: below
            the floor or subnormal; ``large``: near the dtype's largest; ``zeros``: whole rows and
            groups of zeros of both signs.
        seed: the seed of the values.
    """

    kind: ClassVar[str] = "quantize"
    operation: ClassVar[str] = "quantize"

    num_tokens: int = 1
    num_channels: int = 16
    dtype: str = "bfloat16"
    codes: str = "float8_e4m3fn"
    block_rows: int = 1
    block_channels: int = 0
    scale: float | None = None
    scale_format: str = "float32"
    scale_layout: str = "rows"
    floor: float = 1e-10
    saturate: bool = True
    power_rule: str = "up"
    global_scale: float = 1.0
    spare_channels: int = 0
    regime: str = "iid"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        for name, allowed in (
            ("dtype", DTYPES), ("codes", CODES), ("scale_format", SCALE_FORMATS),
            ("scale_layout", SCALE_LAYOUTS), ("regime", QUANTIZE_REGIMES),
            ("power_rule", POWER_RULES),
        ):  # fmt: skip
            check_one_of(name, getattr(self, name), allowed)
        check_at_least(
            self,
            (
                ("num_tokens", 0),
                ("num_channels", 1),
                ("block_rows", 0),
                ("block_channels", 0),
                ("spare_channels", 0),
                ("seed", 0),
            ),
        )
        for name in ("scale", "floor", "global_scale"):
            value = getattr(self, name)
            least = LEAST_NUMBERS[name]
            if value is not None and not least <= value <= LARGEST_NUMBER:
                said = "positive and finite" + (", or null" if name == "scale" else "")
                refuse(name, value, f"{said}, in float32")
        if self.scale is not None and (self.block != (0, 0) or self.scale_format != "float32"):
            refuse(
                "scale",
                self.scale,
                "null, unless both sizes of a block are 0 and scale_format is float32",
            )
        of_bytes = self.scale_format in FP4_SCALES
        if of_bytes and self.scale_layout not in ("rows", "swizzled"):
            refuse("scale_layout", self.scale_layout, "rows or swizzled where scales are bytes")
        if self.scale_layout == "swizzled" and not (of_bytes and self.block_rows == 1):
            wanted = "rows or columns, unless scales are bytes and of one row each"
            refuse("scale_layout", self.scale_layout, wanted)
        if not self.saturate and self.codes in ("int8", "e2m1"):
            refuse("saturate", self.saturate, f"true: {self.codes} has neither infinity nor NaN")
        self._check_fp4()

    def _check_fp4(self) -> None:
        """Refuse what only e2m1 codes have, and what they have not."""
        e2m1, e4m3 = self.codes == "e2m1", self.scale_format == "e4m3"
        if e2m1 and self.num_channels % 2:
            refuse("num_channels", self.num_channels, "even where codes are e2m1")
        if (e2m1 and self.scale_format not in FP4_SCALES) or (e4m3 and not e2m1):
            refuse("scale_format", self.scale_format, "e8m0 or e4m3 with e2m1 codes, e4m3 only so")
        if self.power_rule != "up" and (e4m3 or not e2m1):
            refuse("power_rule", self.power_rule, "up unless codes are e2m1 and scales e8m0")
        if self.global_scale != 1 and not e4m3:
            refuse("global_scale", self.global_scale, "1 unless scales are e4m3")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block, see ``QuantizedFormat``."""
        return self.block_rows, self.block_channels

    @property
    def exact(self) -> bool:
        """Codes are always compared as codes."""
        return True

    @property
    def work(self) -> int:
        """Elements of the matrix."""
        return self.num_tokens * self.num_channels + 1
