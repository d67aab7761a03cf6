"""What fails of two kernels that share a name becomes known by the name that they declare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.ledger.editing import failures_in
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.reference import MergeProblem


def test_what_two_kernels_of_one_name_do_wrong_is_known_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_merge: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.py").write_text(wrong_merge)
    check = ["check", "a.py:merge", "b.py:merge", "--profile", "quick", "--law", "parity"]
    check += ["--json", "r.json"]
    assert main(check) == 1
    found = json.loads(Path("r.json").read_text())
    for each in (*found["findings"], *found["implementations"]):
        assert each["declared_name"] == "mine"
    assert {each["implementation"] for each in found["findings"]} == {
        "mine (a.py:merge)",
        "mine (b.py:merge)",
    }
    learn = ["expectations", "update", "r.json", "--ledger", "known.toml", "--reason", "Empty."]
    assert main(learn) == 0
    assert {each.implementation for each in load_ledger("known.toml").entries} == {"mine"}
    assert main([*check, "--expectations", "known.toml"]) == 0
    assert {each["status"] for each in json.loads(Path("r.json").read_text())["findings"]} == {
        "KNOWN"
    }


@pytest.mark.parametrize("field", [{}, {"declared_name": "mine"}])
def test_a_failure_has_the_declared_name_and_the_version_of_its_provider(
    field: dict[str, str],
) -> None:
    shown = {"name": "mine (b:mine)", "reference": "b:mine", "provider": "pack", **field}
    finding = {
        "implementation": "mine (b:mine)", "law": "parity", "status": "FAIL", "kind": "nan",
        "problem": MergeProblem().to_json(), **field,
    }  # fmt: skip
    (failure,) = failures_in(
        {
            "schema": "kernelproof/report/1",
            "target": {"device": "cpu"},
            "findings": [finding],
            "implementations": [{**shown, "provider_version": "2.0"}],
        }
    )
    assert failure.implementation == "mine"
    assert failure.versions == {"pack": "==2.0"}
