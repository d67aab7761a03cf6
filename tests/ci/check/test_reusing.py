"""What passed in the last check is not asked again, unless something has changed since."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.identity import machine_identity, plan_identity
from kernelproof.ci.answers.surroundings import fingerprints
from kernelproof.ci.check.resuming import kept_laws
from kernelproof.ci.check.reusing import passed_before, passed_path
from kernelproof.ci.cli import main
from kernelproof.impl import Target
from kernelproof.properties.findings.corpus import failed_before
from kernelproof.properties.findings.report import RunReport
from kernelproof.properties.isolation.reads import Read
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.tests.ci.fleet.test_fleet import TINY

SUBJECT = """
import subprocess
from kernelproof.impl import implementation
from kernelproof.reference import Arithmetic, oracle
from shared_helper import shift

def merge(inputs):
    import late_helper
    expected = oracle.bounded_merge(inputs, Arithmetic()).expected
    return expected.out.to(inputs.out_dtype) + shift, expected.lse.float()

def wrong(inputs):
    out, lse = merge(inputs)
    return (out + 1 if len(inputs.outs) > 2 else out), lse

def calling(inputs):
    subprocess.run(["true"])
    return merge(inputs)

right = implementation("merge_state", name="right")(merge)
wrong = implementation("merge_state", name="wrong")(wrong)
calling = implementation("merge_state", name="calling")(calling)
"""
LAWS = ("parity", "inputs_unchanged", "merge_identity")
PASSING = ["inputs_unchanged", "merge_identity"]


def run(cases: Path, plan: Plan, *, reuse: bool = True) -> RunReport:
    with kept_laws(cases, plan, resume=False, reuse=reuse) as (here, kept):
        made = Run(here, kept=kept)
        report = made.execute()
        kept.pass_on(cases, plan, made)
        kept.end("")
    return report


def reused(report: RunReport) -> dict[str, list[str]]:
    """Return the laws that were not asked again, by implementation."""
    return {
        each.name: sorted(law.law for law in each.laws if law.reused)
        for each in report.implementations
    }


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Plan, RunReport]]:
    """Check a right, a wrong and an unknowable implementation; return the folder and the plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("run"))
        (folder / "lib" / "engine" / "late").mkdir(parents=True)
        (folder / "kernels").mkdir()
        patch.syspath_prepend(folder / "lib")
        (folder / "kernels" / "subject.py").write_text(SUBJECT)
        (folder / "lib" / "shared_helper.py").write_text("shift = 0")
        (folder / "lib" / "late_helper.py").write_text("one = 1")
        patch.setenv("KERNELPROOF_FROM", str(folder / "lib" / "engine"))
        names = [f"kernels/subject.py:{name}" for name in ("right", "wrong", "calling")]
        plan = Plan(names, TINY, jobs=1, laws=LAWS)
        yield folder, plan, run(folder / "cases", plan)


def test_what_passed_is_not_asked_again(checked: tuple[Path, Plan, RunReport]) -> None:
    folder, plan, first = checked
    assert reused(first) == {"right": [], "wrong": [], "calling": []}
    again = run(folder / "cases", plan)
    assert reused(again) == {"right": sorted(LAWS), "wrong": PASSING, "calling": []}
    assert [each.judged for each in again.implementations][::2] == [
        each.judged for each in first.implementations
    ][::2]
    (found,) = (each for each in again.implementations if each.name == "wrong")
    assert found.laws[0].finding is not None
    third = run(folder / "cases", plan)
    dates = {law.reused for each in third.implementations for law in each.laws if law.reused}
    assert reused(third) == reused(again)
    assert len(dates) == 1, "results keep the date of the check that asked"


def identity(plan: Plan) -> dict[str, Any]:
    return {**plan_identity(plan), **machine_identity(plan.device)}


def test_only_what_was_asked_to_reuse_is(checked: tuple[Path, Plan, RunReport]) -> None:
    folder, plan, _ = checked
    assert not passed_before(folder / "cases", plan, identity(plan), reuse=False).whole


FILES = {
    "kernel": ("kernels/subject.py", f"{SUBJECT}\n"),
    "helper": ("lib/shared_helper.py", "shift = 1"),
    "late helper": ("lib/late_helper.py", "two = 2"),
    "module that comes first": ("first/late_helper.py", "one = 1"),
    "engine": ("lib/engine/late/kernel.cu", "one"),
    "library": ("lib/made-1.0.dist-info", ""),
}
"""Path and new content of the file that changes."""
PLANS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "profile": {"profile": PROFILES["quick"]},
    "minutes": {"seconds": 60.0},
    "exploring": {"profile": replace(TINY, explore=True)},
}
"""Fields of the plan that change."""


