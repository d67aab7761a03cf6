"""Faults in mapping new tokens to slots of a paged cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from ...reference.tensors.slots import PAGES, SlotInputs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
SLOTS = "map_slots"


def _slot(inputs: SlotInputs, row: int, position: int) -> int:
    """Return the slot of a token, found by counting the rank's tokens before it in its page."""
    size = inputs.page_size * inputs.world
    page, within = divmod(position, size)
    if row < 0 or within // inputs.interleave % inputs.world != inputs.rank:
        return -1
    before = [place // inputs.interleave % inputs.world for place in range(within)]
    return int(inputs.block_table[row, page]) * inputs.page_size + before.count(inputs.rank)


def mapped(inputs: SlotInputs) -> torch.Tensor:
    """Write the slots of a batch into its buffer, token by token."""
    slots = inputs.slot_mapping.fill_(-1)
    positions = inputs.positions.tolist()
    starts = inputs.query_start_loc.tolist()
    for row, (start, end) in zip(inputs.rows.tolist(), pairwise(starts), strict=True):
        for token in range(start, end):
            slots[token] = _slot(inputs, row, positions[token])
    return slots


@seeded(BUGS, SLOTS, "slots_one_buffer", model="vllm#39546")
def slots_of_the_batch_before(inputs: SlotInputs) -> torch.Tensor:
    """Fill up what cannot be slots behind the tokens, and leave the slots of a larger batch."""
    before, slots = inputs.slot_mapping.clone(), mapped(inputs)
    stale = (before >= 0) & (before < PAGES * inputs.page_size)
    stale[: len(inputs.positions)] = False
    return torch.where(stale, before, slots)


@seeded(BUGS, SLOTS, "slots_parity")
def padding_from_the_next_multiple(inputs: SlotInputs) -> torch.Tensor:
    """Fill the buffer from the next multiple of 8 on, up to which engines pad their tokens."""
    before, tokens = inputs.slot_mapping.clone(), len(inputs.positions)
    slots, padded = mapped(inputs), -(-tokens // 8) * 8
    slots[tokens:padded] = before[tokens:padded]
    return slots


@seeded(BUGS, SLOTS, "slots_garbage")
def first_block_of_padding(inputs: SlotInputs) -> torch.Tensor:
    """Fill up one block of 1024 entries behind the tokens, and no more."""
    before, end = inputs.slot_mapping.clone(), len(inputs.positions) + 1024
    slots = mapped(inputs)
    slots[end:] = before[end:]
    return slots


@seeded(BUGS, SLOTS, "slots_parity")
def rows_in_the_batchs_order(inputs: SlotInputs) -> torch.Tensor:
    """Read the row of a request's place in the batch, not the one that it was given."""
    numbers = torch.arange(len(inputs.rows), dtype=torch.int32)
    return mapped(replace(inputs, rows=torch.where(inputs.rows < 0, inputs.rows, numbers)))


@seeded(BUGS, SLOTS, "slots_parity", features=("far_slots",))
def slots_in_int32(inputs: SlotInputs) -> torch.Tensor:
    """Multiply page ids by the page size in int32."""
    slots = mapped(inputs)
    return torch.where(slots < 0, slots, slots.int().long())


@seeded(BUGS, SLOTS, "slots_parity")
def last_row_for_padding(inputs: SlotInputs) -> torch.Tensor:
    """Take the row -1 of a request without pages for the last row."""
    last = inputs.block_table.shape[0] - 1
    if not inputs.block_table.shape[1]:
        return mapped(inputs)
    return mapped(replace(inputs, rows=torch.where(inputs.rows < 0, last, inputs.rows)))


@seeded(BUGS, SLOTS, "slots_parity")
def interleave_ignored_in_slots(inputs: SlotInputs) -> torch.Tensor:
    """Deal the tokens one by one, whatever the interleave is."""
    return mapped(replace(inputs, interleave=1))


@seeded(BUGS, SLOTS, "slots_ranks")
def slots_of_every_rank(inputs: SlotInputs) -> torch.Tensor:
    """Return for tokens of other ranks the slots that they have there."""
    slots = mapped(inputs)
    for rank in range(inputs.world):
        other = mapped(replace(inputs, rank=rank, slot_mapping=slots.clone()))
        slots = torch.where(slots < 0, other, slots)
    return slots


@seeded(BUGS, SLOTS, "slots_parity")
def offset_in_the_groups_page(inputs: SlotInputs) -> torch.Tensor:
    """Add the offset in the group's page to the slot of a rank's own page."""
    slots = mapped(inputs)
    size = inputs.page_size
    within = inputs.positions % (size * inputs.world)
    tokens = slots[: len(within)]
    tokens.copy_(torch.where(tokens < 0, tokens, tokens // size * size + within))
    return slots


@seeded(BUGS, SLOTS, "slots_parity")
def one_page_for_a_chunk(inputs: SlotInputs) -> torch.Tensor:
    """Read the page of a request's first new token, and count on from there."""
    slots = mapped(inputs)
    for start, end in pairwise(inputs.query_start_loc.tolist()):
        if end > start and inputs.world == 1 and slots[start] >= 0:
            slots[start:end] = slots[start] + torch.arange(end - start)
    return slots


@seeded(BUGS, SLOTS, "slots_parts")
def remembered_by_position(inputs: SlotInputs) -> torch.Tensor:
    """Look up the page of first new tokens once for all requests that begin at one position."""
    pages: dict[int, int] = {}
    slots, positions = mapped(inputs), inputs.positions.tolist()
    for start, end in pairwise(inputs.query_start_loc.tolist()):
        if end == start or slots[start] < 0:
            continue
        page, offset = divmod(int(slots[start]), inputs.page_size)
        slots[start] = pages.setdefault(positions[start], page) * inputs.page_size + offset
    return slots


@seeded(BUGS, SLOTS, "slots_garbage")
def first_free_page(inputs: SlotInputs) -> torch.Tensor:
    """Write the last token of a full page into the next page of the row, where there is one."""
    slots, positions = mapped(inputs), inputs.positions.tolist()
    starts, size = inputs.query_start_loc.tolist(), inputs.page_size * inputs.world
    for row, (start, end) in zip(inputs.rows.tolist(), pairwise(starts), strict=True):
        for token in range(start, end):
            page, within = divmod(positions[token], size)
            if slots[token] >= 0 and within == size - 1 and page + 1 < inputs.block_table.shape[1]:
                slots[token] = int(inputs.block_table[row, page + 1]) * inputs.page_size
    return slots


@seeded(BUGS, SLOTS, "slots_parity")
def slots_as_int32(inputs: SlotInputs) -> torch.Tensor:
    """Return the slots in int32."""
    return mapped(inputs).int()


@seeded(BUGS, SLOTS, "integer_inputs_unchanged")
def rows_made_non_negative(inputs: SlotInputs) -> torch.Tensor:
    """Clamp the rows of requests without pages in place, to read a table safely."""
    slots = mapped(inputs)
    inputs.rows.clamp_(min=0)
    return slots


@seeded(BUGS, SLOTS, "integer_inputs_unchanged")
def one_slot_too_many(inputs: SlotInputs) -> torch.Tensor:
    """Fill up one entry behind the buffer."""
    slots = mapped(inputs)
    behind = slots.as_strided((1,), (1,), slots.storage_offset() + len(slots))
    behind.fill_(-1)
    return slots


@seeded(CONTROLS, SLOTS, control="honest")
def own_buffer(inputs: SlotInputs) -> torch.Tensor:
    """Return a tensor of its own, and leave the buffer as it was."""
    return mapped(replace(inputs, slot_mapping=inputs.slot_mapping.clone()))


@seeded(CONTROLS, SLOTS, control="honest", features=("far_slots",))
def written_buffer(inputs: SlotInputs) -> torch.Tensor:
    """Write the buffer that it is given."""
    return mapped(inputs)
