"""The orders in which kernels keep block scales: pure permutations and their inverses."""

from __future__ import annotations

import torch

from ..validation import KVLayout, check_kv_layout

_GROUP = 4  # tokens, or columns, whose scales lie side by side
_CACHE_AXES = "pages", "kv_heads", "page_size", "scales"
_MATRIX_AXES = "rows", "columns"
_ROWS = 128  # rows of one tile of tensor-core scale factors


def interleave_v_scales(scales: torch.Tensor, *, kv_layout: KVLayout = "HND") -> torch.Tensor:
    """Reorder the block scales of a paged V cache as trtllm-gen reads them.

    Within each [page_size, S] tile of a page and head, the scale s of token t goes to the flat
    place ``(t // 4) * 4 * S + s * 4 + t % 4``: for each group of four tokens, the four scales of
    one block lie side by side. K's scales stay linear (FlashInfer,
    ``quantization/fp4_quantization.py``: ``nvfp4_quantize_paged_kv_cache``).

    Args:
        scales: HND [pages, kv_heads, page_size, S] or NHD [pages, page_size, kv_heads, S], any
            dtype; S = head_dim / 16. page_size and S are multiples of 4.
        kv_layout: ``"NHD"`` or ``"HND"``.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ValueError: another shape or layout.
    """
    tiles = _tiles(scales, kv_layout)
    *outer, tokens, blocks = tiles.shape
    groups = tiles.reshape(*outer, tokens // _GROUP, _GROUP, blocks)
    return _cache(groups.transpose(-1, -2).reshape(tiles.shape), kv_layout)


def deinterleave_v_scales(scales: torch.Tensor, *, kv_layout: KVLayout = "HND") -> torch.Tensor:
    """Bring interleaved V scales back to linear order: the inverse of ``interleave_v_scales``.

    Args:
        scales: the same as in ``interleave_v_scales``.
        kv_layout: ``"NHD"`` or ``"HND"``.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        ValueError: another shape or layout.
    """
    tiles = _tiles(scales, kv_layout)
    *outer, tokens, blocks = tiles.shape
    groups = tiles.reshape(*outer, tokens // _GROUP, blocks, _GROUP)
    return _cache(groups.transpose(-1, -2).reshape(tiles.shape), kv_layout)


def swizzle_scales_128x4(scales: torch.Tensor) -> torch.Tensor:
    """Reorder block scales as block-scaled tensor-core products read them.

    The matrix is padded with zeros to whole tiles of 128 rows and 4 columns; the tiles follow one
    another row by row. In a tile, row r and column c go to place ``(r % 32) * 16 + (r // 32) * 4 +
    c`` (cuBLAS documentation, "1D Block Scaling Factors Layout"; FlashInfer,
    ``quantization_utils.cuh``: ``get_sf_out_offset_128x4``).

    Args:
        scales: [..., rows, columns], any dtype.

    Returns:
        [..., rows rounded up to 128, columns rounded up to 4], contiguous: memory order is what
        counts, the shape only says how much there is.

    Raises:
        ValueError: fewer than two dims.
    """
    rows, columns = _matrix_shape("scales", scales)
    padded_rows, padded_columns = _round_up(rows, _ROWS), _round_up(columns, _GROUP)
    shape = (*scales.shape[:-2], padded_rows, padded_columns)
    padded = torch.zeros(shape, dtype=scales.dtype, device=scales.device)
    padded[..., :rows, :columns] = scales
    tiles = padded.view(
        *shape[:-2], padded_rows // _ROWS, 4, 32, padded_columns // _GROUP, _GROUP
    )  # [..., row tile, r // 32, r % 32, column tile, c]
    return tiles.transpose(-4, -2).reshape(shape)


def unswizzle_scales_128x4(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Bring swizzled scales back to linear order and drop the padding.

    Args:
        swizzled: [..., rows rounded up to 128, columns rounded up to 4], what
            ``swizzle_scales_128x4`` gives.
        rows, columns: numbers of rows and columns of the matrix without padding.

    Returns:
        [..., rows, columns], contiguous.

    Raises:
        ValueError: a shape that does not belong to that many rows and columns.
    """
    expected = (_round_up(rows, _ROWS), _round_up(columns, _GROUP))
    if _matrix_shape("swizzled", swizzled) != expected:
        message = (
            f"swizzled has shape {tuple(swizzled.shape)}, but {rows} rows and {columns} columns "
            f"of scales are padded to {expected}"
        )
        raise ValueError(message)
    tiles = swizzled.reshape(
        *swizzled.shape[:-2], expected[0] // _ROWS, expected[1] // _GROUP, 32, 4, _GROUP
    )
    linear = tiles.transpose(-4, -2).reshape(swizzled.shape)
    return linear[..., :rows, :columns].contiguous()


def _tiles(scales: torch.Tensor, kv_layout: KVLayout) -> torch.Tensor:
    """View a cache of scales as [pages, kv_heads, page_size, S]."""
    check_kv_layout(kv_layout)
    if scales.dim() != len(_CACHE_AXES):
        message = f"scales must have four dims, as the cache has, not shape {tuple(scales.shape)}"
        raise ValueError(message)
    tiles = scales if kv_layout == "HND" else scales.transpose(1, 2)
    if tiles.shape[2] % _GROUP or tiles.shape[3] % _GROUP:
        message = (
            f"scales has shape {tuple(scales.shape)} ({kv_layout}): the interleaved order needs "
            f"multiples of 4 as page_size and scales a token, not {tuple(tiles.shape[2:])}"
        )
        raise ValueError(message)
    return tiles


def _cache(tiles: torch.Tensor, kv_layout: KVLayout) -> torch.Tensor:
    """View [pages, kv_heads, page_size, S] in the layout of the cache again."""
    return (tiles if kv_layout == "HND" else tiles.transpose(1, 2)).contiguous()


def _matrix_shape(name: str, matrix: torch.Tensor) -> tuple[int, int]:
    if matrix.dim() < len(_MATRIX_AXES):
        message = f"{name} must be [..., rows, columns], not shape {tuple(matrix.shape)}"
        raise ValueError(message)
    return matrix.shape[-2], matrix.shape[-1]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
