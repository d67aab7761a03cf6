"""A check that repeats one of which all passed says so without torch, unless something changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.surroundings import gpus
from kernelproof.ci.check.repeated import REPEATED, repeatable
from kernelproof.ci.cli import main

SUBJECT = """
from kernelproof.impl import implementation
from kernelproof.reference import Arithmetic, oracle
from helper import shift

@implementation("merge_state", name="mine")
def mine(inputs):
    import late_helper
    expected = oracle.bounded_merge(inputs, Arithmetic()).expected
    return expected.out.to(inputs.out_dtype) + shift, expected.lse.float()
"""
FILES = {
    "subject.py": SUBJECT, "helper.py": "shift = 0", "lib/late_helper.py": "one = 1",
    "cases/case.json": "", "ledger.toml": "",
}  # fmt: skip
WORDS = (
    "check", "subject.py:mine", "--profile", "quick", "--law", "merge_identity",
    "--expectations", "ledger.toml", "--json", "out.json", "--junit", "out.xml",
)  # fmt: skip
ASKED = 99
"""Exit code that stands for a check that asks workers."""
SCRIPT = """
import sys
sys.path[:] = {path!r}
from kernelproof.ci.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules and "hypothesis" not in sys.modules
sys.exit(code)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Check once, in a folder of its own; return the JSON report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("repeated"))
        for name, text in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        patch.syspath_prepend(folder / "lib")
        assert main(WORDS) == 0
        yield json.loads(Path("out.json").read_text())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a check that asks workers end at once."""
    monkeypatch.setattr("kernelproof.ci.cli._preload", lambda _: None)
    monkeypatch.setattr("kernelproof.ci.check.checking.examine", lambda _: ASKED)


def test_a_repeated_check_needs_no_torch(checked: dict[str, Any]) -> None:
    Path("out.json").unlink()
    first = Path("out.xml").read_text()
    script = SCRIPT.format(path=sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", script, *WORDS], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "laws: 1 of 1 reused from " in ran.stdout.splitlines()[0]
    again = json.loads(Path("out.json").read_text())
    assert again["judged"] == checked["judged"]
    assert again["implementations"][0]["laws"][0]["reused"] == again["reused"]["since"] != ""
    assert again["milestones"]["started"] > checked["milestones"]["started"]
    assert again["date"] >= checked["date"]
    assert f'timestamp="{again["date"]}"' in Path("out.xml").read_text() != first


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other.txt", "1"),
        ("subject.py", f"{SUBJECT}\n"),
        ("helper.py", "shift = 1"),
        ("lib/late_helper.py", "one = 2"),
        ("beside.py", ""),
        ("ledger.toml", "\n"),
        ("lib/torch-99.0.dist-info", ""),
    ],
)
def test_a_changed_file_is_asked_about(checked: dict[str, Any], name: str, text: str) -> None:
    assert checked["judged"]
    file = Path(name)
    before = file.read_text() if file.exists() else None
    file.write_text(text)
    try:
        assert main(WORDS) == (0 if name == "other.txt" else ASKED)
    finally:
        file.unlink() if before is None else file.write_text(before)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "1"), ("--profile", "gate"), ("--law", "parity"), ("--only", "seed=1"),
        ("--minutes", "1"), ("--jobs", "1"), ("--no-reuse",), ("--resume",), ("--failed-first",),
        ("--distrust",), ("--device", "cuda"), ("--html", "out.html"), ("-v",),
    ],
)  # fmt: skip
def test_another_option_is_asked_about(checked: dict[str, Any], words: tuple[str, ...]) -> None:
    assert checked["judged"]
    assert main([*WORDS, *words]) == ASKED


@pytest.mark.usefixtures("asked")
def test_another_machine_is_asked_about(
    checked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked["judged"]
    for name in ("own_code", "_first_line"):  # Kernelproof's code; processor and driver
        with monkeypatch.context() as patch:
            patch.setattr(f"kernelproof.ci.answers.surroundings.{name}", lambda *_: "another")
            assert main(WORDS) == ASKED, name
    monkeypatch.setenv("MY_KERNEL_TILE", "64")
    assert main(WORDS) == ASKED


def test_gpus_that_are_not_named_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "device": "cuda", "reuse": True, "implementations": ["torch-moe"], "jobs": None,
        "minutes": None, "expectations": None, "cases": Path("cases"),
        **dict.fromkeys(("resume", "ray", "failed_first", "distrust")),
    }  # fmt: skip
    for chips in (None, "one H200"):
        monkeypatch.setattr("kernelproof.ci.check.repeated.gpus", lambda chips=chips: chips)
        found = repeatable(given, "kernelproof check")
        assert (found and found.about["GPUs"]) == chips
    assert gpus() is None or len(gpus() or "") > 0


@pytest.mark.usefixtures("asked")
def test_an_answer_that_was_cut_off_is_asked_for(checked: dict[str, Any]) -> None:
    assert checked["judged"]
    (file,) = Path(".kernelproof/cases").glob(f"{REPEATED}*")
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert main(WORDS) == ASKED
    file.write_bytes(whole)
    assert main(WORDS) == 0
