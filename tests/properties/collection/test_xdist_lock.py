"""What the processes of an xdist run do once for all: modules are built by the first of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernelproof.properties.collection.conformance import Suite
from kernelproof.properties.collection.surveying import Choices
from kernelproof.properties.collection.xdist_lock import once
from kernelproof.properties.search.building import Builder
from kernelproof.properties.space.module_selection import Module
from kernelproof.properties.space.profiles import PROFILES

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
