"""A score of some of the catalogue, as ``kernelproof score --profile quick`` runs all of it.

All of it is judged on the same problems by ``tests/properties/seeded/test_seeded.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.ci.score.scoring import run_score
from kernelproof.properties.search import preparation
from kernelproof.properties.seeded import BUGS
from kernelproof.properties.space.profiles import PROFILES, Cost

NAMES = (
    # Of each operation the first. A later law of the run kills the second of experts.
    *{bug.operation: bug.name for bug in reversed(BUGS)}.values(),
    "hidden-scale-of-first-token",
    "aborts-on-no-tokens",
    "spins-on-second-tile",
    "merge",
    "append",
)
SECONDS = 600.0
"""Limit for one bug. A busy machine must not end a search of 20 seconds before its last laws."""


@pytest.mark.timeout(900)  # 150 s on an idle machine, one bug after another
def test_quick_kills_bugs_and_accuses_no_honest_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """All count as fast, as they are, so that a slow machine draws the same problems."""
    fast = Cost("fast", 1.0, PROFILES["quick"].max_work)
    monkeypatch.setattr(preparation, "cost_of", lambda *_: fast)
    profile = replace(PROFILES["quick"], seconds=SECONDS)
    score = run_score(profile, names=NAMES, jobs=1, briefly=True)
    assert {each.bug.name for each in score.scored} == set(NAMES)
    assert {each.bug.name for each in score.scored if each.killed} == set(NAMES[:-2])
    assert score.accused == []
    assert all(each.report.judged for each in score.of("honest"))
