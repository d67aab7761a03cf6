"""Kernelproof's own Triton kernel for normalising rows and quantising what comes of it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ...reference import NormQuantizeProblem
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ..gpu.triton_interpreter import hasten, scalars_as_bounds
from ..targets.optional import require
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .quantize import unwritten
from .support import kernel, next_power_of_two, require_triton, unavailable

KERNEL = "kernelproof.impl.triton.kernels.norm_quantize"
BUILD_MINUTES = 0.03
WIDEST = 2**15
"""Channels of the widest row that a program holds."""


def _supports(problem: NormQuantizeProblem, target: Target) -> Refusal | str | bool:
    group = problem.block[1]
    why = first_reason(
        (group & (group - 1), "groups are a power of two"),
        (problem.num_channels > WIDEST, f"a row has at most {WIDEST} channels"),
    )
    return why or unavailable(target) or True


def _compile_key(problem: NormQuantizeProblem) -> Hashable:
    width = next_power_of_two(problem.num_channels)
    how = problem.residual, problem.scale is None, problem.scale_format, problem.block[1]
    return problem.dtype, *how, width


@kernel(
    "norm_and_quantize",
    name="triton-norm-quantize",
    supports=_supports,
    features=("large_rows",),
    compile_key=_compile_key,
    build_minutes=BUILD_MINUTES,
)
def norm_and_quantize(inputs: NormQuantizeInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalise and quantise a row a program; roots and divisions are those of IEEE 754.

    Args:
        inputs: x [tokens, channels] of any floating dtype, whose rows may lie apart; the residual
            is written over.

    Returns:
        The codes, and the scales if none was given.
    """
    require_triton()
    x, to, residual = inputs.x, inputs.to, inputs.residual
    tokens, channels = x.shape
    codes, computed = unwritten(inputs)
    if not tokens:
        return codes, computed
    group = next_power_of_two(to.block[1] or channels)
    if not x.is_cuda:
        hasten()  # the interpreter's own casts round neither to FP8 nor to bfloat16
    down, across = (0, 0) if computed is None else computed.stride()
    arguments: dict[str, Any] = {
        "x": x, "residual": x if residual is None else residual, "gamma": inputs.gamma,
        "codes": codes, "scales": inputs.scale if computed is None else computed,
        "num_channels": channels, "x_token": x.stride(0),
        "residual_token": 0 if residual is None else residual.stride(0), "scales_token": down,
        "scales_group": across, "offset": inputs.gamma_offset, "eps": inputs.eps,
        "floor": to.floor, "LARGEST": to.largest, "ADDED": residual is not None,
        "GIVEN": computed is None, "POWER": to.scale_format == "ue8m0", "GROUP": group,
        "BLOCK": max(next_power_of_two(channels), group),
    }  # fmt: skip
    with scalars_as_bounds(x):
        require(KERNEL, "triton").norm_and_quantize[(tokens,)](**arguments)
    return codes, computed
