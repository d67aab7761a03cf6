"""Slot mapping with torch operations only; it shares no code with the oracle's Python integers."""

from __future__ import annotations

import torch

from ...reference.tensors.slots import SlotInputs
from ..features import INT64_INPUTS
from ..protocol import implementation


@implementation(
    "map_slots", name="torch-map-slots", features=("far_slots", "large_rows", INT64_INPUTS)
)
def map_slots(inputs: SlotInputs) -> torch.Tensor:
    """Look up each token's page, by the rank's own place where keys are dealt to a group."""
    positions, size = inputs.positions, inputs.page_size
    counts = inputs.query_start_loc.diff().long()
    row = torch.repeat_interleave(inputs.rows.long(), counts)
    page, within = positions // (size * inputs.world), positions % (size * inputs.world)
    turn = within // inputs.interleave
    local = turn // inputs.world * inputs.interleave + within % inputs.interleave
    written = (row >= 0) & (turn % inputs.world == inputs.rank)
    slots = torch.full_like(inputs.slot_mapping, -1)
    pages = inputs.block_table.long()[row[written], page[written]]
    slots[: len(positions)][written] = pages * size + local[written]
    return slots
