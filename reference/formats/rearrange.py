"""Orders in which kernels read weights and scales: from where each element comes, by definition."""

from __future__ import annotations

import torch

from ..validation import listed

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
"""Rows of one product of tensor cores, among which a block's rows are dealt."""
_SHORT = 4
"""Words of 16 bits that a group of lanes reads of a row, one each."""


def rearrange(
    x: torch.Tensor, arrangement: str, *, tile: int = 128, group: int = 32
) -> torch.Tensor:
    """Return a matrix, or one for each expert, in the order in which a kernel reads it.

    - ``scales_128x4``: row r and column c go to place (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
      of the tile of 128 rows and 4 columns that has them; tiles follow one another row by row, and
      what is added to whole tiles is 0.
    - ``rows``: in blocks of 32 rows, or 16 where a tile has no whole 128, row r goes to place
      (r % w) * 8 + r // w, where w is an eighth of the block.
    - ``rows_128x4``: the one, then the other.
    - ``scales_64x128``: of the scales of 64 rows and 128 channels, those of rows r, r + f,
      r + 2 f ... lie side by side in 16 bytes, where f is 64 by their number.
    - ``int4_mixed``: rows r and r + 8 of 16 share their words of 16 bits: of each eight words, row
      r gets the first four of both, a word of each in turn, and row r + 8 the others.

    Args:
        x: [rows, columns] or [experts, rows, columns].
        arrangement: the order.
        tile: rows of a tile of the kernel, of shuffled rows.
        group: weights that share a scale, of ``scales_64x128``.

    Returns:
        A contiguous tensor of x's dtype: of ``128x4`` flat; of ``scales_64x128`` [experts,
        rows / 64, channels / 128, f, elements of 16 bytes]; else of x's shape.

    Raises:
        ValueError: another order, or a shape that it does not have.
    """
    if arrangement not in ARRANGEMENTS:
        message = f"arrangement is {arrangement!r}; it must be one of {listed(ARRANGEMENTS)}"
        raise ValueError(message)
    if x.dim() not in (2, 3):
        message = f"x has shape {tuple(x.shape)}; it must be [rows, columns] or one an expert"
        raise ValueError(message)
    if arrangement == "rows_128x4":
        return rearrange(rearrange(x, "rows", tile=tile), "scales_128x4")
    rows, columns = x.shape[-2:]
    r = torch.arange(rows, device=x.device).unsqueeze(1)
    c = torch.arange(columns, device=x.device).unsqueeze(0)
    if arrangement == "rows":
        return _placed(x, _of_rows(r, c, columns, tile), x.shape)
    if arrangement == "int4_mixed":
        return _placed(x, _of_int4(r, c, columns), x.shape)
    if arrangement == "scales_128x4":
        across = -(-columns // TILE_COLUMNS)
        down = -(-rows // TILE_ROWS)
        count = down * across * TILE_ROWS * TILE_COLUMNS
        experts = x.shape[0] if x.dim() == 3 else 1  # noqa: PLR2004  an axis of experts
        return _placed(x, _of_128x4(r, c, across), (experts * count,), count)
    width = FOLD_BYTES // x.element_size()
    many = FOLD_CHANNELS // group
    folded = FOLD_ROWS // (width // many)
    shape = (*x.shape[:-2], rows // FOLD_ROWS, columns // many, folded, width)
    return _placed(x, _of_64x128(r, c, columns // many, (many, folded, width)), shape)


def _placed(
    x: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...], count: int = 0
) -> torch.Tensor:
    """Return elements at their places in each expert's part, and 0 elsewhere."""
    flat = x.reshape(-1, places.numel())
    found = flat.new_zeros((flat.shape[0], count or places.numel()))
    found[:, places.flatten()] = flat
    return found.reshape(shape)


def _of_rows(r: torch.Tensor, c: torch.Tensor, columns: int, tile: int) -> torch.Tensor:
    block = WIDE_BLOCK if tile % TILE_ROWS == 0 else BLOCK
    ways = block // _LANES
    within = r % block
    to = r // block * block + within % ways * _LANES + within // ways
    return to * columns + c


def _of_128x4(r: torch.Tensor, c: torch.Tensor, across: int) -> torch.Tensor:
    tile = r // TILE_ROWS * across + c // TILE_COLUMNS
    within = r % 32 * 16 + r % TILE_ROWS // 32 * 4 + c % TILE_COLUMNS
    return tile * (TILE_ROWS * TILE_COLUMNS) + within


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
