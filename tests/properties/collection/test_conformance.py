"""What becomes of a pytest item whose law has found nothing."""

from __future__ import annotations

import pytest

from kernelproof.properties.collection.conformance import without_finding
from kernelproof.properties.findings.report import LawReport


@pytest.mark.parametrize(
    ("found", "outcome", "allowed"),
    [
        (LawReport("parity", judged=3, floor=3, ended="time"), "passed", "passed"),
        (LawReport("parity", judged=2, floor=3, ended="time"), "failed", "skipped"),
        (LawReport("parity", judged=0, floor=3, ended="stopped"), "failed", "skipped"),
        (LawReport("parity", judged=2, floor=3, ended="rare"), "passed", "passed"),
        (LawReport("parity", judged=0, floor=3, ended="idle"), "failed", "skipped"),
        (LawReport("parity", vacuous=9, floor=3, ended="idle"), "skipped", "skipped"),
    ],
)
def test_a_law_that_had_no_time_fails(found: LawReport, outcome: str, allowed: str) -> None:
    said = without_finding(found, "mine", allow_incomplete=False)
    assert said.outcome == outcome
    assert without_finding(found, "mine", allow_incomplete=True).outcome == allowed
    if outcome == "failed":
        assert f"INCOMPLETE  mine: parity judged {found.judged} of 3 problems" in said.text
