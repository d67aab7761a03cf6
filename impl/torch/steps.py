"""Preparing the batches of an engine's steps with torch operations, in buffers that persist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ...reference.tensors.preparation import BatchInputs
from ...reference.tensors.slots import SlotInputs
from ...reference.tensors.steps import StepInputs, StepsInputs, record_of
from ..protocol import implementation
from .preparation import prepare_batch


class Tables:
    """What an engine keeps of its requests beside the buffers.

    Attributes:
        size: keys a page.
        pages: [rows, columns] int32, the pages of each row's request.
        slots: [rows, columns * page_size] int32, the slots of its keys.
        computed: [rows] int32, its keys before the next step.
    """

    def __init__(self, inputs: StepsInputs) -> None:
        device = inputs.buffers[0].tensor.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.size = inputs.page_size
        self.pages = zeros(inputs.rows, inputs.columns)
        self.slots = zeros(inputs.rows, inputs.columns * self.size)
        self.computed = zeros(inputs.rows)


def write_pages(tables: Tables, step: StepInputs) -> None:
    """Write the pages that requests have got, and the computed keys of those that are new."""
    for request in step.requests:
        new = torch.tensor(request.pages[request.held :], dtype=torch.int32)
        tables.pages[request.row, request.held : len(request.pages)] = new
        if not request.held:
            tables.computed[request.row] = request.computed


def write_slots(tables: Tables, step: StepInputs) -> None:
    """Write the slots of new keys, and of those that a new request shares."""
    for request in step.requests:
        first = request.computed if request.held else 0
        keys = torch.arange(first, request.keys, device=tables.pages.device)
        page = tables.pages[request.row, keys // tables.size]
        tables.slots[request.row, first : request.keys] = page * tables.size + keys % tables.size


def count(tables: Tables, step: StepInputs) -> None:
    """Count the keys that are computed after a step."""
    for request in step.requests:
        tables.computed[request.row] += request.new - request.rejected


KEPT: Mapping[str, Callable[[Tables, StepInputs], None]] = {
    "pages": write_pages,
    "slots": write_slots,
    "computed": count,
}
"""What writes the tables: the first two before a step, the last one behind it."""


def build(record: BatchInputs | SlotInputs, before: object) -> None:
    """Write a buffer, whatever the builder was given in the step before."""
    del before
    if isinstance(record, SlotInputs):
        positions, size = record.positions, record.page_size
        counts = record.query_start_loc.diff().long()
        pages = record.block_table[record.rows.long().repeat_interleave(counts), positions // size]
        record.slot_mapping.fill_(-1)[: len(pages)] = pages * size + positions % size
    else:
        prepare_batch(record)


def walk(inputs: StepsInputs, **others: Callable[..., None]) -> dict[str, torch.Tensor]:
    """Return each buffer after each step [steps, ...].

    Args:
        inputs: the steps.
        others: what takes the place of parts: of ``KEPT``, or of ``build`` for a buffer.
    """
    tables, before = Tables(inputs), dict[str, object]()
    writes = {**KEPT, **others}
    found: dict[str, list[torch.Tensor]] = {buffer.name: [] for buffer in inputs.buffers}
    for step in inputs.steps:
        writes["pages"](tables, step)
        writes["slots"](tables, step)
        for buffer in inputs.buffers:
            record = record_of(step, buffer)
            record = replace(record, block_table=tables.pages.clone())
            if isinstance(record, BatchInputs):
                slots, computed = tables.slots.clone(), tables.computed.clone()
                record = replace(record, token_table=slots, computed=computed)
            others.get(buffer.name, build)(record, before.get(buffer.name))
            before[buffer.name] = record
            found[buffer.name].append(buffer.tensor.clone())
        writes["computed"](tables, step)
    return {name: torch.stack(each) for name, each in found.items()}


@implementation("prepare_steps", name="torch-prepare-steps")
def prepare_steps(inputs: StepsInputs) -> dict[str, torch.Tensor]:
    """Prepare each step from the tables that the steps before have left."""
    return walk(inputs)
