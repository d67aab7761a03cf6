"""Numbers of eight bits and fewer, by definition: decoding tables and rounding onto their grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

WIDE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_PART = 2**15  # elements whose float64 temporaries stay in a processor's cache
_EXPONENT_FIELD = 0x7FF0_0000_0000_0000  # of a float64, read as an int64
_BEYOND_48_BITS = 2**5 - 1  # the bits that a float64 with a significand of 48 bits leaves clear
_BEYOND_5_BITS = 2**48 - 1
_LOWER_HALF = 2**27 - 1


@dataclass(frozen=True)
class SmallFloat:
    """A binary floating-point format with a sign bit and subnormals.

    Attributes:
        name: the name that messages use.
        mantissa_bits: stored bits of the significand.
        min_exponent: floor(log2) of the smallest normal number; the grid below it is even.
        max_exponent: floor(log2) of the largest finite number (emax in the OCP specifications).
        largest: the largest finite number.
        has_infinity: whether the code after the largest finite number is infinity, not NaN.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    largest: float
    has_infinity: bool = False


# OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5.2 (E4M3, E5M2); OCP Microscaling
# Formats (MX) Specification v1.0, section 5.3.3 (E2M1).
E4M3 = SmallFloat("float8_e4m3fn", 3, -6, 8, 448.0)
E5M2 = SmallFloat("float8_e5m2", 2, -14, 15, 57344.0, has_infinity=True)
E2M1 = SmallFloat("e2m1", 1, 0, 2, 6.0)
FP8_FORMATS: dict[torch.dtype, SmallFloat] = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}

_TWO_BYTES: dict[torch.dtype, SmallFloat] = {
    torch.float16: SmallFloat("float16", 10, -14, 15, 65504.0, has_infinity=True),
    torch.bfloat16: SmallFloat("bfloat16", 7, -126, 127, (2 - 2**-7) * 2.0**127, has_infinity=True),
}


def decode_table(form: SmallFloat, codes: int) -> torch.Tensor:
    """Return the value of every code of a format: [codes], float64, on the CPU.

    The top bit is the sign, the lowest ``mantissa_bits`` the fraction f, those between the
    exponent e: (1 + f / 2^mantissa_bits) * 2^(e - 1 + min_exponent), without the 1 and with e = 1
    where e is 0.
    """
    values: list[float] = []
    for code in range(codes):
        negative, rest = divmod(code, codes // 2)
        exponent, fraction = divmod(rest, 2**form.mantissa_bits)
        significand = fraction + (2**form.mantissa_bits if exponent else 0)
        scale = max(exponent, 1) - 1 + form.min_exponent - form.mantissa_bits
        value = math.ldexp(significand, scale)
        if value > form.largest:
            value = math.inf if form.has_infinity and fraction == 0 else math.nan
        values.append(-value if negative else value)
    return torch.tensor(values, dtype=torch.float64)


def elementwise(
    operation: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    x: torch.Tensor,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Apply an elementwise operation, on a CPU to one part at a time, and cast it to ``dtype``.

    Args:
        operation: takes parts of x and of the others, gives a tensor of the former's shape.
        dtype: the dtype of the result.
        x: gives the shape.
        others: broadcast to x.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    padded = (other[(None,) * (x.dim() - other.dim())] for other in others)
    _fill(operation, out, x, *padded)
    return out


def _fill(operation: Callable[..., torch.Tensor], out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """Write an operation's result into ``out``, splitting what is too large for the cache."""
    if out.numel() <= _PART or out.device.type != "cpu":
        out.copy_(operation(*inputs))
        return
    dim = max(range(out.dim()), key=lambda axis: out.shape[axis])
    length, rows = out.shape[dim], max(1, _PART * out.shape[dim] // out.numel())
    splits = (
        tensor.split(rows, dim) if tensor.shape[dim] == length else repeat(tensor)
        for tensor in inputs
    )
    for part, *of_inputs in zip(out.split(rows, dim), *splits, strict=False):
        _fill(operation, part, *of_inputs)


def round_to_format(x: torch.Tensor, form: SmallFloat) -> torch.Tensor:
    """Round to the nearest number of a format, ties to the even one, in a single rounding.

    In a binade [2^e, 2^(e + 1)) the format's numbers are the multiples of 2^(e - mantissa_bits).
    Adding 1.5 * 2^52 such steps to x leaves float64 no bit below the step, so that the addition
    rounds x to the nearest multiple, ties to even; the subtraction is exact.

    Args:
        x: float64, any shape.
        form: the format.

    Returns:
        float64 numbers of the format. What exceeds its largest finite number, infinity too,
        becomes that number (saturation); NaN stays NaN; a result of zero keeps x's sign.
    """
    bounded = x.clamp(-form.largest, form.largest)
    binade = (bounded.view(torch.int64) & _EXPONENT_FIELD).view(torch.float64)
    shift = binade.clamp_(min=2.0**form.min_exponent).mul_(1.5 * 2.0 ** (52 - form.mantissa_bits))
    return (bounded + shift).sub_(shift).copysign_(x)


def round_to_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast float64 to one of ``WIDE_DTYPES`` in a single rounding, overflow to infinity.

    torch's own cast to two bytes goes by way of float32 and so rounds twice.
    """
    form = _TWO_BYTES.get(dtype)
    if form is None:
        return x.to(dtype)
    beyond = form.largest + math.ldexp(1.0, form.max_exponent - form.mantissa_bits - 1)

    def cast(part: torch.Tensor) -> torch.Tensor:
        return torch.where(part.abs() >= beyond, part, round_to_format(part, form)).to(dtype)

    return elementwise(cast, dtype, x)


def quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide in float64 such that ``round_to_format`` of the result rounds x / divisor once.

    Two roundings differ from one where the first hits a tie of the grid, a number t of at most 5
    bits, that x / divisor is not. With a divisor of at most 48 bits that cannot be: t * divisor is
    a float64, x is another, and so they differ by more than the 2^-53 |x| that half a unit of t
    comes to. Otherwise a quotient t of 5 bits or fewer is moved by one float64 to the side on which
    the true one lies, which is the sign of the remainder x - t * divisor. It is computed exactly:
    t times half of the divisor's bits has no rounding, nor has the first difference (of numbers
    within a factor of two: Sterbenz' lemma).

    Args:
        x: any floating dtype.
        divisor: float64, positive, broadcasts to x; infinite where the quotient is to be 0.

    Returns:
        float64, of x's shape.
    """
    dividend = x.to(torch.float64)
    result = dividend / divisor
    divisor_bits = divisor.view(torch.int64)
    if not (divisor_bits & _BEYOND_48_BITS).any():
        return result
    high = (divisor_bits & ~_LOWER_HALF).view(torch.float64)
    remainder = (dividend - result * high).sub_(result * (divisor - high))
    tie = result.view(torch.int64) & _BEYOND_5_BITS == 0
    off = (tie & (remainder != 0)).nonzero(as_tuple=True)
    side, of = remainder[off], result[off]
    result[off] = torch.where(side.isfinite(), of.nextafter(side * math.inf), of)
    return result
