"""The tensors that engines prepare for a batch, against cases by hand and each other."""

from __future__ import annotations

import pytest
import torch

from kernelproof.reference import BatchProblem, build_metadata, map_slots, prepare_batch
from kernelproof.reference.attention.branches import Branches
from kernelproof.reference.attention.drafts import Drafts
from kernelproof.reference.attention.preparation import OUTPUTS
from kernelproof.reference.attention.splits import Splits, num_kv_splits
from kernelproof.reference.tensors.allocation import Allocator
from kernelproof.reference.tensors.preparation import batch_inputs, prepared

CPU = torch.device("cpu")
TABLE = [[7, 3, -9], [5, 2, 8]]
BATCH = ([0, 2, 3], [5, 3], TABLE, 4)
"""Two new tokens of five keys in two pages, and one of three in one."""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("kv_indices", [28, 29, 30, 31, 12, 20, 21, 22]),
        ("page_indices", [7, 3, 5]),
        ("page_table", [[7, 3], [5, 0]]),
        ("kv_indptr", [0, 5, 8]),
        ("query_start_loc", [0, 2, 3]),
        ("query_starts", [0, 2]),
        ("positions", [3, 4, 2]),
        ("token_seq_lens", [4, 5, 3]),
        ("local_positions", [0, 1, 0]),
        ("seq_lens", [5, 3]),
        ("local_seq_lens", [5, 3]),
        ("token_to_request", [0, 0, 1]),
        ("token_rows", [0, 0, 1]),
    ],
)
def test_each_output_of_a_batch(output: str, expected: object) -> None:
    found = prepare_batch(output, *BATCH)
    assert found.tolist() == expected
    assert found.dtype == OUTPUTS[output].dtype


VERIFIED = ([0, 3, 4], [6, 9], [[7, 3], [5, 2, 8]], 4)
"""Three new tokens of six keys, and one of nine."""
DRAFTS = Drafts([1, 0], [11, 12, 13, 21], [14, 22], 2, 99, parents=[-1, 0, 0, -1])
"""The last of three tokens is rejected, and two tokens are drafted."""


@pytest.mark.parametrize(
    ("output", "expected", "shifted"),
    [
        ("slot_mapping", [31, 12, 13, 32], None),
        ("num_rejected_tokens", [1, 0], None),
        ("token_indices_to_sample", [1, 3], None),
        ("valid_sampled_tokens_count", [2, 1], None),
        ("accepted_seq_lens", [5, 9], None),
        ("last_tokens", [12, 21], None),
        ("accepted_tokens", [11, 12, 21], None),
        ("padded_tokens", [[11, 12, 13], [21, 0, 0]], None),
        ("next_positions", [5, 9], None),
        ("next_slots", [13, 33], None),
        ("next_seq_lens", [6, 10], None),
        ("draft_input_ids", [11, 12, 14, 99, 0, 21, 22, 99], [12, 14, 99, 0, 22, 99]),
        ("draft_positions", [3, 4, 5, 6, 0, 8, 9, 10], [3, 4, 5, 0, 8, 9]),
        ("is_rejected_token_mask", [0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]),
        ("is_masked_token_mask", [0, 0, 0, 1, 0, 0, 0, 1], [0, 0, 1, 0, 0, 1]),
        ("new_token_indices", [2, 3, 6, 7], [1, 2, 4, 5]),
        ("hidden_state_mapping", [0, 1, 2, 5], [0, 1, 2, 4]),
        ("query_input_ids", [14, 99, 99, 22, 99, 99], None),
        ("query_positions", [5, 6, 7, 9, 10, 11], None),
        ("query_slots", [13, 14, 15, 33, 34, 35], None),
        ("query_indices_to_sample", [1, 2, 4, 5], None),
        ("num_kv_splits", [2, 2, 2, 3, 3, 3], None),
        ("tree_mask", [1, 0, 0, 1, 1, 0, 1, 0, 1, 1], None),
        ("tree_positions", [3, 4, 4, 8], None),
        ("first_children", [1, -1, -1, -1], None),
        ("next_siblings", [-1, 2, -1, -1], None),
        ("packed_mask", [0b11001111, 0b11110111, 0b10, 0b11111111, 0b1], None),
        ("draft_kv_indptr", [0, 7, 18], None),
        (
            "draft_kv_indices",
            [28, 29, 30, 31, 12, 13, 14, 20, 21, 22, 23, 8, 9, 10, 11, 32, 33, 34],
            None,
        ),
    ],
)
def test_each_output_that_depends_on_drafts(output: str, expected: object, shifted: object) -> None:
    found = prepare_batch(output, *VERIFIED, drafts=DRAFTS)
    assert found.tolist() == expected
    assert found.dtype == OUTPUTS[output].dtype
    found = prepare_batch(output, *VERIFIED, drafts=DRAFTS._replace(is_shifted=True))
    assert found.tolist() == (shifted or expected)


