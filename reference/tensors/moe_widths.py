"""Matrices of experts whose tensors are wider than the channels that count: padded and cut.

Engines pad hidden and inter of weights to what a kernel's tiles ask for, with zeros: 2,880 channels
become 3,072. Gates and ups are padded each for themselves, so that ups begin where the padded gates
end.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ..moe.weights import SCALE_BLOCK, MatrixFormat, QuantizedMatrix
from .allocation import BYTE_OF_NAN

Given = torch.Tensor | QuantizedMatrix


def cut_columns(matrix: Given, columns: int) -> Given:
    """Return the first columns of a matrix [..., columns]."""
    if isinstance(matrix, torch.Tensor):
        return matrix[..., :columns]
    codes = matrix.codes[..., : columns // matrix.format.packed]
    unit = _columns_a_scale(matrix.format)
    scales = matrix.scales[..., : -(-columns // unit)] if unit else matrix.scales
    return matrix._replace(codes=codes, scales=scales)


def cut_rows(matrix: Given, rows: int, *, parts: int = 1) -> Given:
    """Return the first rows of each part of a matrix [experts, parts * wide rows, ...].

    Blocks of scales are of whole rows of 128, of which ``rows`` is a multiple where there are
    several parts.
    """
    if isinstance(matrix, torch.Tensor):
        return cut_entries(matrix, rows, parts=parts)
    unit = _rows_a_scale(matrix.format)
    scales = matrix.scales
    if unit:
        scales = cut_entries(scales, -(-rows // unit), parts=parts)
    return matrix._replace(codes=cut_entries(matrix.codes, rows, parts=parts), scales=scales)


def cut_entries(tensor: torch.Tensor, rows: int, *, parts: int = 1) -> torch.Tensor:
    """Return the first rows of each part of a tensor [experts, parts * wide rows, ...]."""
    if parts == 1:
        return tensor[:, :rows]
    wide = tensor.shape[1] // parts
    index = torch.arange(rows, device=tensor.device)
    index = torch.cat([index + part * wide for part in range(parts)])
    if tensor.element_size() > 1:
        return tensor[:, index]
    return tensor.view(torch.uint8)[:, index].view(tensor.dtype)  # few operations know FP8


def padded(
    tensor: torch.Tensor, shape: tuple[int, ...], fill: float, *, parts: int = 1
) -> torch.Tensor:
    """Pad a tensor to a shape, whose second axis has this many parts; bytes of NaN are 0xFF."""
    dtype = tensor.dtype
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
        fill = BYTE_OF_NAN if math.isnan(fill) else 0
    split, wanted = tensor, shape
    if parts > 1:
        split = tensor.unflatten(1, (parts, -1))
        wanted = (shape[0], parts, shape[1] // parts, *shape[2:])
    sizes: list[int] = []
    for have, want in reversed(list(zip(split.shape, wanted, strict=True))):
        sizes += [0, want - have]
    return functional.pad(split, sizes, value=fill).reshape(shape).contiguous().view(dtype)


def scale_shape(form: MatrixFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix [experts, rows, columns], or [tokens, columns]."""
    rows, columns = _rows_a_scale(form), _columns_a_scale(form)
    found = [shape[0]]
    if len(shape) > 2 and rows:  # noqa: PLR2004  weights
        found.append(-(-shape[1] // rows))
    if columns:
        found.append(-(-shape[-1] // columns))
    return tuple(found)


def _columns_a_scale(form: MatrixFormat) -> int:
    """Return how many columns share a scale; 0 if all do."""
    return SCALE_BLOCK if form.scales == "block" else form.entry.block


def _rows_a_scale(form: MatrixFormat) -> int:
    """Return how many rows of an expert share a scale; 0 if all do."""
    if form.scales == "block":
        return SCALE_BLOCK
    return 0 if form.scales == "tensor" else 1
