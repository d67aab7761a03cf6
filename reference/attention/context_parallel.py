"""The keys of each request that one rank of a decode-context-parallel group holds.

A group of ``world`` ranks divides each request's keys (vLLM's decode context parallelism): key j
lies on rank ``(j // interleave) % world``. The scheduler counts in virtual pages of the whole
group, and each rank stores its share of a virtual page in the local page of the same id.

A virtual page of P * world keys begins at a multiple of interleave * world, because interleave
divides P. So it holds P / interleave whole turns of the ranks, P keys of each: one local page.
Local key l of a rank therefore lies in the request's page l // P, virtual and local, and a rank
needs the first pages of a request only.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ..validation import checked_integer
from .metadata import BatchMetadata, last_page_len


def slice_context_parallel(
    metadata: BatchMetadata, rank: int, world: int, interleave: int = 1
) -> BatchMetadata:
    """Return the metadata of the keys that one rank of a context-parallel group holds.

    Args:
        metadata: the metadata of the whole batch, in virtual pages of ``world`` times as many keys
            as a rank's.
        rank: the rank of the group, from 0.
        world: ranks of the group.
        interleave: consecutive keys on one rank before the next rank's turn
            (``cp_kv_cache_interleave_size``); it divides a rank's page.

    Returns:
        BatchMetadata with the rank's lengths and page size, the first pages of each request under
        their own ids, and ``qo_indptr`` as it was: every rank attends with all queries.

    Raises:
        ValueError: metadata that contradict themselves, a rank outside the group, a page that the
            ranks cannot share equally, an interleave that does not divide a rank's page.
    """
    fields = metadata.checked()
    rank, world, interleave, page_size = _checked(metadata.page_size, rank, world, interleave)
    seq_lens = [local_keys(length, rank, world, interleave) for length in fields["seq_lens"]]
    counts = [-(-length // page_size) for length in seq_lens]
    starts = fields["paged_kv_indptr"]
    indices = [
        page
        for start, count in zip(starts, counts, strict=False)
        for page in fields["paged_kv_indices"][start : start + count]
    ]

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=metadata.seq_lens.device)

    return BatchMetadata(
        qo_indptr=metadata.qo_indptr.clone(),
        paged_kv_indptr=int32([0, *accumulate(counts)]),
        paged_kv_indices=int32(indices),
        paged_kv_last_page_len=int32([last_page_len(length, page_size) for length in seq_lens]),
        seq_lens=int32(seq_lens),
        page_size=page_size,
    )


def local_keys(seq_len: int, rank: int, world: int, interleave: int) -> int:
    """Count the keys j below ``seq_len`` with ``(j // interleave) % world == rank``, run by run."""
    runs = range(rank * interleave, seq_len, interleave * world)
    return sum(min(interleave, seq_len - start) for start in runs)


def checked_group(rank: int, world: int, interleave: int) -> tuple[int, int, int]:
    """Return rank, ranks and interleave of a group; ValueError where no group has them."""
    numbers = {"rank": rank, "world": world, "interleave": interleave}
    rank, world, interleave = (checked_integer(name, each) for name, each in numbers.items())
    for name, number in (("world", world), ("interleave", interleave)):
        if number < 1:
            message = f"{name} is {number}; it must be at least 1"
            raise ValueError(message)
    if not 0 <= rank < world:
        message = f"rank is {rank}; the group has {world} ranks, counted from 0"
        raise ValueError(message)
    return rank, world, interleave


def _checked(
    virtual_page_size: int, rank: int, world: int, interleave: int
) -> tuple[int, int, int, int]:
    """Return rank, world, interleave and a rank's page size."""
    rank, world, interleave = checked_group(rank, world, interleave)
    page_size, rest = divmod(virtual_page_size, world)
    if rest:
        message = (
            f"metadata.page_size is {virtual_page_size}, not a multiple of the {world} ranks: a "
            "virtual page holds as many keys of each"
        )
        raise ValueError(message)
    if page_size % interleave:
        message = (
            f"interleave is {interleave}; it must divide a rank's page of {page_size} keys "
            f"(metadata.page_size {virtual_page_size} over {world} ranks)"
        )
        raise ValueError(message)
    return rank, world, interleave, page_size
