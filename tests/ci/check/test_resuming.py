"""A run on one machine that was killed goes on where it stopped, and reports what it would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.identity import journal_path
from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.check.resuming import kept_laws
from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import MachineError
from kernelproof.impl import Target
from kernelproof.impl.targets.unpacked import FROM, _version
from kernelproof.properties.findings.report import ImplementationReport, LawReport, RunReport
from kernelproof.properties.search.candidate import Candidate, Deadly
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.axes import Axes, example
from kernelproof.properties.space.profiles import PROFILES, Cost
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address
from kernelproof.tests.ci.fleet.test_fleet import TINY, results, subject, without_clock

SUBJECT = """
import time
from pathlib import Path
import torch
from kernelproof.impl import implementation
from kernelproof.reference import Arithmetic, oracle

def merge(inputs):
    expected = oracle.bounded_merge(inputs, Arithmetic()).expected
    return expected.out.to(inputs.out_dtype), expected.lse.to(torch.float32)

def wrong(inputs):
    out, lse = merge(inputs)
    return (out + 1 if len(inputs.outs) > 2 else out), lse

def right(inputs):
    if Path("slow").exists():
        time.sleep(0.05)
    return merge(inputs)

right = implementation("merge_state", name="right")(right)
wrong = implementation("merge_state", name="wrong")(wrong)
"""
WORDS = ("check", "subject.py:wrong", "subject.py:right", "--profile", "quick", "--jobs", "1",
         "--law", "parity", "--law", "merge_identity", "--law", "merge_commutativity",
         "--costs", "costs.json", "--json", "out.json")  # fmt: skip
LAWS = ("parity", "merge_identity", "merge_commutativity", "merge_union")
"""Laws of merging, whose failures shrink to their end in a second, whatever the clock says."""


class EndsAfter(Progress):
    """Ends a run after some laws, and remembers which were judged."""

    def __init__(self, laws: int) -> None:
        self._left = laws
        self.run: Run | None = None
        self.begun: list[str] = []

    def law_begun(self, name: str, law: str) -> None:
        self.begun.append(f"{name} {law}")

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        del report, law
        self._left -= 1
        if not self._left:
            assert self.run is not None
            self.run.ending.end("terminated")


def run(folder: Path, plan: Plan, *, laws: int = 0, resume: bool = False) -> tuple[RunReport, Any]:
    """Run a plan that ends after some laws, and return its report and the laws that were begun."""
    progress = EndsAfter(laws)
    with kept_laws(folder, plan, resume=resume) as (here, kept):
        progress.run = Run(here, progress, kept=kept)
        report = progress.run.execute()
        kept.end(report.ended)
    return report, progress.begun


def two_faults() -> Plan:
    costs = {"two-faults-numeric": Cost("fast", 1.0, TINY.max_work)}
    return Plan([subject("two_faults_numeric")], TINY, costs=costs, jobs=1, laws=LAWS)


def test_a_run_that_was_ended_goes_on_and_reports_the_same(tmp_path: Path) -> None:
    plan = two_faults()
    whole, begun = run(tmp_path / "whole", plan)
    assert len(whole.findings) > 1
    assert len(begun) == len(LAWS)
    assert not [*(tmp_path / "whole").glob("journal-*")], "there is nothing to go on with"
    ended, first = run(tmp_path, plan, laws=2)
    assert ended.ended == "terminated"
    resumed, rest = run(tmp_path, plan, resume=True)
    assert results(resumed) == results(whole)
    assert len(rest) == len(LAWS) - 2
    assert set(first[:2]).isdisjoint(rest)


def test_a_run_that_goes_on_ends_at_its_first_finding_too(tmp_path: Path) -> None:
    plan = two_faults()
    ended, _ = run(tmp_path, plan, laws=len(LAWS) - 1)
    assert len(ended.findings) > 1
    resumed, begun = run(tmp_path, replace(plan, exit_first=True), resume=True)
    assert (resumed.ended, len(resumed.findings)) == ("found", 1)
    assert not begun


def journals(folder: Path) -> list[Path]:
    return [*folder.glob(".kernelproof/cases/journal-*.jsonl")]


def read(folder: Path) -> Any:  # noqa: ANN401  JSON
    """Return what a run has found, without what a busy machine changes: how far it shrinks."""
    report = without_clock(json.loads((folder / "out.json").read_text()))
    wrong, right = report["implementations"]
    failed = {law["law"]: law["verdict"] for law in wrong["laws"]}
    return [report["verdict"], failed, right["laws"], right["coverage"]]


def test_a_command_that_was_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = {"name": "fast", "problems": 1.0, "max_work": 20_000}
    costs = {"schema": "kernelproof-costs-1", "profile": "quick", "device": "cpu"}
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        folder.mkdir()
        (folder / "subject.py").write_text(SUBJECT)
        known = {**costs, "costs": {"right": cost, "wrong": cost}}
        (folder / "costs.json").write_text(json.dumps(known))
    folder = tmp_path / "killed"
    (folder / "slow").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelproof", *WORDS], cwd=folder, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while sum(each.read_bytes().count(b"\n") for each in journals(folder)) < 6:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    (folder / "slow").unlink()
    monkeypatch.chdir(folder)
    assert main([*WORDS, "--resume"]) == 1
    resumed = read(folder)
    assert "no journal" not in capsys.readouterr().err
    assert not journals(folder)
    monkeypatch.chdir(tmp_path / "whole")
    assert main([*WORDS, "--resume"]) == 1
    assert "no journal" in " ".join(capsys.readouterr().err.split())
    assert resumed == read(tmp_path / "whole")


def test_a_kernel_that_was_changed_has_no_results_yet(tmp_path: Path) -> None:
    subject = tmp_path / "subject.py"
    subject.write_text("merge = 1")
    plan = Plan([f"{subject}:merge"], PROFILES["quick"])
    with kept_laws(tmp_path, plan, resume=False):
        pass
    subject.write_text("merge = 2")
    with pytest.raises(JournalError, match=r"its implementation .*subject\.py is"):
        kept_laws(tmp_path, plan, resume=True).__enter__()
    with kept_laws(tmp_path, plan, resume=False):
        assert journal_path(tmp_path, plan).exists()


def test_what_explores_goes_on_with_its_seed(tmp_path: Path) -> None:
    plan = Plan([], PROFILES["nightly"])
    with kept_laws(tmp_path, plan, resume=False) as (first, _):
        assert first.seed
    with kept_laws(tmp_path, plan, resume=True) as (again, _):
        assert again.seed == first.seed
    with kept_laws(tmp_path, plan, resume=False) as (another, _):
        assert another.seed != first.seed


def test_a_folder_that_another_run_uses_is_no_hindrance_unless_it_is_gone_on_from(
    tmp_path: Path,
) -> None:
    plan = Plan([], PROFILES["quick"])
    with Journal(journal_path(tmp_path, plan)):
        with kept_laws(tmp_path, plan, resume=False) as (_, kept):
            kept.keep_costs({})
            kept.end("")
        with pytest.raises(JournalError, match=r"--cases .*another run is writing it"):
            kept_laws(tmp_path, plan, resume=True).__enter__()
    assert journal_path(tmp_path, plan).read_bytes() == b""


def test_another_check_leaves_the_journal_of_a_killed_one(tmp_path: Path) -> None:
    gate, check = Plan([], PROFILES["quick"]), Plan([], PROFILES["quick"], laws=["parity"])
    with kept_laws(tmp_path, gate, resume=False) as (_, kept):
        kept.keep_costs({})
    path = journal_path(tmp_path, gate)
    before = path.read_bytes()
    with kept_laws(tmp_path, check, resume=False) as (_, kept):
        kept.end("")
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == {path: before}
    more_time = Plan([], PROFILES["quick"], seconds=9.0, jobs=3)
    assert journal_path(tmp_path, more_time) == path


@pytest.mark.parametrize("changed", ["release", "interpreter", "folder", "version", "helper"])
def test_results_of_other_code_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    (tmp_path / "subject.py").write_text("import helper")
    helper, init = tmp_path / "helper.py", tmp_path / "engine" / "engine" / "__init__.py"
    init.parent.mkdir(parents=True)
    init.touch()
    version = init.with_name("_version.py")
    helper.write_text("one = 1")
    version.write_text('version = "1.0"')
    monkeypatch.setenv(FROM, str(tmp_path / "engine"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(Target, "here", lambda _: Target(torch="2.1"))
    plan = Plan([f"{tmp_path / 'subject.py'}:merge"], PROFILES["quick"])
    for _ in range(2):
        with kept_laws(tmp_path / "cases", plan, resume=True):
            pass
    match changed:
        case "release":
            monkeypatch.setattr(Target, "here", lambda _: Target(torch="2.2"))
        case "interpreter":
            monkeypatch.setenv("TRITON_INTERPRET", "0")
        case "folder":
            monkeypatch.delenv(FROM)
        case "version":
            version.write_text('version = "1.1"')
            _version.cache_clear()
        case "helper":
            helper.write_text("one = 2")
    names = {"release": "torch", "interpreter": "TRITON_INTERPRET", "helper": "implementation .*"}
    with pytest.raises(JournalError, match=f"its {names.get(changed, '--from')} is"):
        kept_laws(tmp_path / "cases", plan, resume=True).__enter__()


def test_what_a_law_under_way_found_is_left_to_it(tmp_path: Path) -> None:
    problem = example("merge_state", {})
    candidate = Candidate("mine", Address("mine:mine", None, "cpu"), Axes("merge_state", {}, 2000))
    candidate.deadly += [
        Deadly(problem, Verdict("HANG")),
        Deadly(problem, Verdict("CRASH", "SIGSEGV"), shrunk=True),
    ]
    found = LawReport("parity")
    plan = Plan([], PROFILES["quick"])
    with kept_laws(tmp_path, plan, resume=False) as (_, kept):
        kept.keep(candidate, found)
    candidate.deadly.clear()
    with kept_laws(tmp_path, plan, resume=True) as (_, kept):
        assert kept.recall(candidate, "parity") is not None
    assert [each.verdict.status for each in candidate.deadly] == ["CRASH"]


def test_a_failure_of_the_suite_leaves_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: object) -> None:
        raise RuntimeError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "execute", failing)
    assert main(["check", "triton-merge-state", "--profile", "quick"]) == 3
    assert "RuntimeError" in capsys.readouterr().err
    assert len(journals(tmp_path)) == 1


@pytest.mark.parametrize(("profile", "lines"), [("quick", 0), ("nightly", 0), ("nightly", 1)])
def test_a_disk_that_is_full_from_the_start_refuses_only_what_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profile: str,
    lines: int,
) -> None:
    plan, write, left = Plan([], PROFILES[profile]), os.write, [lines]

    def full(file: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return write(file, data)

    monkeypatch.setattr("os.write", full)
    with kept_laws(tmp_path, plan, resume=False) as (here, kept):
        assert bool(here.seed) == (profile == "nightly")
        kept.keep_costs({})
        kept.end("")
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("this run keeps no journal: --cases") == 1
    assert said.count("No space left") == 1
    with pytest.raises(MachineError, match="cannot be written"):
        kept_laws(tmp_path, plan, resume=True).__enter__()


def test_a_full_disk_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with kept_laws(tmp_path, Plan([], PROFILES["quick"]), resume=False) as (_, kept):
        monkeypatch.setattr("os.write", full)
        kept.keep_costs({})
        kept.keep_costs({})
    assert capsys.readouterr().err.count("cannot be written (No space left") == 1
