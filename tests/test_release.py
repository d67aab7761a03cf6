"""What a release refuses; tests/test_packaging.py rehearses one that is right."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

PROJECT = '[tool.kernelproof]\naddress = "https://github.com/us/it/"\ncontact = "a@b.org"\n'
README = """[law](docs/laws.md#parity) ![picture](docs/a.svg) [![badge](b.svg)](CHANGELOG.md)
<img src="docs/c.svg"> <a href="docs/d.md"> [out](https://x.org/a.md) [here](#top)
[mail](mailto:a@b) ![docs/e.svg](docs/e.svg)
"""
ABSOLUTE = """[law](U/blob/v1.2/docs/laws.md#parity) ![picture](U/raw/v1.2/docs/a.svg) \
[![badge](U/raw/v1.2/b.svg)](U/blob/v1.2/CHANGELOG.md)
<img src="U/raw/v1.2/docs/c.svg"> <a href="U/blob/v1.2/docs/d.md"> [out](https://x.org/a.md) \
[here](#top)
[mail](mailto:a@b) ![docs/e.svg](U/raw/v1.2/docs/e.svg)
""".replace("U/", "https://github.com/us/it/")
METADATA = "Name: kernelproof\nProject-URL: Homepage, https://x.org\n\nText, [page]({})\n"


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """Make what a release reads of a checkout that is right."""
    shutil.copytree(repository / ".ci", tmp_path / ".ci")
    for name, text in {
        "pyproject.toml": PROJECT,
        "README.md": README,
        "CHANGELOG.md": "# Changelog\n\n## [1.2]\n",
        "__init__.py": '__version__ = "1.2"\n',
    }.items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path, "files") == (0, "")
    return tmp_path


def run(checkout: Path, *words: str | Path) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, checkout / ".ci" / "release.py", *words],
        check=False,
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stderr


def contents(checkout: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}


def test_links_and_addresses_are_made_of_one_place(checkout: Path) -> None:
    assert run(checkout, "prepare", "v1.2") == (0, "")
    assert (checkout / "README.md").read_text() == ABSOLUTE
    project = (checkout / "pyproject.toml").read_text()
    assert project.startswith(PROJECT)
    assert 'Changelog = "https://github.com/us/it/blob/main/CHANGELOG.md"\n' in project
    security = (checkout / ".github" / "SECURITY.md").read_text()
    assert "write to a@b.org" in security
    assert "](https://github.com/us/it/blob/main/docs/isolation.md)" in security
    issues = checkout / ".github" / "ISSUE_TEMPLATE"
    assert "https://github.com/us/it/security/policy" in (issues / "config.yml").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "https://github.com/us/it/", "", "address of [tool.kernelproof] must"),
        ("pyproject.toml", "https://", "http://", "must be the https address of a repository"),
        ("pyproject.toml", "a@b.org", "", "contact of [tool.kernelproof] must be a mail address"),
        ("__init__.py", "1.2", "1.3", "the tag is v1.2, but __init__.py says 1.3"),
        ("CHANGELOG.md", "[1.2]", "[Unreleased]", "CHANGELOG.md has no section '## [1.2]'"),
        (".github/SECURITY.md", "a@b", "c@d", "SECURITY.md is not what its template makes"),
    ],
)
def test_what_is_amiss_is_refused_and_nothing_is_changed(
    name: str, old: str, new: str, said: str, checkout: Path
) -> None:
    path = checkout / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = contents(checkout)
    code, message = run(checkout, "prepare", "v1.2")
    assert code == 2
    assert said in message
    assert message.count("\n") == 1
    assert contents(checkout) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"urls": False}, "has no addresses of the project"),
        ({"link": "docs/laws.md"}, "its description links to docs/laws.md"),
        ({"source": "tests/test_a.py"}, "strays in what was built: tests/test_a.py"),
        ({"wheel": "build/a.py"}, "strays in what was built: build/a.py"),
        ({"name": "kernelproof-1.3.tar.gz"}, "it must hold kernelproof-1.2-py3-none-any.whl and"),
    ],
)
def test_archives_that_are_not_fit_are_refused(
    change: dict[str, Any], said: str, checkout: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "dist"
    folder.mkdir()
    metadata = METADATA.format(change.get("link", "https://x.org/a"))
    with zipfile.ZipFile(folder / "kernelproof-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(change.get("wheel", "kernelproof/__init__.py"), "")
        text = metadata if change.get("urls", True) else metadata.replace("Project-URL", "X")
        wheel.writestr("kernelproof-1.2.dist-info/METADATA", text)
    with tarfile.open(folder / change.get("name", "kernelproof-1.2.tar.gz"), "w:gz") as source:
        inner = change.get("source", "__init__.py")
        source.addfile(tarfile.TarInfo(f"kernelproof-1.2/{inner}"), io.BytesIO())
    code, message = run(checkout, "check", folder)
    assert code == (2 if said else 0), message
    assert said in message


def test_the_repository_names_no_address_that_somebody_invented(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("release", repository / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    try:
        expected = release.community_files()
    except release.RefusedError:
        expected = {}  # not chosen yet: nothing that needs it is there
    written = {
        path
        for path in (repository / ".github").rglob("*")
        if path.is_file() and path.parent.name != "workflows"
    }
    assert written == set(expected)
    for path, text in expected.items():
        assert path.read_text(encoding="utf-8") == text
