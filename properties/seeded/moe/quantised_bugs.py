"""Faults in reading quantised weights and hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference import QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import apply, read_as

BUGS: list[SeededBug] = []
MOE = "moe"
FP8, FP4 = ("fp8_weights",), ("nvfp4_weights", "mxfp4_weights")
HIDDEN = ("fp8_weights", "quantized_hidden")
NAN_CODE = 0x7F
Tensor = torch.Tensor


@seeded(BUGS, MOE, "parity", features=FP8)
def block_scales_transposed(inputs: MoEInputs) -> Tensor:
    """Read the scales of blocks column by column."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        scales = matrix.scales
        if matrix.format.scales != "block":
            return matrix
        turned = scales.transpose(1, 2).reshape(scales.shape)
        return matrix._replace(scales=turned)

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=FP8)
def scale_of_first_expert(inputs: MoEInputs) -> Tensor:
    """Use the first expert's scales for all."""
    return read_as(inputs, lambda m: m._replace(scales=m.scales[:1].expand_as(m.scales)))


@seeded(BUGS, MOE, "parity", features=FP8)
def scale_of_first_channel(inputs: MoEInputs) -> Tensor:
    """Take the scale of an expert's first channel for that of the expert."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        if matrix.format.scales != "channel":
            return matrix
        return matrix._replace(scales=matrix.scales[:, :1].expand_as(matrix.scales))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "nan_weights", features=(*FP8, "nan_codes"))
def nan_weight_read_as_number(inputs: MoEInputs) -> Tensor:
    """Read the codes of NaN as the largest number of e4m3."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        if matrix.codes.dtype != torch.float8_e4m3fn:
            return matrix
        codes = matrix.codes.view(torch.uint8)
        finite = codes.masked_fill((codes & NAN_CODE) == NAN_CODE, NAN_CODE - 1)
        return matrix._replace(codes=finite.view(matrix.codes.dtype))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=FP8)
def scale_inverted(inputs: MoEInputs) -> Tensor:
    """Divide by the scales of the second weights."""
    return read_as(inputs, lambda m: m._replace(scales=1 / m.scales), "w2")


@seeded(BUGS, MOE, "parity", features=HIDDEN)
def hidden_scale_of_first_token(inputs: MoEInputs) -> Tensor:
    """Use the first token's scales for all."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        many = matrix.scales.dim() > 0
        first = matrix.scales[:1].expand_as(matrix.scales) if many else matrix.scales
        return matrix._replace(scales=first)

    return read_as(inputs, change, "hidden")


@seeded(BUGS, MOE, "parity", features=HIDDEN)
def static_scale_does_not_saturate(inputs: MoEInputs) -> Tensor:
    """Ignore the scale of FP8 intermediates that is given, and what saturates under it."""
    return apply(replace(inputs, intermediate_scale=None))


@seeded(BUGS, MOE, "parity", features=FP4)
def weights_nibbles_swapped(inputs: MoEInputs) -> Tensor:
    """Take the even column from the high nibble."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        codes = matrix.codes
        return matrix._replace(codes=(codes >> 4) | ((codes & 0xF) << 4))

    return read_as(inputs, change)


@seeded(BUGS, MOE, "parity", features=("nvfp4_weights",))
def global_scale_of_weights_dropped(inputs: MoEInputs) -> Tensor:
    """Take the global scale of NVFP4 weights for 1."""
    return read_as(inputs, lambda m: m._replace(global_scale=1.0))


@seeded(BUGS, MOE, "parity", features=("mxfp4_weights",))
def exponent_bias_126(inputs: MoEInputs) -> Tensor:
    """Take 126 for the bias of e8m0 scales."""
    return read_as(inputs, lambda m: m._replace(scales=m.scales + 1))