@pytest.mark.parametrize(
    ("branches", "page_size", "expected"),
    [
        ((1, 0, 0), 4, [28, 29, 30, 31, 12, 13, 14]),
        ((2, 2, 1), 4, [28, 31, 12, 13, 14, 28, 31, 12, 17, 18]),  # the second in the third page
        ((2, 2, 3), 4, [28, 29, 30, 31, 12, 13, 14, 28, 29, 30, 31, 12, 17, 18]),
        ((2, 2, 0), 1, [4, 5, 6, 7, 4, 5, 8, 9]),
    ],
)
def test_branches_see_keys_of_their_request_and_their_own(
    branches: tuple[int, ...], page_size: int, expected: list[int]
) -> None:
    table = [[7, 3, 4]] if page_size > 1 else [list(range(1, 11))]
    drafts = Drafts([0], [11], [12], 2, branches=Branches(*branches))
    found = prepare_batch("draft_kv_indices", [0, 1], [5], table, page_size, drafts=drafts)
    assert found.tolist() == expected
    count = branches[0]
    indptr = prepare_batch("draft_kv_indptr", [0, 1], [5], table, page_size, drafts=drafts)
    assert indptr.tolist() == [len(expected) // count * branch for branch in range(count + 1)]


@pytest.mark.parametrize(
    ("keys", "splits", "expected"),
    [
        ([4096, 512], (32, 8, 8, 132), [8, 1]),  # eight times as long
        ([4096, 4000], (32, 8, 8, 1), [1, 1]),  # almost as long, and the one core is busy
        ([4096, 4000], (32, 32, 8, 132), [8, 8]),  # 132 * log2(64) = 792 programs, 64 are there
        ([64, 51], (32, 8, 8, 1), [2, 2]),  # a quarter more is not almost as long: parts of 32
        ([64, 52], (32, 8, 8, 1), [1, 1]),
        ([100], (96, 1, 64, 9), [2]),  # 9 programs, 6 blocks of 16 heads
    ],
)
def test_keys_are_divided_for_long_requests_and_idle_cores(
    keys: list[int], splits: tuple[int, ...], expected: list[int]
) -> None:
    assert num_kv_splits(keys, 1, Splits(*splits)) == expected
    assert num_kv_splits([], 1, Splits(*splits)) == []


def test_drafts_without_parents_are_a_chain() -> None:
    chain = DRAFTS._replace(parents=None)
    expected = {
        "tree_mask": [1, 0, 0, 1, 1, 0, 1, 1, 1, 1],
        "tree_positions": prepare_batch("positions", *VERIFIED).tolist(),
        "first_children": [1, 2, -1, -1],
        "next_siblings": [-1] * 4,
    }
    for output, entries in expected.items():
        assert prepare_batch(output, *VERIFIED, drafts=chain).tolist() == entries


def test_a_model_takes_no_more_keys() -> None:
    drafts = DRAFTS._replace(max_model_len=9)
    expected = {"next_positions": [5, 0], "next_slots": [13, -1], "next_seq_lens": [6, 1]}
    for output, entries in expected.items():
        assert prepare_batch(output, *VERIFIED, drafts=drafts).tolist() == entries


def test_a_request_that_keeps_no_token_goes_on_with_the_next_one() -> None:
    drafts = DRAFTS._replace(rejected=[3, 1])
    assert prepare_batch("last_tokens", *VERIFIED, drafts=drafts).tolist() == [14, 22]
    assert prepare_batch("next_positions", *VERIFIED, drafts=drafts).tolist() == [3, 8]


def test_slots_behind_a_batch_are_none() -> None:
    buffer = torch.full((4,), 7, dtype=torch.int64)
    found = prepare_batch("next_slots", *VERIFIED, drafts=DRAFTS, buffer=buffer, rest="zero_rows")
    assert found.tolist() == [13, 33, -1, -1]


def test_rows_are_those_that_requests_were_given() -> None:
    assert prepare_batch("page_indices", *BATCH, rows=[1, 0]).tolist() == [5, 2, 7]
    assert prepare_batch("token_rows", *BATCH, rows=[1, 0]).tolist() == [1, 1, 0]


def test_keys_before_a_window_have_no_slot_and_their_pages_are_null() -> None:
    table = [[7, 3, 6]]
    batch = ([0, 2], [11], table, 4)  # the first new token is key 9, and sees key 8
    assert prepare_batch("kv_indices", *batch, window_left=1).tolist() == [24, 25, 26]
    assert prepare_batch("page_indices", *batch, window_left=1).tolist() == [0, 0, 6]
    assert prepare_batch("page_indices", *batch, window_left=2).tolist() == [0, 3, 6]
    assert prepare_batch("kv_indptr", *batch, window_left=1).tolist() == [0, 3]


def test_the_keys_of_all_ranks_are_those_of_the_request() -> None:
    lengths = [
        prepare_batch(
            "local_seq_lens", [0, 1], [11], [[0]], 16, rank=rank, world=3, interleave=2
        ).item()
        for rank in range(3)
    ]
    assert lengths == [4, 4, 3]


def test_what_lies_behind_the_entries() -> None:
    buffer = torch.full((5,), 9, dtype=torch.int32)
    assert prepare_batch("seq_lens", *BATCH, buffer=buffer).tolist() == [5, 3, 9, 9, 9]
    found = prepare_batch("seq_lens", *BATCH, buffer=buffer, rest="zero_rows")
    assert found.tolist() == [5, 3, 0, 0, 0]
    table = torch.full((3, 3), 9, dtype=torch.int32)
    behind = {"kept": 9, "zero_rows": 9, "zero_tails": 0}
    for rest, tail in behind.items():
        found = prepare_batch("page_table", *BATCH, buffer=table, rest=rest)
        last = 0 if rest == "zero_rows" else 9
        assert found.tolist() == [[7, 3, tail], [5, tail, tail], [last] * 3]
    assert table.eq(9).all()
    assert buffer.eq(9).all()


def test_an_empty_batch() -> None:
    for output, each in OUTPUTS.items():
        found = prepare_batch(output, [0], [], [], 4, drafts=Drafts([], [], []))
        assert found.flatten().tolist() == list(each.first)


def test_it_agrees_with_the_metadata_and_the_slots_of_a_batch() -> None:
    metadata = build_metadata([2, 1], [5, 3], TABLE, 4)
    assert torch.equal(prepare_batch("page_indices", *BATCH), metadata.paged_kv_indices)
    slots = prepare_batch("kv_indices", *BATCH)
    positions = prepare_batch("positions", *BATCH)
    assert slots[[3, 4, 7]].tolist() == map_slots([0, 2, 3], positions, TABLE, 4).tolist()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (BATCH, {"output": "slots"}, "output is 'slots'; it must be one of kv_indices"),
        (BATCH, {"rest": "zero"}, "rest is 'zero'; it must be one of kept, zero_rows"),
        (([0, 6, 7], [5, 3], TABLE, 4), {}, r"seq_lens\[0\] is 5; the request has 6 new tokens"),
        (([0, 2], [5, 3], TABLE, 4), {}, "query_start_loc has 1 requests; seq_lens has 2"),
        (([0, 2, 3], [9, 3], TABLE, 4), {}, r"block_table\[0\]\[2\] is -9"),
        (([0, 2, 3], [13, 3], TABLE, 4), {}, r"block_table\[0\] has 3 entries; a request needs 4"),
        (([0, 2, 3], [5, 3], TABLE, 0), {}, "page_size is 0"),
        (BATCH, {"rows": [0, 2]}, r"rows\[1\] is 2; block_table has 2 rows"),
        (BATCH, {"rank": 1}, "rank is 1; the group has 1 ranks"),
        (BATCH, {"output": "next_slots"}, "output is 'next_slots'; it needs drafts"),
        (BATCH, {"drafts": Drafts([0], [1] * 3, [1] * 2)}, "rejected has 1 entries; the batch has"),
        (BATCH, {"drafts": Drafts([0, 0], [1] * 3, [1] * 2, parents=[-1])}, "parents has 1"),
        (
            BATCH,
            {"drafts": Drafts([0, 0], [1] * 3, [1] * 2, parents=[-1, 1, -1])},
            r"parents\[1\] is 1; it must be a token before it",
        ),
        (BATCH, {"drafts": Drafts([3, 0], [1] * 3, [1] * 2)}, r"rejected\[0\] is 3; the request"),
        (
            ([0, 2, 3], [8, 3], [[7, 3], [5, 2]], 4),
            {"output": "next_slots", "drafts": Drafts([0, 0], [1] * 3, [1] * 2)},
            "request 0 has no page for position 8",
        ),
        (BATCH, {"buffer": torch.zeros(1)}, "buffer must be a tensor of torch.int32"),
        (BATCH, {"buffer": torch.zeros(1, dtype=torch.int32)}, r"the entries need \(8,\)"),
    ],
)
def test_what_contradicts_itself(
    arguments: tuple[object, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_batch(options.pop("output", "kv_indices"), *arguments, **options)  # type: ignore[arg-type]


def test_a_problems_tensors() -> None:
    steps = (((1, 2, 0), (5, 2, 0)), ((3,), (3,)))
    problem = BatchProblem("page_table", steps, page_size=2, spare_rows=2, spare_entries=3)
    first, second = (batch_inputs(problem, Allocator(CPU, 0.0), step=step) for step in range(2))
    assert first.query_start_loc.tolist() == [0, 1, 3, 3]
    assert first.kv_indptr.tolist() == [0, 5, 7, 7]
    assert first.page_indptr.tolist() == [0, 3, 4, 4]
    assert first.computed[first.rows.long()].tolist() == [4, 0, 0]
    assert first.block_table.shape == second.block_table.shape == (5, 3)
    assert first.token_table.shape == (5, 6)
    assert first.parents.tolist() == [-1, -1, 0]
    assert first.buffer.shape == second.buffer.shape == (6, 3)
    assert (first.buffer >= 2**30).all()
    pages = prepared(first)
    row = int(first.rows[0])
    assert pages[0].tolist() == first.block_table[row].tolist()
    assert first.token_table[row, 4] == 2 * pages[0, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": "slots"}, "output is 'slots'"),
        ({"rest": "zero_tails"}, "rest is 'zero_tails'; it must be of a table"),
        ({"steps": ()}, r"steps is \(\); it must be at least one batch"),
        ({"steps": (((2,), (1,)),)}, "at most as many tokens as a request has keys"),
        ({"rank": 1}, "rank is 1; it must be less than world = 1"),
        ({"window_left": -2}, "window_left is -2"),
        ({"rejected": ((2,),)}, r"rejected is \(2,\); it must be at most as many as"),
        ({"rejected": ((0, 0),)}, "it must be a number for each request of each batch"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"splits": (8, 8, 0, 1)}, "it must be four numbers of at least 1"),
        ({"branches": (0, 1, 1)}, "a number from 1 on and two from 0 on"),
        ({"splits": (8, 3, 1, 1)}, "of query heads that key-value heads divide"),
        ({"output": "num_kv_splits", "steps": (((0,), (0,)),)}, "must be requests with keys"),
    ],
)
def test_problems_that_no_call_can_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchProblem(**fields)  # type: ignore[arg-type]


def test_the_mask_of_a_problem_is_what_its_bits_are() -> None:
    steps = (((3, 0, 9), (20, 0, 9)),)
    problem = BatchProblem("packed_mask", steps, is_tree=True, seed=3)
    inputs = batch_inputs(problem, Allocator(CPU, 0.0))
    numbers = prepared(inputs)
    bits = (numbers.unsqueeze(1) >> torch.arange(8)) & 1
    assert bits[:8].flatten()[:60].tolist() == inputs.mask[:60].int().tolist()
    assert bits[8:].flatten()[:81].tolist() == inputs.mask[60:].int().tolist()
