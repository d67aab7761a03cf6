"""Misbehaving kernels beside an honest one: a few of each sort; `make faults` has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernelproof.tests.faults import harness, kernels

PARTS = 2
"""Parts of the sample, which run side by side."""
JOBS = 3
"""Runs of a part at a time. A run waits for deadlines three times as long as it computes."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_of_faults_is_answered_rightly(part: int, tmp_path: Path) -> None:
    kept = tmp_path / "answers.json"
    words = ["--sample", str(part), str(PARTS), "--jobs", str(JOBS), "--json", str(kept)]
    ended = subprocess.run(
        [sys.executable, harness.__file__, *words], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers = json.loads(kept.read_text())["answers"]
    assert len(answers) >= 8
    assert all(answer["code"] is not None for answer in answers)


def test_the_table_has_a_row_for_each_point_and_sort() -> None:
    assert len(kernels.BY_NAME) == len(kernels.FAULTS) >= 150
    assert {row.at for row in kernels.FAULTS} == set(kernels.POINTS)
    points = Counter(row.at for row in kernels.FAULTS)
    assert min(points.values()) >= 3, points
    for table in (*kernels.PLAIN, kernels.SUPPORTS):
        assert any(row.sample for row in table), table[0].name


def test_a_seed_draws_the_same_combinations() -> None:
    drawn = harness.at_random(50, 3)
    assert drawn == harness.at_random(50, 3)
    assert drawn != harness.at_random(50, 4)
    assert len({(case.name, case.at, case.operation, case.laws) for case in drawn}) > 40


JUDGED = {
    "name": "bystander",
    "status": "PASS",
    "judged": 5,
    "error": "",
    "laws": [{"law": "parity", "verdict": "PASS", "judged": 5}],
}
ACCUSED: dict[str, dict[str, Any]] = {
    "bystander accused": {"error": "the suite failed: KeyError"},
    "bystander not judged": {"judged": 0, "unsupported_reason": ""},
    "bystander's parity: PASS, judged 0": {
        "laws": [{"law": "parity", "verdict": "PASS", "judged": 0}]
    },
    "bystander's parity: FLAKY": {"laws": [{"law": "parity", "verdict": "FLAKY", "judged": 5}]},
}


@pytest.mark.parametrize("what", ACCUSED)
def test_the_harness_sees_a_bystander_that_is_accused_or_not_judged(what: str) -> None:
    assert not list(harness.accusations(JUDGED, {"findings": []}))
    said = list(harness.accusations({**JUDGED, **ACCUSED[what]}, {"findings": []}))
    assert any(each.startswith(what) for each in said), said


def test_the_harness_calls_a_fault_that_nobody_found_a_false_pass() -> None:
    case = harness.Case("return zeros")
    subject = {"name": "subject", "status": "PASS", "error": ""}
    report = {"findings": [], "message": "CONFORMING"}
    answer = harness.Answer(case, code=0)
    said = list(harness.misjudged(kernels.find(case.name), answer, subject, report, ""))
    assert said[0].startswith("false pass")
