"""Faults in quantising a matrix to FP8 or int8: of scales, of roundings, of rows and of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...reference import Arithmetic
from ...reference.tensors.quantize import QuantizeInputs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
QUANTIZE = "quantize"
PARITY = "quantize_parity"
SIGN, LEAST = 0x80, 0x7F
"""The sign bit of a code in FP8, and the bits of its magnitude."""
Answer = tuple[torch.Tensor, "torch.Tensor | None"]
Change = Callable[[torch.Tensor], torch.Tensor]
OVERFLOWS = {torch.float8_e4m3fn: (464.0, 0x7F), torch.float8_e5m2: (61439.99609375, 0x7C)}
"""The largest float32 that is rounded to a number, and the code of what is beyond it."""


def _blocks(inputs: QuantizeInputs) -> list[list[tuple[slice, slice]]]:
    """Return the rows and columns of each block, block after block."""
    tokens, channels = inputs.x.shape
    rows, columns = inputs.to.block[0] or max(tokens, 1), inputs.to.block[1] or channels
    starts = range(0, tokens, rows) if inputs.to.block[0] else range(1)
    return [
        [(slice(r, r + rows), slice(c, c + columns)) for c in range(0, channels, columns)]
        for r in starts
    ]


def amaxes(inputs: QuantizeInputs, of: Change = torch.abs) -> torch.Tensor:
    """Return the largest number that each block has after a change, block by block."""
    x = of(inputs.x.float())
    found = [
        [x[block].amax() if x[block].numel() else x.new_zeros(()) for block in row]
        for row in _blocks(inputs)
    ]
    shape = inputs.to.scales_of(tuple(x.shape))
    flat = [each for row in found for each in row]
    return torch.stack(flat).view(shape) if flat else x.new_zeros(shape)


def power_at_least(scales: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two that are at least these normal numbers."""
    return ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scales_of(inputs: QuantizeInputs, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scale of each block, of amaxes."""
    to = inputs.to
    amax = amaxes(inputs) if amax is None else amax
    scales = amax.clamp(min=to.floor) / to.largest
    return power_at_least(scales) if to.scale_format == "ue8m0" else scales


def spread(inputs: QuantizeInputs, scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element."""
    wide = torch.ones(inputs.x.shape)
    for row, places in zip(scales, _blocks(inputs), strict=False):
        for scale, place in zip(row, places, strict=True):
            wide[place] = scale
    return wide


def quotients(inputs: QuantizeInputs, scales: torch.Tensor | None) -> torch.Tensor:
    """Divide the matrix by the scales, or by the given one."""
    by = inputs.scale if scales is None else spread(inputs, scales)
    assert by is not None  # noqa: S101  it is given where none is computed
    return inputs.x.float() / by


def codes_of(inputs: QuantizeInputs, numbers: torch.Tensor) -> torch.Tensor:
    """Round quotients to codes."""
    to = inputs.to
    if to.dtype == torch.int8:
        return numbers.round().clamp(-128, 127).to(torch.int8)
    codes = numbers.clamp(-to.largest, to.largest).to(to.dtype)
    if not to.saturate:
        most, beyond = OVERFLOWS[to.dtype]
        code = torch.where(numbers < 0, beyond | SIGN, beyond).to(torch.uint8)
        codes = torch.where(numbers.abs() > most, code, codes.view(torch.uint8)).view(to.dtype)
    return codes


def laid_out(inputs: QuantizeInputs, scales: torch.Tensor) -> torch.Tensor:
    """Return scales as they are to lie."""
    shape = tuple(scales.shape)
    return torch.empty_strided(shape, inputs.scale_strides).copy_(scales)


def computed(inputs: QuantizeInputs) -> torch.Tensor | None:
    """Return the scales that a call computes; None where one is given."""
    return None if inputs.scale is not None else scales_of(inputs)


def answer(
    inputs: QuantizeInputs, scales: torch.Tensor | None, numbers: torch.Tensor | None = None
) -> Answer:
    """Return codes of quotients, and scales as they are to lie."""
    numbers = quotients(inputs, scales) if numbers is None else numbers
    return codes_of(inputs, numbers), None if scales is None else laid_out(inputs, scales)


def _nudged(codes: torch.Tensor, where: torch.Tensor, by: int) -> torch.Tensor:
    """Move the magnitude of some codes by a number of codes, except where none is there."""
    if codes.dtype == torch.int8:
        wide = codes.int()
        moved = wide + torch.where(wide < 0, -by, by)
        return torch.where(where & (moved.abs() <= LEAST), moved, wide).to(torch.int8)
    wide = codes.view(torch.uint8).int()
    size = (wide & LEAST) + by
    good = where & (size >= 0) & (size <= LEAST)
    return torch.where(good, size | (wide & SIGN), wide).to(torch.uint8).view(codes.dtype)


def _one_code(inputs: QuantizeInputs, where: torch.Tensor, by: int) -> Answer:
    codes, scales = answer(inputs, computed(inputs))
    return _nudged(codes, where, by), scales


def _numbers(inputs: QuantizeInputs) -> torch.Tensor:
    """Number the elements of the matrix."""
    return torch.arange(inputs.x.numel()).view(inputs.x.shape)


@seeded(BUGS, QUANTIZE, PARITY)
def first_code_lower(inputs: QuantizeInputs) -> Answer:
    """Return the first element's code one nearer to zero."""
    return _one_code(inputs, _numbers(inputs) == 0, -1)


@seeded(BUGS, QUANTIZE, PARITY)
def last_code_higher(inputs: QuantizeInputs) -> Answer:
    """Return the last element's code one further from zero."""
    return _one_code(inputs, _numbers(inputs) == inputs.x.numel() - 1, 1)


@seeded(BUGS, QUANTIZE, PARITY)
def a_code_of_each_hundred_lower(inputs: QuantizeInputs) -> Answer:
    """Return every 97th code one nearer to zero."""
    return _one_code(inputs, (_numbers(inputs) + 1) % 97 == 0, -1)


@seeded(BUGS, QUANTIZE, PARITY)
def largest_code_lower(inputs: QuantizeInputs) -> Answer:
    """Return the code of each block's largest magnitude one nearer to zero."""
    codes, scales = answer(inputs, computed(inputs))
    size = inputs.x.float().abs()
    if inputs.to.dtype == torch.int8:
        return _nudged(codes, codes.int().abs() == codes.int().abs().max(), -1), scales
    return _nudged(codes, size == spread(inputs, amaxes(inputs)), -1), scales


@seeded(BUGS, QUANTIZE, PARITY)
def ties_away_in_fp8(inputs: QuantizeInputs) -> Answer:
    """Round what lies halfway between two codes in FP8 away from zero."""
    scales = computed(inputs)
    numbers = quotients(inputs, scales)
    if inputs.to.dtype == torch.int8:
        return answer(inputs, scales, numbers)
    return answer(inputs, scales, torch.where(numbers == 0, numbers, numbers * (1 + 2.0**-23)))


@seeded(BUGS, QUANTIZE, PARITY)
def ties_away_in_int8(inputs: QuantizeInputs) -> Answer:
    """Round halves to int8 away from zero, and declare that they go to the even number."""
    scales = computed(inputs)
    numbers = quotients(inputs, scales)
    if inputs.to.dtype == torch.int8:
        numbers = (numbers.abs().double() + 0.5).floor().copysign(numbers).float()
    return answer(inputs, scales, numbers)


@seeded(BUGS, QUANTIZE, PARITY)
def int8_by_a_cast(inputs: QuantizeInputs) -> Answer:
    """Cut off what is behind the point, and declare that it is rounded."""
    scales = computed(inputs)
    numbers = quotients(inputs, scales)
    return answer(inputs, scales, numbers.trunc() if inputs.to.dtype == torch.int8 else numbers)


@seeded(BUGS, QUANTIZE, PARITY)
def cut_codes(inputs: QuantizeInputs) -> Answer:
    """Round each code in FP8 towards zero."""
    codes, scales = answer(inputs, computed(inputs))
    if inputs.to.dtype == torch.int8:
        return codes, scales
    numbers = quotients(inputs, scales)
    return _nudged(codes, codes.float().abs() > numbers.abs(), -1), scales


@seeded(BUGS, QUANTIZE, PARITY)
def quotient_in_16_bits(inputs: QuantizeInputs) -> Answer:
    """Round the quotient to bfloat16 before it is rounded to a code."""
    scales = computed(inputs)
    return answer(inputs, scales, quotients(inputs, scales).bfloat16().float())


@seeded(BUGS, QUANTIZE, PARITY)
def reciprocal_for_division(inputs: QuantizeInputs) -> Answer:
    """Multiply by the rounded reciprocal of the scale, and declare a division."""
    scales = computed(inputs)
    wide = inputs.scale if scales is None else spread(inputs, scales)
    assert wide is not None  # noqa: S101  it is given where none is computed
    numbers = inputs.x.float() * (1.0 / wide)
    return answer(inputs, scales, torch.where(numbers.isnan(), inputs.x.float(), numbers))


@seeded(BUGS, QUANTIZE, PARITY)
def scale_by_a_reciprocal(inputs: QuantizeInputs) -> Answer:
    """Multiply the amax by 1 / largest in float32, and declare a division."""
    if inputs.scale is not None:
        return answer(inputs, None)
    scales = amaxes(inputs).clamp(min=inputs.to.floor) * torch.tensor(1 / inputs.to.largest)
    return answer(inputs, power_at_least(scales) if inputs.to.scale_format == "ue8m0" else scales)


@seeded(BUGS, QUANTIZE, PARITY)
def scale_in_16_bits(inputs: QuantizeInputs) -> Answer:
    """Round each scale to bfloat16."""
    scales = computed(inputs)
    return answer(inputs, None if scales is None else scales.bfloat16().float())


@seeded(BUGS, QUANTIZE, PARITY)
def scale_one_unit_up(inputs: QuantizeInputs) -> Answer:
    """Return the last block's scale one unit in the last place larger."""
    scales = computed(inputs)
    if scales is None or not scales.numel():
        return answer(inputs, scales)
    scales[-1, -1] = scales[-1, -1].nextafter(torch.tensor(torch.inf))
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, PARITY)
def power_of_two_below(inputs: QuantizeInputs) -> Answer:
    """Round scales down to powers of two."""
    scales = computed(inputs)
    if scales is not None and inputs.to.scale_format == "ue8m0":
        exact = amaxes(inputs).clamp(min=inputs.to.floor) / inputs.to.largest
        scales = torch.where(exact == scales, scales, scales / 2)
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, PARITY)
def next_power_of_a_power(inputs: QuantizeInputs) -> Answer:
    """Round a scale that is a power of two up to the next one."""
    scales = computed(inputs)
    if scales is not None and inputs.to.scale_format == "ue8m0":
        exact = amaxes(inputs).clamp(min=inputs.to.floor) / inputs.to.largest
        scales = torch.where(exact == scales, scales * 2, scales)
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, PARITY)
def powers_ignored(inputs: QuantizeInputs) -> Answer:
    """Return scales that are no powers of two where these are asked for."""
    return answer(inputs, computed(replace(inputs, to=replace(inputs.to, scale_format="float32"))))


