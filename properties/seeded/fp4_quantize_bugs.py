"""Faults in quantising a matrix to e2m1 codes: of codes, of scales, and of their order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...impl import Implementation, Target
from ...reference import QuantizeProblem
from ...reference.tensors.quantize import QuantizeInputs
from .catalogue import SeededBug, seeded
from .mx_quantize_bugs import BIAS, COLUMNS, ROWS, Places, place_of, scales_laid_out
from .quantize_bugs import Answer, amaxes, spread

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
QUANTIZE, PARITY = "quantize", "quantize_parity"
FEATURES = ("e8m0_scales", "swizzled_scales", "e2m1_codes", "e4m3_scales", "power_rules")
LARGEST, MANTISSA_BITS, NAN = 126, 3, 0x7F
"""Code of the largest number in e4m3, bits of its mantissas, and its NaN."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(LARGEST + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""Positive numbers of both formats, by their codes."""


def _only(what: str, has: Callable[[QuantizeProblem], bool]) -> Callable[..., bool | str]:
    def supports(problem: QuantizeProblem, target: Target) -> bool | str:
        del target
        return (problem.codes == "e2m1" and has(problem)) or what

    return supports


_only_fp4 = _only("codes are e2m1", lambda _: True)
_only_nvfp4 = _only("scales are e4m3", lambda problem: problem.scale_format == "e4m3")
_only_mxfp4 = _only("scales are e8m0", lambda problem: problem.scale_format == "e8m0")
Bug = Callable[[Callable[[QuantizeInputs], Answer]], Implementation]
_bug: Bug = seeded(BUGS, QUANTIZE, PARITY, supports=_only_fp4, features=FEATURES)
_nv_bug: Bug = seeded(BUGS, QUANTIZE, PARITY, supports=_only_nvfp4, features=FEATURES)
_mx_bug: Bug = seeded(BUGS, QUANTIZE, PARITY, supports=_only_mxfp4, features=FEATURES)


def _nearest(wide: torch.Tensor, numbers: torch.Tensor, ties: str = "even") -> torch.Tensor:
    """Return the codes of the nearest of some numbers, which stand by their codes."""
    middles = (numbers[:-1] + numbers[1:]) / 2
    up, down = (torch.bucketize(wide.contiguous(), middles, right=right) for right in (True, False))
    return {"even": torch.where(up % 2 == 0, up, down), "away": up, "zero": down}[ties]


def _raw(inputs: QuantizeInputs) -> torch.Tensor:
    """Return max(amax, floor) of each block over the largest number and the global scale."""
    amax = amaxes(inputs).clamp(min=inputs.to.floor).double()
    return amax / (inputs.to.largest * inputs.factor)


def _power(inputs: QuantizeInputs, rule: str, halfway: float = 1.75) -> torch.Tensor:
    """Return scales in e8m0 by a rule."""
    if rule == "up":
        exponent = _raw(inputs).log2().ceil()
    else:
        mantissa, whole = torch.frexp(amaxes(inputs).clamp(min=inputs.to.floor).double())
        exponent = whole - 3 + (rule == "rounded") * (2 * mantissa >= halfway).double()
    return exponent.clamp(-BIAS, BIAS) + BIAS


def _scales(inputs: QuantizeInputs) -> torch.Tensor:
    """Return the code of each block's scale."""
    if inputs.to.scale_format == "e4m3":
        return _nearest(_raw(inputs), E4M3)
    return _power(inputs, inputs.to.power_rule).long()


def _steps(
    inputs: QuantizeInputs, scales: torch.Tensor, factor: float | None = None
) -> torch.Tensor:
    """Return what each element is divided by: scales of these codes, and the global scale."""
    if inputs.to.scale_format == "e4m3":
        steps = E4M3[scales.clamp(0, LARGEST)] * (inputs.factor if factor is None else factor)
    else:
        steps = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales - BIAS)
    # Both parts of a product of a float32 and four bits, for the scales are spread in float32.
    high = steps.float()
    wide = spread(inputs, high).double() + spread(inputs, (steps - high.double()).float()).double()
    return torch.where(wide == 0, torch.inf, wide)


def _numbers(
    inputs: QuantizeInputs, scales: torch.Tensor, factor: float | None = None
) -> torch.Tensor:
    """Return the matrix over its steps in float32."""
    return (inputs.x.double() / _steps(inputs, scales, factor)).float()


