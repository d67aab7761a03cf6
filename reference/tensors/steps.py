"""What prepare_steps is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from ..attention.preparation import OUTPUTS
from ..problems.steps import ENGINES, MOST_REQUESTS, Request, Step, StepsProblem
from .allocation import Allocator
from .preparation import BatchInputs, prepared
from .slots import SlotInputs, slots_of
from .values import bits, stream

SLOT_MAPPING = "slot_mapping"


class StepBuffer(NamedTuple):
    """A buffer that persists over all steps; it is zero before the first one.

    Attributes:
        name: the output of ``prepare_batch`` that it holds, or ``slot_mapping``.
        rest: what becomes of the buffer behind the entries, one of ``RESTS``, or ``padded``: -1.
        tensor: the buffer.
    """

    name: str
    rest: str
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One step, by definition: what an engine builds may follow from less.

    Attributes:
        requests: the requests, as the engine's host knows them.
        padding: requests without keys that fill up a recorded graph's batch. SGLang's batch has
            them, of row 0; vLLM's has not.
        batch: what the builders of the step's tensors are given, see ``prepare_batch``.
        table: the same for ``page_table``: vLLM's has all pages that a request has.
        slots: what the builder of the step's slots is given, see ``map_slots``.
    """

    requests: tuple[Request, ...]
    padding: int
    batch: BatchInputs
    table: BatchInputs
    slots: SlotInputs


@dataclass(frozen=True, eq=False)
class StepsInputs:
    """Arguments of ``prepare_steps``: all steps of an engine, one after another.

    Attributes:
        engine: the engine whose buffers are kept, one of ``ENGINES``.
        page_size: keys a page.
        rows: rows of the engine's tables.
        columns: pages that a row of a table has room for.
        steps: the steps.
        buffers: the buffers that are built in each of them, in the engine's order.
        storages: flat buffers by field name, of which the tensors are views.
    """

    engine: str
    page_size: int
    rows: int
    columns: int
    steps: tuple[StepInputs, ...]
    buffers: tuple[StepBuffer, ...]
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def steps_inputs(problem: StepsProblem, home: Allocator) -> StepsInputs:
    """Make the tensors of one call of ``prepare_steps``."""
    steps, size, spare = problem.steps, problem.page_size, problem.spare
    columns = max(len(r.pages) for step in steps for r in step.requests) + spare
    batches = [len(step.requests) + step.padding for step in steps]
    rows = max(MOST_REQUESTS + 1, *batches) + spare
    room = {
        "requests": rows,
        "tokens": max(sum(r.new for r in step.requests) for step in steps) + spare,
        "keys": max(sum(r.keys for r in step.requests) for step in steps) + spare,
        "pages": max(sum(len(r.pages) for r in step.requests) for step in steps) + spare,
    }

    def zeros(name: str) -> torch.Tensor:
        if name == SLOT_MAPPING:
            return torch.zeros(room["tokens"], dtype=torch.int64)
        output = OUTPUTS[name]
        length = len(output.first) + room[output.size]
        shape = (rows, columns) if output.is_table else (length,)
        return torch.zeros(shape, dtype=output.dtype)

    return StepsInputs(
        engine=problem.engine,
        page_size=size,
        rows=rows,
        columns=columns,
        steps=tuple(
            _step(problem, step, number, (rows, columns), home.device)
            for number, step in enumerate(steps)
        ),
        buffers=tuple(
            StepBuffer(name, rest, home.place(name, zeros(name)))
            for name, rest in ENGINES[problem.engine].items()
        ),
        storages=home.storages,
    )


def _step(
    problem: StepsProblem, step: Step, number: int, shape: tuple[int, int], device: torch.device
) -> StepInputs:
    """Make the tensors of a step."""
    size, (rows, columns) = problem.page_size, shape
    padding = step.padding if problem.engine == "sglang" else 0
    requests = [*step.requests, *[Request(0, 0, 0, (), 0)] * padding]
    of = [request.row for request in requests]
    table = bits(stream(problem.seed, f"garbage {number}"), torch.arange(rows), columns).int()
    for request in requests:
        table[request.row, : len(request.pages)] = torch.tensor(request.pages).int()
    width = columns * size
    tokens = table.repeat_interleave(size, dim=1) * size + torch.arange(width).int() % size
    computed = bits(stream(problem.seed, f"computed {number}"), torch.arange(rows), 1).flatten()
    computed[of] = torch.tensor([request.computed for request in requests])
    positions = [p for request in requests for p in range(request.computed, request.keys)]

    def integers(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    def indptr(counts: list[int]) -> torch.Tensor:
        return integers([0, *accumulate(counts)])

    keys, owned = [r.keys for r in requests], [len(r.pages) for r in requests]
    # Nobody asks for drafts here: no token is rejected, each follows the one before it.
    parents = [place - 1 for request in requests for place in range(request.new)]
    zeros, nothing = integers([0] * len(parents)), integers([])
    starts, whose, block_table = indptr([r.new for r in requests]), integers(of), table.to(device)
    batch = BatchInputs(
        output="",
        query_start_loc=starts,
        seq_lens=integers(keys),
        rows=whose,
        block_table=block_table,
        token_table=tokens.to(device),
        computed=computed.int().to(device),
        first_keys=torch.zeros_like(whose),
        kv_indptr=indptr(keys),
        page_indptr=indptr([-(-each // size) for each in keys]),
        rejected=torch.zeros_like(whose),
        tokens=zeros,
        next_tokens=torch.zeros_like(whose),
        parents=integers(parents),
        mask=nothing.bool(),
        buffer=nothing,
        page_size=size,
    )
    whole = replace(
        batch, seq_lens=integers([size * each for each in owned]), page_indptr=indptr(owned)
    )
    return StepInputs(
        requests=step.requests,
        padding=step.padding,
        batch=batch,
        table=whole if problem.engine == "vllm" else batch,
        slots=SlotInputs(
            query_start_loc=starts,
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            rows=whose,
            block_table=block_table,
            slot_mapping=nothing,
            page_size=size,
        ),
    )


def record_of(step: StepInputs, buffer: StepBuffer) -> BatchInputs | SlotInputs:
    """Return what the builder of a buffer is given in a step."""
    if buffer.name == SLOT_MAPPING:
        return replace(step.slots, slot_mapping=buffer.tensor)
    batch = step.table if buffer.name == "page_table" else step.batch
    return replace(batch, output=buffer.name, rest=buffer.rest, buffer=buffer.tensor)


def prepared_steps(inputs: StepsInputs) -> dict[str, torch.Tensor]:
    """Return each buffer after each step [steps, ...], by definition; the record's stay as is."""
    found: dict[str, torch.Tensor] = {}
    for buffer in inputs.buffers:
        after, left = [], torch.zeros_like(buffer.tensor)
        for step in inputs.steps:
            record = record_of(step, buffer._replace(tensor=left))
            left = slots_of(record) if isinstance(record, SlotInputs) else prepared(record)
            after.append(left)
        found[buffer.name] = torch.stack(after)
    return found
