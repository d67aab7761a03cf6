"""Results that are kept, and the page that sums them up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.console.evidence_file import as_evidence
from kernelproof.ci.evidence.command import kept
from kernelproof.ci.evidence.page import EvidenceFileError, page
from kernelproof.fixtures import EVIDENCE

PAGE = Path(__file__).parents[3] / "docs" / "evidence.md"


def test_the_page_in_docs_is_what_the_command_makes() -> None:
    hint = "run: kernelproof evidence --markdown docs/evidence.md"
    assert PAGE.read_text(encoding="utf-8") == "\n".join(page(kept())), hint
    for path in kept():
        assert f"`{path.name}`" in PAGE.read_text(encoding="utf-8")


def test_a_run_says_whether_a_later_one_took_its_place(tmp_path: Path) -> None:
    (first,) = (path for path in kept() if path.name == "h200-gate-0.7.2.post1.json")
    data = json.loads(first.read_text(encoding="utf-8"))
    data["date"] = "2031-" + data["date"][5:]
    data["implementations"] = data["implementations"][:1]
    later = tmp_path / "h200-later.json"
    later.write_text(json.dumps(data), encoding="utf-8")
    name = data["implementations"][0]["name"]
    text = "\n".join(page([first, later]))
    assert f"**Older** than a later run of `{name}`." in text
    assert text.count("The only kept run of its kind of ") == 1
    assert "The newest of several runs of its kind." in text
    assert "Older" not in "\n".join(page([later]))


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


@pytest.mark.parametrize("path", sorted(EVIDENCE.glob("*.json")), ids=lambda path: path.name)
def test_no_file_that_is_kept_names_a_path(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    texts: list[str] = []

    def collect(part: object) -> None:
        if isinstance(part, dict):
            for key, value in part.items():
                if key not in ("trace", "replay"):
                    collect(value)
        elif isinstance(part, list):
            for value in part:
                collect(value)
        elif isinstance(part, str):
            texts.append(part)

    collect(data)
    assert [text for text in texts if as_evidence(text) != text] == []


def test_a_run_writes_what_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
    capfd.readouterr()
    assert main(["evidence", str(path)]) == 0
    out = capfd.readouterr().out
    assert "| `off` | " in out
    assert "| 1 FAIL numeric |" in out
    assert "## Both sides" not in out
    gating = tmp_path / "gating.json"
    words = ["check", "--gating", "reference-metadata", "--jobs", "1"]
    assert main([*words, "--evidence", str(gating)]) == 0
    capfd.readouterr()
    assert main(["evidence", str(gating), "--markdown", "page.md"]) == 0
    row = "| supported | `reference` | reference-metadata | 1 | 1 right |"
    assert row in (tmp_path / "page.md").read_text()


def test_what_is_no_evidence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(EvidenceFileError, match="no results of check or gate"):
        page([path])
    assert main(["evidence", str(tmp_path / "absent.json")]) == 2
    assert "absent.json: cannot be read" in capfd.readouterr().err
