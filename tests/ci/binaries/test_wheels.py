"""`support --binaries` and `bump` on wheels, made-up ones of device code written by the test."""

from __future__ import annotations

import io
import json
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.ci.binaries.wheels.libraries import read_library
from kernelproof.ci.bump.behaviour.shipped import binary_findings
from kernelproof.ci.bump.verdicts.findings import Chip
from kernelproof.ci.cli import main
from kernelproof.impl.gating import Target
from kernelproof.impl.targets.cache import CACHE_VARIABLE
from kernelproof.tests.ci.binaries.device_code import (
    PRINTS,
    RETURNS,
    WHOLE,
    cubin,
    elf,
    entry,
    library,
    ptx,
)

GEMM, NORM, OTHER = "_ZN3our4gemmIiEEvPT_", "_ZN3our4normEPf", "_ZN3our4gemmIfEEvPT_"
STORES = "st.global.u32 [%rd1], 1;\nret;"
Kernels = Mapping[str, Sequence[int]]


def lib(targets: Mapping[str, Kernels], jit: Mapping[str, str] | None = None) -> bytes:
    """Return a library of the kernels of each target, and of PTX of SM80."""
    entries = [entry(2, name, cubin(name, kernels), "zstd") for name, kernels in targets.items()]
    return library([*entries, *([entry(1, "80", ptx("80", jit))] if jit else [])])


OLD = lib(
    {"90": {GEMM: PRINTS, NORM: WHOLE}, "90a": {GEMM: WHOLE, NORM: WHOLE},
     "100f": {GEMM: WHOLE, NORM: WHOLE}}
)  # fmt: skip
NEW = lib({"90": {GEMM: PRINTS, NORM: WHOLE}, "100f": {GEMM: WHOLE, NORM: WHOLE}})
"""As OLD, without the code for ``sm_90a``."""


def wheel(folder: Path, version: str, libraries: Mapping[str, bytes], cpu: str = "aarch64") -> Path:
    """Write a wheel of sglang-kernel."""
    path = folder / f"sglang_kernel-{version}-cp310-abi3-manylinux2014_{cpu}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sgl_kernel/__init__.py", "")
        for name, data in libraries.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache where wheels for aarch64 are found without a network."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "wheels" / "aarch64"


def asked(*words: str) -> int:
    return main(["support", "--binaries", *words])