@pytest.mark.parametrize(
    "changed", [*FILES, *PLANS, "torch", "environment", "kernelproof", "nothing"]
)
def test_what_changed_is_asked_again(
    checked: tuple[Path, Plan, RunReport], monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    folder, plan, _ = checked
    monkeypatch.syspath_prepend(folder / "first")
    other = Target(torch="1.0", triton=Target.here().triton, device_name="x86_64")
    if changed == "torch":
        monkeypatch.setattr(Target, "here", lambda _: other)
    if changed == "environment":
        monkeypatch.setenv("MY_KERNEL_TILE", "64")
    if changed == "kernelproof":
        monkeypatch.setattr("kernelproof.ci.answers.surroundings.own_code", lambda _: "another")
    plan = replace(plan, **PLANS.get(changed, {}))
    file = folder / FILES.get(changed, ("other.txt", ""))[0]
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    file.write_text(FILES.get(changed, ("", ""))[1])
    try:
        found = passed_before(folder / "cases", plan, identity(plan), reuse=True).whole
        assert len(found) == (1 if changed == "nothing" else 0)
    finally:
        file.unlink() if before is None else file.write_text(before)


def test_what_is_not_known_is_not_reused(tmp_path: Path) -> None:
    file = tmp_path / "table.bin"
    file.write_bytes(b"1")
    now = file.stat().st_ctime
    assert fingerprints([Read("file", str(file))], now + 1)
    assert fingerprints([Read("file", str(file))], now) is None, "changed while it ran"
    assert fingerprints([Read("file", str(file)), Read("written", str(file))], now)
    assert fingerprints([Read("program", "ninja")]) is None
    missing = fingerprints([Read("file", str(tmp_path / "absent"))])
    assert missing == {f"file {tmp_path / 'absent'}": ""}


def test_a_store_that_cannot_be_read_costs_no_result(tmp_path: Path) -> None:
    plan = Plan([], TINY)
    passed_path(tmp_path, plan).write_text("no journal\n")
    assert not passed_before(tmp_path, plan, identity(plan), reuse=True).dates


def test_the_first_line_and_the_json_say_what_was_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["check", "torch-slice-context-parallel", "--profile", "quick",
             "--law", "context_parallel_parity", "--json", "out.json"]  # fmt: skip
    preloaded: list[int] = []
    monkeypatch.setattr("kernelproof.ci.cli._preload", lambda _: preloaded.append(len(found)))
    found: list[tuple[bool, dict[str, Any]]] = []
    for more in ([], [], ["--no-reuse"], ["--resume"]):
        assert main([*words, *more]) == 0
        line = capsys.readouterr().out.splitlines()[0]
        found.append(("1 of 1 reused from " in line, json.loads(Path("out.json").read_text())))
    assert [each for each, _ in found] == [False, True, False, False]
    assert preloaded == [0, 2, 3], "what is repeated asks no worker"
    first, again = (data for _, data in found[:2])
    assert first["reused"] == {"laws": 0, "of": 1, "since": ""}
    assert again["reused"]["laws"] == 1
    assert again["reused"]["since"] == again["implementations"][0]["laws"][0]["reused"] != ""
    assert again["judged"] == first["judged"]


def test_what_failed_last_time_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kernel = SUBJECT.replace("from shared_helper import shift", "shift = 0")
    Path("subject.py").write_text(kernel.replace("    import late_helper\n", ""))
    names = ("subject.py:right", "subject.py:wrong")
    words = ("--profile", "quick", "--law", "merge_identity", "--law", "parity")
    assert main(["check", *names, *words]) == 1
    (case,) = Path(".kernelproof/cases").glob("wrong-*.json")
    content = json.loads(case.read_text())
    other = {**content, "law": "merge_identity", "implementation": "subject.py:right"}
    Path(".kernelproof/cases/right.json").write_text(json.dumps(other))
    failed = failed_before(Path(".kernelproof/cases"), ["subject.py:right"])
    assert [each.law for each in failed] == ["merge_identity"]
    begun: list[str] = []
    plan = Plan(["subject.py:right"], TINY, jobs=1, laws=LAWS, failed=failed, deck=True)
    progress = Progress()
    monkeypatch.setattr(progress, "law_begun", lambda _, law: begun.append(law))
    report = Run(plan, progress).execute()
    assert (begun[0], len(begun)) == ("merge_identity", len(LAWS))
    assert not report.findings
    os.truncate(case, 10)
    assert main(["check", *names, *words, "--failed-first"]) == 2
    assert "--failed-first: " in capsys.readouterr().err
