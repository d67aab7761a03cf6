"""A side of a comparison that is another interpreter, with packages of its own."""

from __future__ import annotations

import json
import os
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.bump.behaviour.asking import Bench, Side
from kernelproof.ci.bump.behaviour.preparing import survey_both
from kernelproof.ci.bump.sides import releases
from kernelproof.ci.bump.sides.plan import BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.search.ending import Ending
from kernelproof.properties.space.profiles import PROFILES

OURS = "import sys\n__version__, BROKEN = {version!r}, {broken}\n"
# Its packages are made for its interpreter: no other may import them.
THEIRS = OURS + "assert 'engine' in sys.prefix, sys.prefix\n"
SUBJECT = """
import torch
import flashinfer
from kernelproof.impl import implementation


@implementation("merge_state", name="subject")
def merge(inputs):
    lse = torch.logsumexp(inputs.lses.double(), dim=0)
    empty = lse.isneginf() & (not flashinfer.BROKEN)
    weights = torch.exp(inputs.lses.double() - torch.where(empty, 0.0, lse)).unsqueeze(-1)
    out = (weights * inputs.outs.double()).sum(dim=0)
    return out.to(inputs.out_dtype), lse.float()
"""


def install(folder: Path, version: str, init: str) -> None:
    """Put a made-up release into a folder."""
    (folder / "flashinfer").mkdir(parents=True)
    (folder / "flashinfer" / "__init__.py").write_text(init)
    metadata = folder / f"flashinfer_python-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: flashinfer-python\nVersion: {version}\n")


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a release, an interpreter without anything, and what both run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject.py").write_text(SUBJECT)
    install(tmp_path / "old", "9.9.1", OURS.format(version="9.9.1", broken=False))
    venv.create(tmp_path / "engine", symlinks=True)
    return tmp_path


def with_torch(engine: Path, init: str = "") -> None:
    """Return an interpreter with the packages of this one and a release of its own before them."""
    packages = site_packages(engine)
    (packages / "base.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    install(packages, "9.9.2", init or THEIRS.format(version="9.9.2", broken=True))


def gate(*more: str) -> tuple[int, dict[str, Any]]:
    code = main(
        ["gate", "--baseline", "old", "--candidate", "engine/bin/python", "--sm", "cpu",
         "--profile", "quick", "--law", "parity", "--implementation", "subject.py:merge",
         "--jobs", "1", "--json", "report.json", *more]
    )  # fmt: skip
    report: dict[str, Any] = json.loads(Path("report.json").read_text())
    return code, report


def test_a_release_and_an_interpreter_are_compared(here: Path) -> None:
    with_torch(here / "engine")
    code, report = gate("--part", "surface", "--part", "declarations", "--part", "behaviour")
    assert report["failures"] == []
    assert (code, report["verdict"]) == (1, "do not bump")
    sides = {side: report[side] for side in ("baseline", "candidate")}
    assert {side: each["own_environment"] for side, each in sides.items()} == {
        "baseline": False,
        "candidate": True,
    }
    assert [each["flashinfer"] for each in sides.values()] == ["9.9.1", "9.9.2"]
    assert sides["candidate"]["torch"] == torch.__version__
    (failure,) = [each for each in report["findings"] if each["change"] == "new-failure"]
    assert failure["baseline"]["status"] == "PASS"
    assert failure["candidate"]["kind"] == "nan"
    command = failure["replay"]["candidate"]
    assert command.endswith(" --release engine/bin/python")
    assert main(command.split()[1:]) == 1


def test_an_interpreter_whose_release_does_not_import_is_a_finding(here: Path) -> None:
    with_torch(here / "engine", "raise ImportError('libcudart.so.13: cannot open')\n")
    code, report = gate()
    assert (code, report["verdict"]) == (1, "do not bump")
    (broken,) = report["findings"]
    assert broken["change"] == "release-broken"
    assert "ImportError: libcudart.so.13: cannot open" in broken["message"]
    assert report["baseline"]["flashinfer"] == "9.9.1"


def test_an_interpreter_whose_release_hangs_is_a_finding(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.ci.bump.behaviour.steps.DECLARATION_SECONDS", 1.0)
    with_torch(here / "engine", "import time\ntime.sleep(600)\n")
    code, report = gate("--part", "surface")
    assert (code, report["verdict"]) == (1, "do not bump")
    (broken,) = [each for each in report["findings"] if each["change"] == "release-broken"]
    assert "engine/bin/python: flashinfer did not answer within 1 s" in broken["message"]


def test_an_interpreter_without_torch_is_told_in_the_report(here: Path) -> None:
    install(site_packages(here / "engine"), "9.9.2", OURS.format(version="9.9.2", broken=True))
    code, report = gate("--part", "surface", "--part", "behaviour")
    assert code == report["exit_code"] == 3
    assert report["verdict"] == "undecided"
    assert report["failures"] == ["--candidate: engine/bin/python: has no torch"]
    assert report["baseline"]["flashinfer"] == "9.9.1"
    skipped = {each["what"]: each["why"] for each in report["machines"][0]["not_tested"]}
    assert skipped["behaviour"] == "engine/bin/python does not import or could not be had"
    assert report["not_tested"] == []  # the chip is here: what was not tried is told of the machine


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            "raise SystemExit('not today')",
            "is no Python interpreter that runs (SystemExit: not today)",
        ),
        ("import os; os.abort()", "is no Python interpreter that runs (SIGABRT)"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("import os; os._exit(0)", "is no Python interpreter that runs (it gives no answer)"),
        ("", "has no torch"),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, start: str, said: str
) -> None:
    if "sleep" in start:
        monkeypatch.setattr(releases, "ASK_SECONDS", 1.0)
    (site_packages(here / "engine") / "sitecustomize.py").write_text(start)
    with pytest.raises(releases.InterpreterError) as caught:
        releases.find_release("engine/bin/python")
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("engine/bin/python: ")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("python3").write_text("no program")  # there is one of this name on PATH
    with pytest.raises(releases.InterpreterError) as caught:
        releases.find_release("python3")
    said = "python3: is no Python interpreter that runs (Permission denied)"
    assert caught.value.message == said


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    missing = f"{os.sep}no{os.sep}bin{os.sep}python"
    with pytest.raises(UsageRefusedError) as caught:
        releases.find_release(missing)
    assert caught.value.message == f"{missing}: there is no such wheel, folder or interpreter"
    assert caught.value.exit_code == 2


def test_importing_that_does_not_end_is_told_in_one_sentence(tmp_path: Path) -> None:
    class Stuck(Side):
        def __init__(self) -> None:
            pass

        def run(self, payload: Mapping[str, Any], *_: object) -> Outcome:
            if payload["task"] == "describe":
                return Outcome("error", kind="overrun", stage="load", limit=60.0)
            return Outcome("done", {})

        def remember(self, _: object, answer: Callable[[], Any]) -> Any:  # noqa: ANN401
            return answer()

    plan = BumpPlan((), "cpu", PROFILES["quick"], 0, Ledger(()), tmp_path, tmp_path)
    bench = Bench(plan, dict.fromkeys(SIDES, Stuck()), Journal(None), Ending())
    found = survey_both("mine", "m:f", bench)
    why = "cannot be imported: importing it took longer than 60 s"
    assert found.errors == dict.fromkeys(SIDES, why)
    assert found.unimported == {*SIDES}
