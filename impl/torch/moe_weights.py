"""Quantised matrices widened to float32, the way serving stacks' fallbacks do.

It shares no code with the oracle's codecs: tables and torch's own FP8 conversions.
"""

from __future__ import annotations

import torch

from ...reference import QuantizedMatrix

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
SCALE_BLOCK = 128
COLUMNS_A_SCALE = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def expert_weights(matrix: torch.Tensor | QuantizedMatrix, expert: int) -> torch.Tensor:
    """Return an expert's weights [rows, columns] in float32."""
    if isinstance(matrix, torch.Tensor):
        return matrix[expert].float()
    scale = matrix.global_scale
    return widened(
        matrix.codes[expert],
        matrix.scales[expert],
        matrix,
        scale[expert] if isinstance(scale, torch.Tensor) and scale.numel() > 1 else scale,
        blocks_of_rows=True,
    )


def hidden_states(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return hidden states [tokens, hidden] in float32."""
    if isinstance(matrix, torch.Tensor):
        return matrix.float()
    return widened(matrix.codes, matrix.scales, matrix, matrix.global_scale, blocks_of_rows=False)


def widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    matrix: QuantizedMatrix,
    global_scale: float | torch.Tensor,
    *,
    blocks_of_rows: bool,
) -> torch.Tensor:
    """Return the numbers [rows, columns] of codes.

    Args:
        codes: [rows, columns], or half as many bytes.
        scales: of these rows.
        matrix: that they are part of.
        global_scale: of nvfp4.
        blocks_of_rows: a scale of a block belongs to 128 rows too, not to one.
    """
    element, rows = matrix.format.element, codes.shape[0]
    values = _e2m1(codes) if codes.dtype == torch.uint8 else codes.float()
    if element in COLUMNS_A_SCALE:
        factors = scales.float() * global_scale if element == "nvfp4" else _e8m0(scales)
        return values * factors.repeat_interleave(COLUMNS_A_SCALE[element], dim=1)
    if matrix.format.scales == "channel":
        return values * scales.unsqueeze(1)
    if matrix.format.in_blocks:
        if blocks_of_rows:
            scales = scales.repeat_interleave(SCALE_BLOCK, dim=0)[:rows]
        return values * scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, : values.shape[1]]
    return values * scales


def _e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers of two codes a byte, the even column in the low nibble."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    return table[codes]


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.exp2(codes.view(torch.uint8).float() - E8M0_BIAS)
