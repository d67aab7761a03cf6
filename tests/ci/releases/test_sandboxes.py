"""Side folders hold whole releases or nothing, and say in one sentence why there is none."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from kernelproof.ci.console.errors import MACHINE, USAGE
from kernelproof.ci.releases import sandboxes
from kernelproof.ci.releases.packages import KERNELS_PACKAGE, PACKAGES
from kernelproof.ci.releases.sandboxes import SandboxError, sandbox
from kernelproof.impl.targets.cache import cache_folder

PACKAGE = {"flashinfer/__init__.py": "__version__ = '0.0.1'\n"}


def wheel(
    folder: Path, files: dict[str, str], version: str = "0.0.1", name: str = "flashinfer_python"
) -> Path:
    """Make a wheel that pip takes for FlashInfer, or another package."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    held = {
        **files,
        # Never to be installed beside it.
        f"{information}/METADATA": f"{head}Requires-Dist: no-such-distribution-at-all\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in held.items()]
    held[f"{information}/RECORD"] = "\n".join([*records, f"{information}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in held.items():
            archive.writestr(file, text)
    return path


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a cache of its own, and no network."""
    monkeypatch.setenv("KERNELPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache"


def left(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "flashinfer").glob("*")) if cache.exists() else []


def test_a_version_is_installed_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "links", PACKAGE)
    told: list[str] = []
    folder = sandbox("0.0.1", tell=told.append)
    assert folder == cache / "flashinfer" / "0.0.1"
    assert (folder / "flashinfer" / "__init__.py").read_text() == PACKAGE["flashinfer/__init__.py"]
    assert "installing" in told[0]
    assert "installed in" in told[-1]
    monkeypatch.setattr(subprocess, "Popen", None)
    told.clear()
    assert sandbox("v0.0.1", tell=told.append) == folder  # another spelling of it
    assert told == []
    assert left(cache) == ["0.0.1"]


def test_a_wheel_is_known_by_what_it_holds(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sandbox(wheel(tmp_path / "one", PACKAGE))
    other = sandbox(str(wheel(tmp_path / "two", {"flashinfer/__init__.py": "other = 1\n"})))
    assert (other / "flashinfer" / "__init__.py").read_text() == "other = 1\n"
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / "three").mkdir()
    renamed = tmp_path / "three" / "renamed.whl"
    next((tmp_path / "one").iterdir()).rename(renamed)
    assert sandbox(renamed) == first
    assert left(cache) == sorted([first.name, other.name])


ENGINE = {"vllm/__init__.py": "", "vllm/ops/merge.py": "x = 1\n", "vllm/_C.abi3.so": "binary"}


@pytest.mark.parametrize("given", ["0.0.1", "a wheel"])
def test_of_an_engine_only_python_files_are_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    made = wheel(tmp_path / "links", ENGINE, name="vllm")
    folder = sandbox(str(made) if given == "a wheel" else given, PACKAGES["vllm"])
    kept = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert kept == {
        "vllm/__init__.py",
        "vllm/ops/merge.py",
        "vllm-0.0.1.dist-info/METADATA",
        "vllm-0.0.1.dist-info/RECORD",
    }
    assert [each.name for each in (cache / "vllm").iterdir()] == [folder.name]
    monkeypatch.setattr(subprocess, "Popen", None)
    assert sandbox("0.0.1" if given == "0.0.1" else made, PACKAGES["vllm"]) == folder


def test_of_precompiled_kernels_one_of_each_build_is_kept() -> None:
    folder = f"flashinfer_cubin/cubins/{'ab' * 20}/fmha/trtllm-gen"
    first, *others = (
        f"{folder}/fmhaSm100fKernel_{name}.cubin" for name in ("H128Causal", "H128Dense", "H64")
    )
    own = f"{folder}/fmhaSm103aKernel_H128Causal.cubin"
    header = f"{folder}/include/flashInferMetaInfo.h"
    gemm = f"flashinfer_cubin/cubins/{'cd' * 20}/batched_gemm-1/Bmm_Bfloat16.cubin"
    names = [header, first, *others, own, gemm]
    assert KERNELS_PACKAGE.keeps(names) == [header, first, own]
    assert PACKAGES["vllm"].keeps([*names, "vllm/a.py"]) == ["vllm/a.py"]


def test_what_is_no_wheel_of_an_engine_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "vllm-0.0.1-py3-none-any.whl"
    broken.write_text("no zip")
    with pytest.raises(
        SandboxError, match=r"vllm-0.0.1\S+ cannot be installed \(File is not a zip"
    ):
        sandbox(broken, PACKAGES["vllm"])
    with pytest.raises(SandboxError, match="holds no package vllm"):
        sandbox(wheel(tmp_path / "other", PACKAGE), PACKAGES["vllm"])


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    package = tmp_path / "side" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert sandbox(tmp_path / "side") == tmp_path / "side"
    assert sandbox(str(package)) == tmp_path / "side"


def test_the_installed_version_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        installed = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        pytest.skip("flashinfer-python is not installed")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert sandbox(installed) == sandboxes.installed_folder()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("99.0", r"flashinfer-python==99.0: cannot be installed \(No matching distribution"),
        ("0.6.x", "0.6.x: is no version such as 0.6.7.post2, no wheel and no folder"),
        ("gone.whl", r"gone.whl: cannot be read \(No such file"),
        (".", "holds no package flashinfer"),
    ],
)
def test_what_cannot_be_had_is_named(given: str, sentence: str, cache: Path) -> None:
    with pytest.raises(SandboxError, match=sentence) as raised:
        sandbox(given)
    assert raised.value.exit_code == USAGE
    assert "\n" not in raised.value.message
    assert left(cache) == []


def test_a_broken_wheel_is_named(tmp_path: Path, cache: Path) -> None:
    broken = tmp_path / "flashinfer_python-0.0.1-py3-none-any.whl"
    broken.write_text("no archive")
    with pytest.raises(SandboxError, match=r"flashinfer_python-0.0.1.*: cannot be installed \("):
        sandbox(broken)
    with pytest.raises(SandboxError, match="the wheel holds no package flashinfer"):
        sandbox(wheel(tmp_path / "empty", {"other/__init__.py": ""}))
    assert left(cache) == []


def test_an_index_that_cannot_be_reached_is_the_machines_fault(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(sandboxes, "PIP_FLAGS", (*sandboxes.PIP_FLAGS, "--retries=1"))
    with pytest.raises(SandboxError, match="the package index cannot be reached") as raised:
        sandbox("0.0.1")
    assert raised.value.exit_code == MACHINE
    assert left(cache) == []


def test_a_full_disk_is_one_short_sentence() -> None:
    said = "shutil.Error: [" + "('a', 'b', '[Errno 28] No space left on device')," * 1000
    error = sandboxes._failure("flashinfer-python==0.0.1", ["ERROR: Exception:", said])
    assert error.message == (
        "flashinfer-python==0.0.1: cannot be installed (no space left on the device)"
    )
    assert error.exit_code == MACHINE


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELPROOF_CACHE", str(tmp_path / "file"))
    with pytest.raises(SandboxError, match=r"flashinfer/0.0.1 cannot be written \(") as raised:
        sandbox("0.0.1")
    assert raised.value.exit_code == MACHINE


def test_installations_at_once_share_the_result(tmp_path: Path, cache: Path) -> None:
    wheel(tmp_path / "links", PACKAGE)
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: sandbox("0.0.1"), range(3)))
    assert folders == {cache / "flashinfer" / "0.0.1"}
    assert left(cache) == ["0.0.1"]


def test_what_a_killed_installation_left_is_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "links", PACKAGE)
    (cache / "flashinfer" / ".0.0.1-abandoned").mkdir(parents=True)
    monkeypatch.setattr(sandboxes, "ABANDONED_SECONDS", -1)
    sandbox("0.0.1")
    assert left(cache) == ["0.0.1"]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELPROOF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/kernelproof")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kernelproof"
