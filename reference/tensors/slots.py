"""What map_slots is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..attention.slots import map_slots
from ..problems.preparation import BatchProblem
from ..problems.slots import SlotsProblem
from .allocation import Allocator
from .values import Part, bits, bits_of, stream

PAGES = 10_000
"""Pages that ids are drawn of; two requests may share one, as those of a shared prefix do."""


@dataclass(frozen=True, eq=False)
class SlotInputs:
    """Arguments of ``map_slots`` for a batch of R requests.

    Attributes:
        query_start_loc: [R + 1] int32; request i owns tokens ``[i]`` to ``[i + 1]``.
        positions: [tokens] int64, the place of each token in its request.
        rows: [R] int32, the row of each request in the block table; -1 where it has no pages.
        block_table: [rows, pages] int32; entries that no new token lies in are garbage.
        slot_mapping: [slots] int64, the buffer that is written, whole; what it holds before is
            garbage, or what an earlier batch left there.
        page_size: tokens a page of one rank.
        rank: the rank whose slots are asked for.
        world: ranks of the group; a page of the block table has ``page_size * world`` tokens.
        interleave: consecutive tokens on one rank.
        storages: flat buffers by field name, of which the tensors are views.
    """

    query_start_loc: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    page_size: int
    rank: int = 0
    world: int = 1
    interleave: int = 1
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def drawn_table(
    problem: SlotsProblem | BatchProblem, pages: torch.Tensor, step: int, first_page: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a block table in the order in which requests have them, and the table.

    Args:
        problem: the problem.
        pages: [R] integers, the pages of each request; entries behind them are garbage.
        step: the number of the batch.
        first_page: the least page id.
    """
    numbers = torch.arange(max(len(keys) for _, keys in problem.steps) + problem.spare_rows)
    # Rows that requests got as they came: a permutation, by hash, another one each step.
    orders, ids, garbage = bits_of([
        Part(stream(problem.seed, f"{tag} {step}"), numbers, columns)
        for tag, columns in (("rows", 1), ("pages", problem.columns), ("garbage", problem.columns))
    ])  # fmt: skip
    order = orders.flatten().argsort(stable=True)
    used = torch.zeros(len(numbers), dtype=torch.long)
    used[order[: len(pages)]] = pages
    ids %= PAGES
    is_used = torch.arange(problem.columns).unsqueeze(0) < used.unsqueeze(1)
    return order, torch.where(is_used, ids + first_page, garbage.to(torch.int32))


def slot_inputs(problem: SlotsProblem, home: Allocator, *, step: int = 0) -> SlotInputs:
    """Make the tensors of one call of ``map_slots``, that of a step."""
    query_lens, seq_lens = problem.steps[step]
    size = problem.page_size * problem.world
    pages = torch.tensor([-(-keys // size) for keys in seq_lens], dtype=torch.long)
    order, table = drawn_table(problem, pages, step, problem.first_page)
    has_pages = torch.tensor(seq_lens, dtype=torch.long) > 0
    rows = torch.where(has_pages, order[: len(seq_lens)], -1)
    places = [range(s - t if s else 0, s or t) for t, s in zip(query_lens, seq_lens, strict=True)]
    # Beyond all slots: what an earlier batch may have left there is for a law to say.
    garbage_key, row = stream(problem.seed, f"buffer {step}"), torch.arange(1)
    before = 2**40 + bits(garbage_key, row, problem.num_slots).flatten()
    integers = home.place_integers({
        "query_start_loc": torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        "rows": rows.to(torch.int32),
        "block_table": table.to(torch.int32),
    })  # fmt: skip
    return SlotInputs(
        **integers,
        positions=home.place(
            "positions", torch.tensor([p for each in places for p in each], dtype=torch.int64)
        ),
        slot_mapping=home.place("slot_mapping", before),
        page_size=problem.page_size,
        rank=problem.rank,
        world=problem.world,
        interleave=problem.interleave,
        storages=home.storages,
    )


def slots_of(inputs: SlotInputs) -> torch.Tensor:
    """Map the record's tokens to slots, by definition."""
    return map_slots(
        inputs.query_start_loc,
        inputs.positions,
        inputs.block_table,
        inputs.page_size,
        rows=inputs.rows,
        num_slots=len(inputs.slot_mapping),
        rank=inputs.rank,
        world=inputs.world,
        interleave=inputs.interleave,
    )
