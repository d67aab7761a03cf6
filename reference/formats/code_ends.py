"""Which codes and scales an honest kernel may write of the rows of a cache, to the last bit.

A scale is one of few; a code follows from the scale that was written, and is its neighbour at most
where an arithmetic's error decides. What ``Arithmetic`` calls ``scales`` and ``quotients`` says how
far off is honest, see ``quantizers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .arithmetic import UNIT_ROUNDOFF, Arithmetic
from .fp4 import unpack_e2m1
from .int4 import LARGEST_CODE, LEAST_SCALE, ZERO_POINT
from .latent_records import (
    COMPRESSED,
    FP8_TILE,
    LARGEST_E4M3,
    LARGEST_E4M3_CODE,
    LEAST_FLOAT,
    ROTARY,
)
from .quantization import NVFP4_BLOCK
from .quantizers import LEAST_NORMAL, QuantizedFormat, code_bounds, codes_of, order_of, scale_bounds

NVFP4_FORMAT = QuantizedFormat(torch.uint8, (1, NVFP4_BLOCK), "e4m3", LEAST_NORMAL)
"""The format of rows of nvfp4: a block of zeros has the scale 0."""
INT4_SCALE, INT4_CODE, INT4_STEP = 8, 16, 2.0**-19
"""Most errors of a scale of int4 and of a number before it is rounded to its code, in units of
float32's roundoff, as in ``append_error_bound``; and what a scale loses besides that is read
without the four bits of its zero point."""


Pair = tuple[torch.Tensor, torch.Tensor]


FP8_RECORD_FORMAT = QuantizedFormat(
    torch.float8_e4m3fn, (1, FP8_TILE), floor=LARGEST_E4M3 * LEAST_FLOAT
)
"""The format of fp8_ds_mla's compressed channels: a tile's scale is amax / 448, at least 2^-126."""


class Part(NamedTuple):
    """A part of written rows, and what it may be.

    Attributes:
        name: ``codes``, ``scales``, ``zero points`` or ``rotary channels``.
        found: [rows, ...] integers in the order of what they stand for.
        ends: the least and the greatest that each may be, of the same shape.
        numbers: function from such integers to what they stand for, in float64.
    """

    name: str
    found: torch.Tensor
    ends: Pair
    numbers: Callable[[torch.Tensor], torch.Tensor]


Ends = Callable[
    [torch.Tensor, torch.Tensor, "torch.Tensor | None", float, Arithmetic], tuple[Part, ...]
]
"""Function from rows [rows, channels] of any floating dtype, their codes and scales as they were
written, the scale of the call and an arithmetic to the parts of what was written."""


def nvfp4_ends(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> tuple[Part, ...]:
    """Return scales of blocks, and codes by the scales that were written.

    Args:
        rows: [rows, channels], any floating dtype.
        codes: uint8 [rows, channels / 2].
        scales: float8_e4m3fn [rows, channels / 16], linear.
        scale: the global scale.
        arithmetic: its ``scales``, ``quotients`` and ``ties``.
    """
    assert scales is not None  # noqa: S101  such a cache has them
    low, high = scale_bounds(rows, NVFP4_FORMAT, arithmetic, scale)
    found = order_of(scales)
    ends = order_of(low.to(torch.float8_e4m3fn)), order_of(high.to(torch.float8_e4m3fn))
    # NaN and negative numbers are no scales: codes are then by what it should be.
    by = torch.where((found >= 0) & (found <= LARGEST_E4M3_CODE), scales.float(), low)
    of_codes = code_bounds(rows, by, NVFP4_FORMAT, arithmetic, scale)
    return (
        Part("scales", found, ends, _of_e4m3),
        Part("codes", order_of(unpack_e2m1(codes)), of_codes, _of_codes),
    )


def _of_e4m3(order: torch.Tensor) -> torch.Tensor:
    return codes_of(order, torch.float8_e4m3fn).double()


def _of_codes(order: torch.Tensor) -> torch.Tensor:
    return NVFP4_FORMAT.numbers_of(codes_of(order, torch.uint8))


def int4_ends(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> tuple[Part, ...]:
    """Return the parts of a row of int4: its scale without, its zero point, and its codes.

    A scale is (largest - least) / 15, at least 1e-6; the zero point is -least / scale and a code
    x / scale + zero point, both rounded to the nearest of 0 to 15.

    Args:
        rows: [rows, channels], any floating dtype.
        codes: uint8 [rows, channels / 2].
        scales: float32 [rows, 1].
        scale: what rows are divided by.
        arithmetic: any; float32 is allowed to all.
    """
    del arithmetic
    assert scales is not None  # noqa: S101  such a cache has them
    wide, u = rows.double() / scale, UNIT_ROUNDOFF["float32"]
    least, largest = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    exact = ((largest - least) / LARGEST_CODE).clamp_min(LEAST_SCALE)
    bits = _bits(scales.contiguous())
    steps = _step(exact * (1 - INT4_SCALE * u)), _step(exact * (1 + INT4_SCALE * u))
    zero_points = bits & ZERO_POINT
    place = wide / exact + zero_points
    slack = (INT4_STEP + INT4_CODE * u) * (wide / exact).abs() + INT4_CODE * u
    found = torch.stack([codes & ZERO_POINT, codes >> 4], dim=-1).flatten(1).int()
    return (
        Part("scales", bits & ~ZERO_POINT, steps, _of_bits),
        Part("zero points", zero_points, _nearest(-least / exact, INT4_CODE * u), _as_they_are),
        Part("codes", found, (_code(place - slack), _code(place + slack)), _as_they_are),
    )


def _step(scales: torch.Tensor) -> torch.Tensor:
    """Return the bits of scales in float32 without those of a zero point."""
    return _bits(scales.float()) & ~ZERO_POINT


def _of_bits(order: torch.Tensor) -> torch.Tensor:
    return order.int().view(torch.float32).double()


def _as_they_are(order: torch.Tensor) -> torch.Tensor:
    return order.double()


def _nearest(numbers: torch.Tensor, relative: float) -> Pair:
    slack = relative * (numbers.abs() + 1)
    return _code(numbers - slack), _code(numbers + slack)


def _code(numbers: torch.Tensor) -> torch.Tensor:
    """Round to the nearest code, halves up."""
    return torch.floor(numbers + 0.5).clamp(0, LARGEST_CODE).int()


def fp8_record_ends(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> tuple[Part, ...]:
    """Return the parts of a record of fp8_ds_mla: scales of tiles, codes, and rotary channels.

    Args:
        rows: [rows, 576], any floating dtype.
        codes: uint8 [rows, 656], see ``latent_records.py``.
        scales: None: they lie in the record.
        scale: what rows are divided by.
        arithmetic: its ``scales`` and ``quotients``.
    """
    del scales
    wide = rows.double() / scale
    parts = codes.split((COMPRESSED, 4 * COMPRESSED // FP8_TILE, 2 * ROTARY), dim=1)
    of_codes, of_scales, rotary = (each.contiguous() for each in parts)
    written = of_scales.view(torch.float32)
    low, high = scale_bounds(wide[:, :COMPRESSED], FP8_RECORD_FORMAT, arithmetic)
    by = torch.where((written > 0) & written.isfinite(), written, low)
    ends = code_bounds(wide[:, :COMPRESSED], by, FP8_RECORD_FORMAT, arithmetic)
    turned = _bits(wide[:, COMPRESSED:].to(torch.bfloat16))
    steps = _bits(written), (_bits(low), _bits(high))
    return (
        Part("scales", *steps, _of_bits),
        Part("codes", order_of(of_codes.view(torch.float8_e4m3fn)), ends, _of_e4m3),
        Part("rotary channels", _bits(rotary.view(torch.bfloat16)), (turned, turned), _of_16_bits),
    )


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return bits as integers, in order where numbers are not negative."""
    return numbers.view(torch.int32 if numbers.element_size() == 4 else torch.int16).int()  # noqa: PLR2004


def _of_16_bits(order: torch.Tensor) -> torch.Tensor:
    return order.to(torch.int16).view(torch.bfloat16).double()
