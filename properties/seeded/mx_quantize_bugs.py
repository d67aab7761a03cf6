"""Faults in quantising a matrix with e8m0 scales: of exponents, and of their order in tiles."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...impl import Implementation, Target
from ...reference import QuantizeProblem
from ...reference.tensors.quantize import QuantizeInputs
from .catalogue import SeededBug, seeded
from .quantize_bugs import Answer, amaxes, codes_of, spread

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
QUANTIZE, PARITY = "quantize", "quantize_parity"
FEATURES = ("e8m0_scales", "swizzled_scales")
BIAS, ROWS, COLUMNS = 127, 128, 4
"""What an e8m0 code exceeds its exponent by, and the rows and columns of a tile."""
Places = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def _only_e8m0(problem: QuantizeProblem, target: Target) -> bool | str:
    del target
    return problem.scale_format == "e8m0" or "scales are e8m0 codes"


_bug: Callable[[Callable[[QuantizeInputs], Answer]], Implementation] = seeded(
    BUGS, QUANTIZE, PARITY, supports=_only_e8m0, features=FEATURES
)


def _exponents(inputs: QuantizeInputs) -> torch.Tensor:
    """Return the exponent of each block's scale."""
    raw = amaxes(inputs).double().clamp(min=inputs.to.floor) / inputs.to.largest
    return raw.log2().ceil().int().clamp(min=-BIAS)


def _codes(inputs: QuantizeInputs, exponents: torch.Tensor) -> torch.Tensor:
    """Return the codes of elements by scales of these exponents."""
    by = spread(inputs, torch.ldexp(torch.ones(exponents.shape), exponents))
    return codes_of(inputs, inputs.x.float() / by)


def place_of(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Return where a scale lies among those of all tiles."""
    del down
    tile = row // ROWS * across + column // COLUMNS
    return tile * ROWS * COLUMNS + row % 32 * 16 + row % ROWS // 32 * COLUMNS + column % COLUMNS


def scales_laid_out(
    inputs: QuantizeInputs, exponents: torch.Tensor, place: Places = place_of, padding: int = 0
) -> torch.Tensor:
    """Return exponents as e8m0 codes, in the order that is asked for."""
    codes = (exponents + BIAS).to(torch.uint8)
    if inputs.scale_layout != "swizzled":
        return codes
    rows, columns = inputs.scale_shape
    row, column = (torch.arange(size) for size in codes.shape)
    at = place(row.unsqueeze(1), column, rows // ROWS, columns // COLUMNS)
    found = torch.full((rows * columns,), padding, dtype=torch.uint8)
    found[at.expand(codes.shape).flatten()] = codes.flatten()
    return found.view(rows, columns)


def _by(inputs: QuantizeInputs, exponents: torch.Tensor) -> Answer:
    return _codes(inputs, exponents), scales_laid_out(inputs, exponents)


def _placed(inputs: QuantizeInputs, place: Places) -> Answer:
    exponents = _exponents(inputs)
    return _codes(inputs, exponents), scales_laid_out(inputs, exponents, place)


@_bug
def mx_exponent_of_the_amax(inputs: QuantizeInputs) -> Answer:
    """Use the exponent of amax less that of the largest number, so that some elements saturate."""
    amax = amaxes(inputs).double().clamp(min=inputs.to.floor)
    largest = torch.tensor(inputs.to.largest).log2().floor()
    return _by(inputs, (amax.log2().floor() - largest).int().clamp(min=-BIAS))


@_bug
def mx_next_power_of_a_power(inputs: QuantizeInputs) -> Answer:
    """Round a scale that is a power of two up to the next one."""
    raw = amaxes(inputs).double().clamp(min=inputs.to.floor) / inputs.to.largest
    return _by(inputs, (raw.log2().floor().int() + 1).clamp(min=-BIAS))


@_bug
def mx_bias_of_128(inputs: QuantizeInputs) -> Answer:
    """Return codes with a bias of 128, and divide by the right scales."""
    exponents = _exponents(inputs)
    return _codes(inputs, exponents), scales_laid_out(inputs, exponents + 1)


@_bug
def mx_least_code_is_one(inputs: QuantizeInputs) -> Answer:
    """Use no scale below 2^-126, the least normal float32."""
    return _by(inputs, _exponents(inputs).clamp(min=1 - BIAS))


@_bug
def mx_half_a_group(inputs: QuantizeInputs) -> Answer:
    """Take amax from the first half of each row's last group."""
    exponents = _exponents(inputs)
    group = inputs.to.block[1] or inputs.x.shape[1]
    tail = inputs.x.shape[1] - (exponents.shape[1] - 1) * group
    if len(inputs.x) and inputs.to.block[0] == 1 and tail > 1:
        half = inputs.x[:, -tail : -(tail // 2)].double().abs().amax(1).clamp(min=inputs.to.floor)
        raw = half / inputs.to.largest
        exponents[:, -1] = raw.log2().ceil().int().clamp(min=-BIAS)
    return _by(inputs, exponents)


@_bug
def mx_floor_of_zeros_only(inputs: QuantizeInputs) -> Answer:
    """Apply the floor to blocks of zeros only."""
    amax = amaxes(inputs).double()
    raw = torch.where(amax == 0, inputs.to.floor, amax) / inputs.to.largest
    return _by(inputs, raw.log2().ceil().int().clamp(min=-BIAS))


@_bug
def mx_tiles_are_not_swizzled(inputs: QuantizeInputs) -> Answer:
    """Store the scales of a tile row after row."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        del down
        tile = row // ROWS * across + column // COLUMNS
        return tile * ROWS * COLUMNS + row % ROWS * COLUMNS + column % COLUMNS

    return _placed(inputs, place)


@_bug
def mx_rows_of_a_tile_exchanged(inputs: QuantizeInputs) -> Answer:
    """Take the quarter of a row in its tile by a remainder, and its place in it by a division."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        inner = row % ROWS
        return place_of(row - inner + inner % 4 * 32 + inner // 4, column, down, across)

    return _placed(inputs, place)


@_bug
def mx_tiles_column_by_column(inputs: QuantizeInputs) -> Answer:
    """Store tiles below one another, and not beside one another."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        del across
        tile = column // COLUMNS * down + row // ROWS
        inner = place_of(row % ROWS, column % COLUMNS, 1, 1)
        return tile * ROWS * COLUMNS + inner

    return _placed(inputs, place)


@_bug
def mx_second_tile_forgotten(inputs: QuantizeInputs) -> Answer:
    """Store the scales of rows behind the first 128 over those of the first ones."""

    def place(row: torch.Tensor, column: torch.Tensor, down: int, across: int) -> torch.Tensor:
        return place_of(row % ROWS, column, down, across)

    return _placed(inputs, place)


@_bug
def mx_padding_of_nan(inputs: QuantizeInputs) -> Answer:
    """Leave the code of NaN where tiles are padded, which a product multiplies by zeros."""
    exponents = _exponents(inputs)
    return _codes(inputs, exponents), scales_laid_out(inputs, exponents, padding=255)


@seeded(CONTROLS, QUANTIZE, control="honest", supports=_only_e8m0, features=FEATURES)
def honest_mx_quantiser(inputs: QuantizeInputs) -> Answer:
    """Divide by powers of two."""
    return _by(inputs, _exponents(inputs))
