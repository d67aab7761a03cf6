"""Faults in building batch metadata and in appending to a paged cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference.inputs import AppendInputs, MetadataInputs
from .catalogue import SeededBug, seeded
from .honest import (
    Buffers,
    Built,
    addresses,
    append,
    build,
    by_slot,
    cumulative,
    writable_caches,
)

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
METADATA, APPEND = "build_metadata", "append_paged_kv"
MOST_BATCHES = 4096


@seeded(BUGS, METADATA, "metadata_invariants")
def last_page_len_zero(inputs: MetadataInputs) -> Built:
    """Give a full last page the length 0."""
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


def _written(inputs: AppendInputs, pages: torch.Tensor, slots: torch.Tensor, layout: str) -> Pair:
    caches = writable_caches(inputs)
    for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
        view = by_slot(cache, layout)
        view[pages, slots] = new
    return caches


@seeded(BUGS, APPEND, "append_parity")
def append_off_by_one(inputs: AppendInputs) -> Pair:
    """Write each token into the slot behind its own."""
    pages, slots = addresses(inputs)
    return _written(inputs, pages, (slots + 1) % inputs.metadata.page_size, inputs.kv_layout)


@seeded(BUGS, APPEND, "append_parity")
def append_ignores_layout(inputs: AppendInputs) -> Pair:
    """Write into an HND cache as if its memory were NHD."""
    if inputs.kv_layout == "NHD":
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    pages, slots = addresses(inputs)
    caches = writable_caches(inputs)
    for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
        count, heads, size, dim = cache.shape
        mistaken = cache.reshape(count, size, heads, dim).clone()
        mistaken[pages, slots] = new
        cache.copy_(mistaken.view(cache.shape))
    return caches


@seeded(BUGS, APPEND, "append_parity")
def append_clears_page(inputs: AppendInputs) -> Pair:
    """Clear the rest of the page behind each request's last token."""
    pages, slots = addresses(inputs)
    caches = _written(inputs, pages, slots, inputs.kv_layout)
    last = inputs.metadata.qo_indptr.diff().cumsum(0)[inputs.metadata.qo_indptr.diff() > 0] - 1
    for page, slot in zip(pages[last].tolist(), slots[last].tolist(), strict=True):
        for cache in caches:
            by_slot(cache, inputs.kv_layout)[page, slot + 1 :] = 0
    return caches


@seeded(BUGS, APPEND, "append_parity")
def append_one_token_a_request(inputs: AppendInputs) -> Pair:
    """Append only the last token of each request, as in a decode."""
    pages, slots = addresses(inputs)
    counts = inputs.metadata.qo_indptr.diff()
    last = counts.cumsum(0)[counts > 0] - 1
    caches = writable_caches(inputs)
    for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
        view = by_slot(cache, inputs.kv_layout)
        view[pages[last], slots[last]] = new[last]
    return caches


@seeded(BUGS, APPEND, "integer_inputs_unchanged")
def append_always_in_place(inputs: AppendInputs) -> Pair:
    """Write into the given caches even where copies were asked for."""
    written = append(replace(inputs, in_place=True))
    return written if inputs.in_place else (written[0].clone(), written[1].clone())
