"""What --evidence writes: no path of the machine, no call that harms the software of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.console.evidence_file import as_evidence


def test_what_is_kept_names_no_path_of_the_machine() -> None:
    data = {
        "command": "kernelproof check x --json /somewhere/out/a.json --cases .kernelproof/cases",
        "findings": [
            {"message": "OSError: '/tmp/a/b/c.so' is torn", "trace": "File /x", "replay": "y"}
        ],
        "source": "https://github.com/flashinfer-ai/flashinfer/issues/1",
        "shape": [1, 2.5, None],
    }
    assert as_evidence(data) == {
        "command": "kernelproof check x --json a.json --cases .kernelproof/cases",
        "findings": [{"message": "OSError: 'c.so' is torn"}],
        "source": "https://github.com/flashinfer-ai/flashinfer/issues/1",
        "shape": [1, 2.5, None],
    }


def test_the_problem_of_a_hang_or_a_crash_is_left_out() -> None:
    hang = {"status": "HANG", "kind": "run", "problem": {"seed": 1}, "message": "did not end"}
    both = {"candidate": {"kind": "SIGILL"}, "baseline": {"kind": ""}, "problem": {"seed": 1}}
    raised = {"status": "CRASH", "kind": "RuntimeError", "problem": {"seed": 1}}
    found = as_evidence({"findings": [hang, both, raised]})["findings"]
    assert found == [{**hang, "problem": None}, {**both, "problem": None}, raised]


def test_a_run_writes_what_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "off.py").write_text(
        "from kernelproof.impl import implementation\n"
        "@implementation('merge_state', name='off')\n"
        "def off(inputs):\n"
        "    return inputs.outs[0] + 1, inputs.lses[0]\n"
    )
    path = tmp_path / "out" / "run.json"
    words = ["check", "off:off", "--profile", "quick", "--law", "parity", "--jobs", "1"]
    assert main([*words, "--evidence", str(path)]) == 1
    text = path.read_text()
    data = json.loads(text)
    assert str(tmp_path) not in text
    assert data["command"].endswith("--evidence run.json")
    assert data["target"]["torch"]
    assert data["build_seconds"] == 0
    assert data["run_seconds"] > 0
    assert data["findings"][0]["problem"]
