"""Faults in slicing a batch for one rank of a context-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...reference.tensors.context_parallel import ContextParallelInputs
from .catalogue import SeededBug, seeded
from .honest import Buffers, Built, cumulative

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
SLICE = "slice_context_parallel"
MOST_BATCHES = 4096
Lengths = Callable[[int, ContextParallelInputs], int]
"""Function of a request's number of keys that returns the rank's share."""


@dataclass(frozen=True)
class Sliced(Built):
    """What the slicers here return: a rank's metadata, unchecked."""

    page_size: int


def local_keys(seq_len: int, inputs: ContextParallelInputs) -> int:
    """Count the keys of a request that lie on the rank, one by one."""
    turns = (key // inputs.interleave for key in range(seq_len))
    return sum(turn % inputs.world == inputs.rank for turn in turns)


def sliced(
    inputs: ContextParallelInputs, lengths: Lengths = local_keys, *, truncated: bool = True
) -> Sliced:
    """Slice a batch, with other lengths, or pages past them, where a bug gives these."""
    whole, size = inputs.metadata, inputs.metadata.page_size // inputs.world
    local = torch.tensor([lengths(s, inputs) for s in whole.seq_lens.tolist()], dtype=torch.int32)
    virtual = whole.paged_kv_indptr.diff()
    counts = (local + size - 1) // size if truncated else virtual
    rows = whole.paged_kv_indices.split(virtual.tolist())
    pages = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
    return Sliced(
        whole.qo_indptr.clone(),
        cumulative(counts),
        torch.cat([whole.paged_kv_indices[:0], *pages]),
        torch.where(local > 0, (local - 1) % size + 1, 0).int(),
        local,
        size,
    )


@seeded(BUGS, SLICE, "context_parallel_parity")
def interleave_ignored(inputs: ContextParallelInputs) -> Sliced:
    """Deal the keys one by one, whatever the interleave is."""
    return sliced(replace(inputs, interleave=1))


@seeded(BUGS, SLICE, "context_parallel_parity")
def tail_from_second_rank(inputs: ContextParallelInputs) -> Sliced:
    """Begin the last turn, which does not go round, at the second rank."""

    def lengths(seq_len: int, inputs: ContextParallelInputs) -> int:
        tail = seq_len % (inputs.interleave * inputs.world)
        before = replace(inputs, rank=(inputs.rank - 1) % inputs.world)
        return local_keys(seq_len - tail, inputs) + local_keys(tail, before)

    return sliced(inputs, lengths)


@seeded(BUGS, SLICE, "context_parallel_partition")
def length_rounded_up(inputs: ContextParallelInputs) -> Sliced:
    """Return the length of the longest share for every rank."""
    return sliced(inputs, lambda seq_len, inputs: -(-seq_len // inputs.world))


@seeded(BUGS, SLICE, "context_parallel_partition")
def keys_in_one_block_a_rank(inputs: ContextParallelInputs) -> Sliced:
    """Divide a request into one range of keys for each rank, as prefills are divided."""

    def lengths(seq_len: int, inputs: ContextParallelInputs) -> int:
        share = -(-seq_len // inputs.world)
        return min(max(seq_len - share * inputs.rank, 0), share)

    return sliced(inputs, lengths)


@seeded(BUGS, SLICE, "context_parallel_parity")
def last_page_len_of_group(inputs: ContextParallelInputs) -> Sliced:
    """Leave the length of the last page as the virtual page has it."""
    return replace(sliced(inputs), paged_kv_last_page_len=inputs.metadata.paged_kv_last_page_len)


@seeded(BUGS, SLICE, "context_parallel_merge")
def empty_rank_gets_a_key(inputs: ContextParallelInputs) -> Sliced:
    """Return one key for a rank that holds none of a request, as some kernels need."""
    return sliced(inputs, lambda s, inputs: max(local_keys(s, inputs), min(s, 1)))


@seeded(BUGS, SLICE, "context_parallel_parity")
def pages_not_truncated(inputs: ContextParallelInputs) -> Sliced:
    """Keep the last virtual page of a request though the rank holds nothing of it."""
    return sliced(inputs, truncated=False)


@seeded(BUGS, SLICE, "context_parallel_parity")
def ranks_from_the_end(inputs: ContextParallelInputs) -> Sliced:
    """Deal the keys to the last rank first."""
    return sliced(replace(inputs, rank=inputs.world - 1 - inputs.rank))


@seeded(BUGS, SLICE, "context_parallel_parity")
def page_size_of_group(inputs: ContextParallelInputs) -> Sliced:
    """Report the virtual pages' size."""
    return replace(sliced(inputs), page_size=inputs.metadata.page_size)


@seeded(BUGS, SLICE, "context_parallel_merge")
def page_ids_in_local_pages(inputs: ContextParallelInputs) -> Sliced:
    """Multiply page ids by the ranks, as if virtual pages were local ones side by side."""
    found = sliced(inputs)
    return replace(found, paged_kv_indices=found.paged_kv_indices * inputs.world)


@seeded(BUGS, SLICE, "context_parallel_parity")
def queries_divided_too(inputs: ContextParallelInputs) -> Sliced:
    """Divide the query tokens among the ranks besides the keys."""
    found = sliced(inputs)
    return replace(found, qo_indptr=found.qo_indptr // inputs.world)


@seeded(BUGS, SLICE, "context_parallel_parity")
def local_lengths_in_int64(inputs: ContextParallelInputs) -> Sliced:
    """Leave the lengths in int64, as sums of booleans are."""
    found = sliced(inputs)
    return replace(found, seq_lens=found.seq_lens.long())


_remembered: dict[tuple[object, ...], Sliced] = {}


@seeded(BUGS, SLICE, "context_parallel_partition")
def slice_of_first_rank(inputs: ContextParallelInputs) -> Sliced:
    """Remember the slice of a batch without the rank that it was made for."""
    whole = inputs.metadata
    tensors = (tuple(tensor.tolist()) for tensor in whole.tensors().values())
    key = (whole.page_size, inputs.world, inputs.interleave, *tensors)
    if len(_remembered) > MOST_BATCHES:
        _remembered.clear()
    return _remembered.setdefault(key, sliced(inputs))


@seeded(BUGS, SLICE, "context_parallel_merge")
def first_chunk_gets_a_key(inputs: ContextParallelInputs) -> Sliced:
    """Return one key of page 0 for a prefill that has no context yet."""
    found = sliced(inputs)
    first = (inputs.metadata.qo_indptr.diff() > 1) & (inputs.metadata.seq_lens == 0)
    rows = found.paged_kv_indices.split(found.paged_kv_indptr.diff().tolist())
    pages = [row.new_zeros(1) if new else row for row, new in zip(rows, first, strict=True)]
    return Sliced(
        found.qo_indptr,
        cumulative(found.paged_kv_indptr.diff() + first.int()),
        torch.cat([found.paged_kv_indices[:0], *pages]),
        found.paged_kv_last_page_len + first.int(),
        found.seq_lens + first.int(),
        found.page_size,
    )


@seeded(BUGS, SLICE, "integer_inputs_unchanged")
def lengths_divided_in_place(inputs: ContextParallelInputs) -> Sliced:
    """Divide the batch's own lengths by the ranks after the slice is made."""
    found = sliced(inputs)
    inputs.metadata.seq_lens.div_(inputs.world, rounding_mode="floor")
    return found


_persistent = Buffers()


@seeded(CONTROLS, SLICE, control="honest")
def persistent_slice(inputs: ContextParallelInputs) -> Sliced:
    """Fill persistent buffers and return views of them."""
    *tensors, size = vars(sliced(inputs)).items()
    return Sliced(
        **{name: _persistent.store(name, each) for name, each in tensors}, page_size=size[1]
    )
