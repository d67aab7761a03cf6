"""Runs that are added to what is kept: bugs, cells and caught entries, without the others."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.evidence import RunError, add
from kernelproof.ci.evidence import main as keep
from kernelproof.fixtures import CAUGHT, EVIDENCE
from kernelproof.impl.gating.knowledge import read_trials

if TYPE_CHECKING:
    from pathlib import Path


def read(path: Path) -> Any:  # noqa: ANN401  JSON
    return json.loads(path.read_text(encoding="utf-8"))


def written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_bug_is_added_to_a_score_and_the_others_stay(tmp_path: Path) -> None:
    kept = tmp_path / "score-merge_state.json"
    shutil.copy(EVIDENCE / kept.name, kept)
    before = {each["name"]: each for each in read(kept)["bugs"]}
    name = "empty-states-nan"
    data = read(kept) | {"profile": "quick"}
    data["bugs"] = [each for each in data["bugs"] if each["name"] != name]
    written(kept, data)
    run = tmp_path / "run.json"
    assert main(["score", "--profile", "quick", "--bug", name, "--json", str(run)]) in (0, 1)
    assert add(run, tmp_path) == [kept.name]
    after = {each["name"]: each for each in read(kept)["bugs"]}
    new = after.pop(name)
    assert {**after, name: before[name]} == before
    assert new.keys() == before[name].keys()
    assert new["killed"]
    assert "parity" in new["laws"]
    names = read(kept)["comparisons"]
    assert "error bound (parity alone)" in {names[number] for number in new["rejected_by"]}
    assert kept.read_text().count("\n") == len(before) + 7, "a line a bug"


def test_a_score_that_looked_less_is_not_kept(tmp_path: Path) -> None:
    bug = {"name": "a", "operation": "route", "control": "bug", "killed": True, "judged": 1,
           "seconds": 0.26, "laws": ["routing_parity"]}  # fmt: skip
    run = {"profile": "gate", "shortfalls": [], "comparison": None, "bugs": [bug]}
    (name,) = add(written(tmp_path / "run.json", run), tmp_path)
    (row,) = read(tmp_path / name)["bugs"]
    assert row == {key: bug[key] for key in row} | {"seconds": 0.3}
    for more, told in (
        ({"profile": "quick"}, "score-route.json is of profile gate, and the run is of quick"),
        ({"shortfalls": ["interrupted"]}, "a score that was interrupted cannot be kept"),
    ):
        with pytest.raises(RunError, match=told):
            add(written(tmp_path / "run.json", run | more), tmp_path)


def trial(cell: str, outcome: str, **fields: object) -> dict[str, object]:
    return {
        "implementation": "some", "cell": cell, "side": "supported", "rules": ["fa2-16bit"],
        "outcome": outcome, "entry": None, "feature": {"backend": "fa2", **fields},
        "problem": {"seed": 1}, "seconds": 1.0,
    }  # fmt: skip


def test_the_cells_of_a_later_run_replace_the_same_ones(tmp_path: Path) -> None:
    target = {"sm": 90, "flashinfer": "0.6.13", "cuda": "13.0", "triton": None, "torch": "2.11.0"}
    run = {"schema": "kernelproof/gating/1", "target": target}
    first = [trial("a", "wrong"), trial("b", "right", page_size=32), trial("c", "not run")]
    second = [trial("a", "right"), trial("d", "raises", page_size=64)]
    (name,) = add(written(tmp_path / "1", {**run, "date": "2026-01-01", "trials": first}), tmp_path)
    whole = {"schema": "kernelproof/report/1", "target": target, "findings": [],
             "gating": {**run, "date": "2026-01-02", "trials": second}}  # fmt: skip
    assert name in add(written(tmp_path / "2", whole), tmp_path)
    for dates in (("2026-01-01", first), ("2026-01-02", second)):
        records = read_trials(tmp_path / name)
        found = {record.cell: (record.outcome, record.date) for record in records}
        assert found == {
            "a": ("right", "2026-01-02"),
            "b": ("right", "2026-01-02"),
            "d": ("raises", "2026-01-02"),
        }
        again = {**run, "date": dates[0], "trials": dates[1]}
        add(written(tmp_path / "again", again), tmp_path)  # an older run changes nothing
    assert "problem" not in (tmp_path / name).read_text()


def test_what_was_compiled_is_kept_a_line_a_unit(tmp_path: Path) -> None:
    (path,) = EVIDENCE.glob("compile-*.json")
    assert add(path, tmp_path) == [path.name]
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_laws_that_found_an_entry_are_added_to_it(tmp_path: Path) -> None:
    known, entry = read(CAUGHT), "flashinfer-triton-merge-state-empty"
    (tmp_path / CAUGHT.name).write_text(json.dumps({entry: ["soak"], "another": ["parity"]}))
    target = {"device": "cpu", "sm": None, "flashinfer": "0.7.2.post1", "triton": "3.9.0"}
    case = read(CAUGHT.parents[1] / "corpus" / f"{entry}.json")
    finding = {"implementation": "flashinfer-triton-merge-state", "law": "merge_identity",
               "status": "KNOWN", "kind": "nan", "problem": case["problem"]}  # fmt: skip
    run = {"schema": "kernelproof/report/1", "target": target, "findings": [finding]}
    assert add(written(tmp_path / "run.json", run), tmp_path) == [CAUGHT.name]
    found = read(tmp_path / CAUGHT.name)
    assert found == {entry: ["merge_identity", "soak"], "another": ["parity"]}
    assert set(found[entry]) <= set(known[entry])
    compared = {"schema": "kernelproof/bump/1", "findings": [
        {"entry": entry, "laws": ["parity"]}, {"entry": "", "laws": ["soak"]}]}  # fmt: skip
    add(written(tmp_path / "bump.json", compared), tmp_path)
    assert read(tmp_path / CAUGHT.name)[entry] == ["merge_identity", "parity", "soak"]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused: tuple[object, ...] = ({}, [], {"schema": "another"})
    for data in refused:
        with pytest.raises(RunError, match=r"run\.json: no run of score, check, gate"):
            add(written(tmp_path / "run.json", data), tmp_path)
    assert keep([str(tmp_path / "absent.json")]) == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err
