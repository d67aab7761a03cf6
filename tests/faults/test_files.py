"""Malformed files: each is refused in one sentence that names it and the place, and stays."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import click
import pytest

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.cli import main
from kernelproof.impl.gating import load_rules
from kernelproof.tests.faults.files import CASE, FILES, READERS, SUFFIX, File

RULE_FILE = "rules.toml"


def resume(path: Path) -> None:
    """Go on from a journal."""
    with Journal(path) as journal:
        journal.start({}, resume=True)


def refusal(file: File, path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Have a file read, and return the sentence that refuses it."""
    command = READERS[file.reader][1]
    if " " in command:
        words = [each.format(file=path.name, folder=".") for each in command.split()]
        assert main(words) == 2, capfd.readouterr().err
        usage, _, said = capfd.readouterr().err.rpartition("Error: ")
        assert not usage or usage.startswith("Usage: "), usage
        return said.strip()
    module, _, name = command.partition(":")
    reader = getattr(import_module(f"kernelproof.{module}"), name)
    with pytest.raises((click.ClickException, ValueError)) as refused:
        resume(path) if reader is Journal else reader(path)
    assert getattr(refused.value, "exit_code", 2) == 2
    return str(refused.value)


def state(path: Path) -> object:
    """Return what must not change of a file."""
    if path.is_symlink() or not path.is_file():
        return path.lstat().st_mode if path.is_symlink() or path.exists() else None
    with path.open("rb") as file:
        return path.stat().st_size, file.read(1000)


def files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(each for each in folder.rglob("*") if not each.is_dir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.reader}: {file.name}")
def test_a_malformed_file_is_refused_and_stays(
    file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_rules.__globals__["_load"].cache_clear()
    (tmp_path / "case.json").write_text(json.dumps(CASE))
    path = tmp_path / f"file.{SUFFIX[READERS[file.reader][0]]}"
    if isinstance(file.make, bytes):
        path.write_bytes(file.make)
    else:
        file.make(path)
    before = state(path), files(tmp_path)
    said = refusal(file, path, capfd)
    assert "\n" not in said
    assert said.isprintable()
    assert "Traceback" not in said
    assert re.search(file.word, said), said
    assert re.search(r"file\.|absent|/dev/zero|case|No such", said), said
    assert (state(path), files(tmp_path)) == before


def test_there_are_enough_of_them() -> None:
    assert len(FILES) >= 200
    assert len({(file.reader, file.name) for file in FILES}) == len(FILES)
    assert {file.reader for file in FILES} == set(READERS)
