"""The whole catalogue, scored as `kernelproof score --profile quick` does, a few bugs at a time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from kernelproof.ci.score.scoring import LEAST_KILLED, run_score
from kernelproof.properties.search import preparation
from kernelproof.properties.seeded import BUGS, CATALOGUE
from kernelproof.properties.space.profiles import PROFILES, Cost

AT_ONCE = {"bug": 8, "honest": 2, "hang": 2, "crash": 4}
"""Catalogue entries in one test: about 20 s on two cores that do nothing else."""
UNSEEN = frozenset({"append-does-not-saturate", "graph-keeps-page-indices"})
"""Bugs that 20 problems a law do not show; the profile gate is held to every one."""
SECONDS = 600.0
"""Limit for one bug. A busy machine must not end a search of 20 seconds before its last laws."""


def shares() -> dict[str, list[str]]:
    """Return the names of each share, by operation, control and number."""
    groups: dict[str, list[str]] = defaultdict(list)
    for bug in CATALOGUE:
        groups[f"{bug.operation}-{bug.control}"].append(bug.name)
    return {
        f"{group}-{start // size}": names[start : start + size]
        for group, names in groups.items()
        for size in [AT_ONCE[group.rpartition("-")[2]]]
        for start in range(0, len(names), size)
    }


SHARES = shares()


def test_the_shares_are_the_catalogue() -> None:
    listed = [name for names in SHARES.values() for name in names]
    assert sorted(listed) == sorted(bug.name for bug in CATALOGUE)
    assert {bug.name for bug in BUGS} >= UNSEEN
    assert len(UNSEEN) <= (1 - LEAST_KILLED) * len(BUGS)


@pytest.mark.parametrize("share", SHARES)
def test_quick_kills_the_catalogue_and_accuses_no_honest_control(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All count as fast, as they are, so that a slow machine draws the same problems."""
    fast = Cost("fast", 1.0, PROFILES["quick"].max_work)
    monkeypatch.setattr(preparation, "cost_of", lambda *_: fast)
    profile = replace(PROFILES["quick"], seconds=SECONDS)
    score = run_score(profile, names=SHARES[share], jobs=1, briefly=True)
    survivors = {each.bug.name for each in score.of("bug", "hang", "crash") if not each.killed}
    assert survivors <= UNSEEN
    assert score.accused == []
    assert all(each.report.judged for each in score.of("honest"))
