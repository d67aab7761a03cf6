"""The evidence that is kept speaks of the laws and the bugs that there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.laws import LAWS, Law
from kernelproof.properties.seeded import BUGS

EVIDENCE = Path(__file__).parents[1] / "fixtures" / "evidence"
SCORES = ("score-gate.json", "score-gate-moe.json")
"""Of attention, merging and metadata, and of experts and routing: no bug is of both."""
AGAIN = "run kernelproof score --profile gate --operation OP ... --json fixtures/evidence/FILE"


@pytest.fixture(scope="module")
def scores() -> list[dict[str, Any]]:
    return [json.loads((EVIDENCE / name).read_text(encoding="utf-8")) for name in SCORES]


def test_the_scores_are_of_these_laws_and_bugs(scores: list[dict[str, Any]]) -> None:
    scored = [each["name"] for score in scores for each in score["bugs"]
              if each["control"] == "bug"]  # fmt: skip
    assert sorted(scored) == sorted(bug.name for bug in BUGS), AGAIN
    assert {name for score in scores for name in score["laws"]} == {law.name for law in LAWS}, AGAIN
    for score in scores:
        assert score["share_killed"] >= 0.95
        assert score["accusations"] == []


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_law_kills_something_alone_or_says_why_it_is_kept(
    law: Law, scores: list[dict[str, Any]]
) -> None:
    alone = [name for score in scores
             for name in score["laws"].get(law.name, {"alone": []})["alone"]]  # fmt: skip
    assert alone or law.overlap, f"{law.name} kills nothing that others do not; {AGAIN}"
