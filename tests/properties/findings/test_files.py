"""Folders of results are made where somebody has one already, and never at the root."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.properties.findings.files import Output, OutputError, make_folder

NOWHERE = Path("/surely-no-such-folder")


@pytest.mark.parametrize("inside", ["a.html", "deep/er/a.html"])
def test_no_folder_is_made_at_the_root(inside: str) -> None:
    for act in (Output.check, lambda output: output.write("text")):
        with pytest.raises(OutputError, match=f"--html .*{NOWHERE}: no such folder, and none is"):
            act(Output("--html", NOWHERE / inside))
    assert not NOWHERE.exists()


def test_folders_below_one_that_is_there_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "one" / "two")
    monkeypatch.chdir(tmp_path)
    make_folder(Path("three/four"))
    make_folder(Path("/"))
    assert (tmp_path / "one/two").is_dir()
    assert (tmp_path / "three/four").is_dir()