@seeded(BUGS, QUANTIZE, PARITY)
def floor_added(inputs: QuantizeInputs) -> Answer:
    """Add the floor to each amax."""
    if inputs.scale is not None:
        return answer(inputs, None)
    return answer(inputs, scales_of(inputs, amaxes(inputs) + inputs.to.floor))


@seeded(BUGS, QUANTIZE, PARITY)
def floor_of_scales(inputs: QuantizeInputs) -> Answer:
    """Apply the floor to the scale and not to the amax."""
    if inputs.scale is not None:
        return answer(inputs, None)
    scales = (amaxes(inputs) / inputs.to.largest).clamp(min=inputs.to.floor)
    return answer(inputs, power_at_least(scales) if inputs.to.scale_format == "ue8m0" else scales)


@seeded(BUGS, QUANTIZE, PARITY)
def scale_of_zeros_is_one(inputs: QuantizeInputs) -> Answer:
    """Use the scale 1 for blocks of zeros."""
    scales = computed(inputs)
    if scales is not None:
        scales = torch.where(amaxes(inputs) == 0, 1.0, scales)
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, PARITY)
def cut_group_of_a_row_wraps(inputs: QuantizeInputs) -> Answer:
    """Read a row's last group, which is cut, on into the next row."""
    scales, (rows, columns) = computed(inputs), inputs.to.block
    tokens, channels = inputs.x.shape
    rest = channels % columns if columns else 0
    if scales is not None and rows == 1 and rest and tokens > 1:
        beyond = inputs.x[1:, : columns - rest].float().abs().amax(1) / inputs.to.largest
        last = scales[:-1, -1]
        last.copy_(torch.maximum(last, beyond))
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, PARITY)
def usual_floor(inputs: QuantizeInputs) -> Answer:
    """Use 1e-10 as the floor, whatever is asked for."""
    return answer(inputs, computed(replace(inputs, to=replace(inputs.to, floor=1e-10))))


