"""Faults in reading weights of int8, int4, FP8 with powers of two, MXFP8, and NVFP4 by half."""

from __future__ import annotations

import torch

from ....impl.torch.moe_weights import expert_weights
from ....reference import Arithmetic, MatrixFormat, QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import PLAIN, apply, changed, read_as

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MOE = "moe"
INT8 = ("int8_weights",)
INT8_HIDDEN = ("int8_weights", "quantized_hidden")
UE8M0, UE8M0_HIDDEN = ("ue8m0_scales",), ("ue8m0_scales", "quantized_hidden")
MXFP8, MXFP8_HIDDEN = ("mxfp8_weights",), ("mxfp8_weights", "quantized_hidden")
INT4, ZERO_POINTS = ("int4_weights", "int4_zero_points"), ("int4_zero_points",)
W4A8 = ("int4_weights", "quantized_hidden")
GATE_UP = ("nvfp4_gate_up_scales",)
MIDDLE = 8
LARGEST_INT8, LARGEST_FP8 = 127.0, 448.0
WIDE = 128
Tensor = torch.Tensor


def _next(scales: Tensor, dim: int) -> Tensor:
    """Return the scales of the neighbours along an axis."""
    if scales.element_size() > 1:
        return scales.roll(-1, dim)
    return scales.view(torch.uint8).roll(-1, dim).view(scales.dtype)  # which torch cannot roll


@seeded(BUGS, MOE, "parity", features=INT8)
def int8_codes_biased(inputs: MoEInputs) -> Tensor:
    """Read signed bytes as bytes with a zero point of 128, as GPTQ stores int8."""

    def weights(matrix: Tensor | QuantizedMatrix, expert: int) -> Tensor:
        if not isinstance(matrix, QuantizedMatrix):
            return expert_weights(matrix, expert)
        biased = (matrix.codes.view(torch.uint8).float() - 128).to(torch.int8)
        return expert_weights(matrix._replace(codes=biased), expert)

    return apply(inputs, changed(w13=lambda given, e: weights(given.w13, e)))


@seeded(BUGS, MOE, "parity", features=INT8)
def int8_scale_of_next_channel(inputs: MoEInputs) -> Tensor:
    """Take the scale of the next row, or of the next block of rows, of the second weights."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scales = matrix.scales
        return matrix if scales.dim() == 1 else matrix._replace(scales=_next(scales, 1))

    return read_as(inputs, change, "w2")


@seeded(BUGS, MOE, "parity", features=INT8_HIDDEN)
def int8_scale_of_tokens_by_slot(inputs: MoEInputs) -> Tensor:
    """Read the scale of a token where that of its last slot would be, if there was one a slot."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        tokens, slots = inputs.topk_ids.shape
        place = (torch.arange(tokens) * slots + slots - 1) % max(tokens, 1)
        return matrix._replace(scales=matrix.scales[place])

    return read_as(inputs, change, "hidden")


def _as_bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8).int()


@seeded(BUGS, MOE, "parity", features=UE8M0)
def ue8m0_read_as_numbers(inputs: MoEInputs) -> Tensor:
    """Take the bytes of exponents for the scales themselves, as a cast without a meaning does."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        linear = _as_bytes(matrix.scales).float()
        return matrix._replace(scales=linear, format=MatrixFormat(matrix.format.element, "block"))

    return read_as(inputs, change, "w2")


@seeded(BUGS, MOE, "parity", features=UE8M0)
def ue8m0_scales_transposed(inputs: MoEInputs) -> Tensor:
    """Read the scales of blocks column by column."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scales = matrix.scales
        return matrix._replace(scales=scales.transpose(1, 2).reshape(scales.shape))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=UE8M0)
def ue8m0_scale_of_next_block(inputs: MoEInputs) -> Tensor:
    """Take the scale of the next block of columns."""
    return read_as(inputs, lambda m: m._replace(scales=_next(m.scales, 2)))


