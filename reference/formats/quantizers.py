"""Quantising a matrix to codes of eight bits with a scale for each block, by definition.

A block's scale is max(amax, floor) / largest in float32, where ``largest`` is the largest finite
number of the codes, or the least power of two that is at least as large (``ue8m0``: DeepGEMM's
``ceil_to_ue8m0``), also as its e8m0 code. A code is the number nearest to x / scale, a division in
float32, ties to even. Kernels that round elsewhere say so in their ``Arithmetic``: then a scale or
a code may be one of few, which ``scale_bounds`` and ``code_bounds`` give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ..validation import checked_integer, checked_number, flag_of
from .arithmetic import Arithmetic, checked_arithmetic
from .fp8 import check_floating, check_scale
from .small_floats import FP8_FORMATS, quotient, round_to_format

CODE_DTYPES: Final = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""Dtypes of codes by their names."""
LEAST_NORMAL, LARGEST_NUMBER = 2.0**-126, 2.0**128 - 2.0**104
"""Least normal and largest finite number of float32."""
SCALE_FORMATS: Final = ("float32", "ue8m0", "e8m0")
"""Formats of scales: any float32, a power of two in float32, or the byte that is its e8m0 code (OCP
Microscaling Formats v1.0, section 5.4.1), which is none below 2^-127."""
LEAST_E8M0 = 2.0**-127
"""Least scale in e8m0, whose code is 0."""
QUOTIENT_ERRORS: Final = {
    "once": 0.0,
    "division": 0.0,
    "approximate": 2.0**-22,
    "reciprocal": 2.0**-22 + 2.0**-24,
    "inverse": 2.0**-21 + 2.0**-24,
}
"""Relative errors of x / scale by ``Arithmetic.quotients``. A division of a GPU's is within 2 units
in the last place (PTX ISA, ``div.full.f32``), 2^-22 of the result: ``approximate`` has one,
``reciprocal`` one and a product, ``inverse`` two (scale and inverse) and a product."""
SCALE_ERROR: Final = 2.0**-22
"""Relative error of a scale that a GPU's division gives (``approximate``), as above."""
LOGARITHM_ERROR: Final = 2.0**-17
"""Relative error of 2^y where y, the logarithm of a float32, is in float32 and below 2^8: half a
unit in its last place is 2^-17, times ln 2, and the rest is room for what it is taken of."""


class Quantized(NamedTuple):
    """A matrix of codes and its scales.

    Attributes:
        codes: [T, N] of the codes' dtype.
        scales: float32 [ceil(T / rows), ceil(N / columns)] of blocks, or uint8 codes in e8m0; None
            where one was given.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return those that there are by name."""
        return {name: each for name, each in self._asdict().items() if each is not None}