def _codes(numbers: torch.Tensor, ties: str = "even") -> torch.Tensor:
    """Return codes one by one."""
    return _nearest(numbers.double().abs(), E2M1, ties) + 8 * numbers.signbit()


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _laid_out(
    inputs: QuantizeInputs, scales: torch.Tensor, place: Places = place_of, padding: int = 0
) -> torch.Tensor:
    found = scales_laid_out(inputs, scales - BIAS, place, padding)
    return found.view(inputs.scale_dtype)


def _by(inputs: QuantizeInputs, scales: torch.Tensor) -> Answer:
    return _packed(_codes(_numbers(inputs, scales))), _laid_out(inputs, scales)


def _changed(
    inputs: QuantizeInputs, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Answer:
    """Return an answer whose codes one by one are changed, by numbers and codes."""
    scales = _scales(inputs)
    numbers = _numbers(inputs, scales)
    return _packed(change(numbers, _codes(numbers))), _laid_out(inputs, scales)


@_bug
def fp4_ties_away(inputs: QuantizeInputs) -> Answer:
    """Round ties away from zero."""
    return _changed(inputs, lambda numbers, _: _codes(numbers, "away"))


@_bug
def fp4_ties_to_zero(inputs: QuantizeInputs) -> Answer:
    """Round ties toward zero."""
    return _changed(inputs, lambda numbers, _: _codes(numbers, "zero"))


@_bug
def fp4_nibbles_exchanged(inputs: QuantizeInputs) -> Answer:
    """Put the even channel into the high nibble."""
    return _changed(inputs, lambda _, codes: codes.unflatten(1, (-1, 2)).flip(2).flatten(1))


@_bug
def fp4_no_saturation(inputs: QuantizeInputs) -> Answer:
    """Count one code further from 7 on, which is the sign."""
    return _changed(inputs, lambda numbers, codes: (codes + (numbers.abs() >= 7)) % 16)  # noqa: PLR2004


@_bug
def fp4_subnormal_code_lost(inputs: QuantizeInputs) -> Answer:
    """Flush a half, the subnormal number of e2m1, to zero."""
    return _changed(inputs, lambda _, codes: torch.where(codes % 8 == 1, codes - 1, codes))


@_bug
def fp4_sign_of_zero_lost(inputs: QuantizeInputs) -> Answer:
    """Write every zero as +0, which the bug does not declare."""
    return _changed(inputs, lambda _, codes: torch.where(codes == 8, 0, codes))  # noqa: PLR2004


@_bug
def fp4_rounded_to_16_bits_first(inputs: QuantizeInputs) -> Answer:
    """Round quotients to bfloat16 before they become codes."""
    return _changed(inputs, lambda numbers, _: _codes(numbers.bfloat16().float()))


@_bug
def fp4_last_byte_forgotten(inputs: QuantizeInputs) -> Answer:
    """Leave the last byte of rows 0 that are no multiple of 32 channels."""

    def change(_: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        if codes.shape[1] % 32:
            codes[:, -2:] = 0
        return codes

    return _changed(inputs, change)


@_bug
def fp4_pair_shares_a_scale(inputs: QuantizeInputs) -> Answer:
    """Divide both channels of a byte by the scale of the even one, whose group may have ended."""
    scales = _scales(inputs)
    steps = _steps(inputs, scales)[:, ::2].repeat_interleave(2, 1)
    return _packed(_codes((inputs.x.double() / steps).float())), _laid_out(inputs, scales)


@_bug
def fp4_rows_of_a_tile_exchanged(inputs: QuantizeInputs) -> Answer:
    """Exchange rows of a tile: the quarter is a remainder, the place in it a quotient."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        inner = row % ROWS
        return place_of(row - inner + inner % 4 * 32 + inner // 4, column, down, across)

    scales = _scales(inputs)
    return _by(inputs, scales)[0], _laid_out(inputs, scales, place)


@_bug
def fp4_columns_of_a_tile_exchanged(inputs: QuantizeInputs) -> Answer:
    """Store the four scales of a row of a tile from the last to the first."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        turned = column - column % COLUMNS + COLUMNS - 1 - column % COLUMNS
        return place_of(row, turned, down, across)

    scales = _scales(inputs)
    return _by(inputs, scales)[0], _laid_out(inputs, scales, place)


@_bug
def fp4_padding_of_ones(inputs: QuantizeInputs) -> Answer:
    """Leave bytes of 1 where tiles are padded."""
    scales = _scales(inputs)
    return _by(inputs, scales)[0], _laid_out(inputs, scales, padding=1)


@_nv_bug
def nvfp4_scale_cut_off(inputs: QuantizeInputs) -> Answer:
    """Round scales down to e4m3."""
    return _by(inputs, (torch.bucketize(_raw(inputs), E4M3, right=True) - 1).clamp(max=LARGEST))


@_nv_bug
def nvfp4_scale_ties_away(inputs: QuantizeInputs) -> Answer:
    """Round scales halfway between two numbers up."""
    return _by(inputs, _nearest(_raw(inputs), E4M3, "away"))


@_nv_bug
def nvfp4_global_scale_inverted(inputs: QuantizeInputs) -> Answer:
    """Multiply amax by the global scale."""
    return _by(inputs, _nearest(_raw(inputs) * inputs.factor**2, E4M3))


@_nv_bug
def nvfp4_codes_without_global_scale(inputs: QuantizeInputs) -> Answer:
    """Divide by the block's scale only."""
    scales = _scales(inputs)
    return _packed(_codes(_numbers(inputs, scales, 1.0))), _laid_out(inputs, scales)


@_nv_bug
def nvfp4_codes_by_the_unrounded_scale(inputs: QuantizeInputs) -> Answer:
    """Divide by scales before they are rounded to e4m3, wherever these are not 0."""
    scales = _scales(inputs)
    by = spread(inputs, (_raw(inputs) * inputs.factor).float())
    numbers = torch.where(_numbers(inputs, scales) == 0, 0.0, inputs.x.float() / by)
    return _packed(_codes(numbers.copysign(inputs.x))), _laid_out(inputs, scales)


@_nv_bug
def nvfp4_nan_of_zeros(inputs: QuantizeInputs) -> Answer:
    """Write NaN as the scale of a block of zeros."""
    scales = _scales(inputs)
    found = torch.where(amaxes(inputs) == 0, NAN, scales)
    return _by(inputs, scales)[0], _laid_out(inputs, found)


@_nv_bug
def nvfp4_scale_overflows(inputs: QuantizeInputs) -> Answer:
    """Write NaN as a scale that exceeds 464, instead of 448."""
    scales = _scales(inputs)
    found = torch.where(_raw(inputs) > 464, NAN, scales)  # noqa: PLR2004
    return _by(inputs, scales)[0], _laid_out(inputs, found)


@_nv_bug
def nvfp4_subnormal_scale_flushed(inputs: QuantizeInputs) -> Answer:
    """Flush scales below the least normal number of e4m3 to zero."""
    scales = _scales(inputs)
    return _by(inputs, torch.where(scales < 1 << MANTISSA_BITS, 0, scales))


@_nv_bug
def nvfp4_least_scale(inputs: QuantizeInputs) -> Answer:
    """Use no scale below the least subnormal number of e4m3."""
    return _by(inputs, _scales(inputs).clamp(min=1))


@_nv_bug
def nvfp4_scale_of_a_negative_zero(inputs: QuantizeInputs) -> Answer:
    """Write a scale of 0 as -0."""
    scales = _scales(inputs)
    found = torch.where(scales == 0, 0x80, scales)
    return _by(inputs, scales)[0], _laid_out(inputs, found)


@_mx_bug
def mxfp4_rounded_at_half(inputs: QuantizeInputs) -> Answer:
    """Round amax to a power of two, where a bit behind the point is kept."""
    rule = inputs.to.power_rule
    return _by(inputs, _power(inputs, rule, 1.5).long())


@_mx_bug
def mxfp4_always_down(inputs: QuantizeInputs) -> Answer:
    """Use the exponent of amax, whatever the rule."""
    return _by(inputs, _power(inputs, "down").long())


@_mx_bug
def mxfp4_least_code_is_one(inputs: QuantizeInputs) -> Answer:
    """Use no scale below 2^-126, the least normal float32."""
    return _by(inputs, _scales(inputs).clamp(min=1))


@seeded(CONTROLS, QUANTIZE, control="honest", supports=_only_fp4, features=FEATURES)
def honest_fp4_quantiser(inputs: QuantizeInputs) -> Answer:
    """Look codes and scales up in tables of numbers."""
    return _by(inputs, _scales(inputs))
