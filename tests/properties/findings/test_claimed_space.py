"""The claimed space by what ``supports`` said, and by the problems that were judged and refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.claimed_space import OFTEN, ClaimTally, surveyed

AXES = {"dtype": ("f32", "f16"), "heads": (1, 2, 3), "phase": ("a", "b"), "real": (0, 1)}
ACCEPTED = {"dtype": ("f32", "f16"), "heads": (1,), "phase": ("a",), "real": (0,)}
REFUSED = {"heads=2": Refusal("one head", "supports"), "real=1": "one head"}


def tally(*, whole: bool = True) -> ClaimTally:
    def values_of(problem: Mapping[str, str]) -> Mapping[str, str]:
        return problem

    asked = surveyed(AXES, ACCEPTED, REFUSED)
    return ClaimTally(asked, values_of, {"dtype", "heads"}, whole=whole)


def test_what_is_not_asked_is_neither_claimed_nor_refused() -> None:
    asked = surveyed(AXES, ACCEPTED, REFUSED)
    assert set(asked) == {"dtype", "heads", "phase"}
    assert (asked["heads"].claimed, asked["heads"].not_drawn) == (("1",), ("3",))
    assert asked["heads"].refused == {"2": "one head"}
    assert asked["phase"].not_drawn == ("b",)


def test_a_claimed_value_without_a_judged_problem_is_not_drawn_and_not_refused() -> None:
    made = tally()
    made.judged({"dtype": "f32", "heads": "1"})
    space = made.space()
    assert space["dtype"].claimed == ("f32", "f16")
    assert (space["dtype"].not_drawn, space["dtype"].refused) == (("f16",), {})
    assert space["phase"].not_drawn == ("b",)  # which follow from no field: what is drawn is so


def test_a_value_that_is_refused_by_itself_is_claimed_once_a_problem_with_it_is_judged() -> None:
    made = tally()
    made.judged({"dtype": "f16", "heads": "2"})
    space = made.space()
    assert set(space["heads"].claimed) == {"1", "2"}
    assert not space["heads"].refused
    assert "2" not in space["heads"].not_drawn


@pytest.mark.parametrize(
    ("count", "judged", "whole", "refused"),
    [
        (OFTEN, 0, True, True),
        (OFTEN - 1, 0, True, False),
        (OFTEN, 1, True, False),
        (OFTEN, 0, False, False),
    ],
)
def test_what_is_accepted_in_simple_problems_and_refused_in_every_drawn_one_is_refused(
    count: int, judged: int, whole: bool, refused: bool
) -> None:
    made = tally(whole=whole)
    for _ in range(count):
        made.refused({"dtype": "f16"}, "simple ones only")
    for _ in range(judged):
        made.judged({"dtype": "f16"})
    dtype = made.space()["dtype"]
    assert ("f16" in dtype.refused) == refused
    assert ("f16" in dtype.claimed) != refused
    if refused:
        assert dtype.refused["f16"] == f"each of {OFTEN} problems drawn with it: simple ones only"
    assert dtype.to_json()["refused"] == {k: str(v) for k, v in dtype.refused.items()}
