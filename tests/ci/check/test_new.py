"""What `kernelproof new` writes runs as it is, for every operation."""

from __future__ import annotations

import importlib.util
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from kernelproof.ci.cli import main
from kernelproof.impl import Implementation, Target
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.operations import OPERATIONS as ANSWERS
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem
from kernelproof.reference.operations import OPERATIONS


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module(name: str) -> ModuleType:
    """Import a file of the current folder."""
    spec = importlib.util.spec_from_file_location(name, Path(f"{name}.py").resolve())
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_adapter_of_each_operation_is_right(operation: str) -> None:
    """A field that a record does not have, or a result of another kind, would fail parity."""
    name = f"my_{operation}"
    assert main(["new", name, "--operation", operation]) == 0
    adapter = getattr(module(name), name)
    assert isinstance(adapter, Implementation)
    assert (adapter.name, adapter.operation) == (name, operation)
    parity = find_law(ANSWERS[operation].law)
    kind = OPERATIONS[operation].problem
    problem = AttentionProblem(operation=operation) if kind is AttentionProblem else kind()
    verdict = parity.check(Subject(adapter, Target.here("cpu"), Stages()), problem)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize("code", [0, 1])
def test_the_test_passes_and_fails_with_the_kernel(
    code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself is replaced: it would take ten seconds."""
    assert main(["new", "mine", "--operation", "merge_state"]) == 0
    asked: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        asked.append(command[1:])
        return subprocess.CompletedProcess(command, code + int(check))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(AssertionError) if code else nullcontext():
        module("test_mine").test_mine_conforms()
    kernel = f"{here / 'mine.py'}:mine"
    assert asked == [["-m", "kernelproof", "check", kernel, "--profile", "quick"]]


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "test_mine.py").write_text("mine")
    assert main(["new", "mine", "--operation", "moe"]) == 2
    assert "test_mine.py: is there already" in capsys.readouterr().err
    assert (here / "test_mine.py").read_text() == "mine"
    assert not (here / "mine.py").exists()


@pytest.mark.parametrize(("name", "operation", "told"), [
    ("my-kernel", "moe", "it must be a Python identifier"),
    ("class", "moe", "it must be a Python identifier"),
    ("torch", "moe", "which the adapter needs"),
    ("json", "moe", "json.py would hide the module "),
    ("mine", "merge_states", "'merge_states': did you mean merge_state? there are "),
])  # fmt: skip
def test_wrong_usage(
    name: str, operation: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", name, "--operation", operation]) == 2
    assert told in capsys.readouterr().err
    assert not list(here.iterdir())
