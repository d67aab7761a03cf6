"""Faults in layouts of weights and scales: of tiles, blocks, padding, experts, bits and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...impl.torch.rearrange import folded, mixed, rearrange, shuffled, swizzled
from ...reference.tensors.rearrange import RearrangeInputs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
REARRANGE, PARITY = "rearrange", "rearrange_parity"
Layout = Callable[[torch.Tensor], torch.Tensor]
TILE, GARBAGE = 128, 0x7F
"""Rows of a tile of scales, and a byte that nobody wrote."""


def _made(
    inputs: RearrangeInputs,
    *,
    swizzle: Layout = swizzled,
    shuffle: Layout | None = None,
    fold: Layout | None = None,
    interleave: Layout = mixed,
) -> torch.Tensor:
    """Rearrange, with steps that a fault replaces."""
    x, order = inputs.x, inputs.arrangement
    rows = shuffle or (lambda given: shuffled(given, inputs.tile))
    if order == "scales_64x128":
        return fold(x) if fold else folded(x, inputs.group)
    if order == "int4_mixed":
        return interleave(x)
    if order == "scales_128x4":
        return swizzle(x)
    return rows(x) if order == "rows" else swizzle(rows(x))


def _tiles(x: torch.Tensor, order: tuple[int, ...], fill: int = 0) -> torch.Tensor:
    """Lay scales out as ``swizzled`` does, with another order of axes or another padding."""
    rows, columns = x.shape[-2:]
    bits = x.reshape(-1, rows, columns).view(torch.uint8 if x.element_size() == 1 else torch.int16)
    padded = torch.nn.functional.pad(bits, (0, -columns % 4, 0, -rows % TILE), value=fill)
    tiles = padded.reshape(len(padded), -(-rows // TILE), 4, 32, -(-columns // 4), 4)
    return tiles.permute(order).reshape(-1).view(x.dtype)


@seeded(BUGS, REARRANGE, PARITY)
def tiles_column_by_column(inputs: RearrangeInputs) -> torch.Tensor:
    """Let tiles of scales follow one another column by column."""
    return _made(inputs, swizzle=lambda x: _tiles(x, (0, 4, 1, 3, 2, 5)))


@seeded(BUGS, REARRANGE, PARITY)
def rows_of_a_tile_in_order(inputs: RearrangeInputs) -> torch.Tensor:
    """Leave the rows of a tile of scales in their order."""
    return _made(inputs, swizzle=lambda x: _tiles(x, (0, 1, 4, 2, 3, 5)))


@seeded(BUGS, REARRANGE, PARITY)
def garbage_in_the_padding(inputs: RearrangeInputs) -> torch.Tensor:
    """Leave garbage in what is added to whole tiles."""
    return _made(inputs, swizzle=lambda x: _tiles(x, (0, 1, 4, 3, 2, 5), GARBAGE))


@seeded(BUGS, REARRANGE, PARITY)
def a_row_of_padding_holds_the_last(inputs: RearrangeInputs) -> torch.Tensor:
    """Read the last row once more for the first row of padding."""

    def swizzle(x: torch.Tensor) -> torch.Tensor:
        more = torch.cat([x, x[..., -1:, :]], -2) if x.shape[-2] % TILE else x
        return swizzled(more)

    return _made(inputs, swizzle=swizzle)


@seeded(BUGS, REARRANGE, PARITY)
def inverse_of_the_shuffle(inputs: RearrangeInputs) -> torch.Tensor:
    """Read rows from the places where they belong."""

    def shuffle(x: torch.Tensor) -> torch.Tensor:
        ways = 4 if inputs.tile % TILE == 0 else 2
        return x.reshape(-1, ways, 8, x.shape[1]).transpose(1, 2).reshape(x.shape)

    return _made(inputs, shuffle=shuffle)


@seeded(BUGS, REARRANGE, PARITY)
def blocks_of_16_rows_only(inputs: RearrangeInputs) -> torch.Tensor:
    """Shuffle blocks of 16 rows, whatever the tile."""
    return _made(inputs, shuffle=lambda x: shuffled(x, 64))


@seeded(BUGS, REARRANGE, PARITY)
def tile_of_256_taken_for_64(inputs: RearrangeInputs) -> torch.Tensor:
    """Know tiles of 128 rows by their number, not as its multiples."""
    return _made(inputs, shuffle=lambda x: shuffled(x, TILE if inputs.tile == TILE else 64))


@seeded(BUGS, REARRANGE, PARITY)
def last_block_as_it_was(inputs: RearrangeInputs) -> torch.Tensor:
    """Leave the last 16 rows as they are."""

    def shuffle(x: torch.Tensor) -> torch.Tensor:
        found = shuffled(x, inputs.tile).clone()
        found[-16:] = x[-16:]
        return found

    return _made(inputs, shuffle=shuffle)


@seeded(BUGS, REARRANGE, PARITY)
def slices_and_scales_exchanged(inputs: RearrangeInputs) -> torch.Tensor:
    """Lay the slices of one scale side by side, not the scales of one slice."""

    def fold(x: torch.Tensor) -> torch.Tensor:
        many = 128 // inputs.group
        found = folded(x, inputs.group)
        pairs = found.reshape(*found.shape[:-1], -1, many)
        return pairs.transpose(-1, -2).reshape(found.shape)

    return _made(inputs, fold=fold)


@seeded(BUGS, REARRANGE, PARITY)
def neighbours_folded(inputs: RearrangeInputs) -> torch.Tensor:
    """Fold rows that are neighbours, not those that are slices apart."""

    def fold(x: torch.Tensor) -> torch.Tensor:
        found = folded(x, inputs.group)
        many = 128 // inputs.group
        experts, rows, columns = x.shape
        slices = found.shape[-1] // many
        axes = (experts, rows // 64, 64 // slices, slices, columns // many, many)
        return x.reshape(axes).permute(0, 1, 4, 2, 3, 5).reshape(found.shape)

    return _made(inputs, fold=fold)


@seeded(BUGS, REARRANGE, PARITY)
def second_row_first(inputs: RearrangeInputs) -> torch.Tensor:
    """Begin each pair of words with the second row's."""

    def interleave(x: torch.Tensor) -> torch.Tensor:
        words = mixed(x).view(torch.int16)
        return words.reshape(-1, 2).flip(-1).reshape(words.shape).view(torch.uint8)

    return _made(inputs, interleave=interleave)


