"""The time until a check finds something, by its report's milestones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelproof.ci.bench.command import bench
from kernelproof.ci.bench.first_finding import HALVES, Timed, results, subjects, timed
from kernelproof.ci.console.errors import UsageRefusedError


def test_startup_ends_with_the_first_judged_problem_and_search_begins() -> None:
    report = {
        "milestones": {"started": 102.0, "judged": 1.5, "failing": 4.0},
        "findings": [{"law": "parity"}],
    }
    assert timed("mine", report, 100.0) == Timed("mine", 3.5, 2.5, "parity")


def test_a_check_without_a_finding_has_no_search() -> None:
    report = {"milestones": {"started": 1.0, "judged": 2.0, "failing": None}, "findings": []}
    found = timed("mine", report, 0.0)
    assert (found.startup, found.search) == (3.0, None)
    text = results([found]).text()
    assert "mine" in text
    assert "without a finding" in text


def test_each_half_has_its_own_figures() -> None:
    times = [Timed(f"bug-{number}", 1.0, float(number), "parity") for number in range(40)]
    assert {each.half for each in times} == set(HALVES)
    both, *halves = results(times).tables[1].rows
    assert both[1] == sum(int(row[1]) for row in halves) == 40
    assert both[5] == 36.0


def test_the_subjects() -> None:
    every = subjects((), None, 0)
    assert len(every) > 300
    assert subjects((), 5, 1) == subjects((), 5, 1) != subjects((), 5, 2)
    assert subjects(("mine:kernel",), None, 0) == {"mine:kernel": "mine:kernel"}
    name = next(iter(every))
    with pytest.raises(UsageRefusedError, match=f"did you mean {name}"):
        subjects((name[:-1],), None, 0)


def test_a_seeded_bug_is_timed_by_a_whole_check(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    words = ["first-finding", "append-off-by-one", "--profile", "quick", "--json", str(file)]
    ended = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert ended.exit_code == 0
    [measured] = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    [row] = measured["tables"][0]["rows"]
    assert row[0] == "append-off-by-one"
    assert 0 < row[2] < 600
    assert 0 <= row[3] < 600