def test_what_each_chip_gets_of_a_wheel(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    libraries = {
        "sgl_kernel/common_ops.abi3.so": NEW,
        "sgl_kernel/jit.so": lib({"80": {NORM: WHOLE}}, {NORM: STORES, GEMM: STORES}),
        "sgl_kernel/jit.so.1": lib({"80": {NORM: WHOLE}}, {NORM: STORES, GEMM: STORES}),
        "sgl_kernel/host.so": elf([(".text", 1, b"code", 0)]),
    }
    wheel(kept, "0.4.4", libraries)
    words = ("sglang-kernel==0.4.4", "--cpu", "arm64", "--json", "a.json", "--markdown", "a.md")
    assert asked(*words, "--sm", "86,90,B300") == 0
    told = capsys.readouterr().out
    assert len(told.splitlines()) <= 25
    assert "2 libraries with CUDA code, 4 kernels" in " ".join(told.split())
    assert "SM90: 1 native, 1 stub; stubs: our::gemm 1" in told
    assert "SM103: 2 family" in told
    assert "SM86: 1 family, 1 JIT" in told
    assert "sm_80 1, compute_80 (ISA 8.7) 2" in told.replace("\n", " ")
    data = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert (data["schema"], data["cpu"]) == ("kernelproof/binaries/1", "aarch64")
    kernels = {each["name"]: each for each in data["libraries"][0]["kernels"]}
    assert kernels[GEMM]["chips"] == {"86": "nothing", "90": "stub", "103": "family"}
    assert {each["target"] for each in kernels[GEMM]["bodies"]} == {"sm_90", "sm_100f"}
    assert "- SM90: our::gemm 1" in Path("a.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.whl"], "none.whl: there is no such wheel or folder; of a package write"),
        (["text.txt"], "text.txt: is no wheel, no folder, and no package such as"),
        (["bad.whl"], "bad.whl: is no wheel that can be read"),
        (["hurt.whl"], "hurt.whl: is no wheel that can be read"),
        (["sglang-kernel==x"], "sglang-kernel==x: is no package and version"),
        (["a==1", "--cpu", "sparc"], "--cpu: cpu is 'sparc'; it must be x86_64 or aarch64"),
        (["host.whl"], "host.whl: holds no library with CUDA code"),
        (["cut.whl"], "cut.whl: a.so: it is no ELF file, or it is cut short"),
        (["host.whl", "--sm", "cpu"], "--sm cpu: --binaries is about GPUs"),
        (["x_aarch64.whl", "--cpu", "x86_64"], "--cpu x86_64: x_aarch64.whl is a wheel for aarch"),
    ],
)
def test_what_cannot_be_read_is_named_in_a_sentence(
    words: list[str], sentence: str, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del kept
    Path("text.txt").write_text("", encoding="utf-8")
    Path("bad.whl").write_bytes(b"no zip file")
    with zipfile.ZipFile("hurt.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.so", NEW)
    hurt = bytearray(Path("hurt.whl").read_bytes())
    hurt[60:90] = bytes(30)  # of the packed library
    Path("hurt.whl").write_bytes(hurt)
    Path("x_aarch64.whl").write_bytes(b"")
    for name, data in {"host.whl": elf([(".text", 1, b"", 0)]), "cut.whl": NEW[:-100]}.items():
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("a.so", data)
    assert asked(*words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_without_a_network_the_folder_is_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(*words: object, **more: object) -> SimpleNamespace:
        del words, more
        said = io.StringIO("Retrying after connection broken by an error\nERROR: No match.\n")
        return SimpleNamespace(stdout=said, wait=lambda: 1, poll=lambda: 1)

    monkeypatch.setattr(subprocess, "Popen", pip)
    assert asked("sglang-kernel==0.4.9", "--cpu", "aarch64") == 3
    told = "".join(capsys.readouterr().err.split())
    assert f"orputthewheelinto{kept}" in told


def changes(before: bytes, after: bytes, *chips: int) -> dict[tuple[str, tuple[Chip, ...]], int]:
    old, new = (read_library(each, "x/ops.so") for each in (before, after))
    assert old is not None
    assert new is not None
    found = binary_findings([old], [new], chips)
    return {(each.change, each.chips): each.count for each in found}


SEEDED = {
    "a target that went": (NEW, ("kernel-stub", (90,))),
    "a body that is empty": (
        lib({"90a": {GEMM: RETURNS, NORM: WHOLE}, "100f": {GEMM: WHOLE, NORM: WHOLE}}),
        ("kernel-stub", (90,)),
    ),
    "a body that is empty on all chips": (
        lib({"90a": {GEMM: RETURNS, NORM: WHOLE}, "100f": {GEMM: RETURNS, NORM: WHOLE}}),
        ("kernel-stub", (90, 103)),
    ),
    "one chip instead of its family": (
        lib({"90a": {GEMM: WHOLE, NORM: WHOLE}, "100a": {GEMM: WHOLE, NORM: WHOLE}}),
        ("kernel-lost", (103,)),
    ),
    "a kernel that went": (
        lib({"90a": {GEMM: WHOLE}, "100f": {GEMM: WHOLE, NORM: WHOLE}}),
        ("kernel-lost", (90,)),
    ),
    "PTX instead of code": (
        lib({"90a": {GEMM: WHOLE, NORM: WHOLE}}, {GEMM: STORES, NORM: STORES}),
        ("kernel-jit", (103,)),
    ),
    "other template arguments": (
        lib({"90a": {OTHER: WHOLE, NORM: WHOLE}, "100f": {OTHER: WHOLE, NORM: WHOLE}}),
        ("kernel-replaced", (90, 103)),
    ),
}


@pytest.mark.parametrize("fault", SEEDED)
def test_seeded_faults_are_found(fault: str) -> None:
    after, expected = SEEDED[fault]
    assert changes(OLD, OLD, 90, 103) == {}
    assert expected in changes(OLD, after, 90, 103)


def test_kernels_of_one_name_in_several_files_have_each_its_chips() -> None:
    hidden = [f"_GLOBAL__N__{each * 8}_4_a_cu_{each * 8}" for each in "12"]
    hopper, blackwell = (f"_ZN3our{len(each)}{each}4normEPf" for each in hidden)
    same = lib({"90a": {hopper: WHOLE}, "100f": {blackwell: WHOLE}})
    assert changes(same, same, 90, 100) == {}
    assert changes(same, lib({"100f": {blackwell: WHOLE}}), 90, 100) == {("kernel-lost", (90,)): 1}


def test_a_library_in_another_folder_is_the_same_library() -> None:
    old, new = read_library(OLD, "x/lib/ops.so"), read_library(NEW, "x/ops.so")
    assert old is not None
    assert new is not None
    (found,) = (
        each for each in binary_findings([old], [new], [90]) if each.change != "kernel-gained"
    )
    assert found.message.endswith("; the library is x/ops now")
    assert found.candidate["targets"]


def test_a_bump_says_what_became_stubs(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version, data in {"0.4.3": OLD, "0.4.4": NEW}.items():
        wheel(kept, version, {"sgl_kernel/common_ops.abi3.so": data})
    words = ["bump", "--package", "sglang-kernel", "0.4.3", "0.4.4", "--cpu", "aarch64"]
    assert main([*words, "--sm", "90,100", "--json", "report.json"]) == 1
    report: dict[str, Any] = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "bump with conditions"
    assert [(each["chip"], each["verdict"]) for each in report["chips"]] == [
        (90, "do not bump"),
        (100, "bump"),
    ]
    (found,) = report["findings"]
    assert (found["change"], found["action"], found["count"]) == ("kernel-stub", "block", 1)
    assert "targets that went: sm_90a" in found["message"]
    capsys.readouterr()
    assert main([*words[:3], "0.4.4", *words[4:], "--sm", "90", "--journal", "other"]) == 0
    assert main(["bump", "1", "2", "--cpu", "aarch64"]) == 2
    assert "--cpu does not apply to flashinfer-python" in capsys.readouterr().err


def test_a_target_knows_its_processor() -> None:
    assert Target(sm=90, cpu="ARM64").cpu == "aarch64"
    assert Target(sm=90) != Target(sm=90, cpu="aarch64")
    assert "cpu" not in Target(sm=90).to_json()
    assert Target(sm=90, cpu="x86_64").to_json()["cpu"] == "x86_64"
    with pytest.raises(ValueError, match="cpu is 'sparc'; it must be x86_64 or aarch64"):
        Target(sm=90, cpu="sparc")
