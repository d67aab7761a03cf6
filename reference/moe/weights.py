"""Matrices of an MoE call as codes and scales: what they hold, and how their rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..formats.int4_groups import check_zero_points
from ..formats.mx import E8M0
from ..formats.quantization import (
    MX_BLOCK,
    NVFP4_BLOCK,
    dequantize_e8m0,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
)
from ..scratch import Scratch
from ..validation import check_values, checked_number, listed
from .matrix_elements import POWERS, SCALE_BLOCK, SCALES, MatrixElement, fp8, int4, int8

__all__ = [
    "GATE_UP",
    "IN_BLOCKS",
    "MATRIX_ELEMENTS",
    "OF_128",
    "SCALES",
    "SCALE_BLOCK",
    "WEIGHT_FORMATS",
    "Matrix",
    "MatrixElement",
    "MatrixFormat",
    "QuantizedMatrix",
    "WeightFormat",
    "checked_matrix",
]

NUMBERS = 3 * 2**18
"""Elements of an expert's weights widened at once: few calls, and what a cache holds is multiplied
there."""
CODES = NUMBERS // 2
"""The same of codes, whose decoding has more tensors of that size."""
MATRIX_ELEMENTS = {
    "float8_e4m3fn": fp8(torch.float8_e4m3fn),
    "float8_e5m2": fp8(torch.float8_e5m2),
    "nvfp4": MatrixElement(
        torch.uint8, quantize_nvfp4, dequantize_nvfp4, packed=2, block=NVFP4_BLOCK,
        has_global_scale=True,
    ),
    "mxfp4": MatrixElement(
        torch.uint8,
        lambda values, _: quantize_mxfp4(values),
        lambda codes, scales, _: dequantize_mxfp4(codes, scales),
        packed=2, block=MX_BLOCK,
    ),
    "mxfp8": MatrixElement(
        torch.float8_e4m3fn,
        lambda values, _: quantize_mxfp8(values),
        lambda codes, scales, _: dequantize_mxfp8(codes, scales),
        block=MX_BLOCK,
    ),
    "int8": int8(),
    "int4_g32": int4(32),
    "int4_g128": int4(128),
    "int4_zp_g32": int4(32, zero_points=True),
    "int4_zp_g128": int4(128, zero_points=True),
}  # fmt: skip
"""Every element that the codes of a matrix may have, by name."""
TABLE = "MATRIX_ELEMENTS in kernelproof/reference/moe/weights.py"


@dataclass(frozen=True)
class MatrixFormat:
    """How to read a quantised matrix [..., rows, columns], whose columns a product sums over.

    Attributes:
        element: ``"float8_e4m3fn"``, ``"float8_e5m2"``, ``"nvfp4"`` (e2m1, an e4m3 scale for 16
            columns), ``"mxfp4"`` (e2m1, an e8m0 scale for 32), ``"mxfp8"`` (e4m3, the same),
            ``"int8"``, ``"int4_g32"`` or ``"int4_g128"`` (4 bits around 8, a scale for 32 or 128
            columns), ``"int4_zp_g32"`` or ``"int4_zp_g128"`` (around a zero point for as many).
        scales: the scales of FP8 and int8: ``"tensor"`` (one; one an expert for weights),
            ``"channel"`` (one a row: an output channel, or a token) or ``"block"`` (one for 128
            columns of a token, or for 128 x 128 of a weight); of FP8 also ``"block_ue8m0"``, the
            same as e8m0 bytes, powers of two (DeepGEMM; DeepSeek-V3.1). Empty for the block
            formats.

    Raises:
        ValueError: an unknown element, or scales that it does not have.
    """

    element: str
    scales: str = ""

    def __post_init__(self) -> None:
        """Refuse what no matrix is."""
        if self.element not in tuple(MATRIX_ELEMENTS):
            known = ", ".join(MATRIX_ELEMENTS)
            message = f"element is {self.element!r}; it must be one of {known} ({TABLE})"
            raise ValueError(message)
        allowed = self.entry.scales
        if self.scales not in allowed:
            message = f"scales is {self.scales!r}; {self.element} may have {listed(allowed)}"
            raise ValueError(message)

    @property
    def entry(self) -> MatrixElement:
        """The element's entry in the table of matrix elements."""
        return MATRIX_ELEMENTS[self.element]

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return self.entry.dtype

    @property
    def packed(self) -> int:
        """Columns in one code's byte."""
        return self.entry.packed

    @property
    def multiple(self) -> int:
        """What the number of columns is a multiple of."""
        return self.packed if self.entry.short else max(self.entry.block, 1)

    @property
    def in_blocks(self) -> bool:
        """Whether a scale is one for 128 columns of a token, or for 128 x 128 of a weight."""
        return self.scales in ("block", POWERS)

    @property
    def powers(self) -> bool:
        """Whether these scales are powers of two, as bytes of their exponents."""
        return self.scales == POWERS


