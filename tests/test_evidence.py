"""The evidence that is kept speaks of the laws and the bugs that there are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.ci.console.evidence_file import as_evidence
from kernelproof.fixtures import EVIDENCE
from kernelproof.properties.isolation.outcome import is_forceful
from kernelproof.properties.laws import LAWS, Law, laws_of
from kernelproof.properties.seeded import BUGS, CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPERATIONS = sorted({bug.operation for bug in CATALOGUE})


def again(operation: str) -> str:
    return f"run `make score-evidence OPERATION={operation}`"


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, Any]]:
    files = EVIDENCE.glob("score-*.json")
    return {
        path.stem.removeprefix("score-"): json.loads(path.read_text(encoding="utf-8"))
        for path in files
    }


def test_there_is_one_score_an_operation(scores: dict[str, dict[str, Any]]) -> None:
    missing = [again(operation) for operation in OPERATIONS if operation not in scores]
    assert not missing
    assert sorted(scores) == OPERATIONS


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_score_is_of_these_laws_and_bugs(
    operation: str, scores: dict[str, dict[str, Any]]
) -> None:
    score = scores[operation]
    scored = [each["name"] for each in score["bugs"] if each["control"] == "bug"]
    bugs = [bug.name for bug in BUGS if bug.operation == operation]
    # Named, not counted: only test_seeded tries them.
    waiting = score.get("unscored", {}).get("bugs", [])
    assert sorted([*scored, *waiting]) == sorted(bugs), again(operation)
    assert set(score["laws"]) == {law.name for law in laws_of(operation)}, again(operation)
    assert score["profile"] == "gate"
    assert score["share_killed"] >= 0.95
    assert score["accusations"] == []


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_law_kills_something_alone_or_says_why_it_is_kept(
    law: Law, scores: dict[str, dict[str, Any]]
) -> None:
    alone = [
        name
        for operation in law.operations
        for name in scores[operation]["laws"].get(law.name, {"alone": []})["alone"]
    ]
    mend = f"if {law.name} or a bug is new, {again(law.operations[0])}; else say why in `overlap`"
    assert alone or law.overlap, mend


def test_a_bug_is_killed_alone_by_the_law_that_the_table_names(
    scores: dict[str, dict[str, Any]],
) -> None:
    """The table of each file follows from its own bugs."""
    for operation, score in scores.items():
        killed = [each for each in score["bugs"] if each["control"] == "bug" and each["killed"]]
        for law, found in score["laws"].items():
            kills = [each for each in killed if law in each["laws"]]
            assert found["kills"] == [each["name"] for each in kills], (operation, law)
            alone = [each["name"] for each in kills if len(each["laws"]) == 1]
            assert found["alone"] == alone, (operation, law)


def test_the_readme_counts_what_the_kept_scores_hold(
    repository: Path, scores: dict[str, dict[str, Any]]
) -> None:
    kept = [score["comparison"] for score in scores.values()]
    bugs, honest = (sum(each[name] for each in kept) for name in ("bugs", "honest"))
    found = {
        tuple(
            str(sum(len(each["yardsticks"][name][column]) for each in kept))
            for column in ("caught", "accused")
        )
        for name in kept[0]["yardsticks"]
    }
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert f"{bugs} seeded bugs and {honest} correct kernels" in readme
    rows = re.findall(r"^\| .* \| (\d+) \| (\d+) \|$", readme, re.MULTILINE)
    assert len(rows) == 6
    assert set(rows) <= found, "the table of README.md is stale"


def test_no_kept_file_holds_a_call_that_hangs_or_crashes_the_software_of_others() -> None:
    kept = {path.name: json.loads(path.read_text("utf-8")) for path in EVIDENCE.glob("*.json")}
    assert not [name for name, data in kept.items() if any(forceful_calls(data))]


def test_evidence_leaves_such_calls_out() -> None:
    hang = {"status": "HANG", "kind": "run", "problem": {"seed": 1}, "message": "did not end"}
    both = {"candidate": {"kind": "SIGILL"}, "baseline": {"kind": ""}, "problem": {"seed": 1}}
    raised = {"status": "CRASH", "kind": "RuntimeError", "problem": {"seed": 1}}
    given = {"findings": [hang, both, raised]}
    assert list(forceful_calls(given)) == [hang, both]
    found = as_evidence(given)
    assert not list(forceful_calls(found))
    assert found["findings"][0]["message"] == "did not end"
    assert found["findings"][2] == raised


def forceful_calls(data: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401  JSON
    """Yield the results with a problem that hangs, or crashes where no code chose to raise."""
    for each in data.values() if isinstance(data, dict) else data:
        if isinstance(each, (dict, list)):
            yield from forceful_calls(each)
    if isinstance(data, dict) and data.get("problem"):
        sides = (data, data.get("baseline"), data.get("candidate"))
        kinds = [each.get("kind", "") for each in sides if isinstance(each, dict)]
        if any(map(is_forceful, kinds)):
            yield data
