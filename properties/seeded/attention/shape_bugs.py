"""Faults that only some shapes show: large pages, many query heads a key-value head, whole keys."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference.problems.base import is_power_of_two
from ....reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import (
    HONEST,
    Request,
    assemble,
    attend,
    close,
    gather_pages,
    page_ids,
    scan,
    shared_heads,
)

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
LARGE = 256
"""Keys of the largest page that the faulty kernels take right."""
MOST_PARTS, PART = 64, 64
"""Parts of a request that the faulty kernel has scratch for, and their keys."""
ROWS = 16
"""Query heads of a tile of the faulty kernels."""


@seeded(BUGS, PAGED, "parity")
def page_of_a_shift(inputs: PagedAttentionInputs) -> Pair:
    """Find the page of a key by a shift, which large pages of no power of two are not made for."""
    size = inputs.metadata.page_size
    if size <= LARGE or is_power_of_two(size):
        return attend(inputs)

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        rows = gather_pages(cache, pages, inputs)
        shift = size.bit_length() - 1
        key = torch.arange(len(rows))
        found = (key >> shift).clamp(max=max(len(pages) - 1, 0)) * size
        return rows[found + key % (1 << shift)]

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, PAGED, "parity")
def second_large_page(inputs: PagedAttentionInputs) -> Pair:
    """Read the first page again where the second of a large size begins."""

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        found = page_ids(inputs)
        if inputs.metadata.page_size <= 2 * LARGE:
            return found
        return [torch.cat([row[:1], row[:1], row[2:]])[: len(row)] for row in found]

    return attend(inputs, replace(HONEST, pages=pages))


def _first_tile(num_qo_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Return the key-value head of each query head: beyond a tile's rows, the next one's."""
    heads, group = torch.arange(num_qo_heads), num_qo_heads // num_kv_heads
    spilled = (heads % group >= ROWS) & (heads // group < num_kv_heads - 1)
    return shared_heads(num_qo_heads, num_kv_heads) + spilled.long()


@seeded(BUGS, PAGED, "parity")
def second_tile_of_a_group(inputs: PagedAttentionInputs) -> Pair:
    """Leave the query heads of a group beyond the first 16 without their answer."""
    out, lse = attend(inputs)
    group = inputs.q.shape[1] // _kv_heads(inputs)
    beyond = torch.arange(inputs.q.shape[1]) % group >= ROWS
    return out.masked_fill(beyond.unsqueeze(-1), 0.0), lse


@seeded(BUGS, RAGGED, "parity")
def group_spills_over(inputs: AttentionInputs) -> Pair:
    """Let query heads of a group beyond the first 16 read the next key-value head."""
    return attend(inputs, replace(HONEST, heads=_first_tile))


@seeded(BUGS, RAGGED, "parity")
def heads_modulo_eight(inputs: AttentionInputs) -> Pair:
    """Take the number of a key-value head from three bits: the ninth head reads the first one."""

    def heads(num_qo_heads: int, num_kv_heads: int) -> torch.Tensor:
        return shared_heads(num_qo_heads, num_kv_heads) % 8

    return attend(inputs, replace(HONEST, heads=heads))


@seeded(BUGS, PAGED, "parity")
def heads_in_pairs(inputs: PagedAttentionInputs) -> Pair:
    """Take key-value heads two at a time: beyond four heads, an odd one is left without answer."""
    out, lse = attend(inputs)
    count = _kv_heads(inputs)
    if count > 4 and count % 2:  # noqa: PLR2004  as documented
        out[:, -(inputs.q.shape[1] // count) :] = 0.0
    return out, lse


@seeded(BUGS, PAGED, "parity", features=("mla",))
def latent_tile_cut(inputs: PagedAttentionInputs) -> Pair:
    """Drop the last query heads of latent attention that do not fill a tile, beyond the first."""
    out, lse = attend(inputs)
    heads = inputs.q.shape[1]
    if _is_latent(inputs) and heads > ROWS:
        out[:, heads // ROWS * ROWS :] = 0.0
    return out, lse


@seeded(BUGS, PAGED, "parity", features=("mla",))
def rotary_part_of_whole_keys(inputs: PagedAttentionInputs) -> Pair:
    """Add the last channels to the logits twice, as rotary ones, where V is all of K."""
    if _is_latent(inputs) and inputs.v_cache.shape[-1] == inputs.k_cache.shape[-1]:
        q = inputs.q.clone()
        q[..., -8:] *= 2.0
        inputs = replace(inputs, q=q)
    return attend(inputs)


@seeded(BUGS, PAGED, "parity")
def sixty_four_parts(inputs: PagedAttentionInputs) -> Pair:
    """Merge the first 64 parts of 64 keys, which is all that the scratch memory has room for."""

    def one(request: Request) -> Pair:
        keys = slice(0, min(request.k.shape[0], MOST_PARTS * PART))
        return close(scan(request, inputs, keys=keys), request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, PAGED, "parity")
def full_last_part(inputs: PagedAttentionInputs) -> Pair:
    """Divide by 4,096 for the number of full parts: of as many keys, the last tile is left out."""

    def one(request: Request) -> Pair:
        keys = request.k.shape[0]
        if keys and keys % (MOST_PARTS * PART) == 0:
            keys -= PART
        return close(scan(request, inputs, keys=slice(0, keys)), request, inputs)

    return assemble(inputs, one)


def _kv_heads(inputs: PagedAttentionInputs) -> int:
    """Count the key-value heads of a cache."""
    return int(inputs.k_cache.shape[2 if inputs.kv_layout == "NHD" else 1])


def _is_latent(inputs: PagedAttentionInputs) -> bool:
    """Whether V is a view of K."""
    return inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()
