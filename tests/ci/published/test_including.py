"""Published calls as a part of a gate: verdict, exit code, JSON, page, JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.check import checking
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import CONFORMING, INCOMPLETE, MACHINE, NONCONFORMING
from kernelproof.ci.published import asking
from kernelproof.ci.published.including import (
    LEFT_OUT,
    ON_A_CPU,
    UNSUPPORTED,
    failed,
    judge_installed,
    without,
)
from kernelproof.ci.published.summary import brief
from kernelproof.ci.reports.published_calls import (
    broken_laws,
    exit_code,
    left_out_lines,
    nothing_judged,
    sentence,
    weak_lines,
)
from kernelproof.properties.findings.report import FOUND
from kernelproof.properties.search.ending import Ending
from kernelproof.tests.ci.published.stand_in import FEW, stand_in

GATE = ["gate", "--profile", "quick", "--jobs", "1", "--law", "slots_parity"]


def gate(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Run a gate, and return its exit code and its report."""
    report = folder / "gate.json"
    outputs = ("--json", str(report), "--html", str(folder / "gate.html"))
    junit = ("--junit", str(folder / "gate.xml"), "--cases", str(folder / "cases"))
    code = main([*GATE, *outputs, *junit, *more])
    found: dict[str, Any] = json.loads(report.read_text())
    return code, found


@pytest.fixture(autouse=True)
def one_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kernelproof.ci.check.listing.usable_here", lambda _: (["torch-map-slots"], [])
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: published calls are asked."""
    monkeypatch.setattr(checking, "without", lambda *_: {})


@pytest.mark.usefixtures("asked")
def test_a_gate_judges_published_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path, FEW))
    code, report = gate(tmp_path, "--sarif", str(tmp_path / "gate.sarif"), "--annotations")
    assert code == report["exit_code"] == 1
    published = report["published"]
    states = {each["name"]: each["state"] for each in published["calls"]}
    assert set(states.values()) == {"judged"}
    assert published["summary"]["findings"] == ["norm_code_off", "norm_offset"]
    assert "5 judged by FlashInfer's own function; 2 new findings, 0 known" in report["message"]
    replay = "kernelproof published installed norm_offset --device cpu --seed 0"
    out = capfd.readouterr().out
    for text in (out, *((tmp_path / f"gate.{each}").read_text() for each in ("html", "sarif"))):
        assert replay in text
    notes = [line for line in out.splitlines() if line.startswith("::error title=kernelproof::")]
    assert [each.split("%0A")[0].split("published calls: ")[1].split()[0] for each in notes] == [
        *("norm_code_off", "norm_offset"),
    ]
    assert (tmp_path / "gate.xml").read_text().count("<failure") == len(("code_off", "offset"))


@pytest.mark.usefixtures("asked")
def test_a_known_finding_fails_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "known_text", lambda *_: "settled elsewhere")
    monkeypatch.syspath_prepend(stand_in(tmp_path, FEW))
    code, report = gate(tmp_path)
    assert code == 0
    assert "0 new findings, 2 known" in report["message"]
    assert "settled elsewhere" in (tmp_path / "gate.html").read_text()
    assert gate(tmp_path, "--expectations", "none")[0] == 1


@pytest.mark.usefixtures("asked")
def test_a_release_without_templates_is_unsupported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = stand_in(tmp_path, "")
    monkeypatch.syspath_prepend(folder)
    code, report = gate(tmp_path)
    why = "flashinfer 9.9 publishes no templates"
    assert (code, report["published"]) == (0, {"state": UNSUPPORTED, "why": why})
    assert f"UNSUPPORTED: published calls: {why}" in " ".join(capfd.readouterr().out.split())


@pytest.mark.usefixtures("asked")
def test_a_release_that_cannot_be_read_lets_no_gate_conform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = stand_in(tmp_path, "")
    (tmp_path / "flashinfer" / "__init__.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(folder)
    code, report = gate(tmp_path)
    why = "published calls: flashinfer cannot be read: exit 3"
    assert (code, report["verdict"]) == (MACHINE, "error")
    assert why in report["message"]
    assert f"FAILED: {why}" in " ".join(capfd.readouterr().out.split())
    assert (tmp_path / "gate.xml").read_text().count("<error") == 1


@pytest.mark.usefixtures("asked")
def test_an_error_of_their_part_leaves_the_laws_their_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        message = "no space left on device"
        raise OSError(message)

    monkeypatch.setattr(checking, "judge_installed", full)
    code, report = gate(tmp_path)
    why = "OSError: no space left on device"
    assert (code, report["published"]) == (MACHINE, failed(why, MACHINE))
    assert report["judged"] > 0
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("asked")
def test_a_gate_that_ends_at_its_first_finding_judges_no_further_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path, FEW))
    code, report = gate(tmp_path, "-x")
    assert (code, report["ended"]) == (1, FOUND)
    assert report["published"]["summary"]["findings"] == ["norm_code_off"]
    assert "norm_offset" in report["published"]["not begun"]


def test_calls_for_which_no_time_is_left_are_incomplete() -> None:
    found = judge_installed("cpu", 0, 1, Ending(-5), lambda _: None)
    assert found == failed("no time was left for them", INCOMPLETE)
    for code, worse in ((CONFORMING, INCOMPLETE), (NONCONFORMING, NONCONFORMING)):
        assert exit_code(found, code) == worse
    assert exit_code(failed("no", MACHINE), NONCONFORMING) == NONCONFORMING


def test_a_gate_on_a_cpu_leaves_them_to_the_command(tmp_path: Path) -> None:
    code, report = gate(tmp_path)
    assert (code, report["published"]) == (0, {"state": LEFT_OUT, "why": ON_A_CPU})


def test_a_part_of_a_gate_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without("cuda", "--law")["state"] == LEFT_OUT
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert without("cuda", "")["state"] == UNSUPPORTED
    (line,) = left_out_lines(without("cuda", ""))
    assert line.text == "published calls: flashinfer is not installed"


def published(**changes: object) -> dict[str, Any]:
    """Return what a report has of them where nothing answered."""
    summary = {"judged": 0, "reference only": 1, "not compiled": 1, "accepted": []}
    return {
        "summary": summary,
        "calls": [],
        "not compiled": {"norm_module": ["norm"]},
        "not begun": ["rope"],
        **changes,
    }


def test_what_was_not_compiled_is_named_and_nothing_judged_is_incomplete() -> None:
    found = published()
    assert nothing_judged(found)
    told = [f"{each.label}: {each.text}" for each in weak_lines(found)]
    assert "not compiled: published calls: module norm_module: norm" in told
    assert "not begun: published calls: rope" in told
    assert "1 by their reference only, 1 not compiled, 1 not begun" in sentence(found)


def test_what_a_call_was_not_judged_by_is_noted() -> None:
    said = {"name": "norm", "api": "norms.norm", "state": "judged", "problems": []}
    call = brief({**said, "parts": {"graph": "SIGKILL in stage judge"}})
    told = [each.text for each in weak_lines(published(calls=[call]))]
    assert "published calls: norm: graph not judged: SIGKILL in stage judge" in told


def test_an_accused_reference_is_a_finding() -> None:
    call = {"name": "norm", "state": "judged", "findings": [], "accused": ["5 elements"]}
    ((each, name),) = broken_laws(published(calls=[call]), known=False)
    assert (each["why"], name) == ("5 elements", "norm")
