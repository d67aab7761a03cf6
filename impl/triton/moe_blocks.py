"""Sizes of the tiles that the Triton MoE kernels work on.

They follow only from shapes: reading an expert's tokens from the device would wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .blocks import SHARED_MEMORY
from .support import next_power_of_two

LEAST_M, MOST_M = 16, 128
"""Tensor cores multiply 16 rows; Hopper's 64, of which two groups of warps take one each."""
LEAST_N, LEAST_K = 64, 32
"""Rows and columns of weights: products of FP8 are over 32 columns, also where gate and up share 64
rows of which the intermediate's scale is."""
SCALE_BLOCK = 128
"""Columns that a block's scale is for: a tile must not reach into the next."""
LEAST_STAGES = 2


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts one product.

    Attributes:
        m: rows: pairs of a token and a slot, all of one expert.
        n: rows of weights; gate and up rows both count.
        k: columns at a time.
        group: blocks of m rows that take a tile of weights before the next: what L2 keeps.
        num_warps, num_stages: numbers of warps and of pipeline stages of the compiled kernel.
    """

    m: int
    n: int
    k: int
    group: int
    num_warps: int
    num_stages: int


TILES = {
    16: (Tile(16, 64, 128, 16, 4, 4), Tile(16, 64, 128, 16, 4, 4)),
    32: (Tile(32, 128, 128, 16, 4, 3), Tile(32, 128, 128, 16, 4, 3)),
    64: (Tile(64, 128, 64, 16, 4, 4), Tile(64, 128, 64, 16, 4, 4)),
    128: (Tile(128, 256, 64, 16, 8, 4), Tile(128, 256, 64, 16, 8, 4)),
}
"""Tiles of both products by rows, for 16-bit numbers on Hopper. With 128 by 256 a byte that comes
from L2 is used 85 times, which is what keeps tensor cores busy; where an expert has fewer rows,
weights that come from memory are what takes the time."""
WIDENED = {
    16: (Tile(16, 64, 128, 16, 4, 3), Tile(16, 64, 128, 16, 4, 3)),
    32: (Tile(32, 64, 128, 16, 4, 3), Tile(32, 64, 128, 16, 4, 3)),
    64: (Tile(64, 128, 64, 16, 4, 3), Tile(64, 128, 64, 16, 4, 3)),
    128: (Tile(128, 128, 64, 16, 8, 3), Tile(128, 128, 64, 16, 8, 3)),
}
"""Tiles for FP8 weights and 16-bit hidden states: codes are widened in registers."""
CODES = {
    16: (Tile(16, 128, 128, 16, 4, 4), Tile(16, 64, 128, 16, 4, 4)),
    32: (Tile(32, 128, 128, 16, 4, 3), Tile(32, 128, 128, 16, 4, 3)),
    64: (Tile(64, 128, 128, 16, 4, 4), Tile(64, 128, 128, 16, 4, 4)),
    128: (Tile(128, 128, 128, 16, 8, 4), Tile(128, 128, 128, 16, 8, 4)),
}
"""Tiles for FP8 weights and hidden states: block scales want a second set of sums, for which 256
columns leave no registers."""
INTERPRETED = Tile(16, 64, 64, 2, 1, 1)
"""Small, so that few tokens take several tiles in the interpreter too."""
INTERPRETED_LARGE = Tile(16, 128, 128, 2, 1, 1)
INTERPRETED_COLUMNS = 256
"""Columns of either product beyond which the interpreter would take seconds by small tiles."""
SINGLE = Tile(32, 64, 32, 16, 4, 2)
"""float32 products run on the plain cores, and unroll: large tiles would take minutes to build."""


@dataclass(frozen=True)
class Shape:
    """What tiles depend on.

    Attributes:
        rows: the mean number of pairs that an expert has.
        element_size: bytes of an element of the hidden states.
        weight_size: bytes of an element of the weights.
        gated: whether w13 has gate and up rows.
        interpreted: whether they are for the interpreter.
        columns: most columns that a product sums over; only the interpreter's tiles use it.
        available: bytes of shared memory that a program may take.
    """

    rows: float
    element_size: int
    weight_size: int
    gated: bool
    interpreted: bool
    columns: int = 0
    available: int = SHARED_MEMORY


def moe_tiles(shape: Shape) -> tuple[Tile, Tile]:
    """Choose the tiles of both products, of the same rows; they fit the GPU.

    Matrices smaller than a tile take one all the same: other tiles would be other kernels to build.
    """
    first, second = (_fitted(shape, tile) for tile in _tiles(shape))
    if shape.element_size == 1:
        second = replace(second, k=min(second.k, columns_of(first, gated=shape.gated)))
    return first, second


def block_rows(rows: float) -> int:
    """Return the rows of a block for this number of pairs of an expert.

    Rows vary from expert to expert: twice the mean takes nearly all of them in one block.
    """
    return min(max(next_power_of_two(int(2 * rows)), LEAST_M), MOST_M)


def columns_of(tile: Tile, *, gated: bool) -> int:
    """Return how many columns of the intermediate a tile of the first product makes.

    Where the intermediate is FP8, they share a scale in each row.
    """
    return tile.n // 2 if gated else tile.n


def shared_memory(tile: Tile, element_size: int, weight_size: int) -> int:
    """Estimate the bytes that the tiles under way take; widened ones are there twice."""
    codes = tile.m * element_size + tile.n * weight_size
    widened = tile.n * element_size if weight_size < element_size else 0
    return tile.k * (codes * tile.num_stages + widened)


def _tiles(shape: Shape) -> tuple[Tile, Tile]:
    if shape.interpreted:
        tile = INTERPRETED_LARGE if shape.columns > INTERPRETED_COLUMNS else INTERPRETED
        return tile, tile
    if shape.element_size > 2:  # noqa: PLR2004  bytes
        return SINGLE, SINGLE
    m = block_rows(shape.rows)
    if shape.weight_size < shape.element_size:
        return WIDENED[m]
    return (CODES if shape.element_size == 1 else TILES)[m]


def _fitted(shape: Shape, tile: Tile) -> Tile:
    """Cut a tile to the shared memory: first stages, then rows of weights, then columns."""
    while _exceeds(shape, tile) and tile.num_stages > LEAST_STAGES:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while _exceeds(shape, tile) and tile.n > LEAST_N:
        tile = replace(tile, n=tile.n // 2)
    while _exceeds(shape, tile) and tile.k > LEAST_K:
        tile = replace(tile, k=tile.k // 2)
    return tile


def _exceeds(shape: Shape, tile: Tile) -> bool:
    if shape.interpreted:
        return False
    return shared_memory(tile, shape.element_size, shape.weight_size) > shape.available
