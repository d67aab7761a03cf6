"""Orders of weights and scales by views of axes; no code is the oracle's, which counts places."""

from __future__ import annotations

import torch

from ...reference.tensors.rearrange import RearrangeInputs
from ..protocol import implementation


@implementation("rearrange", name="torch-rearrange")
def rearrange(inputs: RearrangeInputs) -> torch.Tensor:
    """Exchange the axes of tiles."""
    x = inputs.x
    if inputs.arrangement == "rows":
        return shuffled(x, inputs.tile)
    if inputs.arrangement == "rows_128x4":
        return swizzled(shuffled(x, inputs.tile))
    if inputs.arrangement == "scales_128x4":
        return swizzled(x)
    if inputs.arrangement == "scales_64x128":
        return folded(x, inputs.group)
    return mixed(x)


def shuffled(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Shuffle each block's rows."""
    ways = 4 if tile % 128 == 0 else 2
    return x.reshape(-1, 8, ways, x.shape[1]).transpose(1, 2).reshape(x.shape)


def swizzled(x: torch.Tensor) -> torch.Tensor:
    """Lay scales out in tiles of 128 rows and 4 columns."""
    matrices = x.reshape(-1, *x.shape[-2:])
    rows, columns = x.shape[-2:]
    as_bits = matrices.view(torch.uint8 if x.element_size() == 1 else torch.int16)
    padded = torch.nn.functional.pad(as_bits, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(len(matrices), -(-rows // 128), 4, 32, -(-columns // 4), 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1).view(x.dtype)


def folded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Lay the scales of rows that are far apart side by side in 16 bytes."""
    experts, rows, columns = x.shape
    many, width = 128 // group, 16 // x.element_size()
    slices = width // many
    axes = (experts, rows // 64, slices, 64 // slices, columns // many, many)
    return x.reshape(axes).permute(0, 1, 4, 3, 2, 5).flatten(-2).contiguous()


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Let two rows eight apart share their words of 16 bits."""
    experts, rows, columns = x.shape
    words = x.view(torch.int16).reshape(experts, rows // 16, 2, 8, columns // 32, 2, 2, 4)
    # expert, block, second row, row, tile, eight, half, word -> the half is the row, words in turn
    return words.permute(0, 1, 6, 3, 4, 5, 7, 2).reshape(experts, rows, -1).view(torch.uint8)
