"""Quantised matrices widened to float32, the way serving stacks' fallbacks do.

It shares no code with the oracle's codecs: tables and torch's own FP8 conversions.
"""

from __future__ import annotations

import torch

from ...reference import QuantizedMatrix
from ...reference.moe.activations import ACTIVATIONS
from ...reference.tensors.moe_inputs import MoEInputs

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
SCALE_BLOCK = 128
COLUMNS_A_SCALE = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
MIDDLE = 8.0
"""The zero point of int4 without zero points."""


def expert_weights(
    matrix: torch.Tensor | QuantizedMatrix, expert: int, *, interleaved: bool = False
) -> torch.Tensor:
    """Return an expert's weights [rows, columns] in float32; gate and up rows may alternate."""
    if isinstance(matrix, torch.Tensor):
        return matrix[expert].float()
    scale = matrix.global_scale
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        scale = scale[expert]
        if scale.dim():  # of gate and of up
            rows = matrix.codes.shape[1] // 2
            scale = (scale.repeat(rows) if interleaved else scale.repeat_interleave(rows))[:, None]
    return widened(
        matrix.codes[expert],
        matrix.scales[expert],
        matrix,
        scale if matrix.zero_points is None else matrix.zero_points[expert],
        blocks_of_rows=True,
    )


def hidden_states(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return hidden states [tokens, hidden] in float32."""
    if isinstance(matrix, torch.Tensor):
        return matrix.float()
    return widened(matrix.codes, matrix.scales, matrix, matrix.global_scale, blocks_of_rows=False)


def true_rows(inputs: MoEInputs, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of w13, or of its bias, that are no padding: [rows, ...]."""
    if inputs.inter_size is None:
        return rows
    if inputs.interleaved or not ACTIVATIONS[inputs.activation].gated:
        return rows[: inputs.inter_size * (2 if inputs.interleaved else 1)]
    gates, ups = rows.chunk(2)
    return torch.cat([gates[: inputs.inter_size], ups[: inputs.inter_size]])


def first_weights(
    inputs: MoEInputs, matrix: torch.Tensor | QuantizedMatrix, expert: int
) -> torch.Tensor:
    """Return an expert's w13 in float32 without padding."""
    rows = expert_weights(matrix, expert, interleaved=inputs.interleaved)
    return true_rows(inputs, rows)[:, : inputs.hidden_size]


def second_weights(
    inputs: MoEInputs, matrix: torch.Tensor | QuantizedMatrix, expert: int
) -> torch.Tensor:
    """Return an expert's w2 in float32 without padding."""
    return expert_weights(matrix, expert)[: inputs.hidden_size, : inputs.inter_size]


def widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    matrix: QuantizedMatrix,
    other: float | torch.Tensor,
    *,
    blocks_of_rows: bool,
) -> torch.Tensor:
    """Return the numbers [rows, columns] of codes.

    Args:
        codes: [rows, columns], or half as many bytes.
        scales: the scales of these rows.
        matrix: the matrix that they are part of.
        other: the global scale of nvfp4, one or one a row; the zero points of int4.
        blocks_of_rows: a scale of a block belongs to 128 rows too, not to one.
    """
    element, rows = matrix.format.element, codes.shape[0]
    if element.startswith("int4"):
        given = other if isinstance(other, torch.Tensor) else torch.tensor(MIDDLE)
        return _int4(codes, scales, given, int(element.rpartition("g")[2]))
    values = _e2m1(codes) if codes.dtype == torch.uint8 else codes.float()
    if element in COLUMNS_A_SCALE:
        factors = scales.float() * other if element == "nvfp4" else _e8m0(scales)
        return values * factors.repeat_interleave(COLUMNS_A_SCALE[element], dim=1)
    if matrix.format.scales == "channel":
        return values * scales.unsqueeze(1)
    if matrix.format.in_blocks:
        if matrix.format.powers:
            scales = _e8m0(scales)
        if blocks_of_rows:
            scales = scales.repeat_interleave(SCALE_BLOCK, dim=0)[:rows]
        return values * scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, : values.shape[1]]
    return values * scales


def _int4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int
) -> torch.Tensor:
    """Return (code - zero point) * scale of groups of columns, even ones in the low nibbles."""
    numbers = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).float()
    of_column = torch.arange(numbers.shape[1], device=codes.device) // group
    if zeros.dim():
        zeros = zeros.float()[:, of_column]
    return (numbers - zeros) * scales[:, of_column]


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of two codes a byte, the even column in the low nibble."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    return table[codes]


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.exp2(codes.view(torch.uint8).float() - E8M0_BIAS)
