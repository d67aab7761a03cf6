"""Refusals: what they carry, and which of several is told."""

from __future__ import annotations

import copy
import json
from itertools import pairwise, permutations

import pytest

from kernelproof.impl.targets.refusal import CODES, MOST_CHARACTERS, Refusal, most_telling


@pytest.mark.parametrize("code", CODES)
def test_a_code_survives_json_and_copies(code: str) -> None:
    said = Refusal("no", code, "this")  # type: ignore[arg-type]
    for each in (Refusal(**json.loads(json.dumps(said.to_json()))), copy.deepcopy(said)):
        assert (each, each.code, each.about) == ("no", code, "this")


def test_the_words_do_not_matter() -> None:
    """A user's sentence may read like any of ours."""
    given = [Refusal("no GPU", "device"), Refusal("x does not name the feature mla", "supports"),
             Refusal("the support rules: shut", "feature"), None]  # fmt: skip
    for order in permutations(given):
        assert most_telling(order) == "no GPU"


def test_an_earlier_code_says_more_and_the_first_of_a_code_is_told() -> None:
    for more, less in pairwise(CODES):
        given = [None, Refusal("a", less), Refusal("b", more), Refusal("c", more)]
        assert most_telling(given) == "b"
    assert most_telling([None]) is None


def test_a_reason_is_cut_and_a_code_is_one_of_the_table() -> None:
    assert len(Refusal("no" * 10_000)) == MOST_CHARACTERS
    with pytest.raises(ValueError, match="code is 3; it must be one of machine"):
        Refusal("no", 3)  # type: ignore[arg-type]
