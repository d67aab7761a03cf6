"""Faults in building batch metadata."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ...impl.features import INT64_INPUTS, REFUSES
from ...reference.tensors.inputs import MetadataInputs
from .catalogue import SeededBug, seeded
from .honest import (
    Buffers,
    Built,
    build,
    cumulative,
)

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
METADATA = "build_metadata"
MOST_BATCHES = 4096


@seeded(BUGS, METADATA, "metadata_invariants")
def last_page_len_zero(inputs: MetadataInputs) -> Built:
    """Return the length 0 for a last page that is full."""
    return replace(build(inputs), paged_kv_last_page_len=inputs.seq_lens % inputs.page_size)


@seeded(BUGS, METADATA, "metadata_invariants")
def page_indptr_in_tokens(inputs: MetadataInputs) -> Built:
    """Accumulate tokens where pages belong."""
    return replace(build(inputs), paged_kv_indptr=cumulative(inputs.seq_lens))


@seeded(BUGS, METADATA, "metadata_invariants")
def one_page_too_many(inputs: MetadataInputs) -> Built:
    """Count seq_len // page_size + 1 pages, and read garbage where seq_len is a multiple."""
    counts = inputs.seq_lens // inputs.page_size + 1
    return build(inputs, counts.clamp(max=inputs.block_table.shape[1]))


@seeded(BUGS, METADATA, "metadata_parity")
def indptr_in_int64(inputs: MetadataInputs) -> Built:
    """Leave an indptr in int64, as cumsum gives it."""
    built = build(inputs)
    return replace(built, qo_indptr=built.qo_indptr.long())


_shrinking = Buffers()


@seeded(BUGS, METADATA, "metadata_parity", model="vllm#39546")
def end_of_larger_batch(inputs: MetadataInputs) -> Built:
    """Leave the last entry of a persistent indptr as a larger batch wrote it."""
    built = build(inputs)
    before = _shrinking.view("largest", 1)
    view = _shrinking.view("indptr", len(built.paged_kv_indptr))
    stale = view[-1].clone()
    view.copy_(built.paged_kv_indptr)
    if len(view) < int(before):
        view[-1] = stale
    before.fill_(max(int(before), len(view)))
    return replace(built, paged_kv_indptr=view)


@seeded(BUGS, METADATA, "metadata_invariants")
def indptr_not_rebased(inputs: MetadataInputs) -> Built:
    """Start qo_indptr where the requests without queries end, not at 0."""
    built = build(inputs)
    offset = int((inputs.query_lens == 0).sum())
    return replace(built, qo_indptr=built.qo_indptr + offset)


_shared = Buffers()
_built: dict[Hashable, Built] = {}


@seeded(BUGS, METADATA, "metadata_fresh_buffers")
def remembered_views(inputs: MetadataInputs) -> Built:
    """Remember results of large batches until one is used again, though later ones overwrite."""
    built = build(inputs)
    if len(built.seq_lens.unique()) < 3:  # noqa: PLR2004  such batches come again by chance
        return built
    key = tuple(tuple(tensor.tolist()) for tensor in vars(built).values())
    if key in _built:
        used = _built[key]
        _built.clear()
        return used
    if len(_built) > MOST_BATCHES:
        _built.clear()
    _built[key] = Built(**{name: _shared.store(name, t) for name, t in vars(built).items()})
    return _built[key]


@seeded(BUGS, METADATA, "integer_inputs_unchanged")
def lengths_decremented(inputs: MetadataInputs) -> Built:
    """Compute last page lengths from seq_lens - 1, subtracted in place."""
    built = build(inputs)
    inputs.seq_lens.sub_(1)
    return built


_first_sizes: list[int] = []


@dataclass(frozen=True)
class Sized(Built):
    """Metadata with the number of keys that its pages have."""

    page_size: int


@seeded(BUGS, METADATA, "metadata_attended")
def page_size_of_the_first_batch(inputs: MetadataInputs) -> Sized:
    """Return the page size that the first call had."""
    _first_sizes.append(inputs.page_size)
    return Sized(**vars(build(inputs)), page_size=_first_sizes[0])


@seeded(BUGS, METADATA, "int64_inputs", features=(INT64_INPUTS,))
def int64_lengths_read_as_int32(inputs: MetadataInputs) -> Built:
    """Read the bytes of lengths as int32, whatever their dtype is."""
    lengths = inputs.seq_lens.contiguous().view(torch.int32)[: len(inputs.seq_lens)]
    return build(replace(inputs, seq_lens=lengths))


@seeded(BUGS, METADATA, "metadata_refusals", features=(REFUSES,))
def narrow_table_accepted(inputs: MetadataInputs) -> Built:
    """Refuse negative lengths and pages, and cut what a row has no pages for."""
    for name in ("query_lens", "seq_lens"):
        if (getattr(inputs, name) < 0).any():
            raise ValueError(name)
    counts = (-(-inputs.seq_lens // inputs.page_size)).clamp(max=inputs.block_table.shape[1])
    built = build(inputs, counts)
    if (built.paged_kv_indices < 0).any():
        message = "block_table has a negative page"
        raise ValueError(message)
    return built
