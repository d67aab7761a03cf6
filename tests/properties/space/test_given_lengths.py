"""Lengths that ``--only`` asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.properties.space.axes import Axes
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.restrictions import Only, OnlyError
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference.problems import MAX_SEQ_LEN

ALL = ("paged_attention", "ragged_attention", "append_paged_kv", "slice_context_parallel")


def drawn(operation: str, *texts: str, count: int = 30) -> list[Any]:
    """Draw problems as a run with ``--only`` does."""
    only = Only.read(texts)
    found = draw_problems(
        Axes(operation, only.axes(operation), 400_000), PROFILES["gate"], 1, count
    )
    assert all(only.meets(problem) for problem in found)
    return found


@pytest.mark.parametrize("operation", ALL)
@pytest.mark.parametrize("keys", [0, 1, 8200, 16384, MAX_SEQ_LEN])
def test_one_number_is_that_of_every_request(operation: str, keys: int) -> None:
    found = drawn(operation, f"seq_lens={keys}")
    assert len(found) > 5
    assert {length for each in found for length in each.seq_lens} == {keys}
    assert keys > 1 or max(len(each.seq_lens) for each in found) > 1


@pytest.mark.parametrize("operation", ALL)
def test_several_numbers_are_the_requests_of_one_batch(operation: str) -> None:
    assert {each.seq_lens for each in drawn(operation, "seq_lens=8200,17,17")} == {(8200, 17, 17)}
    both = drawn(operation, "query_lens=2", "seq_lens=8200,17")
    assert {(each.query_lens, each.seq_lens) for each in both} == {((2, 2), (8200, 17))}


@pytest.mark.parametrize("operation", ALL)
def test_query_tokens_are_given_likewise(operation: str) -> None:
    found = drawn(operation, "query_lens=5")
    assert {length for each in found for length in each.query_lens} == {5}
    assert len({each.seq_lens for each in found}) > 3


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("seq_lens=many",), "give one number for every request"),
        (("seq_lens=-1",), "give one from 0 to"),
        ((f"seq_lens={MAX_SEQ_LEN + 1}",), f"give one from 0 to {MAX_SEQ_LEN}"),
        (("seq_lens=5", "seq_lens=6"), "write the lengths of one batch behind each other"),
        (("seq_lens=5,6", "query_lens=1,1,1"), "give as many of both"),
    ],
)
def test_a_refusal_says_what_to_do(texts: tuple[str, ...], said: str) -> None:
    with pytest.raises(OnlyError, match=said):
        Only.read(texts)


def test_keys_that_are_appended_are_among_those_of_the_request() -> None:
    with pytest.raises(OnlyError, match="give fewer"):
        Only.read(["query_lens=9", "seq_lens=8"]).axes("append_paged_kv")