class WeightFormat(NamedTuple):
    """What a problem's ``quantized`` stands for.

    Attributes:
        weights, hidden: formats of weights, and of hidden states that are quantised too.
        feature: optional feature that an implementation names to be given such weights.
    """

    weights: MatrixFormat
    hidden: MatrixFormat
    feature: str


_FP8 = {f"fp8_{scales}": MatrixFormat("float8_e4m3fn", scales) for scales in SCALES}
_INT8 = {scales: MatrixFormat("int8", scales) for scales in SCALES}
_NVFP4, _MXFP4, _MXFP8 = (MatrixFormat(element) for element in ("nvfp4", "mxfp4", "mxfp8"))
_UE8M0 = MatrixFormat("float8_e4m3fn", POWERS)
GATE_UP = "nvfp4_gate_up_scales"
"""Feature of global scales of gate and up apart."""
WEIGHT_FORMATS = {
    **{name: WeightFormat(form, form, "fp8_weights") for name, form in _FP8.items()},
    "nvfp4": WeightFormat(_NVFP4, _NVFP4, "nvfp4_weights"),
    "mxfp4": WeightFormat(_MXFP4, _MXFP8, "mxfp4_weights"),
    "int8_tensor": WeightFormat(_INT8["tensor"], _INT8["channel"], "int8_weights"),
    "int8_channel": WeightFormat(_INT8["channel"], _INT8["channel"], "int8_weights"),
    "int8_block": WeightFormat(_INT8["block"], _INT8["block"], "int8_weights"),
    "fp8_block_ue8m0": WeightFormat(_UE8M0, _UE8M0, "ue8m0_scales"),
    "mxfp8": WeightFormat(_MXFP8, _MXFP8, "mxfp8_weights"),
    "int4_g32": WeightFormat(MatrixFormat("int4_g32"), _INT8["channel"], "int4_weights"),
    "int4_g128": WeightFormat(MatrixFormat("int4_g128"), _FP8["fp8_channel"], "int4_weights"),
    "int4_zp_g32": WeightFormat(MatrixFormat("int4_zp_g32"), _INT8["channel"], "int4_zero_points"),
    "int4_zp_g128": WeightFormat(
        MatrixFormat("int4_zp_g128"), _FP8["fp8_channel"], "int4_zero_points"
    ),
    "nvfp4_gate_up": WeightFormat(_NVFP4, _NVFP4, GATE_UP),
}
"""Quantised weights of problems by name: FP8 with scales of a tensor, ..., and block formats.

Hidden states in int8 have a scale a token, or one for 128 columns where weights have blocks; beside
int4 they are int8 (groups of 32, as vLLM's w4a8 int8) or FP8 (of 128, as its CUTLASS w4a8), with a
scale a token. ``nvfp4_gate_up`` has two global scales for each expert's w13, as checkpoints have
them whose gate and up were quantised apart."""
IN_BLOCKS = tuple(name for name, form in WEIGHT_FORMATS.items() if form.weights.in_blocks)
"""Those whose scales are of 128 x 128 weights."""
OF_128 = (
    *IN_BLOCKS,
    *(name for name, form in WEIGHT_FORMATS.items() if form.weights.entry.block == SCALE_BLOCK),
)
"""Those whose scales are of 128 columns: small matrices have one of them."""


