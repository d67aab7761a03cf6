"""What timing says of memory becomes a finding where a call needs more of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.ci.bump.behaviour.records import Compared, Tried
from kernelproof.ci.bump.behaviour.speed import SLOW_SECONDS, memory_findings, to_be_timed
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.ci.bump.verdicts.findings import CHANGES, REPORT
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import MergeProblem

MIB = 1 << 20
NONE: dict[str, int | None] = {"baseline": None, "candidate": None}


@pytest.mark.parametrize(
    ("old", "new", "tells"),
    [
        (MIB, 2 * MIB, True),
        (MIB, MIB, False),
        (2 * MIB, MIB, False),
        (100 * MIB, 101 * MIB, False),  # one per cent
        (0, 1 << 10, False),  # a buffer of a few scalars
        (0, MIB, True),
        (None, MIB, False),  # it is not known
    ],
)
@pytest.mark.parametrize("field", ["peak_bytes", "workspace_bytes"])
def test_more_memory_is_told(field: str, old: int | None, new: int | None, tells: bool) -> None:
    measured = {"peak_bytes": NONE, "workspace_bytes": NONE}
    speeds = [{**measured, field: {"baseline": old, "candidate": new}}, measured]
    found = list(memory_findings([Compared("mine", "made.up:mine", speeds=speeds)], ()))
    assert [each.change for each in found] == ["more-memory"] * tells
    assert CHANGES["more-memory"].action == REPORT
    if tells:
        assert found[0].candidate == {field: new}
        assert "with the baseline" in found[0].message


def test_the_largest_difference_is_told_and_others_are_counted() -> None:
    sizes = [(MIB, 3 * MIB), (MIB, 9 * MIB)]
    speeds = [
        {"peak_bytes": {"baseline": old, "candidate": new}, "workspace_bytes": NONE}
        for old, new in sizes
    ]
    (found,) = memory_findings([Compared("mine", "made.up:mine", speeds=speeds)], ())
    assert found.message == "mine allocates 1.0 MB with the baseline, 9.4 MB with the candidate"
    assert found.count == 2


def test_the_longest_calls_are_timed_but_for_those_that_take_too_long() -> None:
    seconds = [SLOW_SECONDS * factor for factor in (0.1, 9.0, 0.5, 2.0)]
    tried = [
        Tried(
            "parity",
            MergeProblem(num_tokens=number),
            dict.fromkeys(SIDES, Verdict("PASS", seconds=each)),
            same_bits=True,
        )
        for number, each in enumerate(seconds, 1)
    ]
    addresses = {side: Address("made.up:mine", None, "cpu") for side in SIDES}
    found = Compared("mine", "made.up:mine", addresses=addresses, tried=tried)
    assert [each.problem for each in to_be_timed(found)] == [tried[2].problem, tried[0].problem]
    found = replace(found, tried=[tried[1], tried[3], tried[2]])
    assert [each.problem for each in to_be_timed(found)] == [tried[2].problem, tried[3].problem]
