"""The option --from: workers load the named files, and replay commands name them again."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.impl.targets.unpacked import FROM

ADAPTER = """
from kernelproof.impl import implementation
from kernelproof.impl.engines.sources import load, missing_file

FILE = "vllm.ops.merge"


def supports(problem, target):
    return missing_file(FILE) or True


@implementation("merge_state", name="made-up", provider="vllm", supports=supports)
def merge(inputs):
    with load(FILE, dict) as kernels:
        return kernels.merge(inputs.outs)
"""
CHECK = ("check", "made_up_adapter:merge", "--profile", "quick", "--law", "parity")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(FROM, raising=False)
    Path("made_up_adapter.py").write_text(ADAPTER, encoding="utf-8")
    folder = Path("an engine")
    (folder / "vllm" / "ops").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / "vllm" / "_version.py").write_text("version = '9.8'", encoding="utf-8")
    text = "def merge(outs): return outs[0], outs[0][..., 0]"
    (folder / "vllm" / "ops" / "merge.py").write_text(text, encoding="utf-8")
    return folder


def test_a_finding_of_an_engines_kernel_is_replayed_with_its_files(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, "--from", str(engine), "--json", "r.json"]) == 1
    assert FROM not in os.environ
    data = json.loads(Path("r.json").read_text())
    replay = shlex.split(data["findings"][0]["replay"])
    assert replay[-2:] == ["--from", "an engine"]
    assert main(replay[1:]) == 1
    assert "still fails" in capsys.readouterr().out
    assert main(replay[1:-2]) == 3
    assert "vllm is not installed" in capsys.readouterr().out


@pytest.mark.usefixtures("engine")
def test_an_absent_engine_is_unsupported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK]) == 3
    assert "vllm is not installed: install it, or name a folder" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["nowhere", ".", "an engine/vllm"])
@pytest.mark.parametrize("command", ["check x:y", "gate", "list", "replay x.json"])
@pytest.mark.usefixtures("engine")
def test_a_folder_without_an_engine_is_wrong_usage(
    folder: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--from", folder]) == 2
    said = f"Error: --from {folder}: it must be a folder that holds a package, unpacked\n"
    assert said in capsys.readouterr().err
