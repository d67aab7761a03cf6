"""Findings of several machines are one, and nothing that one of them said is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.bump.report.contents import assemble, with_actions
from kernelproof.ci.bump.report.merging import MergeError, merge
from kernelproof.ci.bump.surface.uses import Source
from kernelproof.ci.bump.verdicts.findings import Chip, Finding, finding
from kernelproof.ci.bump.verdicts.policy import DEFAULT, Accepted, Policy
from kernelproof.ci.bump.verdicts.verdict import RAN, decide
from kernelproof.ci.releases.packages import FLASHINFER_PACKAGE, PACKAGES, Package

SIDE = {
    "given": "9.9.1",
    "own_environment": False,
    **dict.fromkeys(("flashinfer", "torch", "triton", "cuda")),
}


def failure(chip: Chip, tokens: int, message: str = "it is NaN") -> Finding:
    return finding(
        "new-failure",
        "flashinfer-decode",
        f"flashinfer-decode: wrong: {message}",
        detail="fail-nan",
        chips=(chip,),
        rule="do not run it",
        baseline={"status": "PASS"},
        candidate={"status": "FAIL", "kind": "nan", "message": message},
        problem={"id": f"p{tokens}", "told": f"{tokens} tokens"},
        replay={"candidate": f"kernelproof replay {tokens}.json"},
    )


def lost(chip: Chip) -> Finding:
    return finding(
        "declared-lost",
        "runner Bf16",
        f"runner Bf16 no longer declares SM{chip}",
        chips=(chip,),
        rule=f"do not use runner Bf16 on SM{chip}",
    )


def write(
    path: Path,
    chip: Chip,
    *findings: Finding,
    policy: Policy = DEFAULT,
    package: Package = FLASHINFER_PACKAGE,
) -> Path:
    """Write the report of one machine."""
    found = with_actions(findings, policy)
    verdict = decide(found, {chip: RAN}, policy, baseline="9.9.1")
    side: dict[str, Any] = {**SIDE, "artifacts": {}, "not_imported": {}}
    report = assemble(
        verdict,
        found,
        policy,
        sides={"baseline": side, "candidate": side},
        features=None,
        machines=[],
        not_tested=[],
        failures=[],
        command="",
        package=package,
    )
    path.write_text(json.dumps(report))
    return path


def verdicts(report: dict[str, Any]) -> dict[Chip, str]:
    return {each["chip"]: each["verdict"] for each in report["chips"]}


def test_what_the_second_machine_found_is_told(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "90.json", 90, failure(90, 1)),
        write(tmp_path / "100.json", 100, failure(100, 2, "off by 3")),
    ]
    (found,) = merge(paths, None, "")["findings"]
    assert found["chips"] == (90, 100)
    assert found["message"] == (
        "flashinfer-decode: wrong: it is NaN (on SM100: flashinfer-decode: wrong: off by 3)"
    )
    assert found["problem"]["id"] == "p1"
    assert found["candidate"]["on SM100"] == "FAIL nan off by 3 of 2 tokens"
    assert found["baseline"] == {"status": "PASS", "on SM100": "PASS"}
    assert found["replay"] == {
        "candidate": "kernelproof replay 1.json",
        "candidate on SM100": "kernelproof replay 2.json",
    }


def test_what_both_say_is_told_once(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{chip}.json", chip, failure(chip, 1)) for chip in (90, 100)]
    (found,) = merge(paths, None, "")["findings"]
    assert (found["message"], len(found["replay"])) == ("flashinfer-decode: wrong: it is NaN", 1)
    assert found["rule"] == "do not run it"


def test_rules_of_both_machines_are_conditions(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{chip}.json", chip, lost(chip)) for chip in (90, 100)]
    (condition,) = merge(paths, None, "")["conditions"]
    assert condition["rule"] == "do not use runner Bf16 on SM90; do not use runner Bf16 on SM100"


@pytest.mark.parametrize("change", ["new-failure", "declared-lost"])
def test_what_is_accepted_on_one_chip_stays_accepted_there(tmp_path: Path, change: str) -> None:
    accepted = Accepted(f"*/{change}/*", "looked at", (90,))
    policy = Policy(accepted=(accepted,))
    make = lost if change == "declared-lost" else lambda chip: failure(chip, 1)
    paths = [write(tmp_path / f"{c}.json", c, make(c), policy=policy) for c in (90, 100)]
    alone = [verdicts(json.loads(path.read_text())) for path in paths]
    merged = merge(paths, None, "")
    assert verdicts(merged) == {**alone[0], **alone[1]}
    assert verdicts(merged)[90] == "bump"
    assert verdicts(merged)[100] != "bump"
    assert merged["policy"]["unused"] == []


def test_reports_of_two_packages_do_not_go_together(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{chip}.json", chip, failure(chip, 1), package=PACKAGES["triton"])
        for chip in (90, 100)
    ]
    merged = merge(paths, None, "")
    assert (merged["package"], len(merged["chips"])) == ("triton", 2)
    (tmp_path / "engine.py").write_text("")
    engine = Source.read(tmp_path)
    with pytest.raises(MergeError, match="--uses does not apply to triton"):
        merge(paths, None, "", [engine])
    other = write(tmp_path / "other.json", 100, failure(100, 1))
    with pytest.raises(
        MergeError, match=r"other\.json: it compares flashinfer-python, but .* triton"
    ):
        merge([*paths, other], None, "")
