"""The wrong elements that a FAIL lists, and their names."""

from __future__ import annotations

import math

import pytest
import torch

from kernelproof.properties.findings.text_format import description, element_lines
from kernelproof.properties.verdicts.comparison import bitwise, within
from kernelproof.properties.verdicts.elements import with_places
from kernelproof.properties.verdicts.text import defaults
from kernelproof.reference import AttentionProblem, MergeProblem, MoEProblem, Problem
from kernelproof.reference.tensors.placement import placement

PAGED = AttentionProblem(
    query_lens=(2, 3), seq_lens=(4, 9), group_size=2, head_dim_vo=4, page_size=4
)
APPEND = AttentionProblem(
    operation="append_paged_kv", query_lens=(2, 3), seq_lens=(4, 9), page_size=4, page_order=1
)


def test_the_ten_worst_are_listed_the_worst_first() -> None:
    expected = torch.zeros(3, 5, dtype=torch.float64)
    actual = torch.arange(15.0).view(3, 5)
    listed = within("out", actual, expected, torch.full((3, 5), 2.0)).worst
    assert [each["index"] for each in listed[:2]] == [[2, 4], [2, 3]]
    assert listed[0] == {
        "name": "out", "shape": [3, 5], "index": [2, 4], "got": "14", "expected": "0", "bound": "2",
    }  # fmt: skip
    assert len(listed) == 10
    # Those within their bounds are not.
    assert len(within("out", actual[0], expected[0], torch.full((5,), 2.0)).worst) == 2


def test_misplaced_nans_are_listed_in_order() -> None:
    actual = torch.tensor([1.0, math.nan, 9.0, math.nan])
    listed = within("out", actual, torch.zeros(4).double(), torch.ones(4).double()).worst
    assert [(each["index"], each["got"]) for each in listed] == [([1], "nan"), ([3], "nan")]


def test_integers_are_listed_with_all_their_digits() -> None:
    first, second = torch.tensor([5, 2**31 - 1]), torch.tensor([5, 7])
    (listed,) = bitwise("seq_lens", first, second).worst
    assert (listed["got"], listed["expected"], listed["bound"]) == ("2147483647", "7", "exactly")


@pytest.mark.parametrize(
    ("problem", "shape", "index", "place"),
    [
        # Token 1 of request 1 stands at key 9 - 3 + 1 = 7, the last one of its page 1.
        (PAGED, [5, 2, 4], [3, 1, 2],
         {"request": 1, "token": 1, "head": 1, "page": 1, "channel": 2}),
        (PAGED, [5, 2, 4], [1, 0, 0],
         {"request": 0, "token": 1, "head": 0, "page": 0, "channel": 0}),
        # The answer to a part of the batch has other requests.
        (PAGED, [3, 2, 4], [1, 0, 0], {}),
        (MergeProblem(num_tokens=3), [3, 1, 8], [2, 0, 7], {"token": 2, "head": 0, "channel": 7}),
        (MoEProblem(num_tokens=3), [3, 64], [2, 63], {"token": 2, "channel": 63}),
    ],
)  # fmt: skip
def test_an_element_is_named(
    problem: Problem, shape: list[int], index: list[int], place: dict[str, int]
) -> None:
    actual = torch.zeros(shape)
    actual[tuple(index)] = 1.0
    zeros = torch.zeros(shape, dtype=torch.float64)
    (listed,) = with_places(within("out", actual, zeros, zeros), problem).worst
    assert listed["at"] == place
    assert listed["where"] == f"out{index}"


def test_a_slot_of_a_cache_is_named_by_its_request_and_token() -> None:
    where = placement(APPEND)
    page, slot = where.slots[:, 4 + 7].tolist()  # key 7 of request 1, token 1 of its three
    cache = torch.zeros(where.num_pages, 4, 1, 16)
    cache[page, slot, 0, 3] = 1.0
    found = bitwise("k_cache", cache, torch.zeros_like(cache))
    (listed,) = with_places(found, APPEND).worst
    assert listed["at"] == {
        "request": 1, "token": 1, "page": page, "slot": slot, "head": 0, "channel": 3,
    }  # fmt: skip


def test_a_description_has_the_whole_problem_and_the_elements() -> None:
    ones, zeros = torch.ones(1, 1, 8), torch.zeros(1, 1, 8, dtype=torch.float64)
    problem = MergeProblem(head_dim=8)
    verdict = with_places(within("out", ones, zeros, zeros), problem)
    lines = description("parity", problem, verdict)
    assert lines[0] == "FAIL numeric under parity"
    assert "problem: MergeProblem(head_dim=8)" in lines
    assert f"defaults: {defaults(problem)}" in lines
    assert "num_states=2, num_tokens=1, num_heads=1, dtype='float32'" in defaults(problem)
    assert len(element_lines(verdict)) == 8
    assert lines[-1].split() == [
        "wrong:", "out[0,", "0,", "7]", "token", "0,", "head", "0,", "channel", "7",
        "got", "1", "expected", "0", "bound", "0",
    ]  # fmt: skip
