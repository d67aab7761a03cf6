"""What the processes of an xdist run do once for all: modules are built by the first of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.collection import conformance
from kernelproof.properties.collection.conformance import Interruption, Suite
from kernelproof.properties.collection.surveying import Choices
from kernelproof.properties.collection.xdist_lock import (
    BUSY,
    JUDGED,
    keep,
    kept,
    once,
    stop,
)
from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.search.building import Builder
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.search.module_plan import ModulePlan
from kernelproof.properties.search.preparation import Setting
from kernelproof.properties.space.module_selection import Module
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.reference import Problem

SLOW = f"{Path(__file__).parents[1] / 'space' / 'test_module_selection.py'}:slow_to_compile"
RACE = """
    import sys, time
    from pathlib import Path
    from kernelproof.properties.collection.xdist_lock import once

    folder = Path(sys.argv[1])

    def build():
        assert not (folder / "busy").exists()
        (folder / "busy").touch()
        time.sleep(0.3)
        with (folder / "built").open("a") as file:
            file.write(sys.argv[2] + "\\n")
        (folder / "busy").unlink()

    once(folder, sys.argv[2], build)
    assert sys.argv[2] in (folder / "built").read_text().split()
"""


def test_one_process_builds_and_the_others_wait_for_it(tmp_path: Path) -> None:
    code = textwrap.dedent(RACE)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name])
        for name in ("a", "a", "b", "a", "b")
    ]
    assert [process.wait(60) for process in processes] == [0] * len(processes)
    assert sorted((tmp_path / "built").read_text().split()) == ["a", "b"]


def test_a_build_that_fails_is_left_to_the_next(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        once(tmp_path, "a", fail)
    built = []
    once(tmp_path, "a", lambda: built.append(1))
    once(tmp_path, "a", lambda: built.append(2))
    assert built == [1]
    once(None, "a", lambda: built.append(3))
    assert built == [1, 3]


def test_what_became_of_items_is_kept_for_the_process_that_prints(tmp_path: Path) -> None:
    assert kept(tmp_path) == {}
    keep(tmp_path, "one", {"status": "FAIL\n", "failed": True})
    keep(tmp_path, "another", {"failed": False})
    assert kept(tmp_path) == {
        "one": {"status": "FAIL\n", "failed": True},
        "another": {"failed": False},
    }
    with (tmp_path / JUDGED).open("a") as file:
        file.write('["third", {"fai')
    assert set(kept(tmp_path)) == {"one", "another"}
    keep(None, "one", {})
    keep(tmp_path / "elsewhere", "one", {})


def test_an_interrupted_run_waits_for_searches_under_way(tmp_path: Path) -> None:
    searching, ended = Interruption(tmp_path), threading.Event()

    def search() -> None:
        with searching.awaited():
            begun.set()
            while not searching.stopped():
                time.sleep(0.01)
            ended.set()

    begun, thread = threading.Event(), threading.Thread(target=search)
    thread.start()
    assert begun.wait(60)
    stop(tmp_path)
    assert ended.is_set()
    thread.join()
    assert not list(tmp_path.glob("busy*"))


def test_an_interrupted_run_waits_for_no_process_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    (tmp_path / f"{BUSY}-{ended.pid}").touch()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    stop(tmp_path)


def test_the_first_interrupt_ends_a_search_and_the_second_raises() -> None:
    alone = Interruption(None)

    def interrupted_twice() -> None:
        with alone.awaited():
            signal.raise_signal(signal.SIGINT)
            assert alone.stopped()
            assert alone.asked
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupted_item_tells_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CaseRunner.take

    def take(self: CaseRunner) -> Problem | None:
        signal.raise_signal(signal.SIGINT)
        return plain(self)

    subjects = Path(__file__).parents[1] / "engine_subjects.py"
    name = f"{subjects}:honest_attention"
    choices = Choices((name,), None, PROFILES["quick"], "cpu", 0, "none", tmp_path / "cases")
    suite = Suite(choices)
    try:
        items = [each for each in suite.items if each.law in ("parity", "well_formed")]
        monkeypatch.setattr(CaseRunner, "take", take)
        interrupted = suite.judge(items[0])
        after = suite.judge(items[1])
    finally:
        suite.close()
    assert interrupted.outcome == "skipped"
    assert "was interrupted, with no finding until then" in interrupted.text
    assert interrupted.properties["ended"] == "stopped"
    assert (after.outcome, after.text) == ("skipped", "honest: the run was interrupted")


def test_processes_of_one_run_build_modules_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []

    def build(_: Builder, address: Any, modules: Sequence[Module], *__: object) -> None:  # noqa: ANN401
        assert dict(address.environment) == {"KERNELPROOF_TEST": "gpu 1"}
        built.append(len(modules))

    monkeypatch.setattr(Builder, "build", build)
    common = tmp_path / "common"
    common.mkdir()
    choices = Choices((SLOW,), None, PROFILES["quick"], "cpu", 0, "none", tmp_path / "cases")
    for _ in range(2):  # as two processes do
        environment = {"KERNELPROOF_TEST": "gpu 1"}
        suite = Suite(choices, common=common, environment=environment, jobs=2)
        try:
            item = next(each for each in suite.items if each.law == "well_formed")
            judged = suite.judge(item)
        finally:
            suite.close()
        assert judged.outcome == "passed", judged.text
    assert built == [PROFILES["quick"].modules]


def test_each_implementation_chooses_its_modules_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ModulePlan] = []

    def prepare(setting: Setting, report: ImplementationReport, *_: object) -> None:
        report.error = "not here"
        plans.append(setting.together)

    monkeypatch.setattr(conformance, "prepare", prepare)
    subjects = Path(__file__).parents[1] / "engine_subjects.py"
    names = (f"{subjects}:honest_attention", f"{subjects}:always_causal")
    choices = Choices(names, None, PROFILES["quick"], "cpu", 0, "none", tmp_path / "cases")
    suite = Suite(choices)
    try:
        for item in [each for each in suite.items if each.law == "parity"]:
            assert "not here" in suite.judge(item).text
    finally:
        suite.close()
    first, second = plans
    assert first is not second  # one of two would wait for the other for a minute
