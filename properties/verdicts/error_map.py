"""Where in a tensor an answer is wrong: the worst error over its bound, by row and column."""

from __future__ import annotations

import math
from typing import Any

import torch

MOST_ROWS, MOST_COLUMNS = 64, 32
"""Most rows and columns of a map; of a larger tensor, neighbours share a cell."""


def error_map(name: str, ratio: torch.Tensor) -> dict[str, Any] | None:
    """Return the worst error over its bound by the first two axes, tokens and heads of ``out``.

    Args:
        name: the name of the tensor.
        ratio: error over bound of each element, infinite where no number is right.

    Returns:
        ``tensor``, ``shape``, ``step`` (rows and columns of the tensor in one cell) and ``worst``,
        a list of rows; None for a scalar.
    """
    if ratio.dim() == 0 or not ratio.numel():
        return None
    rows = ratio.shape[0]
    columns = ratio.shape[1] if ratio.dim() > 1 else 1
    worst = ratio.reshape(rows, columns, -1).amax(-1)
    down, across = math.ceil(rows / MOST_ROWS), math.ceil(columns / MOST_COLUMNS)
    padded = torch.nn.functional.pad(worst, (0, -columns % across, 0, -rows % down))
    cells = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down)).amax((1, 3))
    return {
        "tensor": name,
        "shape": list(ratio.shape),
        "step": [down, across],
        "worst": [[_rounded(each) for each in row] for row in cells.tolist()],
    }


def _rounded(ratio: float) -> float:
    """Return a ratio to three digits, on its side of 1."""
    rounded = float(f"{ratio:.3g}")
    return 1.01 if ratio > 1 >= rounded else rounded
