"""Slots of new tokens, by hand and against what appending and context parallelism define."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kernelproof.reference import (
    PAD_SLOT,
    SlotsProblem,
    build_metadata,
    map_slots,
    slice_context_parallel,
)
from kernelproof.reference.tensors.allocation import Allocator
from kernelproof.reference.tensors.slots import slot_inputs, slots_of

CPU = torch.device("cpu")
TABLE = [[7, 2, 9], [4, 5, 6]]


def test_by_hand() -> None:
    # Request 0 has token 5 of its pages 7, 2; request 1 tokens 0 to 3 of page 4, then of page 5.
    slots = map_slots([0, 1, 6], [5, 0, 1, 2, 3, 4], TABLE, 4, num_slots=8)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [2 * 4 + 1, 16, 17, 18, 19, 20, PAD_SLOT, PAD_SLOT]


def test_rows() -> None:
    slots = map_slots([0, 1, 2, 3], [0, 4, 0], TABLE, 4, rows=[1, 0, -1])
    assert slots.tolist() == [16, 8, PAD_SLOT]


def test_of_nothing() -> None:
    assert map_slots([0], [], [], 4).tolist() == []
    assert map_slots([0, 0], [], TABLE, 4, rows=[-1], num_slots=2).tolist() == [PAD_SLOT] * 2


def test_beyond_int32() -> None:
    assert map_slots([0, 1], [1], [[2**30]], 64).tolist() == [2**36 + 1]


def test_as_vllm_documents_context_parallelism() -> None:
    # 2 ranks, local pages of 4, interleave 2: rank 0 holds keys 0 1 4 5 | 8 9 12 13.
    every = [
        map_slots([0, 14], range(14), [[5, 3]], 4, rank=rank, world=2, interleave=2).tolist()
        for rank in range(2)
    ]
    assert [key for key, slot in enumerate(every[0]) if slot != PAD_SLOT] == [
        0, 1, 4, 5, 8, 9, 12, 13,
    ]  # fmt: skip
    assert [slot for slot in every[0] if slot != PAD_SLOT] == [20, 21, 22, 23, 12, 13, 14, 15]
    assert all((a == PAD_SLOT) != (b == PAD_SLOT) for a, b in zip(*every, strict=True))


def test_the_new_tokens_of_metadata() -> None:
    queries, keys = [1, 3, 2], [9, 3, 6]
    table = torch.arange(9).view(3, 3)
    metadata = build_metadata(queries, keys, table, 4)
    positions = [p for t, s in zip(queries, keys, strict=True) for p in range(s - t, s)]
    slots = map_slots([0, *accumulate(queries)], positions, table, 4)
    assert slots.tolist() == metadata.slot_mapping().tolist()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("interleave", [1, 2])
def test_all_keys_of_a_rank(world: int, interleave: int) -> None:
    keys = 23
    table = torch.tensor([[3, 8, 1, 6, 0, 7]])
    metadata = build_metadata([1], [keys], table, 4 * world)
    for rank in range(world):
        local = slice_context_parallel(metadata, rank, world, interleave)
        slots = map_slots(
            [0, keys], range(keys), table, 4, rank=rank, world=world, interleave=interleave
        )
        written = slots[slots != PAD_SLOT]
        assert len(written) == int(local.seq_lens[0])
        places = torch.arange(len(written))
        assert written.tolist() == (table[0][places // 4] * 4 + places % 4).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 2], [0], TABLE, 4), "query_start_loc ends at 2"),
        (([0, 1], [-1], TABLE, 4), r"positions\[0\] is -1"),
        (([0, 1], [12], TABLE, 4), r"block_table\[0\] has 3 entries; a token lies in page 3"),
        (([0, 1], [0], [[-5]], 4), r"block_table\[0\]\[0\] is -5"),
        (([0, 1], [0], TABLE, 0), "page_size is 0"),
        (([0, 0, 0, 0], [], TABLE, 4), r"rows\[2\] is 2; block_table has 2 rows"),
    ],
)
def test_what_contradicts_itself(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        map_slots(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [0, 1]}, "rows has 2 entries; query_start_loc has 1 requests"),
        ({"rows": [2]}, r"rows\[0\] is 2; block_table has 2 rows"),
        ({"num_slots": 0}, "num_slots is 0; the batch has 1 tokens"),
        ({"rank": 1}, "rank is 1; the group has 1 ranks"),
        ({"world": 0}, "world is 0"),
        ({"interleave": 3}, "interleave is 3; it must divide page_size 4"),
    ],
)
def test_options_that_contradict(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        map_slots([0, 1], [0], TABLE, 4, **options)  # type: ignore[arg-type]


def test_a_problems_tensors() -> None:
    steps = (((1, 2, 1), (5, 2, 0)), ((3,), (3,)))
    problem = SlotsProblem(steps, page_size=2, spare_rows=2, spare_columns=1, spare_slots=3)
    first, second = (slot_inputs(problem, Allocator(CPU, 0.0), step=step) for step in range(2))
    assert first.query_start_loc.tolist() == [0, 1, 3, 4]
    assert first.positions.tolist() == [4, 0, 1, 0]
    assert first.rows[2] == -1
    assert first.block_table.shape == second.block_table.shape == (5, 4)
    assert len(first.slot_mapping) == len(second.slot_mapping) == 4 + 3
    assert (first.slot_mapping >= 2**40).all()
    assert (slots_of(first)[3:] == PAD_SLOT).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": ()}, r"steps is \(\); it must be at least one batch"),
        ({"steps": (((2,), (1,)),)}, "at most as many tokens as a request has keys"),
        ({"rank": 1}, "rank is 1; it must be less than world = 1"),
        ({"page_size": 4, "interleave": 3}, "interleave is 3; it must be a divisor"),
        ({"first_page": 2**30 + 1}, "first_page is 1073741825"),
    ],
)
def test_problems_that_no_call_can_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlotsProblem(**fields)  # type: ignore[arg-type]