@seeded(BUGS, QUANTIZE, PARITY)
def largest_of_e4m3(inputs: QuantizeInputs) -> Answer:
    """Scale codes in e5m2 by the largest number of e4m3."""
    if inputs.scale is not None or inputs.to.dtype != torch.float8_e5m2:
        return answer(inputs, computed(inputs))
    return answer(
        inputs,
        scales_of(replace(inputs, to=replace(inputs.to, dtype=torch.float8_e4m3fn, saturate=True))),
    )


@seeded(BUGS, QUANTIZE, PARITY)
def int8_of_128(inputs: QuantizeInputs) -> Answer:
    """Divide an amax by 128 for int8."""
    scales = computed(inputs)
    if scales is None or inputs.to.dtype != torch.int8:
        return answer(inputs, scales)
    return answer(inputs, scales_of(inputs, amaxes(inputs).clamp(min=inputs.to.floor) * 127 / 128))


@seeded(BUGS, QUANTIZE, PARITY)
def overflow_to_nan(inputs: QuantizeInputs) -> Answer:
    """Let codes overflow where they are to saturate."""
    codes, scales = answer(inputs, computed(inputs))
    if inputs.to.dtype == torch.int8:
        return codes, scales
    free = replace(inputs, to=replace(inputs.to, saturate=False))
    return codes_of(free, quotients(inputs, scales)), scales


