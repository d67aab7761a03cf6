"""A check that begins anew when a file changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.ci.answers.identity import files_of
from kernelproof.ci.check.watching import stamps, watch_files
from kernelproof.ci.console.errors import UsageRefusedError

MINE = """
from kernelproof.impl import implementation
from kernelproof.reference import merge_states

@implementation("merge_state", name="mine")
def mine(inputs):
    out, lse = merge_states(inputs.outs.double(), inputs.lses.double())
    return (out + {off}).to(inputs.out_dtype), lse.float()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.format(off=1))
    return tmp_path


@pytest.mark.usefixtures("here")
def test_the_file_of_an_implementation_is_found_without_an_import() -> None:
    assert [file.name for file in files_of("mine:mine")] == ["mine.py"]
    assert files_of("mine.py:mine") == [Path("mine.py")]
    assert [file.name for file in files_of("triton-merge-state")] == ["merge.py"]
    assert files_of("nowhere:mine") == []
    assert "mine" not in sys.modules
    with pytest.raises(UsageRefusedError, match="--watch: no file of nowhere:mine"):
        watch_files(["nowhere:mine"], [])


def test_a_file_that_is_changed_added_or_removed_counts(here: Path) -> None:
    seen = [stamps([here])]
    (here / "mine.py").write_text(MINE.format(off=22))
    seen.append(stamps([here]))
    (here / "helper.py").write_text("")
    seen.append(stamps([here]))
    (here / "notes.txt").write_text("no code")
    assert stamps([here]) == seen[-1]
    (here / "mine.py").unlink()
    seen.append(stamps([here]))
    assert len({tuple(sorted(each.items())) for each in seen}) == len(seen)


def watching(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kernelproof", "check", "mine:mine", "--watch", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_a_mended_kernel_is_checked_again_until_ctrl_c(here: Path) -> None:
    told = []
    with watching("-x", "--profile", "quick", "--law", "parity", "--jobs", "1") as process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if "waiting for a change" in line:
                if any("CONFORMING" in each and "NOT" not in each for each in told):
                    break
                (here / "mine.py").write_text(MINE.format(off=0))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
    assert sum("waiting for a change" in line for line in told) == 2
    assert any("NOT CONFORMING" in line for line in told)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGTERM")
def test_a_check_ends_with_the_process_that_watches(here: Path) -> None:
    (here / "mine.py").write_text(MINE.format(off=0))
    with watching("--profile", "nightly", "--jobs", "1") as process:
        assert process.stdout is not None
        told = ""
        while "to be judged" not in told:
            told = process.stdout.readline()
            assert told
        process.terminate()
        rest = process.stdout.read()  # to the end of all that writes there
        assert process.wait(60) == 143
    assert "terminated, this is what was learned until then" in rest
