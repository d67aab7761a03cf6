"""A case is replayed from any folder, and says so where its function is a copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelproof.ci.check.carrying import CALLS
from kernelproof.ci.cli import main
from kernelproof.reference import MergeProblem

KERNEL = """
from kernelproof.impl import implementation
from kernelproof.reference import merge_states

@implementation("merge_state", name="mine")
def merge(inputs):
    return merge_states(inputs.outs, inputs.lses)
"""


@pytest.mark.parametrize("file", ["replayed_kernel.py", f"{CALLS}/replayed_copy.py"])
def test_a_case_of_another_folder_finds_its_kernel(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    kernel, case = project / file, project / ".kernelproof" / "cases" / "case.json"
    for path in (kernel, case):
        path.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_text(KERNEL)
    content = {
        "schema": "kernelproof/case/1", "law": "inputs_unchanged",
        "implementation": f"{file}:merge", "operation": None,
        "problem": MergeProblem(head_dim=4).to_json(), "device": "cpu",
    }  # fmt: skip
    case.write_text(json.dumps(content))
    assert main(["replay", "../project/.kernelproof/cases/case.json", "--in-process"]) == 0
    said = capsys.readouterr().out
    assert f"PASS  {file}:merge" in said or f"{kernel}:merge" in said
    assert ("source:  the function as kernelproof.check took it" in said) == (str(CALLS) in file)
    kernel.unlink()
    assert main(["replay", str(case), "--in-process"]) == 2
    assert f"there is no file '{file}'" in capsys.readouterr().err