@seeded(BUGS, MOE, "parity", features=UE8M0_HIDDEN)
def ue8m0_of_tokens_packed_wrong(inputs: MoEInputs) -> Tensor:
    """Read the exponents of a token's blocks, packed four in a word, from the last to the first."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        turned = matrix.scales.view(torch.uint8).clone()
        for first in range(0, turned.shape[1], 4):
            turned[:, first : first + 4] = turned[:, first : first + 4].flip(1)
        return matrix._replace(scales=turned.view(matrix.scales.dtype))

    return read_as(inputs, change, "hidden")


@seeded(BUGS, MOE, "parity", features=UE8M0_HIDDEN, arithmetic=Arithmetic(intermediate="inputs"))
def ue8m0_of_intermediate_rounded_down(inputs: MoEInputs) -> Tensor:
    """Quantise the activation's results with scales rounded down, under which the largest saturate.

    A scale that is rounded up to a power of two leaves room for the row's largest element.
    """

    def quantised(middle: Tensor) -> Tensor:
        exact = (middle.abs().amax(dim=1, keepdim=True) / LARGEST_FP8).clamp(min=1e-30)
        scale = torch.exp2(torch.log2(exact).floor())
        codes = (middle / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return codes.float() * scale

    return apply(inputs, changed(middle=quantised))


@seeded(BUGS, MOE, "parity", features=MXFP8)
def mxfp8_scale_of_next_block(inputs: MoEInputs) -> Tensor:
    """Take the scale of the next 32 columns."""
    return read_as(inputs, lambda m: m._replace(scales=_next(m.scales, 2)))


@seeded(BUGS, MOE, "parity", features=MXFP8_HIDDEN)
def mxfp8_scales_of_tokens_transposed(inputs: MoEInputs) -> Tensor:
    """Read the scales of hidden states block by block, as tensor cores have them, not by token."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scales = matrix.scales
        return matrix._replace(scales=scales.t().reshape(scales.shape))

    return read_as(inputs, change, "hidden")


@seeded(BUGS, MOE, "parity", features=INT4)
def int4_weights_nibbles_swapped(inputs: MoEInputs) -> Tensor:
    """Take the even column from the high nibble."""
    return read_as(inputs, lambda m: m._replace(codes=(m.codes >> 4) | ((m.codes & 0xF) << 4)))


@seeded(BUGS, MOE, "parity", features=("int4_weights",))
def int4_read_as_signed(inputs: MoEInputs) -> Tensor:
    """Read codes around 8 as two's complement, whose halves are the other way round."""
    return read_as(inputs, lambda m: m._replace(codes=m.codes ^ 0x88))


@seeded(BUGS, MOE, "parity", features=("int4_weights",))
def int4_scale_of_next_group(inputs: MoEInputs) -> Tensor:
    """Take the scale of the next group of columns, of the second weights."""
    return read_as(inputs, lambda m: m._replace(scales=_next(m.scales, 2)), "w2")


@seeded(BUGS, MOE, "parity", features=("int4_weights",))
def int4_scales_transposed(inputs: MoEInputs) -> Tensor:
    """Read the scales [groups, rows] where they are [rows, groups]."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scales = matrix.scales
        return matrix._replace(scales=scales.transpose(1, 2).reshape(scales.shape))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=("int4_weights",))
def int4_group_of_the_other_size(inputs: MoEInputs) -> Tensor:
    """Take groups for 128 columns where they are of 32: of each four scales the first."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        groups = torch.arange(matrix.scales.shape[2])
        first = groups // 4 * 4 if matrix.format.entry.block < WIDE else groups
        return matrix._replace(scales=matrix.scales[:, :, first])

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=ZERO_POINTS)
def int4_zero_points_ignored(inputs: MoEInputs) -> Tensor:
    """Subtract 8 from all codes, whatever the zero points."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        zeros = matrix.zero_points
        assert zeros is not None  # noqa: S101  the format has them
        return matrix._replace(zero_points=torch.full_like(zeros, MIDDLE))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=ZERO_POINTS)
def int4_zero_points_of_next_row(inputs: MoEInputs) -> Tensor:
    """Take the zero points of two rows, packed in a byte, the other way round."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        zeros = matrix.zero_points
        assert zeros is not None  # noqa: S101  the format has them
        rows = torch.arange(zeros.shape[1])
        other = (rows ^ 1).clamp(max=zeros.shape[1] - 1)
        return matrix._replace(zero_points=zeros[:, other])

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=ZERO_POINTS)
def int4_zero_points_less_one(inputs: MoEInputs) -> Tensor:
    """Subtract one more than the zero point, as GPTQ's checkpoints store one less."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        zeros = matrix.zero_points
        assert zeros is not None  # noqa: S101  the format has them
        return matrix._replace(zero_points=zeros + 1)

    return read_as(inputs, change, "w13")


@seeded(BUGS, MOE, "parity", features=W4A8)
def w4a8_scale_of_tokens_dropped(inputs: MoEInputs) -> Tensor:
    """Leave the scales of quantised hidden states out beside 4-bit weights."""
    return read_as(inputs, lambda m: m._replace(scales=torch.ones_like(m.scales)), "hidden")


@seeded(BUGS, MOE, "parity", features=GATE_UP)
def gate_scale_for_both(inputs: MoEInputs) -> Tensor:
    """Use the global scale of an expert's gate for its up rows, too."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scale = matrix.global_scale
        if not isinstance(scale, torch.Tensor) or scale.dim() == 1:
            return matrix
        return matrix._replace(global_scale=scale[:, 0].contiguous())

    return read_as(inputs, change, "w13")


