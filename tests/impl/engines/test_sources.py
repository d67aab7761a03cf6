"""Files of a made-up engine are loaded one by one; its packages' own code is never run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kernelproof.impl import Target
from kernelproof.impl.engines.sources import find, load, missing_file
from kernelproof.impl.targets.target import UnsupportedError, installed_version
from kernelproof.impl.targets.unpacked import FROM, packages_in

FILE = "vllm.ops.merge"
SOURCE = """
from vllm.helpers import twice
from vllm.platforms import platform

import vllm.envs as envs


def merge(value):
    from vllm.late import more

    return more(twice(value)), platform, envs.FAST


def wants_more():
    return envs.SLOW


def wants_nothing():
    return hasattr(envs, "SLOW"), getattr(envs, "SLOW", 7)
"""


def stubs() -> Mapping[str, Mapping[str, object]]:
    return {"vllm.platforms": {"platform": "a stub"}, "vllm.envs": {"FAST": True}}


def engine(folder: Path, *, version: str = "1.2.3", source: str = SOURCE) -> Path:
    """Write an unpacked wheel whose packages cannot be imported."""
    for inner in ("", "ops", "platforms"):
        (folder / "vllm" / inner).mkdir(parents=True)
        init = folder / "vllm" / inner / "__init__.py"
        init.write_text("raise SystemExit('an __init__ was run')", encoding="utf-8")
    (folder / "vllm" / "ops" / "merge.py").write_text(source, encoding="utf-8")
    (folder / "vllm" / "helpers.py").write_text("def twice(x): return 2 * x", encoding="utf-8")
    (folder / "vllm" / "late.py").write_text("def more(x): return x + 1", encoding="utf-8")
    text = f"version: str\n__version__ = version = '{version}'\n"
    (folder / "vllm" / "_version.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = engine(tmp_path / "unpacked")
    monkeypatch.setenv(FROM, str(folder))
    return folder


@pytest.mark.usefixtures("named")
def test_a_file_is_loaded_with_its_real_neighbours_and_the_stubs() -> None:
    with load(FILE, stubs) as kernels:
        assert kernels.merge(20) == (41, "a stub", True)
        assert kernels.wants_nothing() == (False, 7)
    with load(FILE, stubs) as again:
        assert again is kernels
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@pytest.mark.usefixtures("named")
def test_the_engine_that_somebody_has_imported_stays_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = type(sys)("vllm")
    monkeypatch.setitem(sys.modules, "vllm", theirs)
    with load(FILE, stubs):
        assert sys.modules["vllm"] is not theirs
    assert sys.modules["vllm"] is theirs


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from vllm.platforms import other", "cannot import name 'other' from 'vllm.platforms'"),
        ("import vllm.envs as e; e.SLOW", "the adapter's stub of vllm.envs has no SLOW"),
        ("import vllm.nowhere", "No module named 'vllm.nowhere'"),
        ("from vllm.ops import name", "cannot import name 'name' from 'vllm.ops'"),
        ("import nowhere_x", "No module named 'nowhere_x'"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setenv(FROM, str(engine(tmp_path, source=source)))
    with pytest.raises(UnsupportedError) as raised, load(FILE, stubs):
        pass
    assert str(raised.value).startswith(f"vllm/ops/merge.py of vllm 1.2.3: {said}")
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("named")
def test_a_stub_that_lacks_something_at_the_call_says_so() -> None:
    said = "vllm/ops/merge.py of vllm 1.2.3: the adapter's stub of vllm.envs has no SLOW"
    with pytest.raises(UnsupportedError, match=said), load(FILE, stubs) as kernels:
        kernels.wants_more()


def test_an_absent_engine_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FROM, raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    said = missing_file(FILE)
    hint = "install it, or name a folder with its files by --from (or in KERNELPROOF_FROM)"
    assert said == f"vllm is not installed: {hint}"
    assert said is not None
    assert (said.code, said.about) == ("package", "vllm")
    with pytest.raises(UnsupportedError, match="vllm is not installed"), load(FILE, stubs):
        pass


@pytest.mark.usefixtures("named")
def test_a_release_without_the_file_is_no_finding() -> None:
    said = missing_file("vllm.ops.other")
    assert said == "vllm 1.2.3 has no vllm/ops/other.py"
    assert said.code == "package"
    said = missing_file(("vllm.new", "vllm.old"))
    assert said == "vllm 1.2.3 has no vllm/new.py or vllm/old.py"


@pytest.mark.usefixtures("named")
def test_a_file_that_moved_is_found_where_this_release_has_it() -> None:
    with load(("vllm.attention.merge", FILE), stubs) as kernels:
        assert kernels.__name__ == FILE


def test_an_installed_engine_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FROM, raising=False)
    folder = engine(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    found = find("vllm")
    assert found is not None
    assert found.folder == folder / "vllm"
    with load(FILE, stubs) as kernels:
        assert kernels.merge(1)[0] == 3


@pytest.mark.parametrize("inside", ["", "python", "src"])
def test_the_version_is_read_from_what_lies_beside(tmp_path: Path, inside: str) -> None:
    own, source, wheel = (tmp_path / name for name in ("own", "source", "wheel"))
    roots = [engine(folder / inside) for folder in (own, source, wheel)]
    for folder in (source, wheel):
        (folder / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.4\n", encoding="utf-8")
    beside = roots[-1] / "vllm-1.2.5.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text("Name: vllm\nVersion: 1.2.5\n", encoding="utf-8")
    titles = [found.title for folder in (own, source, wheel) for found in packages_in(folder)]
    assert titles == ["vllm 1.2.3", "vllm 1.2.4", "vllm 1.2.5"]


def test_the_version_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel's METADATA has hundreds of lines, and thousands of problems ask for support."""
    folder = engine(tmp_path)
    assert packages_in(folder)
    monkeypatch.setattr(Path, "read_text", None)
    assert [each.title for each in packages_in(folder)] == ["vllm 1.2.3"]


def test_a_folder_without_a_version_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engine(tmp_path)
    (folder / "vllm" / "_version.py").unlink()
    monkeypatch.setenv(FROM, str(folder))
    assert installed_version("vllm") is None
    assert missing_file("vllm.x") == "vllm (of unknown version) has no vllm/x.py"


def test_the_first_folder_that_has_the_engine_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    named = [tmp_path / "empty", engine(tmp_path / "a"), engine(tmp_path / "b", version="2.0")]
    monkeypatch.setenv(FROM, os.pathsep.join(map(str, named)))
    assert Target().version_of("vLLM") == installed_version("vllm") == "1.2.3"
    assert installed_version("torch")


def test_a_file_of_any_package_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "other_engine" / "ops"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    text = "from other_engine.utils import twice\n\ndef merge(x):\n    return twice(x) + 1\n"
    (package / "merge.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv(FROM, str(tmp_path))
    assert [each.name for each in packages_in(tmp_path)] == ["other_engine"]
    with load("other_engine.ops.merge", other_stubs) as kernels:
        assert kernels.merge(3) == 7


def other_stubs() -> Mapping[str, Mapping[str, object]]:
    return {"other_engine.utils": {"twice": lambda x: 2 * x}}