@seeded(BUGS, QUANTIZE, PARITY)
def always_saturating(inputs: QuantizeInputs) -> Answer:
    """Saturate where codes are to overflow."""
    return answer(replace(inputs, to=replace(inputs.to, saturate=True)), computed(inputs))


@seeded(BUGS, QUANTIZE, PARITY)
def overflow_at_the_largest(inputs: QuantizeInputs) -> Answer:
    """Let what exceeds the largest number overflow, also where it is rounded to it."""
    codes, scales = answer(inputs, computed(inputs))
    if inputs.to.saturate:
        return codes, scales
    numbers, beyond = quotients(inputs, scales), OVERFLOWS[inputs.to.dtype][1]
    code = torch.where(numbers < 0, beyond | SIGN, beyond).to(torch.uint8)
    exceeds = numbers.abs() > inputs.to.largest * (1 + 2.0**-20)
    return torch.where(exceeds, code, codes.view(torch.uint8)).view(codes.dtype), scales


@seeded(BUGS, QUANTIZE, PARITY)
def zeros_without_a_sign(inputs: QuantizeInputs) -> Answer:
    """Return the code of 0 for -0."""
    scales = computed(inputs)
    return answer(inputs, scales, quotients(inputs, scales) + 0.0)


@seeded(BUGS, QUANTIZE, PARITY)
def amax_of_positive_numbers(inputs: QuantizeInputs) -> Answer:
    """Look for the largest number, not the largest magnitude."""
    if inputs.scale is not None:
        return answer(inputs, None)
    return answer(inputs, scales_of(inputs, amaxes(inputs, torch.relu)))


