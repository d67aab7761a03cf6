"""Where the keys of a paged problem lie: which pages are whose, and the tables that say so.

It follows only from the structure of the batch, which many problems in a row have in common: they
differ in their values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..attention.metadata import BatchMetadata, build_metadata
from ..problems import AttentionProblem
from .values import bits, stream

REMEMBERED = 8
"""Structures, the latest."""


class Placement(NamedTuple):
    """Pages of a batch, on the host. Others hold it too: it is not to be changed.

    Attributes:
        num_pages: number of pages of the cache; at least two belong to nobody.
        used: [R, pages + 1] bool, which entries of the block table are pages.
        slots: [2, keys] int64, page and offset in it of every logical key of the batch.
        metadata: the metadata of the batch.
    """

    num_pages: int
    used: torch.Tensor
    slots: torch.Tensor
    metadata: BatchMetadata


def placement(problem: AttentionProblem) -> Placement:
    """Place a problem's keys."""
    return _placement(
        problem.query_lens,
        problem.seq_lens,
        problem.page_size,
        problem.page_order,
        problem.shared_prefix_pages,
    )


@functools.lru_cache(maxsize=REMEMBERED)
def _placement(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    page_size: int,
    page_order: int,
    shared_prefix_pages: int,
) -> Placement:
    owned: dict[tuple[int, int], int] = {}
    rows: list[list[int]] = []
    for request, seq_len in enumerate(seq_lens):
        shared = min(shared_prefix_pages, seq_len // page_size)
        row = []
        for page in range(-(-seq_len // page_size)):
            owner = (-1, page) if page < shared else (request, page)
            row.append(owned.setdefault(owner, len(owned)))
        rows.append(row)
    num_pages = len(owned) + 2 + (len(owned) // 4 if page_order else 0)
    places = list(range(num_pages))
    if page_order:
        keys = bits(stream(page_order, "pages"), torch.arange(num_pages), 1)
        places = torch.argsort(keys.flatten(), stable=True).tolist()
    pages = [[places[page] for page in row] for row in rows]
    counts = torch.tensor([len(row) for row in pages], dtype=torch.int64)
    width = max(map(len, pages), default=0) + 1
    metadata = build_metadata(query_lens, seq_lens, pages, page_size)
    return Placement(
        num_pages,
        torch.arange(width) < counts.unsqueeze(1),
        _slots(metadata, seq_lens),
        metadata,
    )


def _slots(metadata: BatchMetadata, seq_lens: tuple[int, ...]) -> torch.Tensor:
    """Return the [2, keys] page and offset in it of every logical key of the batch."""
    size = metadata.page_size
    pages = metadata.paged_kv_indices.long().unsqueeze(1)
    slots = (pages * size + torch.arange(size)).flatten()
    begins = (size * metadata.paged_kv_indptr).tolist()
    used = [slots[begin : begin + s] for begin, s in zip(begins, seq_lens, strict=False)]
    keys = torch.cat(used) if used else slots
    return torch.stack([keys // size, keys % size])


def block_table(problem: AttentionProblem) -> tuple[torch.Tensor, int]:
    """Return the [R, pages] int32 block table and the number of pages in the cache.

    At least two pages belong to nobody. Entries past a request's pages are garbage.
    """
    placed = placement(problem)
    requests, width = placed.used.shape
    garbage = bits(stream(problem.seed, "garbage"), torch.arange(requests), width)
    table = garbage.to(torch.int32)
    return table.masked_scatter_(placed.used, placed.metadata.paged_kv_indices), placed.num_pages