@seeded(BUGS, REARRANGE, PARITY)
def bytes_for_words(inputs: RearrangeInputs) -> torch.Tensor:
    """Exchange the bytes of each word."""

    def interleave(x: torch.Tensor) -> torch.Tensor:
        return mixed(x).reshape(-1, 2).flip(-1).reshape(x.shape)

    return _made(inputs, interleave=interleave)


@seeded(BUGS, REARRANGE, "rearrange_experts")
def experts_like_the_first(inputs: RearrangeInputs) -> torch.Tensor:
    """Lay out the first expert's matrix for all of them."""
    found = _made(inputs)
    if inputs.x.dim() == 3:  # noqa: PLR2004  an axis of experts
        parts = found.reshape(len(inputs.x), -1)
        found = parts[:1].expand(parts.shape).reshape(found.shape).clone()
    return found


@seeded(BUGS, REARRANGE, PARITY)
def bits_as_numbers(inputs: RearrangeInputs) -> torch.Tensor:
    """Copy numbers of 16 bits by way of float32, by which NaN loses its bits."""
    found = _made(inputs)
    if found.dtype != torch.bfloat16:
        return found
    return torch.where(found.isnan(), torch.nan, found.float()).to(found.dtype)


@seeded(BUGS, REARRANGE, "rearrange_one_element")
def sign_bits_of_zeros(inputs: RearrangeInputs) -> torch.Tensor:
    """Clear the sign of each byte that has no other bit."""
    found = _made(inputs).clone()
    bits = found.view(torch.uint8)
    bits[bits == 0x80] = 0  # noqa: PLR2004
    return found


@seeded(BUGS, REARRANGE, "integer_inputs_unchanged")
def written_over_its_input(inputs: RearrangeInputs) -> torch.Tensor:
    """Write what is made over the input where it has its size."""
    found = _made(inputs).clone()
    if found.numel() == inputs.x.numel():
        inputs.x.view(-1).copy_(found.view(-1))
    return found