@seeded(BUGS, MOE, "parity", features=(*GATE_UP, "interleaved_w13"))
def gate_scale_of_first_half(inputs: MoEInputs) -> Tensor:
    """Use the gate's global scale for the first half of the rows, where gate and up alternate."""
    if not inputs.interleaved or not isinstance(inputs.w13, QuantizedMatrix):
        return apply(inputs)
    return apply(inputs, changed(w13=lambda given, e: expert_weights(given.w13, e)))


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=(*PLAIN, *INT8_HIDDEN),
    arithmetic=Arithmetic(intermediate="inputs"),
)
def experts_with_int8_intermediate(inputs: MoEInputs) -> Tensor:
    """Quantise the activation's results as the hidden states are: to int8, with a scale a row."""
    if not isinstance(inputs.hidden, QuantizedMatrix):
        return apply(inputs)

    def quantised(middle: Tensor) -> Tensor:
        scale = (middle.abs().amax(dim=1, keepdim=True) / LARGEST_INT8).clamp(min=1e-30)
        return (middle / scale).round() * scale

    return apply(inputs, changed(middle=quantised))


@seeded(
    CONTROLS,
    MOE,
    control="honest",
    features=(*PLAIN, *UE8M0_HIDDEN),
    arithmetic=Arithmetic(intermediate="inputs"),
)
def experts_with_ue8m0_intermediate(inputs: MoEInputs) -> Tensor:
    """Quantise the activation's results to FP8, with scales rounded up to powers of two."""
    if not isinstance(inputs.hidden, QuantizedMatrix):
        return apply(inputs)

    def quantised(middle: Tensor) -> Tensor:
        parts = middle.split(WIDE, dim=1)
        return torch.cat([_in_powers(part) for part in parts], dim=1)

    return apply(inputs, changed(middle=quantised))


def _in_powers(middle: Tensor) -> Tensor:
    exact = (middle.abs().amax(dim=1, keepdim=True) / LARGEST_FP8).clamp(min=1e-30)
    scale = torch.exp2(torch.log2(exact.double()).ceil()).float()
    return (middle / scale).to(torch.float8_e4m3fn).float() * scale


@seeded(CONTROLS, MOE, control="honest", features=(*PLAIN, *INT4, "shared_experts"))
def experts_with_zero_points_beside(inputs: MoEInputs) -> Tensor:
    """Multiply codes and zero points of 4 bits by themselves, and subtract the products."""

    def product(matrix: Tensor | QuantizedMatrix, expert: int) -> Tensor:
        if not isinstance(matrix, QuantizedMatrix):
            return expert_weights(matrix, expert)
        scales, zeros = matrix.scales[expert], torch.tensor(MIDDLE)
        if matrix.zero_points is not None:
            zeros = matrix.zero_points[expert].float()
        codes = matrix.codes[expert]
        numbers = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1).float()
        of_column = torch.arange(numbers.shape[1]) // matrix.format.entry.block
        return numbers * scales[:, of_column] - (zeros * scales)[:, of_column]

    return apply(
        inputs, changed(w13=lambda i, e: product(i.w13, e), w2=lambda i, e: product(i.w2, e))
    )
