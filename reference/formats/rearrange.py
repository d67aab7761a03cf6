"""Orders in which kernels read weights and scales: from where each element comes, by definition."""

from __future__ import annotations

import torch

from ..validation import listed
from .scale_layouts import swizzle_scales_128x4

ARRANGEMENTS = ("scales_128x4", "rows", "rows_128x4", "scales_64x128", "int4_mixed")
"""Orders of elements, see ``rearrange``."""
FOLD_ROWS, FOLD_CHANNELS, FOLD_BYTES = 64, 128, 16
"""Rows and channels of weights whose scales lie together, and the bytes of a row of these."""
TILE_ROWS, TILE_COLUMNS = 128, 4
"""Rows and columns of a tile of swizzled scales."""
MIXED_ROWS, MIXED_BYTES = 16, 32
"""Rows and bytes of a tile of interleaved weights of four bits."""
WIDE_BLOCK, BLOCK = 32, 16
"""Rows of a block that is shuffled, where tiles have whole 128 rows, and elsewhere."""
_LANES = 8
"""Rows of one product of tensor cores, each of which gets as many rows of a block."""
_SHORT = 4
"""Words of 16 bits that a group of lanes reads of a row, one each."""


def rearrange(
    x: torch.Tensor, arrangement: str, *, tile: int = 128, group: int = 32
) -> torch.Tensor:
    """Return a matrix, or one for each expert, in the order in which a kernel reads it.

    - ``scales_128x4``: flat, as ``swizzle_scales_128x4`` has it. Padding is 0.
    - ``rows``: in blocks of 32 rows, or 16 where a tile has no whole 128, row r goes to place
      (r % w) * 8 + r // w, where w is an eighth of the block (FlashInfer, ``utils.py``:
      ``srcToDstBlk32RowMap``, ``srcToDstBlk16RowMap``).
    - ``rows_128x4``: the one, then the other.
    - ``scales_64x128``: of the scales of 64 rows and 128 channels, those of rows r, r + f,
      r + 2 f ... lie side by side in 16 bytes, where f is 64 by their number (FlashInfer,
      ``fused_moe/prepare.py``).
    - ``int4_mixed``: rows r and r + 8 of 16 share their words of 16 bits: of each eight words, row
      r gets the first four of both, a word of each in turn, and row r + 8 the others. With
      s = r % 16 // 8, word j of row r goes to row r - 8 s + 8 (j % 8 // 4) and there to word
      8 (j // 8) + 2 (j % 4) + s (FlashInfer, ``moe_gemm_mixed_utils.cu``).

    Args:
        x: [rows, columns] or [experts, rows, columns].
        arrangement: the order.
        tile: rows of a tile of the kernel, of shuffled rows.
        group: weights that share a scale, of ``scales_64x128``.

    Returns:
        A contiguous tensor of x's dtype: of ``128x4`` flat; of ``scales_64x128`` [experts,
        rows / 64, channels / 128, f, elements of 16 bytes]; else of x's shape.

    Raises:
        ValueError: another order, or a shape, group or size of elements that it does not have.
    """
    if arrangement not in ARRANGEMENTS:
        message = f"arrangement is {arrangement!r}; it must be one of {listed(ARRANGEMENTS)}"
        raise ValueError(message)
    if x.dim() not in (2, 3) or not x.numel():
        message = f"x has shape {tuple(x.shape)}; it must be [rows, columns] or one an expert"
        raise ValueError(message)
    steps = step_of(arrangement, tile=tile, group=group, bytes_each=x.element_size())
    for name, size, step in zip(("rows", "columns"), x.shape[-2:], steps, strict=True):
        if size % step:
            message = f"x has {size} {name}; they must be a multiple of {step} of {arrangement}"
            raise ValueError(message)
    if arrangement == "scales_128x4":
        return swizzle_scales_128x4(x).flatten()
    rows, columns = x.shape[-2:]
    r = torch.arange(rows, device=x.device).unsqueeze(1)
    c = torch.arange(columns, device=x.device).unsqueeze(0)
    if arrangement == "int4_mixed":
        return _placed(x, _of_int4(r, c, columns), x.shape)
    if arrangement == "scales_64x128":
        many = steps[1]
        width = FOLD_BYTES // x.element_size()
        folded = FOLD_ROWS // (width // many)
        shape = (*x.shape[:-2], rows // FOLD_ROWS, columns // many, folded, width)
        return _placed(x, _of_64x128(r, c, columns // many, (many, folded, width)), shape)
    shuffled = _placed(x, _of_rows(r, c, columns, block_of(tile)), x.shape)
    return shuffled if arrangement == "rows" else swizzle_scales_128x4(shuffled).flatten()


def block_of(tile: int) -> int:
    """Return the rows of a block that is shuffled."""
    return WIDE_BLOCK if tile % TILE_ROWS == 0 else BLOCK


def step_of(arrangement: str, *, tile: int, group: int, bytes_each: int) -> tuple[int, int]:
    """Return what rows and columns are multiples of.

    Args:
        arrangement, tile, group: see ``rearrange``.
        bytes_each: bytes of an element.

    Raises:
        ValueError: there is no such order of these elements.
    """
    if tile < 1 or group < 1:
        message = f"tile is {tile} and group {group}; they must be at least 1"
        raise ValueError(message)
    if arrangement == "int4_mixed" and bytes_each != 1:
        message = "dtype must be uint8 of int4_mixed: two weights a byte"
        raise ValueError(message)
    many = FOLD_CHANNELS // group
    whole = FOLD_CHANNELS % group == 0 and FOLD_BYTES // bytes_each % many == 0
    if arrangement == "scales_64x128" and not whole:
        message = f"group is {group}; it must be a divisor of 128 with whole rows of 16 bytes"
        raise ValueError(message)
    return {
        "scales_128x4": (1, 1),
        "rows": (block_of(tile), 1),
        "rows_128x4": (TILE_ROWS, 1),
        "scales_64x128": (FOLD_ROWS, many),
        "int4_mixed": (MIXED_ROWS, MIXED_BYTES),
    }[arrangement]


def _placed(x: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return elements at their places in each expert's part."""
    flat = x.reshape(-1, places.numel())
    found = torch.empty_like(flat)
    found[:, places.flatten()] = flat
    return found.reshape(shape)


def _of_rows(r: torch.Tensor, c: torch.Tensor, columns: int, block: int) -> torch.Tensor:
    ways = block // _LANES
    within = r % block
    to = r // block * block + within % ways * _LANES + within // ways
    return to * columns + c


def _of_64x128(
    r: torch.Tensor, c: torch.Tensor, across: int, fold: tuple[int, int, int]
) -> torch.Tensor:
    many, folded, width = fold
    within = r % FOLD_ROWS
    block = r // FOLD_ROWS * across + c // many
    return (block * folded + within % folded) * width + within // folded * many + c % many


def _of_int4(r: torch.Tensor, c: torch.Tensor, columns: int) -> torch.Tensor:
    word, second = c // 2, r // _LANES % 2
    lane = word % (MIXED_BYTES // 2)
    row = r - second * _LANES + lane % _LANES // _SHORT * _LANES
    to = word - lane + lane // _LANES * _LANES + lane % _SHORT * 2 + second
    return row * columns + to * 2 + c % 2
