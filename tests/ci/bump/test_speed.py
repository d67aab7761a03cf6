"""What timing says of memory becomes a finding where a call needs more of it."""

from __future__ import annotations

import pytest

from kernelproof.ci.bump.behaviour.comparison import Compared
from kernelproof.ci.bump.behaviour.speed import memory_findings
from kernelproof.ci.bump.verdicts.findings import CHANGES, REPORT

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
