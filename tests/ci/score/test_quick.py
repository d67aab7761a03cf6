"""The whole catalogue, scored as `kernelproof score --profile quick` does, in a few shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.ci.score.scoring import LEAST_KILLED, run_score
from kernelproof.properties.seeded import BUGS, CATALOGUE
from kernelproof.properties.space.profiles import PROFILES

SHARES = 5
MISSED_A_SHARE = 2
"""Quick looks at 20 problems a law, so a bug may stay unseen, rare ones of experts above all; the
profile gate is held to every one."""
SECONDS = 120.0
"""For one bug. A busy machine must not end a search of 20 seconds before its last laws."""


def test_the_misses_allowed_in_all_shares_are_those_allowed_in_a_score() -> None:
    assert (1 - LEAST_KILLED) * len(BUGS) >= SHARES * MISSED_A_SHARE


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_quick_kills_the_catalogue_and_accuses_no_honest_control(share: int) -> None:
    names = sorted(bug.name for bug in CATALOGUE)[share::SHARES]
    profile = replace(PROFILES["quick"], seconds=SECONDS)
    score = run_score(profile, names=names, jobs=1, briefly=True)
    survivors = [each.bug.name for each in score.of("bug") if not each.killed]
    assert len(survivors) <= MISSED_A_SHARE, survivors
    assert [each.bug.name for each in score.of("hang", "crash") if not each.killed] == []
    assert score.accused == []
    assert all(each.report.judged for each in score.of("honest"))
