"""Kernelproof's own Triton kernel for quantising the rows, or groups of rows, of a matrix."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from ...reference import QuantizeProblem
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from ..gpu.triton_interpreter import hasten, scalars_as_bounds
from ..targets.optional import require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .support import ceil_div, kernel, next_power_of_two, require_triton, unavailable

KERNEL = "kernelproof.impl.triton.kernels.quantize"
BUILD_MINUTES = 0.03
ELEMENTS, INTERPRETED_ELEMENTS = 2**10, 2**15
"""Elements a program: few keep a GPU busy, many spare the interpreter programs."""
OVERFLOWS = {
    torch.float8_e4m3fn: (464.0, 0x7F),
    torch.float8_e5m2: (math.nextafter(61440.0, 0.0), 0x7C),
}
"""The largest number that a cast without saturation rounds to one, and the code of those beyond."""


def _supports(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    if problem.scale is None and problem.block[0] != 1:
        return "a program computes the scale of one row, or of a group of it"
    return unavailable(target) or True


def _compile_key(problem: QuantizeProblem) -> Hashable:
    width = next_power_of_two(problem.block[1] or problem.num_channels)
    how = problem.saturate, problem.scale is None, problem.scale_format
    return problem.dtype, problem.codes, *how, width


def unwritten(
    inputs: QuantizeInputs | NormQuantizeInputs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return memory for the codes, and for the scales if they are to be computed."""
    x, to = inputs.x, inputs.to
    codes = torch.empty(x.shape, dtype=to.dtype, device=x.device)
    if inputs.scale is not None:
        return codes, None
    shape = to.scales_of((x.shape[0], x.shape[1]))
    scales = torch.empty_strided(shape, inputs.scale_strides, dtype=torch.float32, device=x.device)
    return codes, scales


@kernel(
    "quantize",
    name="triton-quantize",
    supports=_supports,
    features=("large_rows",),
    compile_key=_compile_key,
    build_minutes=BUILD_MINUTES,
)
def quantize(inputs: QuantizeInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise each row, or group of a row, in one launch; it divides as IEEE 754 says.

    Args:
        inputs: x [tokens, channels] of any floating dtype, whose rows may lie apart.

    Returns:
        The codes, and the scales if none was given.
    """
    require_triton()
    x, to = inputs.x, inputs.to
    tokens, channels = x.shape
    codes, computed = unwritten(inputs)
    if not tokens:
        return codes, computed
    group = to.block[1] or channels
    width = next_power_of_two(group)
    block = max(ELEMENTS // width, 1)
    if not x.is_cuda:
        hasten()  # the interpreter's own casts do not round to FP8
        block = min(max(INTERPRETED_ELEMENTS // width, 1), next_power_of_two(tokens))
    beyond, overflow = (0.0, 0) if to.saturate else OVERFLOWS[to.dtype]
    down, across = (0, 0) if computed is None else computed.stride()
    arguments: dict[str, Any] = {
        "x": x, "codes": codes, "scales": inputs.scale if computed is None else computed,
        "num_tokens": tokens, "num_channels": channels, "group": group, "x_token": x.stride(0),
        "scales_token": down, "scales_group": across, "floor": to.floor, "LARGEST": to.largest,
        "BEYOND": beyond, "OVERFLOW": overflow, "GIVEN": computed is None,
        "POWER": to.scale_format == "ue8m0", "BLOCK_TOKENS": block, "BLOCK_CHANNELS": width,
    }  # fmt: skip
    with scalars_as_bounds(x):
        require(KERNEL, "triton").quantize[(ceil_div(tokens, block), ceil_div(channels, group))](
            **arguments
        )
    return codes, computed
