"""Faults in reading weights of int8: signs and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....impl.torch.moe_weights import expert_weights
from ....reference import Arithmetic, QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import PLAIN, apply, changed

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MOE = "moe"
INT8 = ("int8_weights",)
INT8_HIDDEN = ("int8_weights", "quantized_hidden")
LARGEST_INT8 = 127.0
Change = Callable[[QuantizedMatrix], QuantizedMatrix]
Tensor = torch.Tensor


def _read(inputs: MoEInputs, change: Change, *names: str) -> Tensor:
    """Apply the experts with the codes of these matrices read in another way."""
    given = {name: getattr(inputs, name) for name in names or ("w13", "w2")}
    read: dict[str, Any] = {
        name: change(matrix)
        for name, matrix in given.items()
        if isinstance(matrix, QuantizedMatrix)
    }
    return apply(replace(inputs, **read))


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

    return _read(inputs, change, "w2")


@seeded(BUGS, MOE, "parity", features=INT8_HIDDEN)
def int8_scale_of_tokens_by_slot(inputs: MoEInputs) -> Tensor:
    """Read the scale of a token where that of its last slot would be, if there was one a slot."""

    def change(matrix: QuantizedMatrix) -> QuantizedMatrix:
        tokens, slots = inputs.topk_ids.shape
        place = (torch.arange(tokens) * slots + slots - 1) % max(tokens, 1)
        return matrix._replace(scales=matrix.scales[place])

    return _read(inputs, change, "hidden")


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