@seeded(BUGS, QUANTIZE, PARITY)
def power_of_two_channels(inputs: QuantizeInputs) -> Answer:
    """Look for the amax in as many channels of a block as a power of two has."""
    scales = computed(inputs)
    if scales is None:
        return answer(inputs, None)
    columns = inputs.to.block[1] or inputs.x.shape[1]
    whole = 1 << (columns.bit_length() - 1)
    behind = torch.arange(inputs.x.shape[1]) % columns >= whole
    return answer(
        inputs, scales_of(inputs, amaxes(inputs, lambda x: x.abs().masked_fill(behind, 0)))
    )


@seeded(BUGS, QUANTIZE, PARITY)
def scale_of_the_next_group(inputs: QuantizeInputs) -> Answer:
    """Divide each group by the scale of the one behind it."""
    scales = computed(inputs)
    if scales is None:
        return answer(inputs, None)
    return answer(inputs, scales, quotients(inputs, scales.roll(-1, 1)))


@seeded(BUGS, QUANTIZE, PARITY)
def float16_subnormals_flushed(inputs: QuantizeInputs) -> Answer:
    """Treat subnormal float16 as zero."""
    x = inputs.x
    if x.dtype == torch.float16:
        x = torch.where(x.float().abs() < 2.0**-14, torch.zeros_like(x), x)
    changed = replace(inputs, x=x)
    return answer(changed, computed(changed))


@seeded(BUGS, QUANTIZE, PARITY)
def values_in_float16(inputs: QuantizeInputs) -> Answer:
    """Hold the matrix in float16."""
    changed = replace(inputs, x=inputs.x.half())
    return answer(changed, computed(changed))


@seeded(BUGS, QUANTIZE, PARITY)
def rows_without_a_stride(inputs: QuantizeInputs) -> Answer:
    """Read rows as if one lay right behind the other."""
    tokens, channels = inputs.x.shape
    changed = replace(inputs, x=inputs.x.as_strided((tokens, channels), (channels, 1)))
    return answer(changed, computed(changed))


@seeded(BUGS, QUANTIZE, PARITY)
def scales_row_by_row(inputs: QuantizeInputs) -> Answer:
    """Return scales row after row where they are to lie column after column."""
    return answer(replace(inputs, scale_layout="rows"), computed(inputs))


@seeded(BUGS, QUANTIZE, PARITY)
def columns_without_padding(inputs: QuantizeInputs) -> Answer:
    """Leave out the rows that columns of scales are padded with."""
    layout = "rows" if inputs.scale_layout == "rows" else "columns"
    return answer(replace(inputs, scale_layout=layout), computed(inputs))


@seeded(BUGS, QUANTIZE, PARITY)
def scales_in_float64(inputs: QuantizeInputs) -> Answer:
    """Return scales in float64."""
    codes, scales = answer(inputs, computed(inputs))
    return codes, None if scales is None else scales.double()


@seeded(BUGS, QUANTIZE, "quantize_not_finite")
def nan_for_a_tile(inputs: QuantizeInputs) -> Answer:
    """Make the scales of the four rows of a tile NaN where one of them holds a NaN."""
    scales = computed(inputs)
    if scales is None or inputs.to.block[0] != 1:
        return answer(inputs, scales)
    bad = inputs.x.float().isnan().any(1)
    for first in range(0, len(bad), 4):
        if bad[first : first + 4].any():
            scales[first : first + 4] = torch.nan
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, "quantize_not_finite")
def infinity_by_a_product(inputs: QuantizeInputs) -> Answer:
    """Leave out rows that are not in use by a product with 0, which infinity makes NaN."""
    scales = computed(inputs)
    if scales is None or inputs.to.block[0] != 1 or not len(inputs.x):
        return answer(inputs, scales)
    first = inputs.x[0].float()
    noise = (first * 0.0).sum()  # 0, unless a number is none
    scales[1:] = scales[1:] + noise
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, "quantize_not_finite")
def nan_in_a_neighbour(inputs: QuantizeInputs) -> Answer:
    """Return the code above one of NaN or infinity, in the row before, as the largest and more."""
    codes, scales = answer(inputs, computed(inputs))
    bad = (~inputs.x.isfinite()).roll(-1, 0)
    return torch.where(bad, LEAST, codes.view(torch.uint8)).to(torch.uint8).view(
        codes.dtype
    ), scales


