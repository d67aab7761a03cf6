"""The journal of a comparison: what it goes by, and what its answers depend on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernelproof.ci.answers import identity
from kernelproof.ci.answers.journal import Journal, JournalError
from kernelproof.ci.bump.command import Request, bump
from kernelproof.ci.bump.sides import releases
from kernelproof.ci.bump.sides.releases import Release


def test_a_refused_comparison_takes_nothing_from_the_running_one(tmp_path: Path) -> None:
    path, results = tmp_path / "j.jsonl", tmp_path / "j.tensors"
    results.mkdir()
    with Journal(path), pytest.raises(JournalError):
        bump(Request("old", "new", "", journal=path))
    assert results.is_dir()


def test_interpreters_have_journals_of_their_own() -> None:
    def name(baseline: str, candidate: str) -> str:
        return Request(baseline, candidate, "").journal_path.name

    assert name("0.6.13", "0.7.2") == "0.6.13-0.7.2-cpu.jsonl"
    one, other = (name(f"/opt/{env}/bin/python", "/opt/c/bin/python") for env in ("a", "b"))
    assert one.startswith("python-python-")
    assert one != other


def release(folder: Path, text: str = "", record: str = "") -> Release:
    """Write a release that was given as a folder."""
    (folder / "flashinfer" / "__pycache__").mkdir(parents=True, exist_ok=True)
    (folder / "flashinfer" / "__init__.py").write_text(text)
    metadata = folder / "flashinfer_python-9.9.1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "RECORD").write_text(record)
    return Release(str(folder), folder, sys.executable, (str(folder),))


def test_a_release_that_was_built_again_is_another(tmp_path: Path) -> None:
    one = releases.release_identity(release(tmp_path, "a = 1"))
    assert one.startswith("9.9.1, files ")
    (tmp_path / "flashinfer" / "__pycache__" / "x.pyc").touch()
    assert releases.release_identity(Release(*_fields(tmp_path, str(tmp_path)))) == one
    assert releases.release_identity(release(tmp_path, "a = 10")) != one
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    assert releases.release_identity(release(tmp_path)).endswith(", torch-2.9.1")


def test_a_version_is_what_was_installed(tmp_path: Path) -> None:
    record = "flashinfer/__init__.py,sha256=abc,1\n../../bin/flashinfer,sha256={}\n"
    found = []
    for text, bin_hash, version in (("", 1, "a"), ("changed", 2, "a"), ("", 1, "b")):
        release(tmp_path, text, record.format(bin_hash).replace("abc", version))
        found.append(releases.release_identity(Release(*_fields(tmp_path, "9.9.1"))))
    assert found[0] == found[1] != found[2]


def _fields(folder: Path, given: str) -> tuple[str, Path, str, tuple[str, ...]]:
    return given, folder, sys.executable, (str(folder),)


def test_own_code_and_implementations_in_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("subject.py").write_text("merge = 1")
    names = ["subject.py:merge", "torch-route"]
    one = releases.identity_of({}, names)
    assert one.keys() == {"code of kernelproof", "implementation subject.py"}
    Path("subject.py").write_text("merge = 2")
    other = releases.identity_of({}, names)
    assert one["code of kernelproof"] == other["code of kernelproof"]
    assert one["implementation subject.py"] != other["implementation subject.py"]
    monkeypatch.setattr(identity, "ANSWERING", ("fixtures/support",))
    assert releases.identity_of({}, [])["code of kernelproof"] != one["code of kernelproof"]


def test_a_module_of_an_implementation_counts_wherever_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file, name in (
        ("mine/inner/a.py", "mine.inner.a"),
        ("mine/inner/__init__.py", "mine.inner"),
    ):
        found = []
        for text in ("merge = 1", "merge = 2"):
            (tmp_path / file).write_text(text)
            found.append(identity.code_identity([f"{name}:merge"])[f"implementation {name}"])
        assert found[0] != found[1]
    assert identity.code_identity(["nowhere.at.all:merge"]).keys() == {"code of kernelproof"}
