"""Quantising a matrix to codes of eight or four bits with a scale for each block, by definition.

A block's scale is max(amax, floor) / largest in float32, where ``largest`` is the largest finite
number of the codes, or the least power of two that is at least as large (``ue8m0``: DeepGEMM's
``ceil_to_ue8m0``), also as its e8m0 code. A code is the number nearest to x / scale, a division in
float32, ties to even. NVFP4's scales are e4m3, beside one global scale: of max(amax, floor) /
(largest * global scale), rounded once, and x is divided by the exact product of both. Kernels that
round elsewhere say so in their ``Arithmetic``: then a scale or a code may be one of few, which
``scale_bounds`` and ``code_bounds`` give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ..validation import checked_integer, checked_number, flag_of
from .arithmetic import Arithmetic, checked_arithmetic
from .fp4 import E2M1_VALUES, encode_e2m1, pack_e2m1, unpack_e2m1
from .fp8 import check_floating, check_scale
from .small_floats import E2M1, E4M3, FP8_FORMATS, quotient, round_to_format

CODE_DTYPES: Final = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "e2m1": torch.uint8,
}
"""Dtypes of codes by their names; e2m1 are two a byte, the even channel in the low nibble."""
MIDDLES: Final = (E2M1_VALUES[:7] + E2M1_VALUES[1:8]) / 2
"""Numbers halfway between two positive ones of e2m1."""
LEAST_NORMAL, LARGEST_NUMBER = 2.0**-126, 2.0**128 - 2.0**104
"""Least normal and largest finite number of float32."""
SCALE_FORMATS: Final = ("float32", "ue8m0", "e8m0", "e4m3")
"""Formats of scales: any float32, a power of two in float32, the byte that is its e8m0 code (OCP
Microscaling Formats v1.0, section 5.4.1), which is none below 2^-127, or e4m3 (NVFP4)."""
FP4_SCALES: Final = ("e8m0", "e4m3")
"""Formats of scales of e2m1 codes; the last is theirs only."""
POWER_RULES: Final = ("up", "down", "rounded")
"""What a scale in e8m0 is: the least power of two that is at least max(amax, floor) / largest; the
largest one of at most amax, by that of at most the largest number (OCP, section 6.3), so that the
largest elements may saturate; or this of amax rounded to a bit behind the point, halves up (vLLM's
``downcast_to_mxfp``)."""
LEAST_E8M0, LARGEST_E8M0 = 2.0**-127, 2.0**127
"""Least scale in e8m0, whose code is 0, and the largest."""
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
E4M3_SCALE_ERROR: Final = 2.0**-21
"""The same before it is rounded to e4m3: a reciprocal of 6, within a unit in the last place (PTX
ISA, ``rcp.approx``), 2^-23, its product with amax, and one with the rounded reciprocal of the
global scale: three times 2^-24."""
LOGARITHM_ERROR: Final = 2.0**-17
"""Relative error of 2^y where y, the logarithm of a float32, is in float32 and below 2^8: half a
unit in its last place is 2^-17, times ln 2, and the rest is room for what it is taken of."""


class Quantized(NamedTuple):
    """A matrix of codes and its scales.

    Attributes:
        codes: [T, N] of the codes' dtype; e2m1 [T, N / 2].
        scales: float32 [ceil(T / rows), ceil(N / columns)] of blocks, uint8 codes in e8m0, or
            float8_e4m3fn; None where one was given.
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
        dtype: ``float8_e4m3fn``, ``float8_e5m2``, ``int8``, or ``uint8`` of packed e2m1 codes.
        block: rows and columns of a block; 0 is all of them. The last blocks may be smaller.
        scale_format: one of ``SCALE_FORMATS``.
        floor: what an amax counts at least, as a float32, so that no scale is 0.
        saturate: whether what exceeds the largest number becomes it; if not, it becomes infinity,
            or NaN in e4m3, which has none. Only a given scale lets numbers exceed it.
        power_rule: what scales of e2m1 codes in e8m0 are, one of ``POWER_RULES``.

    Raises:
        ValueError: a value that is none of these; the field is named.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] = (0, 0)
    scale_format: str = "float32"
    floor: float = 1e-10
    saturate: bool = True
    power_rule: str = "up"

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
        if not saturate and self.dtype not in FP8_FORMATS:
            name = "e2m1" if self.is_fp4 else "int8"
            message = f"saturate is False; {name} has neither infinity nor NaN"
            raise ValueError(message)
        allowed = FP4_SCALES if self.is_fp4 else SCALE_FORMATS[:3]
        if self.scale_format not in allowed:
            of = f"it must be one of {allowed} with these codes"
            message = f"scale_format is {self.scale_format!r}; {of}"
            raise ValueError(message)
        rules = POWER_RULES if self.is_fp4 and self.scale_format == "e8m0" else POWER_RULES[:1]
        if self.power_rule not in rules:
            message = f"power_rule is {self.power_rule!r}; it must be one of {rules} here"
            raise ValueError(message)

    @property
    def is_fp4(self) -> bool:
        """Whether codes are e2m1."""
        return self.dtype == torch.uint8

    @property
    def largest(self) -> float:
        """The largest number of the codes, as scales count: 448, 57344, 127 or 6."""
        if self.is_fp4:
            return E2M1.largest
        form = FP8_FORMATS.get(self.dtype)
        return 127.0 if form is None else form.largest

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes of a matrix of this shape."""
        return (*shape[:-1], shape[-1] // 2) if self.is_fp4 else shape

    def elements_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes one by one, as wide as the matrix: e2m1 from 0 to 15."""
        return unpack_e2m1(codes) if self.is_fp4 else codes

    def numbers_of(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the numbers that codes one by one stand for, in float64."""
        return E2M1_VALUES.to(elements.device)[elements.int()] if self.is_fp4 else elements.double()

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
    x: torch.Tensor,
    to: QuantizedFormat,
    *,
    scale: float | torch.Tensor | None = None,
    global_scale: float = 1.0,
) -> Quantized:
    """Quantise a matrix by definition.

    Args:
        x: [T, N], any floating dtype; N is even for e2m1.
        to: the format.
        scale: one for the whole matrix, positive and finite; None: each block's own.
        global_scale: what multiplies scales in e4m3 when codes are read, positive, a float32.

    Returns:
        Quantized. Of the codes of a block that holds NaN or infinity nothing is promised.

    Raises:
        ValueError: an x that is no matrix of floats, another scale.
    """
    check_floating("x", x)
    if x.dim() != 2 or (to.is_fp4 and x.shape[1] % 2):  # noqa: PLR2004  rows and columns
        even = ", with N even" if to.is_fp4 else ""
        message = f"x has shape {tuple(x.shape)}; it must be a matrix [T, N]{even}"
        raise ValueError(message)
    if scale is not None and to.is_fp4:
        message = "scale is given; those of e2m1 codes are computed"
        raise ValueError(message)
    factor = _global_scale(global_scale, to)
    by = scale_bounds(x, to, None, factor)[0] if scale is None else given_scale(x, scale)
    codes = codes_of(code_bounds(x, by, to, None, factor)[0], to.dtype)
    if scale is not None:
        return Quantized(codes, None)
    if to.scale_format == "e4m3":
        by = by.to(torch.float8_e4m3fn)
    return Quantized(
        pack_e2m1(codes) if to.is_fp4 else codes,
        e8m0_codes(by) if to.scale_format == "e8m0" else by,
    )


def _global_scale(factor: float, to: QuantizedFormat) -> float:
    """Return a global scale as a float32.

    Raises:
        ValueError: it is not positive and finite there; scales in another format than e4m3 have 1.
    """
    found = torch.tensor(checked_number("global_scale", factor), dtype=torch.float32).item()
    if not 0 < found <= LARGEST_NUMBER or (found != 1 and to.scale_format != "e4m3"):
        message = f"global_scale is {factor!r}; it must be positive and finite, and 1 without e4m3"
        raise ValueError(message)
    return found


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
    x: torch.Tensor,
    to: QuantizedFormat,
    arithmetic: Arithmetic | None = None,
    global_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest scale of each block that an arithmetic may give.

    Args:
        x: [T, N], any floating dtype.
        to: the format.
        arithmetic: its ``scales`` and ``powers``; None: both exact, and both bounds equal.
        global_scale: see ``quantize``.

    Returns:
        Two float32 tensors of the scales' shape; NaN or infinity where the block holds one.
    """
    check_floating("x", x)
    arithmetic = checked_arithmetic(arithmetic)
    least = torch.tensor(to.floor, dtype=torch.float32).double().to(x.device)
    amax = torch.maximum(_amax(x, to), least)
    if to.power_rule != "up":  # of the exponent only: nothing is rounded
        power = _power_by_rule(amax, to).clamp(LEAST_E8M0, LARGEST_E8M0).float()
        return power, power
    raw = amax / to.largest
    if arithmetic.scales == "reciprocal":  # of float32: both roundings are defined
        inverse = (1.0 / torch.tensor(to.largest, dtype=torch.float64)).float()
        raw = (amax.float() * inverse.to(x.device)).double()
    if to.scale_format == "e4m3":
        return _e4m3_bounds(
            amax if arithmetic.scales != "reciprocal" else raw, to, arithmetic, global_scale
        )
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
    global_scale: float = 1.0,
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
        global_scale: see ``quantize``. Where its product with a scale is 0, so are all codes.

    Returns:
        Two int16 tensors of x's shape, see ``order_of``.
    """
    arithmetic = checked_arithmetic(arithmetic)
    steps = scales.double() * global_scale
    by = _of_elements(torch.where(steps == 0, torch.inf, steps), x, to)
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
    """Return codes one by one as int16 that are in the order of their numbers.

    Those of FP8 and e2m1 count from -0, which is -1, and from 0; infinity and NaN follow the
    largest number.
    """
    if codes.dtype == torch.int8:
        return codes.to(torch.int16)
    sign = 8 if codes.dtype == torch.uint8 else 128
    code = codes.view(torch.uint8).to(torch.int16)
    return torch.where(code < sign, code, sign - 1 - code)


def codes_of(order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the codes, one by one, that ``order_of`` makes this of."""
    if dtype == torch.int8:
        return order.to(torch.int8)
    if dtype == torch.uint8:
        return torch.where(order < 0, 7 - order, order).to(torch.uint8)
    return torch.where(order < 0, 127 - order, order).to(torch.uint8).view(dtype)


def _rounded(wide: torch.Tensor, to: QuantizedFormat, ties: str) -> torch.Tensor:
    """Round numbers in float64 to codes, in the order of their numbers."""
    if to.is_fp4:
        return order_of(_rounded_to_e2m1(wide, ties))
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


def _rounded_to_e2m1(wide: torch.Tensor, ties: str) -> torch.Tensor:
    """Round numbers in float64 to e2m1 codes, one by one."""
    if ties == "even":
        return encode_e2m1(wide)
    size = torch.bucketize(wide.abs(), MIDDLES.to(wide.device), right=ties == "away")
    return (size + 8 * wide.signbit()).to(torch.uint8)


def _power_by_rule(amax: torch.Tensor, to: QuantizedFormat) -> torch.Tensor:
    """Return the power of two of amaxes by the rules ``down`` and ``rounded``, in float64."""
    mantissa, exponent = torch.frexp(amax)
    if to.power_rule == "rounded":  # of a mantissa from 1/2 to 1: from 7/8 on it becomes 1
        exponent = exponent + (mantissa >= 0.875).int()  # noqa: PLR2004
    power = torch.ldexp(torch.ones_like(amax), exponent - 1 - E2M1.max_exponent)
    return torch.where(amax.isfinite(), power, amax)


def _e4m3_bounds(
    wide: torch.Tensor, to: QuantizedFormat, arithmetic: Arithmetic, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round scales to e4m3: of amaxes, or of their products with the reciprocal of 6."""
    largest = 1.0 if arithmetic.scales == "reciprocal" else to.largest
    raw = quotient(wide, wide.new_full((), largest * global_scale))
    error = E4M3_SCALE_ERROR if arithmetic.scales == "approximate" else 0.0
    ends = (round_to_format(raw * (1 + each), E4M3).float() for each in (-error, error))
    low, high = ends
    return low, high


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