@seeded(BUGS, QUANTIZE, "quantize_rows")
def rows_of_a_cut_tile(inputs: QuantizeInputs) -> Answer:
    """Divide a row alone in its tile of four in float16, where others are beside it in float32."""
    scales = computed(inputs)
    if len(inputs.x) % 4 != 1 or inputs.to.block[0] > 1:
        return answer(inputs, scales)
    numbers = quotients(inputs, scales)
    numbers[-1] = numbers[-1].bfloat16().float()
    return answer(inputs, scales, numbers)


_LEFT: dict[str, float] = {}


@seeded(BUGS, QUANTIZE, PARITY)
def amax_never_cleared(inputs: QuantizeInputs) -> Answer:
    """Take the largest magnitude of this tensor and of all before it."""
    scales = computed(inputs)
    if scales is None or inputs.to.block != (0, 0):
        return answer(inputs, scales)
    amax = amaxes(inputs)
    _LEFT["amax"] = max(_LEFT.get("amax", 0.0), float(amax.amax()))
    return answer(inputs, scales_of(inputs, amax.clamp(min=_LEFT["amax"])))


_SHAPES: dict[tuple[int, ...], torch.Tensor] = {}


@seeded(BUGS, QUANTIZE, "quantize_again")
def scales_of_an_earlier_call(inputs: QuantizeInputs) -> Answer:
    """Keep the scales of the last call in which there were more rows, and return these at first."""
    scales = computed(inputs)
    if scales is None or inputs.to.block[0] != 1:
        return answer(inputs, scales)
    channels = tuple(inputs.x.shape[1:]) + tuple(scales.shape[1:])
    kept = _SHAPES.get(channels)
    _SHAPES[channels] = scales
    if kept is not None and len(kept) > len(scales):
        return answer(inputs, kept[: len(scales)].clone())
    return answer(inputs, scales)


@seeded(BUGS, QUANTIZE, "integer_inputs_unchanged")
def magnitudes_in_place(inputs: QuantizeInputs) -> Answer:
    """Take the magnitudes in place."""
    found = answer(inputs, computed(inputs))
    inputs.x.abs_()
    return found


@seeded(BUGS, QUANTIZE, "integer_inputs_unchanged")
def reciprocal_in_place(inputs: QuantizeInputs) -> Answer:
    """Write the reciprocal of a given scale over it."""
    found = answer(inputs, computed(inputs))
    if inputs.scale is not None:
        inputs.scale.reciprocal_()
    return found


@seeded(BUGS, QUANTIZE, "slack_rows")
def row_behind_the_last(inputs: QuantizeInputs) -> Answer:
    """Look for the amax of the last blocks in one row more than there is, where memory goes on."""
    x = inputs.x
    room = x.untyped_storage().nbytes() // x.element_size()
    end = x.storage_offset() + len(x) * x.stride(0)
    if inputs.scale is not None or not len(x) or end + x.shape[1] > room:
        return answer(inputs, computed(inputs))
    behind = replace(inputs, x=x.as_strided((1, x.shape[1]), x.stride(), end))
    amax = amaxes(inputs)
    amax[-1] = torch.maximum(amax[-1], amaxes(behind)[0])
    return answer(inputs, scales_of(inputs, amax))


@seeded(CONTROLS, QUANTIZE, control="honest")
def honest_quantiser(inputs: QuantizeInputs) -> Answer:
    """Divide in float32."""
    return answer(inputs, computed(inputs))


