"""Faults of slack: what lies behind the rows of a batch is taken for a part of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference.tensors.inputs import (
    AppendInputs,
    MergeInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from .append.bugs import written_slots
from .catalogue import SeededBug, seeded
from .honest import merge_states
from .kernels import HONEST, attend, key_counts

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED, MERGE, APPEND = (
    "paged_attention",
    "ragged_attention",
    "merge_state",
    "append_paged_kv",
)
PADDED, TILE, PARTS = ("padded_rows",), 8, 4
"""The feature; requests or tokens of a tile; parts of a request."""


def whole_tiles(numbers: torch.Tensor) -> torch.Tensor:
    """Return integers up to the end of their last tile, as far as there is memory."""
    wanted = -(-len(numbers) // TILE) * TILE
    there = numbers.untyped_storage().nbytes() // numbers.element_size() - numbers.storage_offset()
    return numbers.as_strided((min(wanted, there),), (1,))


@seeded(BUGS, PAGED, "slack_rows")
def lengths_of_whole_tiles(inputs: PagedAttentionInputs) -> Pair:
    """Cut keys into parts by the longest request of a tile, in int32, also behind the batch."""
    lengths = whole_tiles(inputs.metadata.seq_lens)
    length = int(((lengths.max() + (PARTS - 1)) // PARTS).clamp(min=0)) if len(lengths) else 0

    def counts(inputs: PagedAttentionInputs) -> list[int]:
        return [min(count, PARTS * length) for count in key_counts(inputs)]

    return attend(inputs, replace(HONEST, counts=counts))


@seeded(BUGS, PAGED, "slack_rows", features=PADDED)
def queries_by_shape(inputs: PagedAttentionInputs) -> Pair:
    """Divide the rows of q by the requests, where all requests have as many query tokens."""
    metadata = inputs.metadata
    if len(set(metadata.qo_indptr.diff().tolist())) != 1:
        return attend(inputs)
    requests = metadata.num_requests
    indptr = torch.arange(requests + 1, dtype=torch.int32) * (len(inputs.q) // requests)
    out, lse = attend(replace(inputs, metadata=replace(metadata, qo_indptr=indptr)))
    return out, lse


@seeded(BUGS, RAGGED, "slack_rows", features=PADDED)
def last_request_to_the_end(inputs: RaggedAttentionInputs) -> Pair:
    """Let the keys of the last request end where those of the tensor do."""
    indptr = inputs.kv_indptr.clone()
    if inputs.custom_mask is None and inputs.logits_bias is None and len(indptr) > 1:
        indptr[-1] = len(inputs.k)
    return attend(replace(inputs, kv_indptr=indptr))


@seeded(BUGS, MERGE, "slack_rows")
def merged_rows_placed_by_product(inputs: MergeInputs) -> Pair:
    """Bring the rows of a tile to their places by a product with ones and zeros."""
    out, lse = merge_states(inputs.outs, inputs.lses, torch.float32)
    placed = (torch.eye(len(out)) @ out.flatten(1)).view(out.shape)
    return placed.to(inputs.out_dtype), lse


@seeded(BUGS, APPEND, "never_written", features=("slot_mapping",))
def append_checks_whole_tiles(inputs: AppendInputs) -> Pair:
    """Leave a tile of tokens out if one of its slots, behind the batch too, is not in the cache."""
    pages, slots = len(inputs.k_cache), inputs.slot_mapping
    tiles = whole_tiles(slots).split(TILE)
    wrong = [bool((tile >= pages * inputs.metadata.page_size).any()) for tile in tiles]
    out = torch.tensor(wrong, dtype=torch.bool).repeat_interleave(TILE)[: len(slots)]
    return written_slots(inputs, slots.masked_fill(out, -1))


VIEWS = ("lse_views",)


@seeded(BUGS, PAGED, "output_buffers", features=VIEWS, writes_out=True)
def lse_heads_by_tokens(inputs: PagedAttentionInputs) -> None:
    """Write the LSE of a head as many numbers behind the one before as there are tokens."""
    out, lse = attend(inputs)
    if inputs.out is None or inputs.lse is None:
        return
    inputs.out.copy_(out)
    given = inputs.lse
    if given.stride(0) == 1 and given.numel():
        given = given.as_strided(given.shape, (1, len(given)))
    given.copy_(lse)


@seeded(BUGS, RAGGED, "output_buffers", features=VIEWS, writes_out=True)
def lse_rows_by_heads(inputs: RaggedAttentionInputs) -> None:
    """Write the LSE as if its buffer were dense."""
    out, lse = attend(inputs)
    if inputs.out is not None and inputs.lse is not None:
        inputs.out.copy_(out)
        dense = torch.empty(inputs.lse.shape, device="meta").stride()
        inputs.lse.as_strided(inputs.lse.shape, dense).copy_(lse)


@seeded(CONTROLS, PAGED, control="honest", features=VIEWS, writes_out=True)
def lse_by_its_strides(inputs: PagedAttentionInputs) -> None:
    """Write the LSE by the strides of its buffer."""
    out, lse = attend(inputs)
    if inputs.out is not None and inputs.lse is not None:
        inputs.out.copy_(out)
        inputs.lse.copy_(lse)


@seeded(CONTROLS, PAGED, control="honest", features=PADDED)
def rows_that_are_named(inputs: PagedAttentionInputs) -> Pair:
    """Attend to the rows that qo_indptr names; others are zeros."""
    return attend(inputs)


@seeded(CONTROLS, RAGGED, control="honest", features=PADDED, writes_out=True)
def only_rows_that_are_named(inputs: RaggedAttentionInputs) -> None:
    """Write the rows that qo_indptr names, and no other."""
    out, lse = attend(inputs)
    tokens = int(inputs.qo_indptr[-1])
    if inputs.out is not None and inputs.lse is not None:
        inputs.out[:tokens], inputs.lse[:tokens] = out[:tokens], lse[:tokens]