class QuantizedMatrix(NamedTuple):
    """Weights [experts, rows, columns] or hidden states [tokens, columns] as codes.

    Attributes:
        codes: the codes, of the format's dtype; half as many bytes as columns for nvfp4, mxfp4 and
            int4, the even column in the low nibble.
        scales: floating for FP8 and int8: ``"tensor"``: [experts], or [] for hidden states;
            ``"channel"``: [experts, rows] or [tokens]; ``"block"``: [experts, rows / 128,
            columns / 128] or [tokens, columns / 128], rounded up. Block formats: e4m3
            [..., columns / 16] or e8m0 [..., columns / 32], in linear order; int4: floating
            [..., columns / group], rounded up; ``"block_ue8m0"``: e8m0, as uint8 or float8_e8m0fnu.
        format: how to read them.
        global_scale: scale of a whole nvfp4 matrix: a float, or a tensor [experts]; it multiplies.
            For a w13 also [experts, 2]: gate's and up's, wherever their rows are.
        zero_points: zero points of int4, where it has any: uint8, one for each scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: MatrixFormat
    global_scale: float | torch.Tensor = 1.0
    zero_points: torch.Tensor | None = None


class Matrix(NamedTuple):
    """A matrix whose format, dtypes and shapes agree.

    Attributes:
        values: numbers, or codes.
        columns: numbers in a row.
        quantized: how to read codes; None for numbers.
        interleaved: whether gate and up rows alternate.
    """

    values: torch.Tensor
    columns: int
    quantized: QuantizedMatrix | None
    interleaved: bool = False

    @property
    def element(self) -> str:
        """The format of its elements."""
        if self.quantized:
            return self.quantized.format.element
        return str(self.values.dtype).removeprefix("torch.")

    @property
    def rounding(self) -> str:
        """What is quantised as this is loses: its entry in ``roundings.SCALED``, or its element."""
        powers = self.quantized is not None and self.quantized.format.powers
        return f"{self.element}_ue8m0" if powers else self.element

    @property
    def step(self) -> int:
        """Rows of an expert's weights that are widened at once; of codes a multiple of 128."""
        if self.quantized:
            return max(1, CODES // self.columns // SCALE_BLOCK) * SCALE_BLOCK
        return max(1, min(NUMBERS // self.columns, self.values.shape[1]))

    def blocks(self, expert: int, dtype: torch.dtype, scratch: Scratch) -> Iterator[torch.Tensor]:
        """Return the numbers of an expert's weights, ``step`` rows at a time.

        They may lie in the scratch memory, until the next are read.
        """
        weights, step = self.values[expert], self.step
        if self.quantized is None:
            wide = scratch.take("rows", (step, self.columns), dtype, weights.device)
            for numbers in weights.split(step):
                yield wide[: len(numbers)].copy_(numbers)
        else:
            for start in range(0, len(weights), step):
                yield self._decoded(self.quantized, expert, start, start + step).to(dtype)

    def weights(self, expert: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the numbers [rows, columns] of an expert's weights."""
        if self.quantized is None:
            return self.values[expert].to(dtype)
        return self._decoded(self.quantized, expert, 0, self.values.shape[1]).to(dtype)

    def _decoded(self, given: QuantizedMatrix, expert: int, start: int, stop: int) -> torch.Tensor:
        """Decode rows; start is a multiple of 128, so that it cuts no block of scales."""
        codes = self.values[expert, start:stop]
        form, scales = given.format, _numbers(given, expert)
        if form.scales == "channel":
            scales = scales[start:stop].unsqueeze(-1)
        elif form.in_blocks:
            scales = _spread(scales[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)], 0, len(codes))
            scales = _spread(scales, 1, self.columns)
        elif form.entry.block:
            scales = scales[start:stop]
        return form.entry.decode(codes, scales, self._third(given, expert, start, stop))

    def _third(
        self, given: QuantizedMatrix, expert: int, start: int, stop: int
    ) -> float | torch.Tensor:
        """Return the zero points or the global scale of rows of an expert, those of w13 by half."""
        if given.zero_points is not None:
            return given.zero_points[expert, start:stop]
        scale = given.global_scale
        if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
            return scale
        if scale.dim() == 1:
            return scale[expert]
        rows = torch.arange(self.values.shape[1], device=scale.device)
        half = rows % 2 if self.interleaved else rows // -(-len(rows) // 2)
        return scale[expert][half[start:stop]].unsqueeze(1)

    def tokens(self, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers [rows, columns] of these tokens' hidden states."""
        codes = self.values[index]
        if self.quantized is None:
            return codes.to(dtype)
        form = self.quantized.format
        scales = _numbers(self.quantized, None if form.scales == "tensor" else index)
        if form.scales == "channel":
            scales = scales.unsqueeze(-1)
        elif form.in_blocks:
            scales = _spread(scales, 1, self.columns)
        return form.entry.decode(codes, scales, self.quantized.global_scale).to(dtype)


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Repeat each scale for the 128 elements that it belongs to, the last one for what is left."""
    return scales.repeat_interleave(SCALE_BLOCK, dim=dim).narrow(dim, 0, size)


def _numbers(matrix: QuantizedMatrix, index: int | torch.Tensor | None) -> torch.Tensor:
    """Return scales at an index of the first axis: those of FP8 that are powers of two, decoded."""
    # As bytes: torch does not index their dtype everywhere.
    scales = matrix.scales.view(torch.uint8) if matrix.scales.dtype == E8M0 else matrix.scales
    chosen = scales if index is None else scales[index]
    return dequantize_e8m0(chosen) if matrix.format.powers else chosen


def checked_matrix(
    name: str,
    given: torch.Tensor | QuantizedMatrix,
    axes: str,
    *,
    interleaved: bool = False,
) -> Matrix:
    """Bring a matrix and its format together.

    Args:
        name: the name of the argument.
        given: numbers, or codes with their scales.
        axes: ``"experts rows columns"`` or ``"tokens columns"``, in words for the message.
        interleaved: the interleaved of a w13 whose gate and up rows alternate.

    Raises:
        ValueError: bytes that do not say what they hold, a dtype that is not the format's, or
            scales of another shape; the argument is named.
    """
    values = given.codes if isinstance(given, QuantizedMatrix) else given
    names = axes.split()
    if not isinstance(values, torch.Tensor) or values.dim() != len(names):
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        message = f"{name} must be a tensor [{', '.join(names)}], not {found}"
        raise ValueError(message)
    check_values(name, values)
    if 0 in values.shape[1:]:
        message = f"{name} is empty: its shape is {list(values.shape)}"
        raise ValueError(message)
    if not isinstance(given, QuantizedMatrix):
        if not values.dtype.is_floating_point:
            message = (
                f"{name} is {values.dtype}, which does not say what it holds: give a "
                "QuantizedMatrix(codes, scales, MatrixFormat(...))"
            )
            raise ValueError(message)
        return Matrix(values, values.shape[-1], None)
    if not isinstance(given.format, MatrixFormat):
        message = f"{name}.format is {given.format!r}; it must be a MatrixFormat"
        raise ValueError(message)
    if not isinstance(given.scales, torch.Tensor):
        message = f"{name}.scales must be a tensor, not {type(given.scales).__name__}"
        raise ValueError(message)
    check_values(f"{name}.scales", given.scales)
    if not isinstance(given.global_scale, torch.Tensor):
        checked_number(f"{name}.global_scale", given.global_scale)
    if values.dtype != given.format.dtype:
        message = f"{name}.codes is {values.dtype}; {given.format} has {given.format.dtype}"
        raise ValueError(message)
    columns = values.shape[-1] * given.format.packed
    _check_scales(name, given, columns)
    return Matrix(values, columns, given, interleaved)


def _check_scales(name: str, given: QuantizedMatrix, columns: int) -> None:
    shape, form = list(given.codes.shape), given.format
    weights = len(shape) > len(("tokens", "columns"))
    block = form.entry.block
    if block:
        if columns % block and not form.entry.short:
            message = f"{name} has {columns} columns; {form.element} needs a multiple of {block}"
            raise ValueError(message)
        wanted = [*shape[:-1], -(-columns // block)]
    elif form.scales == "tensor":
        wanted = shape[:-2]
    elif form.scales == "channel":
        wanted = shape[:-1]
    else:
        blocks = -(-columns // SCALE_BLOCK)
        wanted = [shape[0], -(-shape[1] // SCALE_BLOCK), blocks] if weights else [shape[0], blocks]
    if list(given.scales.shape) != wanted:
        message = f"{name}.scales has shape {list(given.scales.shape)}; {form} needs {wanted}"
        raise ValueError(message)
    scale = given.global_scale
    allowed = [shape[:1], [shape[0], 2]] if weights and not shape[1] % 2 else [shape[:1]]
    one_each = weights and isinstance(scale, torch.Tensor) and list(scale.shape) in allowed
    if isinstance(scale, torch.Tensor) and scale.numel() != 1 and not one_each:
        each = f", [{shape[0]}], or of a w13 [{shape[0]}, 2]" if weights else ""
        message = f"{name}.global_scale has shape {list(scale.shape)}; give one number{each}"
        raise ValueError(message)
    _check_contents(name, given)


def _check_contents(name: str, given: QuantizedMatrix) -> None:
    """Check that scales are bytes where the format has them, and that there are zero points."""
    form = given.format
    found, is_byte = given.scales.dtype, given.scales.dtype in (torch.uint8, E8M0)
    if form.powers and not is_byte:
        message = f"{name}.scales is {found}; {form} has e8m0 bytes: uint8 or {E8M0}"
        raise ValueError(message)
    if form.scales in SCALES and is_byte:
        message = f"{name}.scales is {found}; {form} has numbers, e8m0 bytes are {POWERS!r} of FP8"
        raise ValueError(message)
    if form.entry.has_zero_points != (given.zero_points is not None):
        needed = "needs them" if form.entry.has_zero_points else "has none"
        message = f"{name}.zero_points: {form} {needed}"
        raise ValueError(message)
    if given.zero_points is not None:
        check_zero_points(f"{name}.zero_points", given.zero_points, given.scales)
