"""Runs that are added to what is kept: bugs, cells and caught entries, without the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.evidence.__main__ import main as keep
from kernelproof.ci.evidence.adding import RunError, add
from kernelproof.fixtures import CAUGHT, EVIDENCE
from kernelproof.impl.gating.knowledge import EvidenceError, read_trials
from kernelproof.impl.gating.selections import read_selections

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
    assert list(add(run, tmp_path)) == [kept.name]
    after = {each["name"]: each for each in read(kept)["bugs"]}
    new = after.pop(name)
    assert {**after, name: before[name]} == before
    assert new.keys() == before[name].keys() | {"date"}
    assert new["killed"]
    assert "parity" in new["laws"]
    names = read(kept)["comparisons"]
    assert "error bound (parity alone)" in {names[number] for number in new["rejected_by"]}
    assert kept.read_text().count("\n") == len(before) + 7, "a line a bug"


def bug(**fields: object) -> dict[str, object]:
    return {"name": "a", "operation": "route", "control": "bug", "killed": True, "judged": 1,
            "seconds": 0.26, "laws": ["routing_parity"], **fields}  # fmt: skip


def score(*bugs: object, **fields: object) -> dict[str, object]:
    return {"profile": "gate", "shortfalls": [], "comparison": None, "bugs": bugs, **fields}


def test_a_score_that_looked_less_is_not_kept(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    (name,) = add(written(run, score(bug())), tmp_path)
    (row,) = read(tmp_path / name)["bugs"]
    assert row == {key: bug()[key] for key in row} | {"seconds": 0.3}
    for less, told in (
        (score(bug(), profile="quick"), "is of profile gate, and the run is of quick"),
        (score(bug(), shortfalls=["interrupted"]), "a score that was interrupted cannot be kept"),
        (score(bug(), bug(name="b", judged=0)), r"run\.json: no problem was judged of b"),
        (score(bug(control="tile")), "no bug that is kept; faults in Triton kernels are not"),
        (score(), "no bug that is kept"),
    ):
        with pytest.raises(RunError, match=told):
            add(written(run, less), tmp_path)
    assert read(tmp_path / name)["bugs"] == [row]


def test_the_newest_measurement_of_a_bug_is_kept_whatever_it_says(tmp_path: Path) -> None:
    def added(date: str, **fields: object) -> tuple[bool, str]:
        run = written(tmp_path / "run.json", score(bug(**fields), date=date))
        ((name, (said,)),) = add(run, tmp_path).items()
        (row,) = read(tmp_path / name)["bugs"]
        return row["killed"], said

    assert added("2026-01-02") == (True, "kept")
    assert added("2026-01-01", killed=False) == (True, "a: older than what is kept")
    assert added("2026-01-03", killed=False) == (False, "kept")
    assert added("2026-01-02") == (False, "a: older than what is kept")
    assert added("2026-01-04") == (True, "kept")


@pytest.mark.parametrize("dates", [("2026-01-02", "2026-01-01"), ("2026-01-02", "")])
@pytest.mark.parametrize("turn", [1, -1])
def test_of_two_rows_of_a_bug_in_a_merged_file_the_newest_is_kept(
    tmp_path: Path, dates: tuple[str, str], turn: int
) -> None:
    row = {key: value for key, value in bug().items() if key != "operation"}
    rows = [row | {"date": dates[0]}, row | {"killed": False, "date": dates[1]}][::turn]
    kept = {"operation": "route", "profile": "gate", "comparisons": [], "bugs": rows}
    written(tmp_path / "score-route.json", kept)
    add(written(tmp_path / "run.json", score(bug(name="b"))), tmp_path)
    found = {each["name"]: each["killed"] for each in read(tmp_path / "score-route.json")["bugs"]}
    assert found == {"a": True, "b": True}


def test_a_score_that_falls_short_is_kept(tmp_path: Path) -> None:
    slow = score(bug(seconds=17.2), shortfalls=["a median of 17.2 s to kill, not 10 s"])
    (name,) = add(written(tmp_path / "run.json", slow), tmp_path)
    assert read(tmp_path / name)["bugs"][0]["seconds"] == 17.2


@pytest.mark.parametrize(
    ("score_code", "reducer_code", "ended", "kept"),
    [(0, 0, 0, True), (1, 0, 0, True), (1, 2, 2, True), (130, 0, 130, False), (2, 0, 2, False)],
)
def test_make_keeps_a_score_that_ended(
    score_code: int, reducer_code: int, ended: int, kept: bool, repository: Path, tmp_path: Path
) -> None:
    for name, text in (
        ("kernelproof", f'echo "$5" >{tmp_path}/named; exit {score_code}'),
        ("python", f'echo "$3" >{tmp_path}/added; exit {reducer_code}'),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    for stamp in (".created", ".installed-gate"):
        (tmp_path / stamp).touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "score-evidence", "BUG=a", f"VENV={tmp_path}"],  # noqa: S607  make is wherever it is installed
        check=False,
        capture_output=True,
        text=True,
        cwd=repository,
        env=environment,
    )
    assert (f"Error {ended}" in done.stderr) == bool(ended)
    run = (tmp_path / "named").read_text().strip()
    assert (tmp_path / "added").exists() == kept
    assert not kept or (tmp_path / "added").read_text().strip() == run
    assert not os.path.lexists(run), "it is removed in any case"


def test_what_a_run_did_not_compare_stays_known(tmp_path: Path) -> None:
    def compared(**yardsticks: list[str]) -> dict[str, object]:
        found = {name: {"caught": bugs, "accused": []} for name, bugs in yardsticks.items()}
        return {"compared": ["a"], "yardsticks": found}

    def rejected(comparison: object) -> set[str]:
        (name,) = add(written(tmp_path / "run", score(bug(), comparison=comparison)), tmp_path)
        kept = read(tmp_path / name)
        return {kept["comparisons"][number] for number in kept["bugs"][0]["rejected_by"]}

    assert rejected(compared(close=["a"], cosine=["a"])) == {"close", "cosine"}
    assert rejected(None) == {"close", "cosine"}
    assert rejected(compared(cosine=[], other=["a"])) == {"close", "other"}


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
            "b": ("right", "2026-01-01"),
            "d": ("raises", "2026-01-02"),
        }
        again = {**run, "date": dates[0], "trials": dates[1]}
        add(written(tmp_path / "again", again), tmp_path)  # an older run changes nothing
    assert "problem" not in (tmp_path / name).read_text()


TARGET = {"sm": 90, "flashinfer": "0.6.13", "cuda": "13.0", "triton": None}


def cells(date: str, *trials: object, **target: object) -> dict[str, object]:
    return {"schema": "kernelproof/gating/1", "target": TARGET | target, "date": date,
            "trials": trials}  # fmt: skip


def test_each_cell_has_its_own_date(tmp_path: Path) -> None:
    run, b = tmp_path / "run.json", trial("b", "right", page_size=32)
    (name,) = add(written(run, cells("2026-01-01", trial("a", "wrong"), b)), tmp_path)
    add(written(run, cells("2026-01-03", trial("a", "right"), cuda="13.2")), tmp_path)
    newer, older = trial("b", "raises", page_size=32), trial("a", "hangs")
    told = add(written(run, cells("2026-01-02", older, newer, newer, cuda="12.9")), tmp_path)
    assert told == {name: ["some, a: older than what is kept", "some, b: kept", "some, b: kept"]}
    kept = read(tmp_path / name)
    assert kept["target"]["cuda"] == "13.2", "that of the last run"
    assert kept["date"] == "2026-01-03"
    own = {each["cell"]: each["date"] for each in kept["trials"] if "date" in each}
    assert own == {"b": "2026-01-02"}, "where it is not that of the file"
    found = [(each.cell, each.outcome, each.date) for each in read_trials(tmp_path / name)]
    assert sorted(found) == [("a", "right", "2026-01-03"), ("b", "raises", "2026-01-02")]


def test_what_is_kept_is_added_without_a_change(tmp_path: Path) -> None:
    for path in EVIDENCE.glob("gating-*.json"):
        for _ in range(2):
            assert list(add(path, tmp_path)) == [path.name]
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_units_that_were_compiled_later_that_day_join_the_others(tmp_path: Path) -> None:
    (path,) = EVIDENCE.glob("compile-*.json")
    shutil.copy(path, tmp_path)
    whole = read(path)
    again = whole["records"][3] | {"status": "failed", "message": "no memory"}
    few = whole | {"interrupted": True, "command": "another", "records": [again]}
    add(written(tmp_path / "run.json", few), tmp_path)
    records = [*whole["records"][:3], again, *whole["records"][4:]]
    assert read(tmp_path / path.name) == whole | {"records": records}
    with pytest.raises(RunError, match=r"is of nvcc 13\.0\.88, and the run is of 12\.9"):
        add(written(tmp_path / "run.json", few | {"nvcc": "12.9"}), tmp_path)


def test_what_was_compiled_is_kept_a_line_a_unit(tmp_path: Path) -> None:
    (path,) = EVIDENCE.glob("compile-*.json")
    assert list(add(path, tmp_path)) == [path.name]
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_sweep_of_a_release_is_kept_a_file_a_chip(tmp_path: Path) -> None:
    name = "selected-sm103-0.6.13.json"
    kept = read_selections(EVIDENCE / name, ValueError)
    found = [
        {"sm": 103, "feature": feature.to_json(), "outcome": outcome}
        for feature, outcome in kept.kinds()
    ]
    run = {"schema": "kernelproof/selected/1", "level": "selected", "flashinfer": "0.6.13",
           "artifact": kept.artifact, "cells": found}  # fmt: skip
    assert list(add(written(tmp_path / "run.json", run), tmp_path)) == [name]
    assert (tmp_path / name).read_bytes() == (EVIDENCE / name).read_bytes()
    with pytest.raises(RunError, match="one kind of call is no sweep"):
        add(written(tmp_path / "run.json", run | {"cells": found[:1]}), tmp_path)
    with pytest.raises(RunError, match="it is listed: only what a release selects is kept"):
        add(written(tmp_path / "run.json", run | {"level": "listed"}), tmp_path)


def test_laws_that_found_an_entry_are_added_to_it(tmp_path: Path) -> None:
    known, entry = read(CAUGHT), "flashinfer-triton-merge-state-empty"
    (tmp_path / CAUGHT.name).write_text(json.dumps({entry: ["soak"], "another": ["parity"]}))
    target = {"device": "cpu", "sm": None, "flashinfer": "0.7.2.post1", "triton": "3.9.0"}
    case = read(CAUGHT.parents[1] / "corpus" / f"{entry}.json")
    finding = {"implementation": "flashinfer-triton-merge-state", "law": "merge_identity",
               "status": "KNOWN", "kind": "nan", "problem": case["problem"]}  # fmt: skip
    run = {"schema": "kernelproof/report/1", "target": target, "findings": [finding]}
    assert list(add(written(tmp_path / "run.json", run), tmp_path)) == [CAUGHT.name]
    found = read(tmp_path / CAUGHT.name)
    assert found == {entry: ["merge_identity", "soak"], "another": ["parity"]}
    assert set(found[entry]) <= set(known[entry])
    compared = {"schema": "kernelproof/bump/1", "findings": [
        {"entry": entry, "laws": ["parity"]}, {"entry": "", "laws": ["soak"]}]}  # fmt: skip
    add(written(tmp_path / "bump.json", compared), tmp_path)
    assert read(tmp_path / CAUGHT.name)[entry] == ["merge_identity", "parity", "soak"]


ODD = {"implementation": "some", "law": "parity", "status": "FAIL", "kind": ""}
REPORT = {"schema": "kernelproof/report/1"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (REPORT, "missing required field `target`"),
        (REPORT | {"target": {}, "findings": [ODD]}, "`problem` - at `$.findings[0]`"),
        ({"schema": "kernelproof/gating/1"}, "missing required field `target`"),
        (cells("2026-01-01", {"implementation": "some", "cell": "a"}),
         "`feature` - at `$.trials[0]`"),
        (cells("2026-01-01", trial("a", "explodes")), "trials[0].outcome"),
        (cells("2026-01-01", trial("a", "right"), sm=None), "on a CPU, or without FlashInfer"),
        (cells("2026-01-01", trial("a", "right"), flashinfer=None), "or without FlashInfer"),
        (cells("2026-01-01", trial("a", "not run")), "none of its cells was run"),
        (cells("", trial("a", "right")), "its cells have no date"),
        (cells("2026-01-01", trial("a", "right"), flashinfer="../1"), "is no name of a file"),
        (REPORT | {"target": {}, "findings": [], "gating": {}}, "missing required field `target`"),
        ({"format": "kernelproof/compile-evidence/1"}, "missing required field `nvcc`"),
        (score({"name": "a"}), "at `$.bugs[0]`"),
        ({"schema": "kernelproof/bump/1"}, "missing required field `findings`"),
    ],
)  # fmt: skip
def test_a_malformed_run_is_refused_in_a_sentence(
    data: object, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path / "run.json", data)
    with pytest.raises((RunError, EvidenceError)):
        add(run, tmp_path)
    assert keep([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: {run}: ")
    assert told in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [run], "nothing is kept, and no draft is left"


def test_a_kept_file_that_is_malformed_is_named(tmp_path: Path) -> None:
    kept = written(tmp_path / "score-route.json", {"profile": "gate"})
    with pytest.raises(RunError, match=r"score-route\.json: .*missing required field `operation`"):
        add(written(tmp_path / "run.json", score(bug())), tmp_path)
    assert read(kept) == {"profile": "gate"}


def test_what_is_kept_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kernelproof.ci.evidence.__main__.add", lambda path: add(path, tmp_path / "kept")
    )
    one = written(tmp_path / "one", score(bug()))
    other = written(tmp_path / "other", cells("2026-01-01", trial("a", "right")))
    assert keep([str(one), str(other)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{one}: score-route.json: kept",
        f"{other}: gating-sm90-0.6.13.json: some, a: kept",
    ]


def test_the_usage_is_told_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert keep([]) == 2
    assert capsys.readouterr().err == "Usage: python -m kernelproof.ci.evidence RUN.json...\n"


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused: tuple[object, ...] = ({}, [], {"schema": "another"})
    for data in refused:
        with pytest.raises(RunError, match=r"run\.json: no run of score, check, gate"):
            add(written(tmp_path / "run.json", data), tmp_path)
    assert keep([str(tmp_path / "absent.json")]) == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err
