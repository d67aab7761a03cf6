"""What quantize is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..formats.quantizers import (
    CODE_DTYPES,
    Quantized,
    QuantizedFormat,
    codes_of,
    quantize,
)
from ..formats.scale_layouts import swizzle_scales_128x4
from ..problems.quantize import QuantizeProblem
from .allocation import Allocator
from .values import bell, bits, choose, stream

OUTLIER, OUTLIERS = 64.0, 61
"""Factor of an outlier, and every how many elements there is one."""
GROUP_OF_ZEROS = 32
"""Channels that are zero together, a multiple or a part of most groups."""
LEAST_UNIT = 6
"""Least power of two, negative, that scales of ties are: float16 holds these ties too."""
FACTORS = {
    "faint": {"float32": 2.0**-120, "bfloat16": 2.0**-120, "float16": 2.0**-20},
    "large": {"float32": 2.0**125, "bfloat16": 2.0**125, "float16": 2.0**13},
}
"""Factors of values below 4 that are below every floor or subnormal, and near the largest."""
TILE_ROWS, TILE_COLUMNS = 128, 4
"""Rows and columns of a tile of swizzled scales."""
E2M1_CODES = 8
"""Codes of e2m1 without a sign."""
SCALE_DTYPES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
"""Dtypes of scales by formats that are not float32."""
KINDS_OF_TIES, BESIDE = 4, 2
"""Kinds of values of ties, and those of them that are the next number below or above one."""


@dataclass(frozen=True, eq=False)
class QuantizeInputs:
    """Arguments of ``quantize``.

    Attributes:
        x: [T, N], the matrix; its rows may lie further apart.
        to: what it is quantised to: ``dtype``, ``block``, ``scale_format``, ``floor``,
            ``saturate``, ``power_rule``.
        scale: float32 [1], the given scale of the whole matrix; None: each block's own.
        global_scale: float32 [1], what multiplies scales in e4m3; None of other formats.
        scale_layout: how computed scales [rows, columns] of blocks lie: ``rows``, ``columns``,
            ``padded_columns``, whose columns lie a multiple of 4 scales apart, or ``swizzled``:
            see ``swizzle_scales_128x4``; what is added to whole tiles is 0.
        storages: flat buffers by field name, of which the tensors are views.
    """

    x: torch.Tensor
    to: QuantizedFormat
    scale: torch.Tensor | None = None
    scale_layout: str = "rows"
    global_scale: torch.Tensor | None = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the computed scales."""
        return SCALE_DTYPES.get(self.to.scale_format, torch.float32)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.to.codes_shape(tuple(self.x.shape))

    @property
    def factor(self) -> float:
        """The global scale, or 1."""
        return 1.0 if self.global_scale is None else self.global_scale.item()

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the computed scales."""
        down, across = self.to.scales_of(tuple(self.x.shape))
        if self.scale_layout != "swizzled":
            return down, across
        return -(-down // TILE_ROWS) * TILE_ROWS, -(-across // TILE_COLUMNS) * TILE_COLUMNS

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Strides of the computed scales."""
        down, across = self.scale_shape
        if self.scale_layout in ("rows", "swizzled"):
            return across, 1
        return 1, -(-down // 4) * 4 if self.scale_layout == "padded_columns" else down


def format_of(problem: QuantizeProblem) -> QuantizedFormat:
    """Return what a problem's matrix is quantised to."""
    return QuantizedFormat(
        CODE_DTYPES[problem.codes],
        problem.block,
        problem.scale_format,
        problem.floor,
        problem.saturate,
        problem.power_rule,
    )


def quantize_inputs(problem: QuantizeProblem, home: Allocator) -> QuantizeInputs:
    """Make the tensors of a call of ``quantize``."""
    to = format_of(problem)
    values = matrix_of(problem, home.device)
    tokens, channels = values.shape
    rows = home.empty("x", (tokens, channels + problem.spare_channels), values.dtype)
    x = rows[:, :channels]
    x.copy_(values)
    given = {"scale": problem.scale}
    if problem.scale_format == "e4m3":
        given["global_scale"] = problem.global_scale
    numbers = {
        name: home.place(name, torch.tensor([each], dtype=torch.float32))
        for name, each in given.items()
        if each is not None
    }
    return QuantizeInputs(
        x=x,
        to=to,
        **numbers,
        scale_layout=problem.scale_layout,
        storages=home.storages,
    )


def quantized(inputs: QuantizeInputs) -> Quantized:
    """Quantise the record's matrix, by definition."""
    found = quantize(inputs.x, inputs.to, scale=inputs.scale, global_scale=inputs.factor)
    if found.scales is None or inputs.scale_layout != "swizzled":
        return found
    scales = swizzle_scales_128x4(found.scales.view(torch.uint8))
    return found._replace(scales=scales.view(found.scales.dtype))


def matrix_of(problem: QuantizeProblem, device: torch.device) -> torch.Tensor:
    """Make the matrix [T, N] in its dtype."""
    to = format_of(problem)
    rows = torch.arange(problem.num_tokens, device=device)
    dtype: torch.dtype = getattr(torch, problem.dtype)
    if problem.regime == "ties":
        return ties(problem, to, rows).to(dtype)
    values = bell(stream(problem.seed, "x"), rows, problem.num_channels)
    hashes = bits(stream(problem.seed, "which"), rows, problem.num_channels)
    if problem.regime == "outliers":
        values = torch.where(hashes % OUTLIERS == 0, OUTLIER * values, values)
    if problem.regime == "zeros":
        groups = hashes[:, ::GROUP_OF_ZEROS].repeat_interleave(GROUP_OF_ZEROS, 1)
        is_zero = (groups[:, : problem.num_channels] % 3 != 0) | (rows % 3 == 1).unsqueeze(1)
        zeros = torch.where(hashes % 2 == 0, 0.0, -0.0)
        values = torch.where(is_zero, zeros, values)
    return (values * FACTORS.get(problem.regime, {}).get(problem.dtype, 1.0)).to(dtype)


def ties(problem: QuantizeProblem, to: QuantizedFormat, rows: torch.Tensor) -> torch.Tensor:
    """Make values halfway between two codes times a scale, or next to it, in the dtype."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    hashes = bits(stream(problem.seed, "x"), rows, problem.num_channels)
    most = 126 if to.dtype == torch.int8 else int(codes_to_largest(to)) - 1
    grid = to.numbers_of(codes_of(torch.arange(most + 2, dtype=torch.int16), to.dtype))
    grid = grid.to(rows.device)
    code = hashes % (most + 1)
    middle = (grid[code] + grid[code + 1]) / 2
    if problem.scale is not None:  # beyond the largest number, too: as far again as its neighbour
        step = grid[-1] - grid[-2]
        further = (bits(stream(problem.seed, "beyond"), rows, problem.num_channels) % 8).double()
        middle = torch.where(code == most, grid[-1] + further * step / 4, middle)
    unit = 2.0 ** -choose(problem.seed, "unit", 0, LEAST_UNIT + 1)
    by = unit * problem.global_scale if problem.scale is None else problem.scale
    values = (middle * by).to(dtype)
    which = (hashes >> 16) % KINDS_OF_TIES
    numbers = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    moved = numbers + torch.where(which < BESIDE, which * 2 - 1, 0).to(numbers.dtype)
    values = torch.where(numbers > 0, moved, numbers).view(dtype)
    most_finite = torch.finfo(dtype).max  # float16 holds few multiples of a large scale
    values = values.nan_to_num(nan=most_finite, posinf=most_finite)
    if problem.scale is None:  # one of the largest magnitude in each block: a power of two as scale
        down, across = to.blocks_of(tuple(values.shape))
        first, place = choose(problem.seed, "row", 0, down), choose(problem.seed, "at", 0, across)
        tie = 0.0  # of the scale, where that is e4m3
        if problem.scale_format == "e4m3" and choose(problem.seed, "tie", 0, 2):
            tie = (1 + 2 * choose(problem.seed, "tie", 1, 8)) / 16
        values[first::down, place::across] = to.largest * by * (1 + tie)
    return torch.where((hashes >> 24) % 2 == 0, values, -values)


def codes_to_largest(to: QuantizedFormat) -> int:
    """Return the number of positive codes up to the largest number's."""
    if to.is_fp4:
        return E2M1_CODES - 1
    return int(torch.tensor([to.largest]).to(to.dtype).view(torch.uint8))
