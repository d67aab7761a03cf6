"""Normalising rows by their root mean square and quantising the result, by definition.

    h = x + residual,   y = h / sqrt(mean(h^2) + eps) * (gamma + offset),   codes = y / scale

The sum h and the gain are of float32, each rounded once, and the residual is h in its dtype: so
far every bit is defined. The rest is in float64; ``norm_bounds`` says how far float32 may be off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.error_terms import SUM, growth
from ..formats.arithmetic import UNIT_ROUNDOFF, Arithmetic, checked_arithmetic
from ..formats.fp8 import check_floating
from ..formats.quantizers import QuantizedFormat, quantize, scale_bounds
from ..formats.small_floats import round_to_dtype
from ..validation import checked_number

ROOT_ERROR = {"rounded": 2.0**-23, "approximate": 2.0**-22 + 2.0**-24}
"""Relative errors of 1 / sqrt by ``Arithmetic.roots``: of a root and a division, each rounded; or
of 2 units in the last place (CUDA C++ programming guide, ``rsqrtf``)."""
PRODUCTS = 2.0
"""Roundings of the products with the root's inverse and the gain, in units of roundoff."""
SUBNORMAL = 2.0**-126
"""Below it a GPU may flush a product to zero."""


class NormQuantized(NamedTuple):
    """What a norm and a quantiser make of a matrix.

    Attributes:
        codes: [T, N] of the codes' dtype.
        scales: those of blocks, see ``Quantized``; None where one was given.
        residual: [T, N] in x's dtype, the sum; None where nothing is added.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    residual: torch.Tensor | None


@torch.no_grad()
def norm_and_quantize(
    x: torch.Tensor,
    gamma: torch.Tensor,
    to: QuantizedFormat,
    *,
    residual: torch.Tensor | None = None,
    gamma_offset: float = 0.0,
    eps: float = 1e-6,
    scale: float | torch.Tensor | None = None,
) -> NormQuantized:
    """Normalise rows and quantise them, by definition; the residual is not written over.

    Args:
        x: [T, N], any floating dtype.
        gamma: [N], the gains.
        to: the format.
        residual: [T, N], what is added to x.
        gamma_offset: what is added to each gain.
        eps: what is added to the mean of the squares.
        scale: one for the whole matrix; None: each block's own.

    Raises:
        ValueError: a tensor that is no float or has another shape, another scale or eps.
    """
    h = summed(x, residual)
    y = _norm(h.double(), gained(gamma, gamma_offset, x), checked_number("eps", eps))
    found = quantize(y, to, scale=scale)
    return NormQuantized(
        found.codes, found.scales, None if residual is None else h.to(residual.dtype)
    )


def summed(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return x + residual in float32, rounded once.

    Rounding it once more to 16 bits gives the number that is nearest to the exact sum: where
    float32 rounds at all, the lesser addend is too small to move the sum to halfway.

    Raises:
        ValueError: they are no matrices of floats of one shape.
    """
    check_floating("x", x)
    if x.dim() != 2:  # noqa: PLR2004  rows and columns
        message = f"x has shape {tuple(x.shape)}; it must be a matrix [T, N]"
        raise ValueError(message)
    if residual is None:
        return x.float()
    check_floating("residual", residual)
    if residual.shape != x.shape:
        message = f"residual has shape {tuple(residual.shape)}; it must be {tuple(x.shape)}"
        raise ValueError(message)
    return x.float() + residual.float()


def gained(gamma: torch.Tensor, offset: float, x: torch.Tensor) -> torch.Tensor:
    """Return the gains with their offset, rounded to float32, in float64.

    Raises:
        ValueError: they are no floats, or not as many as x has columns.
    """
    check_floating("gamma", gamma)
    if tuple(gamma.shape) != (x.shape[1],):
        message = f"gamma has shape {tuple(gamma.shape)}; it must be [{x.shape[1]}]"
        raise ValueError(message)
    return (gamma.float() + checked_number("gamma_offset", offset)).double()


def _norm(h: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of rows in float64."""
    return h / (h.square().mean(dim=1, keepdim=True) + eps).sqrt() * gain


def norm_bounds(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    gamma_offset: float = 0.0,
    eps: float = 1e-6,
    arithmetic: Arithmetic | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest number that an arithmetic may quantise, in float64.

    The squares of N numbers gather n(N) + SUM roundings on their way to the mean, which the root
    halves; then come the root's own error and two products. All are relative, so that zeros have
    none. Where eps is 0 and all of a row have the magnitude of one power of two, sums, mean and
    root have no rounding: then both numbers are equal, unless the root is an approximate one.

    Args:
        x: [T, N], any floating dtype, as the others.
        gamma: [N].
        residual: [T, N], or None.
        gamma_offset: see ``norm_and_quantize``.
        eps: see there.
        arithmetic: its ``roots``; ``combine``: the format of h; ``intermediate``: that of y.
    """
    arithmetic = checked_arithmetic(arithmetic)
    h = summed(x, residual)
    if arithmetic.rounded("combine", x.dtype):
        h = h.to(x.dtype)
    wide = h.double()
    y = _norm(wide, gained(gamma, gamma_offset, x), eps)
    unit = UNIT_ROUNDOFF["float32"]
    units = (growth(x.shape[1]) + SUM) / 2 + PRODUCTS
    error = torch.full_like(y[:, :1], unit * units + ROOT_ERROR[arithmetic.roots])
    size = wide.abs()
    largest = size.amax(dim=1, keepdim=True)
    is_exact = (size == largest).all(1, keepdim=True) & (torch.frexp(largest).mantissa == 0.5)  # noqa: PLR2004
    if eps == 0 and arithmetic.roots == "rounded":
        error = error.masked_fill(is_exact, 0.0)
    slack = y.abs() * error
    slack = torch.where((y != 0) & (y.abs() < SUBNORMAL), slack + SUBNORMAL, slack)
    # Signs are those of y, of zeros too.
    ends = (-slack, slack)
    low, high = ((y + e).copysign(torch.where(slack > y.abs(), e, y)) for e in ends)
    if arithmetic.rounded("intermediate", x.dtype):
        low, high = (round_to_dtype(each, x.dtype).double() for each in (low, high))
    return low, high


def norm_scale_bounds(
    numbers: tuple[torch.Tensor, torch.Tensor],
    to: QuantizedFormat,
    arithmetic: Arithmetic | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest scale of each block of numbers between these."""
    low, high = numbers
    crosses = low.signbit() != high.signbit()
    least = torch.minimum(low.abs(), high.abs()).masked_fill(crosses, 0.0)
    most = torch.maximum(low.abs(), high.abs())
    return scale_bounds(least, to, arithmetic)[0], scale_bounds(most, to, arithmetic)[1]
