"""A journal loses no answers: other files are refused, earlier answers are put aside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.console.errors import MachineError

IDENTITY = {"seed": 0}


def keep(path: Path, *questions: str, resume: bool = False) -> tuple[list[Any], list[str]]:
    """Ask questions, and give the answers and what was told."""
    told: list[str] = []
    with Journal(path) as journal:
        journal.start(IDENTITY, resume=resume, tell=told.append)
        return [journal.ask({"ask": each}, lambda: "new") for each in questions], told


def answers(path: Path) -> int:
    return path.read_bytes().count(b"\n") - 1


@pytest.mark.parametrize("text", ["notes\n", "notes", "{}\n", '{"schema": "other/1"}\n', "[]\n"])
def test_another_file_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    for resume in (False, True):
        with pytest.raises(JournalError, match=r"notes\.txt: is no journal of a run") as said:
            keep(path, resume=resume)
        assert said.value.exit_code == 2
    assert path.read_text() == text


def test_without_resume_earlier_answers_are_put_aside(tmp_path: Path) -> None:
    path, aside = tmp_path / "j.jsonl", tmp_path / "j.jsonl.old"
    assert keep(path, "a", "b") == (["new", "new"], [])
    earlier = path.read_bytes()
    assert keep(path, "a")[1] == [f"the answers of an earlier run are kept in {aside}"]
    assert aside.read_bytes() == earlier
    assert answers(path) == 1
    aside.write_text("mine\n")
    with pytest.raises(JournalError, match=r"j\.jsonl\.old: is no journal"):
        keep(path, "a")
    assert (aside.read_text(), answers(path)) == ("mine\n", 1)


def test_a_journal_is_one_comparisons(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.start(IDENTITY)
        with pytest.raises(JournalError, match="another run is writing it") as said:
            Journal(path)
        assert said.value.exit_code == 2
        journal.ask({"ask": "a"}, lambda: "mine")
    assert keep(path, "a", resume=True) == (["mine"], [])


def test_a_line_that_was_cut_off_is_dropped_and_a_bad_one_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j.jsonl"
    keep(path, "a", "b", "c")
    head, a, b, c = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + a + b[:9] + c + b)
    with pytest.raises(JournalError, match="line 3: is no line of a journal"):
        keep(path, resume=True)
    path.write_bytes(head + a + b[:-1])
    assert keep(path, resume=True) == ([], [])
    assert path.read_bytes() == head + a
    deep = b'{"question": "q", "digest": "", "answer": ' + b"[" * 100_000 + b"\n"
    other = a.replace(b'"new"', b'"old"')
    for bad in (b"[]\n", b'"text"\n', b'{"question": "q"}\n', b"\xff\n", deep, other):
        path.write_bytes(head + a + bad + c)
        with pytest.raises(JournalError, match=r"j\.jsonl: line 3: ") as said:
            keep(path, resume=True)
        assert "\n" not in str(said.value)
        assert path.read_bytes() == head + a + bad + c


def test_what_is_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., int] = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    keep(tmp_path / "j.jsonl", "a", "b")
    monkeypatch.undo()
    lines = (tmp_path / "j.jsonl").read_text().splitlines()
    assert [json.loads(line).get("answer") for line in lines] == [None, "new", "new"]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MachineError, match=r"j\.jsonl: cannot be written \(No space left"):
        keep(tmp_path / "j.jsonl", "a")


def test_a_line_that_a_full_disk_cut_off_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, written = tmp_path / "j.jsonl", os.write, iter((9, 0))

    def full(file: int, data: memoryview) -> int:
        if not (part := next(written)):
            raise OSError(28, "No space left on device")
        return write(file, data[:part])

    with Journal(path) as journal:
        journal.start(IDENTITY)
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(MachineError, match="No space left"):
            journal.ask({"ask": "a"}, lambda: "lost")
        monkeypatch.undo()  # there is room again for another thread's answer
        journal.ask({"ask": "b"}, lambda: "kept")
    assert keep(path, "a", "b", resume=True) == (["new", "kept"], [])


def test_nothing_to_go_on_from_is_told(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    said = [f"--resume: there is no journal at {path} yet; starting afresh"]
    assert keep(path, "a", resume=True) == (["new"], said)
    assert keep(path, "a", resume=True) == (["new"], [])


def test_what_was_not_started_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    keep(path, "a")
    before = path.read_bytes()
    with Journal(path) as journal:
        assert journal.ask({"ask": "b"}, lambda: 1) == 1
    assert path.read_bytes() == before
    with Journal(None) as journal:
        journal.start(IDENTITY)
        assert journal.ask({"ask": "b"}, lambda: 1) == 1
