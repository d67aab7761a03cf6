"""The evidence that is kept speaks of the laws and the bugs that there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.laws import LAWS, Law
from kernelproof.properties.seeded import BUGS

SCORE = Path(__file__).parents[1] / "fixtures" / "evidence" / "score-gate.json"
AGAIN = "run kernelproof score --profile gate --json fixtures/evidence/score-gate.json"


@pytest.fixture(scope="module")
def score() -> dict[str, Any]:
    return json.loads(SCORE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_score_is_of_these_laws_and_bugs(score: dict[str, Any]) -> None:
    scored = {each["name"] for each in score["bugs"] if each["control"] == "bug"}
    assert scored == {bug.name for bug in BUGS}, AGAIN
    assert set(score["laws"]) == {law.name for law in LAWS}, AGAIN
    assert score["share_killed"] >= 0.95
    assert score["accusations"] == []


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_law_kills_something_alone_or_says_why_it_is_kept(
    law: Law, score: dict[str, Any]
) -> None:
    alone = score["laws"][law.name]["alone"]
    assert alone or law.overlap, f"{law.name} kills nothing that others do not; {AGAIN}"
