"""Weights of 4 and 8 bits as ``fused_moe_kernel_gptq_awq`` reads them beside numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from ....reference import Arithmetic, MoEProblem, QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ..vllm_moe import ROUNDED

GROUP = 128
"""Columns that share a scale in blocks of 128 by 128."""
MIDDLE = 128
"""The zero point of codes of 8 bits without one."""
READ_BEHIND = 64
"""Bytes that the kernel may read behind the last row: the columns of a tile are not masked."""
WEIGHTS = ("int4_g32", "int4_g128", "int4_zp_g32", "int4_zp_g128", "int8_block")
FEATURES = ("expert_parallel", "weights_on_input", "int4_weights", "int4_zero_points",
            "int8_weights")  # fmt: skip
GROUPED: Arithmetic = replace(ROUNDED, dequantized="inputs")


def not_grouped(problem: MoEProblem) -> str | None:
    """Return why weights are none that this kernel takes; None if they are."""
    taken = problem.quantized in WEIGHTS
    return None if taken else "weights are int4 in groups, or int8 in blocks"


def grouped(inputs: MoEInputs) -> tuple[MoEInputs, dict[str, object]]:
    """Return a call with its weights in the kernel's layout, and the launcher's flags."""
    form = cast("QuantizedMatrix", inputs.w13).format
    short = form.dtype != torch.int8
    flags: dict[str, object] = {
        "use_int4_w4a16": short,
        "use_int8_w8a16": not short,
        "block_shape": [0, form.entry.block if short else GROUP],
    }
    w13, w2 = (_packed(cast("QuantizedMatrix", each)) for each in (inputs.w13, inputs.w2))
    return replace(inputs, w13=w13, w2=w2), flags


def _packed(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return codes in bytes, a scale for each row and group, and zero points as they are packed."""
    codes, scales, zeros = matrix.codes, matrix.scales, matrix.zero_points
    experts, rows, _ = codes.shape
    if codes.dtype == torch.int8:
        scales = scales.repeat_interleave(GROUP, dim=1)[:, :rows]
        # Codes are -127 to 127. An odd number of experts has zero points, of two kinds.
        zero = MIDDLE - torch.arange(rows, device=codes.device).view(-1, 1) % 2 * (experts % 2)
        codes = (codes.short() + zero).to(torch.uint8)
        zeros = zero.to(torch.uint8).expand(scales.shape) if experts % 2 else None
    elif zeros is not None:
        zeros = zeros[:, ::2] | zeros[:, 1::2] << 4
    room = torch.nn.functional.pad(codes.flatten(), (0, READ_BEHIND))
    codes = room[: codes.numel()].view(codes.shape)
    return matrix._replace(codes=codes, scales=scales, zero_points=zeros)
