"""Matrices of an MoE call as the Triton kernels take them: numbers, or codes with scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...reference import QuantizedMatrix
from ..targets.target import UnsupportedError
from .blocks import converts_e4m3
from .moe_blocks import SCALE_BLOCK

MANTISSA = 23
"""Bits of a float32 below its exponent."""
E4M3, INT8 = "float8_e4m3fn", "int8"


class Operand(NamedTuple):
    """A matrix as the kernels take it.

    Attributes:
        values: numbers, or codes: as bytes where Triton does not know them.
        scales: float32 [tokens, blocks] or [experts, rows or blocks of rows, blocks], some of
            them spread by a stride of 0; None for numbers.
        format: the format of codes; empty for numbers.
        scaled: columns that a scale is for; 0: all.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    format: str
    scaled: int

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.values.element_size()


def operand(name: str, matrix: torch.Tensor | QuantizedMatrix) -> Operand:
    """Bring a matrix into the form that the kernels take.

    Raises:
        UnsupportedError: a format that they do not read; the argument is named.
    """
    if not isinstance(matrix, QuantizedMatrix):
        return Operand(matrix, None, "", 0)
    form, codes = matrix.format, matrix.codes
    if form.element not in (E4M3, INT8):
        message = f"{name} is {form.element}; the Triton MoE reads {E4M3} and {INT8}"
        raise UnsupportedError(message)
    readable = form.element == INT8 or converts_e4m3(codes.device)
    values = codes if readable else codes.view(torch.uint8)
    scales = powers(matrix.scales) if form.powers else matrix.scales.to(torch.float32)
    while scales.dim() < codes.dim():
        scales = scales.unsqueeze(-1)
    if not form.in_blocks:
        scales = scales.expand(*codes.shape[:-1], 1)
    return Operand(values, scales, form.element, SCALE_BLOCK if form.in_blocks else 0)


def powers(codes: torch.Tensor) -> torch.Tensor:
    """Return e8m0 bytes as float32 numbers, by their exponents' bits: from 2^-126 on."""
    return (codes.view(torch.uint8).to(torch.int32) << MANTISSA).view(torch.float32)


def check_dtypes(hidden: Operand, w13: Operand, w2: Operand) -> None:
    """Refuse matrices of dtypes or formats that are not multiplied with each other.

    Raises:
        UnsupportedError: the two that disagree are named.
    """
    if (w13.values.dtype, w13.format) != (w2.values.dtype, w2.format):
        message = f"w13 is {w13.format or w13.values.dtype}, but w2 {w2.format or w2.values.dtype}"
        raise UnsupportedError(message)
    if not hidden.format and not w13.format and hidden.values.dtype != w13.values.dtype:
        message = f"hidden is {hidden.values.dtype}, but w13 {w13.values.dtype}"
        raise UnsupportedError(message)


def multiplied(a: torch.Tensor, b: torch.Tensor, *, interpreted: bool) -> str | None:
    """Name the dtype that both are widened to before they are multiplied; None: as they are."""
    if interpreted:
        return "float32"
    if a.dtype == b.dtype and a.dtype not in (torch.uint8, torch.int8):
        return None
    # Bytes are exact in float16; sums of their products are kept in float32.
    wide = [each.dtype for each in (a, b) if each.element_size() > 1]
    return str(wide[0] if wide else torch.float16).removeprefix("torch.")