@dataclass(frozen=True)
class QuantizedFormat:
    """What a matrix is quantised to.

    Attributes:
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        block: rows and columns of a block; 0 is all of them. The last blocks may be smaller.
        scale_format: one of ``SCALE_FORMATS``.
        floor: what an amax counts at least, as a float32, so that no scale is 0.
        saturate: whether what exceeds the largest number becomes it; if not, it becomes infinity,
            or NaN in e4m3, which has none. Only a given scale lets numbers exceed it.

    Raises:
        ValueError: a value that is none of these; the field is named.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = (0, 0)
    scale_format: str = "float32"
    floor: float = 1e-10
    saturate: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no format."""
        if not any(self.dtype is each for each in CODE_DTYPES.values()):
            message = f"dtype is {self.dtype}; it must be one of {', '.join(CODE_DTYPES)}"
            raise ValueError(message)
        sizes = self.block if isinstance(self.block, (tuple, list)) else ()
        if len(sizes) != 2 or min(checked_integer("block", each) for each in sizes) < 0:  # noqa: PLR2004
            message = f"block is {self.block!r}; it must be two sizes, 0 for all rows or columns"
            raise ValueError(message)
        if not isinstance(self.scale_format, str) or self.scale_format not in SCALE_FORMATS:
            message = f"scale_format is {self.scale_format!r}; it must be one of {SCALE_FORMATS}"
            raise ValueError(message)
        floor = checked_number("floor", self.floor)
        if not LEAST_NORMAL <= floor <= LARGEST_NUMBER:
            message = f"floor is {self.floor!r}; it must be positive and finite, a normal float32"
            raise ValueError(message)
        if (saturate := flag_of(self.saturate)) is None:
            message = f"saturate is {self.saturate!r}; it must be True or False"
            raise ValueError(message)
        if not saturate and self.dtype == torch.int8:
            message = "saturate is False; int8 has neither infinity nor NaN"
            raise ValueError(message)

    @property
    def largest(self) -> float:
        """The largest number of the codes, as scales count: 448, 57344 or 127."""
        form = FP8_FORMATS.get(self.dtype)
        return 127.0 if form is None else form.largest

    def blocks_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of a block in a matrix of this shape."""
        sizes = zip(self.block, shape, strict=True)
        rows, columns = (size or max(whole, 1) for size, whole in sizes)
        return rows, columns

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix of this shape."""
        sizes = zip(self.block, shape, self.blocks_of(shape), strict=True)
        down, across = (-(-whole // each) if size else 1 for size, whole, each in sizes)
        return down, across


@torch.no_grad()
def quantize(
    x: torch.Tensor, to: QuantizedFormat, *, scale: float | torch.Tensor | None = None
) -> Quantized:
    """Quantise a matrix by definition.

    Args:
        x: [T, N], any floating dtype.
        to: the format.
        scale: one for the whole matrix, positive and finite; None: each block's own.

    Returns:
        Quantized. Of the codes of a block that holds NaN or infinity nothing is promised.

    Raises:
        ValueError: an x that is no matrix of floats, another scale.
    """
    check_floating("x", x)
    if x.dim() != 2:  # noqa: PLR2004  rows and columns
        message = f"x has shape {tuple(x.shape)}; it must be a matrix [T, N]"
        raise ValueError(message)
    by = scale_bounds(x, to)[0] if scale is None else given_scale(x, scale)
    codes = codes_of(code_bounds(x, by, to)[0], to.dtype)
    if scale is not None:
        return Quantized(codes, None)
    return Quantized(codes, e8m0_codes(by) if to.scale_format == "e8m0" else by)


def e8m0_codes(scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of powers of two from 2^-127 to 2^127; 255 of what is not finite."""
    exponents = torch.frexp(scales.double()).exponent - 1 + 127
    return torch.where(scales.isfinite(), exponents, 255).to(torch.uint8)


def given_scale(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Return a scale of a whole matrix as float32 [1, 1].

    Raises:
        ValueError: it is not one positive and finite number.
    """
    return check_scale("scale", scale, x).to(torch.float32).reshape(1, 1)


def scale_bounds(
    x: torch.Tensor, to: QuantizedFormat, arithmetic: Arithmetic | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest scale of each block that an arithmetic may give.

    Args:
        x: [T, N], any floating dtype.
        to: the format.
        arithmetic: its ``scales`` and ``powers``; None: both exact, and both bounds equal.

    Returns:
        Two float32 tensors of the scales' shape; NaN or infinity where the block holds one.
    """
    check_floating("x", x)
    arithmetic = checked_arithmetic(arithmetic)
    least = torch.tensor(to.floor, dtype=torch.float32).double().to(x.device)
    amax = torch.maximum(_amax(x, to), least)
    raw = amax / to.largest
    if arithmetic.scales == "reciprocal":  # of float32: both roundings are defined
        inverse = (1.0 / torch.tensor(to.largest, dtype=torch.float64)).float()
        raw = (amax.float() * inverse.to(x.device)).double()
    error = SCALE_ERROR if arithmetic.scales == "approximate" else 0.0
    if to.scale_format == "float32":
        return (raw * (1 - error)).float(), (raw * (1 + error)).float()
    if arithmetic.powers == "logarithm":
        error = LOGARITHM_ERROR
    elif arithmetic.scales != "division":
        raw = raw.float().double()
    powers = _power_at_least(raw * (1 - error)), _power_at_least(raw * (1 + error))
    if to.scale_format == "e8m0":
        return powers[0].clamp(min=LEAST_E8M0), powers[1].clamp(min=LEAST_E8M0)
    return powers


def code_bounds(
    x: torch.Tensor,
    scales: torch.Tensor,
    to: QuantizedFormat,
    arithmetic: Arithmetic | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest code of each element, in the order of their numbers.

    They differ only where x / scale lies so near to halfway between two codes that an arithmetic's
    error decides, and then by one. Powers of two divide without an error, whatever the arithmetic.

    Args:
        x: [T, N], any floating dtype.
        scales: float32, of the scales' shape, or [1, 1].
        to: the format.
        arithmetic: its ``quotients`` and ``ties``; None: a division in float32, and ties
            to even.

    Returns:
        Two int16 tensors of x's shape, see ``order_of``.
    """
    arithmetic = checked_arithmetic(arithmetic)
    by = _of_elements(scales.double(), x, to)
    wide = quotient(x, by)
    if arithmetic.quotients == "division":
        wide = wide.float().double()
    slack = wide.abs() * QUOTIENT_ERRORS[arithmetic.quotients]
    is_exact = torch.frexp(by).mantissa == 0.5  # noqa: PLR2004  of a power of two
    if arithmetic.quotients == "inverse":  # of the amax, which then is a power of two times largest
        is_exact = is_exact & (_of_elements(_amax(x, to), x, to) == by * to.largest)
    # Infinite quotients, of float32, have none either.
    slack = slack.masked_fill_(is_exact | wide.isinf(), 0.0)
    # Signs are those of x, of zeros too: -0 + 0 is 0.
    ends = (each.copysign(wide) for each in (wide - slack, wide + slack))
    low, high = (_rounded(each, to, arithmetic.ties) for each in ends)
    return low, high


def order_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as int16 that are in the order of their numbers.

    Those of FP8 count from -0, which is -1, and from 0; infinity and NaN follow the largest number.
    """
    if codes.dtype == torch.int8:
        return codes.to(torch.int16)
    code = codes.view(torch.uint8).to(torch.int16)
    return torch.where(code < 128, code, 127 - code)  # noqa: PLR2004  the sign bit


def codes_of(order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes that ``order_of`` makes this of."""
    if dtype == torch.int8:
        return order.to(torch.int8)
    return torch.where(order < 0, 127 - order, order).to(torch.uint8).view(dtype)


def _rounded(wide: torch.Tensor, to: QuantizedFormat, ties: str) -> torch.Tensor:
    """Round numbers in float64 to codes, in the order of their numbers."""
    form = FP8_FORMATS.get(to.dtype)
    if form is None:
        # A NaN has no code in int8; nothing is promised of it.
        finite = wide.nan_to_num(nan=0.0)
        whole = finite.abs().floor()
        if ties == "away":
            found = (whole + (finite.abs() - whole >= 0.5)).copysign(finite)  # noqa: PLR2004
        else:
            found = whole.copysign(finite) if ties == "cut" else finite.round()
        return found.clamp(-128, 127).to(torch.int16)
    found = order_of(round_to_format(wide, form).to(to.dtype))
    if to.saturate:
        return found
    most = int(order_of(torch.tensor([form.largest]).to(to.dtype)))
    beyond = form.largest + math.ldexp(1.0, form.max_exponent - form.mantissa_bits - 1)
    # A tie goes to the even code: to the largest number where that is even.
    exceeds = wide.abs() > beyond if most % 2 == 0 else wide.abs() >= beyond
    return torch.where(exceeds, torch.where(wide < 0, -2 - most, most + 1), found).to(torch.int16)


def _amax(x: torch.Tensor, to: QuantizedFormat) -> torch.Tensor:
    """Return the largest magnitude of each block in float64; 0 of one without elements."""
    rows, columns = to.blocks_of(x.shape)
    down, across = to.scales_of(x.shape)
    padded = torch.zeros((down * rows, across * columns), dtype=torch.float64, device=x.device)
    padded[: x.shape[0], : x.shape[1]] = x.double().abs()
    return padded.view(down, rows, across, columns).amax(dim=(1, 3))


def _of_elements(of_blocks: torch.Tensor, x: torch.Tensor, to: QuantizedFormat) -> torch.Tensor:
    """Spread a number of each block over its elements."""
    if of_blocks.numel() == 1:
        return of_blocks.expand(x.shape)
    rows, columns = to.blocks_of(x.shape)
    spread = of_blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: x.shape[0], : x.shape[1]]


def _power_at_least(wide: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is at least a number, in float32; NaN stays NaN."""
    mantissa, exponent = torch.frexp(wide)
    power = torch.ldexp(torch.ones_like(wide), exponent - (mantissa == 0.5).int())  # noqa: PLR2004
    return torch.where(wide.isfinite(), power, wide).float()
