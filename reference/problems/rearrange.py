"""The problem of laying out weights and their scales as a kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..formats.rearrange import ARRANGEMENTS, TILE_COLUMNS, TILE_ROWS, step_of
from .base import BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types

ELEMENTS = {"uint8": 1, "bfloat16": 2}
"""Dtypes of elements, and their bytes."""


@dataclass(frozen=True)
class RearrangeProblem(BaseProblem):
    """One call of rearrange.

    Attributes:
        arrangement: the order, one of ``ARRANGEMENTS``.
        matrices: experts, each with a matrix; 0: a matrix without an axis of experts.
        rows: rows of each matrix.
        columns: its columns, in elements.
        dtype: dtype of the elements, whose bits only count.
        tile: rows of a tile of the kernel that reads shuffled rows.
        group: weights that share a scale, of ``scales_64x128``.
        seed: the seed of the values.
    """

    kind: ClassVar[str] = "rearrange"
    operation: ClassVar[str] = "rearrange"

    arrangement: str = "scales_128x4"
    matrices: int = 0
    rows: int = 1
    columns: int = 1
    dtype: str = "uint8"
    tile: int = 128
    group: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("arrangement", self.arrangement, ARRANGEMENTS)
        check_one_of("dtype", self.dtype, tuple(ELEMENTS))
        least = {"rows": 1, "columns": 1, "tile": 1, "group": 1, "matrices": 0, "seed": 0}
        check_at_least(self, [*least.items()])
        if self.arrangement.startswith("rows") and self.matrices:
            refuse("matrices", self.matrices, "0 where rows are shuffled")
        if self.arrangement in ("scales_64x128", "int4_mixed") and not self.matrices:
            refuse("matrices", self.matrices, f"at least 1 of {self.arrangement}")
        try:
            rows, columns = self.step
        except ValueError as error:
            refuse("arrangement", self.arrangement, f"another: {error}")
        if self.rows % rows:
            refuse("rows", self.rows, f"a multiple of {rows} of {self.arrangement}")
        if self.columns % columns:
            refuse("columns", self.columns, f"a multiple of {columns} of {self.arrangement}")

    @property
    def step(self) -> tuple[int, int]:
        """What rows and columns are multiples of."""
        size = ELEMENTS[self.dtype]
        return step_of(self.arrangement, tile=self.tile, group=self.group, bytes_each=size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is rearranged."""
        return (*((self.matrices,) if self.matrices else ()), self.rows, self.columns)

    @property
    def exact(self) -> bool:
        """Bits are always compared as bits."""
        return True

    @property
    def work(self) -> int:
        """Elements, those that are added to whole tiles too."""
        rows, columns = self.rows, self.columns
        if self.arrangement.endswith("128x4"):
            rows += -rows % TILE_ROWS
            columns += -columns % TILE_COLUMNS
        return max(self.matrices, 1) * rows * columns + 1
