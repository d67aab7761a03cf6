"""The problem of normalising the rows of a matrix and quantising what comes of it, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import refuse
from .quantize import QuantizeProblem


@dataclass(frozen=True)
class NormQuantizeProblem(QuantizeProblem):
    """One call of norm_and_quantize: of a QuantizeProblem whose matrix is a norm's result.

    Its ``regime`` says how the matrix that is normalised is made: ``ties``: rows of one magnitude,
    a power of two, whose norm is the gain, and gains halfway between two codes; ``faint``: far
    below the root of ``eps``; ``large``: near the largest whose square float32 holds.

    Attributes:
        residual: whether another matrix is added first, which the sum is written over.
        gamma_offset: what is added to each gain, 1 in Gemma.
        eps: what is added to the mean of the squares; in ties it is 0 instead.
    """

    kind: ClassVar[str] = "norm_and_quantize"
    operation: ClassVar[str] = "norm_and_quantize"

    residual: bool = False
    gamma_offset: float = 0.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        super().__post_init__()
        if self.codes != "float8_e4m3fn" or not self.saturate:
            refuse("codes", self.codes, "float8_e4m3fn, saturated, of a norm")
        if self.scale is None and self.block_rows != 1:
            refuse("block_rows", self.block_rows, "1: a norm knows its own row only")
        if self.gamma_offset not in (0.0, 1.0):
            refuse("gamma_offset", self.gamma_offset, "0 or 1")
        if not 0 < self.eps <= 1:
            refuse("eps", self.eps, "above 0 and at most 1")

    @property
    def work(self) -> int:
        """Elements of the matrix, and of the one that is added."""
        return self.num_tokens * self.num_channels * (1 + self.residual) + 1