@seeded(CONTROLS, QUANTIZE, control="honest", arithmetic=Arithmetic(quotients="once"))
def exact_quotients(inputs: QuantizeInputs) -> Answer:
    """Round the quotient once, to a code."""
    scales = computed(inputs)
    wide = inputs.x.double() / (
        inputs.scale.double()
        if inputs.scale is not None
        else spread(inputs, scales_of(inputs)).double()
    )
    near = wide.float()
    cut = torch.where(near.double().abs() > wide.abs(), near.nextafter(torch.zeros(())), near)
    # Rounded to odd: a float32 that has lost something is never halfway between two codes.
    odd = (cut.view(torch.int32) | 1).view(torch.float32)
    numbers = torch.where(near.isinf() | (near.double() == wide), near, odd)
    return answer(inputs, scales, numbers)


def _off(inputs: QuantizeInputs, numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Return quotients by numbers that are no powers of two with an error, by hash up or down."""
    up = (inputs.x.view(torch.int32 if inputs.x.dtype == torch.float32 else torch.int16) % 2) == 0
    return torch.where(up, numbers * (1 + by), numbers * (1 - by))


@seeded(CONTROLS, QUANTIZE, control="honest", arithmetic=Arithmetic(quotients="approximate"))
def approximate_quotients(inputs: QuantizeInputs) -> Answer:
    """Divide with an error of one unit in the last place, unless by a power of two."""
    scales = computed(inputs)
    by = (
        inputs.scale.expand(inputs.x.shape)
        if inputs.scale is not None
        else spread(inputs, scales_of(inputs))
    )
    numbers = quotients(inputs, scales)
    power = torch.frexp(by).mantissa == 0.5  # noqa: PLR2004
    return answer(inputs, scales, torch.where(power, numbers, _off(inputs, numbers, 2.0**-23)))


@seeded(CONTROLS, QUANTIZE, control="honest", arithmetic=Arithmetic(quotients="reciprocal"))
def reciprocals(inputs: QuantizeInputs) -> Answer:
    """Multiply by the rounded reciprocal of the scale where it has one."""
    scales = computed(inputs)
    by = inputs.scale if inputs.scale is not None else spread(inputs, scales_of(inputs))
    inverse = 1.0 / by
    numbers = inputs.x.float() * inverse
    return answer(inputs, scales, torch.where(inverse.isinf(), inputs.x.float() / by, numbers))


@seeded(
    CONTROLS,
    QUANTIZE,
    control="honest",
    arithmetic=Arithmetic(scales="reciprocal", powers="logarithm", quotients="approximate"),
)
def logarithms(inputs: QuantizeInputs) -> Answer:
    """Compute scales by a reciprocal, and powers of two by a logarithm in float32."""
    if inputs.scale is not None:
        return answer(inputs, None)
    raw = amaxes(inputs).clamp(min=inputs.to.floor) * torch.tensor(1 / inputs.to.largest)
    return answer(inputs, raw.log2().ceil().exp2() if inputs.to.scale_format == "ue8m0" else raw)


@seeded(
    CONTROLS,
    QUANTIZE,
    control="honest",
    arithmetic=Arithmetic(scales="approximate", quotients="inverse", ties="away"),
)
def inverses(inputs: QuantizeInputs) -> Answer:
    """Multiply by the largest number over amax, and round halves to int8 away from zero."""
    if inputs.scale is not None or inputs.to.scale_format == "ue8m0":
        numbers = quotients(inputs, scales := computed(inputs))
    else:
        amax = amaxes(inputs).clamp(min=inputs.to.floor)
        scales = amax / inputs.to.largest
        numbers = inputs.x.float() * spread(inputs, torch.full_like(amax, inputs.to.largest) / amax)
    if inputs.to.dtype == torch.int8:
        numbers = (numbers.abs().double() + 0.5).floor().copysign(numbers).float()
    return answer(inputs, scales, numbers)


@seeded(CONTROLS, QUANTIZE, control="honest", arithmetic=Arithmetic(ties="cut"))
def casts(inputs: QuantizeInputs) -> Answer:
    """Cut off what is behind the point in int8."""
    scales = computed(inputs)
    numbers = quotients(inputs, scales)
    return answer(inputs, scales, numbers.trunc() if inputs.to.dtype == torch.int8 else numbers)
