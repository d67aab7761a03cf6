"""Faults in how attention finds its keys: page tables, last pages, layouts, strides."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference import KVLayout
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, attend, gather_pages, key_counts, page_ids

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED = "paged_attention"


def _all_slots(inputs: PagedAttentionInputs) -> list[int]:
    size = inputs.metadata.page_size
    return [len(pages) * size for pages in page_ids(inputs)]


@seeded(BUGS, PAGED, "parity")
def last_page_full(inputs: PagedAttentionInputs) -> Pair:
    """Attend to the whole last page, whatever last_page_len says."""
    return attend(inputs, replace(HONEST, counts=_all_slots))


@seeded(BUGS, PAGED, "parity")
def last_page_off_by_one(inputs: PagedAttentionInputs) -> Pair:
    """Leave the last key of a partly filled last page out."""

    def counts(inputs: PagedAttentionInputs) -> list[int]:
        size = inputs.metadata.page_size
        return [count - (count % size > 1) for count in key_counts(inputs)]

    return attend(inputs, replace(HONEST, counts=counts))


@seeded(BUGS, PAGED, "page_size_invariance")
def last_page_modulo(inputs: PagedAttentionInputs) -> Pair:
    """Take seq_len % page_size keys of the last page: none where it is full."""

    def counts(inputs: PagedAttentionInputs) -> list[int]:
        size = inputs.metadata.page_size
        return [max(count - 1, 0) // size * size + count % size for count in key_counts(inputs)]

    return attend(inputs, replace(HONEST, counts=counts))


@seeded(BUGS, PAGED, "parity")
def first_table_for_all(inputs: PagedAttentionInputs) -> Pair:
    """Read every request's pages from the first request's row of the page table."""

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        found = page_ids(inputs)
        every = inputs.metadata.paged_kv_indices.long()
        return [every[: len(row)] for row in found]

    return attend(inputs, replace(HONEST, pages=pages))


@seeded(BUGS, PAGED, "parity")
def pages_swapped(inputs: PagedAttentionInputs) -> Pair:
    """Swap the second and the third page of a request."""

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        return [torch.cat([row[:1], row[2:3], row[1:2], row[3:]]) for row in page_ids(inputs)]

    return attend(inputs, replace(HONEST, pages=pages))


@seeded(BUGS, PAGED, "parity", model="flashinfer#3219")
def pages_taken_as_contiguous(inputs: PagedAttentionInputs) -> Pair:
    """Read a request's pages as neighbours of its first one."""

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        last = inputs.k_cache.shape[0] - 1
        return [(row[:1] + torch.arange(len(row))).clamp(max=last) for row in page_ids(inputs)]

    return attend(inputs, replace(HONEST, pages=pages))


@seeded(BUGS, PAGED, "parity", model="flashinfer#3130")
def page_offset_overflows(inputs: PagedAttentionInputs) -> Pair:
    """Compute the offset of a page (in elements) in 16 bits, as others have in 32."""
    stride = inputs.k_cache[0].numel()

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        count = inputs.k_cache.shape[0]
        offsets = [(row * stride).to(torch.int16).long() for row in page_ids(inputs)]
        return [(row // stride) % count for row in offsets]

    return attend(inputs, replace(HONEST, pages=pages))


@seeded(BUGS, PAGED, "layout_invariance")
def layout_guessed(inputs: PagedAttentionInputs) -> Pair:
    """Guess the layout from the shape: HND wherever the second axis could be the heads."""
    cache = inputs.k_cache
    heads = cache.shape[2 if inputs.kv_layout == "NHD" else 1]
    layout: KVLayout = "HND" if cache.shape[1] == heads else "NHD"
    return attend(replace(inputs, kv_layout=layout))


@seeded(BUGS, PAGED, "parity", model="flashinfer#4044")
def strides_ignored(inputs: PagedAttentionInputs) -> Pair:
    """Read caches as if they were contiguous."""

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        dense = torch.empty(cache.shape, device="meta").stride()
        return gather_pages(cache.as_strided(cache.shape, dense), pages, inputs)

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, PAGED, "unused_memory")
def tail_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Multiply the tail of the last page by zero in place of skipping it: 0 * NaN is NaN."""
    return attend(inputs, replace(HONEST, reads_tail=True))


@seeded(BUGS, PAGED, "unused_memory")
def largest_value_of_pages(inputs: PagedAttentionInputs) -> Pair:
    """Check all slots of the pages in use, unwritten ones too, and clear values if one is NaN."""

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        found = gather_pages(cache, pages, inputs)
        return torch.zeros_like(found) if found.isnan().any() else found

    return attend(inputs, replace(HONEST, gather=gather))
