"""Files that commands write: none replaces another, and a long run is not lost for one of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.bump.command import tell
from kernelproof.ci.bump.report.shape import read_report
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import MachineError, UsageRefusedError
from kernelproof.ci.console.outputs import Outputs
from kernelproof.fixtures import CORPUS

COMPARED = ["gate", "--baseline", "old", "--candidate", "new", "--part", "surface", "--sm", "cpu"]
CASE = str(next(CORPUS.glob("flashinfer-*.json")))
CHECKED = ["check", "torch-sdpa-paged", "--profile", "quick"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with two releases that are alike."""
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        (tmp_path / name / "flashinfer").mkdir(parents=True)
        (tmp_path / name / "flashinfer" / "__init__.py").write_text("__version__ = '9.9.1'\n")
    return tmp_path


@pytest.mark.parametrize(("words", "told"), [
    ([*CHECKED, "--json", "same", "--html", "same"], "--html same: is the file of --json too"),
    ([*CHECKED, "--json", "./same", "--junit", "same"], "--junit same: is the file of --json too"),
    (["check", "--gating", "--json", "same", "--evidence", "same"], "--evidence same: is the"),
    ([*CHECKED, "--json", "same", "--expectations", "same"], "same: is the file of --"),
    (["gate", "--json", "same", "--html", "same"], "--html same: is the file of --json too"),
    ([*COMPARED, "--json", "same", "--markdown", "same"], "same: is the file of --"),
    ([*COMPARED, "--json", "same", "--policy", "same"], "same: is the file of --"),
    ([*COMPARED, "--json", "same", "--journal", "same"], "same: is the file of --"),
    (["merge", "other", "same", "--json", "same"], "--json same: is the file of REPORTS too"),
])  # fmt: skip
def test_a_file_of_two_options_is_refused_and_stays(
    words: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "same").write_text("mine")
    assert main(words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert (here / "same").read_text() == "mine"


@pytest.mark.usefixtures("here")
def test_each_file_that_was_written_has_a_line_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--json", "o/r.json", "--junit", "/dev/null", "--markdown", "r.md"]
    assert main([*COMPARED, *words]) == 0
    assert capsys.readouterr().err.endswith("\nwrote o/r.json\nwrote r.md\n")


@pytest.mark.usefixtures("here")
def test_what_is_no_file_may_be_named_twice() -> None:
    assert main([*COMPARED, "--json", "/dev/null", "--junit", "/dev/null"]) == 0


@pytest.mark.parametrize(("words", "told"), [
    ([*CHECKED, "--json", "/proc/none.json"], "--json /proc/none.json: cannot be written ("),
    (["check", "--gating", "--json", "/proc/none.json"], "--json /proc/none.json: cannot be wr"),
    ([*COMPARED, "--html", "/proc/none.html"], "--html /proc/none.html: cannot be written ("),
    ([*COMPARED, "--html", "old/flashinfer/__init__.py/a"], "/__init__.py/a: cannot be written ("),
    ([*COMPARED, "--part", "behaviour", "--cases", "/proc/none"], "none/case.json: cannot be w"),
    (["score", "--json", "/proc/none.json"], "--json /proc/none.json: cannot be written ("),
    (["bench", "kernels", "--json", "/proc/none.json"], "--json /proc/none.json: cannot be wr"),
    (["support", "--declared", "0.0", "--json", "/proc/none.json"], "json: cannot be written ("),
    (["list", "--markdown", "/proc/law-book.md"], "--markdown /proc/law-book.md: cannot be w"),
    (["corpus", "add", CASE, "--folder", "/proc/none"], "/proc/none/flashinfer-"),
    ([*CHECKED, "--json", "j" * 300], "cannot be written (File name too long)"),
    ([*COMPARED, "--json", "j" * 300], "cannot be written (File name too long)"),
])  # fmt: skip
def test_what_cannot_be_written_is_told_before_the_run(
    words: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert told in " ".join(said.err.split())
    assert not said.out
    assert not (here / ".kernelproof" / "gate").exists()


@pytest.mark.parametrize(("words", "told"), [
    (["--policy", "p.toml"], "--policy p.toml: Invalid value 'nope' - at `key` in `$.actions`; "),
    (["--policy", "none.toml"], "--policy none.toml: "),
    (["--sm", "h2000"], "--sm"),
    (["--part", "behaviour", "--law", "nope"], "--law"),
    (["--part", "behaviour", "--expectations", "none.toml"], "none.toml"),
])  # fmt: skip
def test_a_comparison_that_is_refused_has_a_report_that_says_why(
    words: list[str], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.toml").write_text('[actions]\nnope = "block"\n')
    outputs = {"--json": "r.json", "--html": "r.html", "--markdown": "r.md", "--junit": "r.xml"}
    named = [each for pair in outputs.items() for each in pair]
    assert main([*COMPARED, *words, *named, "--evidence", "e.json"]) == 2
    said = capsys.readouterr()
    assert told in " ".join(said.err.split())
    assert not said.out
    report = read_report(here / "r.json")
    assert (report["verdict"], report["exit_code"], report["machines"]) == ("undecided", 2, [])
    (failure,) = report["failures"]
    assert told in failure
    assert read_report(here / "e.json")["failures"] == [failure]
    assert all((here / name).stat().st_size for name in outputs.values())


def test_a_journal_of_another_comparison_costs_no_report(here: Path) -> None:
    words = [*COMPARED, "--json", "r.json"]
    assert main(words) == 0
    before = (here / "r.json").read_bytes()
    assert main([*words, "--resume", "--seed", "7"]) == 2
    assert (here / "r.json").read_bytes() == before


def test_a_refused_comparison_is_judged_by_its_policy_and_goes_with_others(here: Path) -> None:
    (here / "p.toml").write_text('[actions]\n"name-removed" = "block"\n')
    words = [*COMPARED, "--policy", "p.toml"]
    assert main([*words, "--json", "good.json"]) == 0
    assert main([*words, "--sm", "h2000", "--json", "bad.json"]) == 2
    assert read_report(here / "bad.json")["policy"]["source"] == "p.toml"
    assert main(["merge", "bad.json", "good.json", "--json", "both.json"]) == 3
    both = read_report(here / "both.json")
    assert (both["verdict"], both["baseline"]["flashinfer"]) == ("undecided", "9.9.1")
    assert "--sm" in both["message"]


@pytest.mark.parametrize(("error", "code", "told"), [
    (RuntimeError("boom"), 3, "the suite failed: RuntimeError: boom"),
    (MachineError("--journal j: cannot be written (No space left on device)"), 3, "No space left"),
])  # fmt: skip
def test_a_comparison_that_fails_tells_what_it_knows(
    error: Exception, code: int, told: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("kernelproof.ci.bump.command.compare_declarations", fails)
    assert main([*COMPARED, "--json", "r.json"]) == code
    report = json.loads((here / "r.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("undecided", code)
    assert told in report["failures"][0]
    assert report["baseline"]["flashinfer"] == "9.9.1"


@pytest.mark.parametrize("given", ["", " "])
def test_a_side_that_is_empty_is_not_the_current_folder(
    given: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMPARED, "--candidate", given, "--json", "r.json"]) == 2
    (failure,) = json.loads((here / "r.json").read_text())["failures"]
    assert main(["bump", "old", given, "--json", "b.json"]) == 2
    (told,) = json.loads((here / "b.json").read_text())["failures"]
    assert told.startswith("CANDIDATE is empty: give a version")
    assert failure.startswith("--candidate is empty: give a version")
    said = capsys.readouterr()
    assert failure in " ".join((said.out + said.err).split())


def test_a_case_that_is_not_written_costs_no_report(
    report: Callable[..., dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(UsageRefusedError, match=r"c\.json cannot be written"):
        tell(report(), Outputs({"--json": path}), ["--cases: c.json cannot be written (disk full)"])
    with pytest.raises(UsageRefusedError, match=r"c\.json cannot .* \(and 1 more\)"):
        tell(
            report(), Outputs(), ["--cases: c.json cannot be written", "--cases: d.json cannot be"]
        )
    assert "DO NOT BUMP" in capsys.readouterr().out
    assert json.loads(path.read_text())["verdict"] == "do not bump"
