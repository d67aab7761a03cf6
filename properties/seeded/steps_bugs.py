"""Faults in preparing an engine's steps: what a builder takes over from the step before.

Each shows only where a request goes on in a later step: to a law that asks for batches of other
requests, one by one, such a builder is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch

from ...impl.protocol import Implementation
from ...impl.torch.steps import Tables, build, walk, write_pages
from ...reference import StepsProblem
from ...reference.problems.steps import ENGINES
from ...reference.tensors.preparation import BatchInputs
from ...reference.tensors.slots import SlotInputs
from ...reference.tensors.steps import StepInputs, StepsInputs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
STEPS = "prepare_steps"
Fault = Callable[..., None]
FAULTS: dict[str, tuple[str, Fault]] = {}
"""What each bug takes the place of, a buffer or a table of ``walk``, and its code, by name."""


def _in_place_of(part: str, model: str = "") -> Callable[[Fault], Implementation]:
    """Make a bug of code that takes the place of a part of ``walk``, for use as a decorator."""

    def supports(problem: StepsProblem, _: object) -> bool | str:
        kept = {"pages", "computed", *ENGINES[problem.engine]}
        if problem.engine == "sglang":
            kept.add("slots")
        return part in kept or f"builds {part}"

    def decorate(fault: Fault) -> Implementation:
        @wraps(fault)
        def walked(inputs: StepsInputs) -> dict[str, torch.Tensor]:
            return walk(inputs, **{part: fault})

        made = seeded(BUGS, STEPS, "steps_parity", model=model, supports=supports)(walked)
        FAULTS[made.name] = part, fault
        return made

    return decorate


def _known(record: Any, before: Any) -> list[tuple[int, int]]:  # noqa: ANN401  of ``record_of``
    """Return which requests go on, with their places in the batch before.

    A request is known by its row and its first page, and has more computed keys than before.
    """
    if before is None or not record.block_table.shape[1]:
        return []
    places = {row: place for place, row in enumerate(before.rows.tolist())}
    known = []
    for number, row in enumerate(record.rows.tolist()):
        place = places.get(row)
        if place is not None and record.block_table[row, 0] == before.block_table[row, 0]:
            known += [(number, place)] if _first_new(record)[row] > _first_new(before)[row] else []
    return known


def _first_new(record: BatchInputs | SlotInputs) -> dict[int, int]:
    """Return the position of the first new token by row; -1 of a request without one."""
    starts, found = record.query_start_loc.tolist(), dict[int, int]()
    for row, (start, end) in zip(record.rows.tolist(), pairwise(starts), strict=True):
        if isinstance(record, SlotInputs):
            first = record.positions[start:end]
        else:
            first = record.computed[row : row + 1]
        found[row] = int(first[0]) if start < end else -1
    return found


def _all_known(record: BatchInputs, before: BatchInputs | None) -> bool:
    """Whether a batch has the requests that the last one had, in the same places."""
    same = [(number, number) for number in range(len(record.rows))]
    return before is not None and len(before.rows) == len(same) == len(_known(record, before))


@_in_place_of("pages")
def pages_behind_a_finished_requests(tables: Tables, step: StepInputs) -> None:
    """Write a new request's second page and those behind it only where its row has none yet."""
    before = tables.pages.clone()
    write_pages(tables, step)
    for request in step.requests:
        if not request.held:
            row, last = tables.pages[request.row], before[request.row]
            row[1:] = torch.where(last[1:] > 0, last[1:], row[1:])


@_in_place_of("computed")
def rejected_tokens_are_computed(tables: Tables, step: StepInputs) -> None:
    """Count the new tokens of a step as computed, those of rejected drafts too."""
    for request in step.requests:
        tables.computed[request.row] += request.new