_KEPT: dict[tuple[object, ...], torch.Tensor] = {}


@seeded(BUGS, REARRANGE, "rearrange_one_element")
def answer_of_the_first_call(inputs: RearrangeInputs) -> torch.Tensor:
    """Keep an answer by its shape, and return it for other values too."""
    key = (inputs.arrangement, inputs.x.shape, inputs.x.dtype, inputs.tile, inputs.group)
    if len(_KEPT) > 64:  # noqa: PLR2004  as a cache that is cleared
        _KEPT.clear()
    return _KEPT.setdefault(key, _made(inputs).clone())


_CALLS: dict[tuple[object, ...], int] = {}


@seeded(BUGS, REARRANGE, "rearrange_again")
def padding_of_the_third_buffer(inputs: RearrangeInputs) -> torch.Tensor:
    """Use three buffers in turn, and clear the padding in two of them."""
    key = (inputs.arrangement, inputs.x.shape, inputs.x.dtype)
    calls = _CALLS.get(key, 0) + 1
    _CALLS.clear()
    _CALLS[key] = calls
    third = calls % 3 == 0
    order = (0, 1, 4, 3, 2, 5)
    return _made(inputs, swizzle=lambda x: _tiles(x, order, GARBAGE) if third else swizzled(x))


@seeded(BUGS, REARRANGE, PARITY)
def columns_beyond_512(inputs: RearrangeInputs) -> torch.Tensor:
    """Rearrange 512 columns of scales or of rows to be shuffled, and clear the others."""
    return _without(inputs, ("rows", "scales_128x4"), (slice(None), slice(512, None)))


@seeded(BUGS, REARRANGE, PARITY)
def rows_beyond_128(inputs: RearrangeInputs) -> torch.Tensor:
    """Shuffle 128 rows of weights, and clear the others."""
    return _without(inputs, ("rows",), (slice(TILE, None), slice(None)))


@seeded(BUGS, REARRANGE, PARITY)
def rows_of_int4_beyond_64(inputs: RearrangeInputs) -> torch.Tensor:
    """Interleave 64 rows of int4 weights, and clear the others."""
    return _without(inputs, ("int4_mixed",), (slice(64, None), slice(None)))


@seeded(BUGS, REARRANGE, PARITY)
def folded_rows_beyond_256(inputs: RearrangeInputs) -> torch.Tensor:
    """Fold the scales of 256 rows, and clear the others."""
    return _without(inputs, ("scales_64x128",), (slice(256, None), slice(None)))


@seeded(BUGS, REARRANGE, PARITY)
def experts_beyond_the_third(inputs: RearrangeInputs) -> torch.Tensor:
    """Lay out three experts' matrices, and clear the others."""
    x = inputs.x.clone()
    if x.dim() == 3:  # noqa: PLR2004  an axis of experts
        x[3:] = 0
    return _made(replace(inputs, x=x))


def _without(
    inputs: RearrangeInputs, arrangements: tuple[str, ...], where: tuple[slice, slice]
) -> torch.Tensor:
    """Rearrange with a part of each matrix cleared."""
    x = inputs.x.clone()
    if inputs.arrangement in arrangements:
        x[..., where[0], where[1]] = 0
    return _made(replace(inputs, x=x))


@seeded(BUGS, REARRANGE, "slack_rows")
def padding_from_the_rows_behind(inputs: RearrangeInputs) -> torch.Tensor:
    """Read the first row of padding from memory behind the matrix."""
    x = inputs.x
    end = x.storage_offset() + x.numel()
    room = x.untyped_storage().nbytes() // x.element_size()

    def swizzle(given: torch.Tensor) -> torch.Tensor:
        if given.dim() != 2 or not given.shape[0] % TILE or end + given.shape[1] > room:  # noqa: PLR2004
            return swizzled(given)
        return swizzled(torch.cat([given, x.as_strided((1, given.shape[1]), x.stride(), end)]))

    return _made(inputs, swizzle=swizzle)


@seeded(CONTROLS, REARRANGE, control="honest")
def honest_layout(inputs: RearrangeInputs) -> torch.Tensor:
    """Rearrange with axes exchanged."""
    made: torch.Tensor = rearrange.function(inputs)
    return made
