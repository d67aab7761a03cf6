"""Runs in which processes hang, die or wear out, output buffers, and how a run ends early."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.console.errors import MACHINE
from kernelproof.ci.reports.summary import summarise
from kernelproof.properties.collection.conformance import Suite
from kernelproof.properties.collection.surveying import Choices
from kernelproof.properties.findings.cases import CaseWriter
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.findings.text_format import finding_lines
from kernelproof.properties.isolation.workers import Worker
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.law_search import LawSearch
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.profiles import PROFILES, Profile
from kernelproof.properties.worker.requests import DeviceLostError
from kernelproof.reference import AttentionProblem, MergeProblem

SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"
TINY = Profile("tiny", problems=30, max_work=20_000, shrink_seconds=3.0, seconds=60.0)
RUN_SECONDS = 1.5


@pytest.fixture
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelproof.properties.search.deadlines.DEADLINE_FLOOR", RUN_SECONDS)


def execute(
    *names: str,
    laws: Sequence[str] = ("parity",),
    profile: Profile = TINY,
    progress: Progress | None = None,
    **options: Any,  # noqa: ANN401  a plan's
) -> list[ImplementationReport]:
    return run(*names, laws=laws, profile=profile, progress=progress, **options).implementations


def run(
    *names: str,
    laws: Sequence[str],
    profile: Profile = TINY,
    progress: Progress | None = None,
    **options: Any,  # noqa: ANN401
) -> RunReport:
    names = tuple(f"{SUBJECTS}:{name}" for name in names)
    report = Run(Plan(names, profile, laws=laws, **options), progress).execute()
    for each in report.implementations:
        assert not each.error, each.error
    return report


def finding_of(report: ImplementationReport) -> Finding:
    (finding,) = report.findings
    return finding


def running(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped by whoever inherited it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs a child subreaper")
def test_what_is_left_is_named_with_whose_it_is() -> None:
    profile = replace(TINY, problems=3)
    neighbour, leaves = execute("honest_attention", "leaves_a_process", profile=profile, jobs=1)
    assert {each.name for each in leaves.left} == {"sleep 600"}
    assert neighbour.left == []


ENDINGS: dict[str, tuple[str, str, str, str]] = {
    "hangs": ("HANG", "run", "_hang", "did not end within its deadline"),
    "aborts": ("CRASH", "SIGABRT", "_abort", ""),
    "raises": ("CRASH", "KeyError", "_raise", ""),
}
"""By subject: status, kind, a function in the trace (of where it stood), words of the message."""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.usefixtures("_short_deadline")
@pytest.mark.parametrize("name", ENDINGS)
def test_hangs_and_deaths_are_confirmed_and_shrunk_and_leave_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "processes"
    monkeypatch.setenv("KERNELPROOF_TEST_RECORD", str(record))
    profile = replace(TINY, shrink_seconds=0.5)
    report = run(name, laws=["parity"], profile=profile, jobs=1)
    # Shrinking takes at most 6 times shrink_seconds where each try costs a process.
    assert report.respawns < 20
    (ended,) = report.implementations
    finding = finding_of(ended)
    status, kind, trace, words = ENDINGS[name]
    assert (finding.verdict.status, finding.verdict.kind) == (status, kind)
    assert words in finding.verdict.message
    assert trace in finding.verdict.trace
    assert finding.attempts >= 1
    assert isinstance(finding.problem, AttentionProblem)
    shows = {
        "hangs": max(finding.problem.seq_lens) >= 4,
        "aborts": finding.problem.strided_kv,
        "raises": finding.problem.logits_soft_cap,  # the rest shrinks as far as one second goes
    }
    assert shows[name]
    (law,) = ended.laws
    assert law.judged > 1  # the verdicts before and after are kept
    assert law.flaky == 0
    processes = {int(line) for line in record.read_text(encoding="ascii").split()}
    assert len(processes) > (name != "raises")  # what only raises costs no process
    assert wait_until(lambda: not any(running(pid) for pid in processes))


@pytest.mark.usefixtures("_short_deadline")
def test_a_hang_shrinks_to_the_exact_length_in_few_tries(tmp_path: Path) -> None:
    """A prefill with a window hangs from so many tokens on (as flashinfer#3578 from 257)."""
    profile = replace(TINY, problems=300, max_work=200_000, shrink_seconds=10.0)
    report = run("hangs_from_21", laws=["parity", "well_formed"], profile=profile, jobs=1)
    (hangs,) = report.implementations
    finding = hangs.findings[0]
    assert (finding.verdict.status, finding.verdict.kind) == ("HANG", "run")
    assert finding.problem == AttentionProblem(
        query_lens=(21,), seq_lens=(21,), page_size=16, window_left=0
    )
    # Shrinking and the second law try it in forks: its first hang costs a process, its confirmation
    # and the judging of the smallest problem a fresh one each.
    assert finding.deaths == 1
    assert report.respawns <= 6
    assert finding.attempts > finding.deaths
    assert "; stuck in hang (engine_subjects.py:" in finding.verdict.message
    assert f"{finding.deaths} of which cost a process" in "\n".join(finding_lines(finding))
    assert finding.to_json()["attempts"] == finding.attempts
    # The run went on: the second law finds the same in the case that the first has left.
    second = hangs.findings[1]
    assert (second.law, second.verdict.status) == ("well_formed", "HANG")
    assert second.problem == finding.problem
    assert hangs.judged > 1

    CaseWriter(tmp_path, None, Ledger()).write(finding, hangs, report)
    _, *arguments = shlex.split(finding.replay)
    ended = subprocess.run(
        [sys.executable, "-m", "kernelproof", *arguments, "--deadline", "1"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith("HANG run  ")


def test_a_failure_that_does_not_repeat_is_flaky() -> None:
    once, worn = execute("fifth_call", "wears_out", jobs=2)
    finding = finding_of(once)
    assert finding.verdict.status == "FLAKY"
    assert finding.verdict.message.startswith("FAIL at first, PASS when confirmed: out[")
    assert once.laws[0].flaky
    assert once.laws[0].judged >= TINY.problems / 2  # the search went on
    finding = finding_of(worn)
    assert finding.verdict.status == "FLAKY"
    assert finding.verdict.message.startswith("passes in a fresh process, fails after other calls")
    assert finding.entry is None


def test_what_another_left_in_the_process_is_no_failure_of_its_neighbour() -> None:
    profile = replace(TINY, problems=6)
    both = execute("spoils", "victim", laws=("parity", "well_formed"), profile=profile, jobs=1)
    for each in both:
        assert [law.verdict for law in each.laws] == ["PASS", "PASS"]
        assert not any(law.flaky for law in each.laws)
    again = execute("spoils", "wrong_from_five", profile=profile, jobs=1)
    assert finding_of(again[1]).verdict.status == "FAIL"


def test_a_failure_of_a_processs_first_calls_is_seen_again_in_a_fresh_one(tmp_path: Path) -> None:
    report = run("starts_slowly", laws=["repeated_calls"])
    (slow,) = report.implementations
    finding = finding_of(slow)
    assert (finding.verdict.status, finding.verdict.kind) == ("FAIL", "nondeterministic")
    assert finding.verdict.message.startswith("in the first calls of a process alone: lse has")
    assert slow.laws[0].flaky == 0
    assert isinstance(finding.problem, MergeProblem)
    assert finding.problem.num_tokens > 8  # each step costs a process
    CaseWriter(tmp_path, None, Ledger()).write(finding, slow, report)
    _, *arguments = shlex.split(finding.replay)
    ended = subprocess.run(
        [sys.executable, "-m", "kernelproof", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.startswith("FAIL nondeterministic  "), ended.stderr


def test_noise_is_a_fault_unless_it_is_declared() -> None:
    declared, secret = execute(
        "noisy_and_says_so", "noisy_in_secret", laws=["repeated_calls"], jobs=2
    )
    assert declared.findings == []
    assert declared.judged >= 4
    finding = finding_of(secret)
    assert (finding.verdict.status, finding.verdict.kind) == ("FAIL", "nondeterministic")
    assert "lse has other bits in a repeated call" in finding.verdict.message


def test_output_buffers_are_poisoned_and_fenced() -> None:
    laws = ["parity", "inputs_unchanged"]
    good, far, nothing = execute("writes", "writes_too_far", "writes_nothing", laws=laws, jobs=2)
    assert good.findings == []
    assert [law.verdict for law in good.laws] == ["PASS", "PASS"]
    assert finding_of(far).verdict.kind == "wrote_outside"
    assert finding_of(far).verdict.message == "the call wrote outside of out"
    assert finding_of(far).law == "inputs_unchanged"
    assert finding_of(nothing).verdict.kind == "nan"


def test_a_kernel_that_writes_no_lse_says_so() -> None:
    laws = ["parity", "well_formed", "output_buffers", "soak"]
    # One worker: soak finds the fault where it begins after parity has, and tries its problem.
    good, wrong = execute("writes_out_only", "writes_wrong_lse", laws=laws, jobs=1)
    assert good.findings == []
    assert [law.verdict for law in good.laws] == ["PASS"] * len(laws)
    assert [finding.law for finding in wrong.findings] == ["parity", "soak"]
    assert all(each.verdict.message.startswith("lse[") for each in wrong.findings)


def test_only_the_laws_that_are_asked_for_run_in_their_order() -> None:
    laws = ["merge_identity", "parity", "well_formed"]
    (report,) = execute("merges", laws=laws, jobs=1)
    assert [law.law for law in report.laws] == ["parity", "well_formed", "merge_identity"]
    assert all(law.verdict == "PASS" and law.judged for law in report.laws)


def test_a_plain_function_runs_under_the_operation_of_the_plan() -> None:
    laws = ["parity"]
    (report,) = execute("plain", laws=laws, operation="merge_state", jobs=1)
    assert report.operation == "merge_state"
    assert report.name == f"{SUBJECTS}:plain"
    assert report.findings == []
    assert report.judged


def test_a_law_that_runs_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a call that sleeps for 0.02 s may take seconds, and would be a finding.
    monkeypatch.setattr("kernelproof.properties.search.deadlines.DEADLINE_FLOOR", 60.0)
    profile = replace(TINY, problems=5000, seconds=0.1)
    (report,) = execute("sleeps", profile=profile, jobs=1)
    (law,) = report.laws
    assert law.ended == "time"
    assert law.judged < 1000
    assert law.finding is None
    assert report.cost in ("medium", "slow")


def test_after_a_finding_later_laws_are_brief_where_the_plan_says_so() -> None:
    laws = ["parity", "merge_commutativity"]
    (report,) = execute(
        "wears_out", laws=laws, profile=replace(TINY, problems=200), shrink_all=False, jobs=1
    )
    first, second = report.laws
    assert first.finding is not None
    assert second.judged <= 60


class _Interrupting(Progress):
    """Interrupts a run once, as Ctrl-C does; a second one would end it at once."""

    def __init__(self) -> None:
        self.pressed = False

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        del report, law
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt


def test_what_was_learned_before_an_interrupt_is_reported() -> None:
    laws = ["parity", "well_formed", "merge_identity", "merge_union"]
    profile = replace(PROFILES["nightly"], explore=False)
    report = run(
        "merges",
        "wears_out",
        laws=laws,
        profile=replace(profile, problems=40),
        progress=_Interrupting(),
        jobs=1,
    )
    assert report.interrupted
    assert report.judged > 0
    assert report.implementations[0].laws[0].law == "parity"
    assert report.seconds > 0
    assert wait_until(lambda: not _children())


class _Ending(Progress):
    """Has the time of a run end with its first verdict."""

    run: Run

    def judged(self, name: str, count: int) -> None:
        del name, count
        self.run.ending.end("time")


def test_laws_that_have_not_begun_when_the_run_ends_are_named() -> None:
    # The last one is for Triton kernels: it has nothing to judge of this one, and owes no problem.
    laws = ["parity", "well_formed", "merge_identity", "merge_union", "algebra"]
    progress = _Ending()
    progress.run = Run(Plan([f"{SUBJECTS}:merges"], TINY, laws=laws, jobs=1), progress)
    ended = progress.run.execute()
    assert ended.ended == "time"
    (report,) = ended.implementations
    found = {law.law: law for law in report.laws}
    assert found.keys() == set(laws)
    assert found["parity"].judged
    assert (found["merge_union"].ended, found["merge_union"].judged) == ("stopped", 0)
    assert (found["algebra"].ended, found["algebra"].floor) == ("idle", 0)
    assert not report.error
    assert wait_until(lambda: not _children())


def _children() -> list[int]:
    """Return the workers' processes: forks of this process's fork servers."""
    parents = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if fields[0] not in "ZX" and b"fork_server" in command:
                parents[int(entry.name)] = int(fields[1])
    servers = {process for process, parent in parents.items() if parent == os.getpid()}
    return [process for process, parent in parents.items() if parent in servers]


class _GoneAfter:
    """Stands for the look at a device that does not come back."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, worker: Worker, device: str) -> None:
        del worker, device
        self.left -= 1
        if self.left < 0:
            message = "cuda did not come back: hang run"
            raise DeviceLostError(message)


@pytest.mark.usefixtures("_short_deadline")
@pytest.mark.parametrize("times", [0, 1])
def test_nothing_is_scheduled_on_a_device_that_is_lost(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device goes with the first HANG, or when that is confirmed."""
    searched: list[str] = []

    class Noted(LawSearch):
        def run(self) -> LawReport:
            searched.append(self._candidate.name)
            return super().run()

    monkeypatch.setattr("kernelproof.properties.search.engine.LawSearch", Noted)
    monkeypatch.setattr("kernelproof.properties.search.case_runner.probe_device", _GoneAfter(times))
    names = ("merges", "hangs", "honest_attention")
    report = run(*names, laws=["parity", "well_formed"], jobs=1)
    assert report.lost == "cuda did not come back: hang run"
    _, hangs, _ = report.implementations
    assert searched[-1] == "hangs"
    (law,) = hangs.laws
    assert law.lost
    assert law.judged  # what was learned until then
    finding = finding_of(hangs)
    assert (finding.law, finding.verdict.status) == ("parity", "HANG")
    assert finding.verdict.message.endswith("; then cuda did not come back: hang run")
    summary = summarise(report, Ledger(), gate=False, command="check")
    assert summary.code == MACHINE
    assert "the device was lost" in summary.sentence


@pytest.mark.usefixtures("_short_deadline")
def test_under_pytest_too_nothing_runs_on_a_device_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.properties.search.case_runner.probe_device", _GoneAfter(0))
    choices = Choices((f"{SUBJECTS}:hangs",), None, TINY, "cpu", 0, "none", tmp_path)
    suite = Suite(choices)
    try:
        first, second = (suite.judge(item) for item in suite.items[:2])
    finally:
        suite.close()
    assert first.outcome == "failed"
    assert first.text.startswith("LOST  hangs\n  cuda did not come back")
    assert "\nHANG run  hangs  parity\n" in first.text
    assert second.outcome == "skipped"
    assert "the device was lost" in second.text