@_in_place_of("slots")
def slots_of_a_finished_request(tables: Tables, step: StepInputs) -> None:
    """Write the slots of a new request only where its row holds none yet, behind its first key."""
    for request in step.requests:
        row = tables.slots[request.row]
        keys = torch.arange(request.computed if request.held else 0, request.keys)
        slots = tables.pages[request.row, keys // tables.size] * tables.size + keys % tables.size
        stale = (row[keys] > 0) & (keys > 0) & (not request.held)
        row[keys] = torch.where(stale, row[keys], slots.int())


@_in_place_of("positions")
def positions_behind_rejected_drafts(record: BatchInputs, before: BatchInputs | None) -> None:
    """Let the positions of a request go on from its last one, rejected or not."""
    _go_on(record, before)


def _go_on(record: BatchInputs, before: BatchInputs | None) -> None:
    """Write what follows from the computed keys, as if all tokens of the last step were right."""
    computed = record.computed.clone()
    for number, place in _known(record, before):
        assert before is not None  # noqa: S101  else no request is known
        row = record.rows[number]
        computed[row] = before.computed[row] + before.query_start_loc.diff()[place]
    build(replace(record, computed=computed), before)


@_in_place_of("token_seq_lens")
def keys_behind_rejected_drafts(record: BatchInputs, before: BatchInputs | None) -> None:
    """Let each token see the keys of the last step, rejected or not."""
    _go_on(record, before)


@_in_place_of("seq_lens")
def lengths_of_other_places(record: BatchInputs, before: BatchInputs | None) -> None:
    """Add the new tokens to the length that the buffer has at a known request's place."""
    held = record.buffer.clone()
    build(record, before)
    for number, _ in _known(record, before):
        record.buffer[number] = held[number] + record.query_start_loc.diff()[number]


@_in_place_of("page_table", model="vllm#39546")
def rows_of_other_places(record: BatchInputs, before: BatchInputs | None) -> None:
    """Write only the pages that a known request has got, behind what its place in the batch has."""
    held = record.buffer.clone()
    build(record, before)
    for number, place in _known(record, before):
        assert before is not None  # noqa: S101  else no request is known
        pages = int(before.page_indptr.diff()[place])
        record.buffer[number, :pages] = held[number, :pages]


@_in_place_of("page_indices", model="vllm#39546")
def count_of_the_last_step(record: BatchInputs, before: BatchInputs | None) -> None:
    """Copy as many pages of a known request as it had in the last step."""
    held = record.buffer.clone()
    build(record, before)
    starts = record.page_indptr.tolist()
    for number, place in _known(record, before):
        assert before is not None  # noqa: S101  else no request is known
        last = starts[number] + int(before.page_indptr.diff()[place])
        record.buffer[last : starts[number + 1]] = held[last : starts[number + 1]]


@_in_place_of("kv_indices")
def slots_of_other_places(record: BatchInputs, before: BatchInputs | None) -> None:
    """Write only the slots of a known request's new keys, wherever its keys begin now."""
    held = record.buffer.clone()
    build(record, before)
    starts = record.kv_indptr.tolist()
    for number, _ in _known(record, before):
        new = int(record.query_start_loc.diff()[number])
        record.buffer[starts[number] : starts[number + 1] - new] = held[
            starts[number] : starts[number + 1] - new
        ]


@_in_place_of("token_to_request")
def map_of_the_last_step(record: BatchInputs, before: BatchInputs | None) -> None:
    """Keep the entries of the last step's tokens while the batch has the same requests."""
    held = record.buffer.clone()
    build(record, before)
    if before is not None and _all_known(record, before):
        tokens = min(int(each.query_start_loc[-1]) for each in (record, before))
        record.buffer[:tokens] = held[:tokens]


@_in_place_of("query_starts")
def starts_of_the_last_step(record: BatchInputs, before: BatchInputs | None) -> None:
    """Keep where new tokens begin while the batch has the same requests."""
    held = record.buffer.clone()
    build(record, before)
    if _all_known(record, before):
        record.buffer.copy_(held)


@_in_place_of("kv_indptr")
def one_key_more(record: BatchInputs, before: BatchInputs | None) -> None:
    """Count one key more than in the last step for each known request, drafts and chunks or not."""
    keys = record.kv_indptr.diff()
    for number, place in _known(record, before):
        assert before is not None  # noqa: S101  else no request is known
        keys[number] = before.kv_indptr.diff()[place] + 1
    starts = torch.zeros_like(record.kv_indptr)
    starts[1:] = keys.cumsum(0)
    build(replace(record, kv_indptr=starts), before)


@_in_place_of("slot_mapping", model="vllm#39546")
def next_slot(record: SlotInputs, before: SlotInputs | None) -> None:
    """Write a known request's one new token into the slot behind its last one."""
    held = record.slot_mapping.clone()
    build(record, before)
    starts = record.query_start_loc.tolist()
    for number, place in _known(record, before):
        assert before is not None  # noqa: S101  else no request is known
        start, end = starts[number : number + 2]
        if end - start == 1:
            record.slot_mapping[start] = held[before.query_start_loc[place + 1] - 1] + 1


@seeded(CONTROLS, STEPS, control="honest")
def steps_of_their_own(inputs: StepsInputs) -> dict[str, torch.Tensor]:
    """Keep buffers of its own, and leave the record's as they were."""
    own = tuple(each._replace(tensor=torch.zeros_like(each.tensor)) for each in inputs.buffers)
    return walk(replace(inputs, buffers=own))
