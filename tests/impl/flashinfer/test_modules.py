"""What releases generate for chips: a made-up release, and the one that is installed."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from kernelproof.ci.compile import generating
from kernelproof.ci.compile.generating import Plan, Release, plan_units
from kernelproof.ci.compile.nvcc import Nvcc
from kernelproof.impl.flashinfer import modules
from kernelproof.impl.flashinfer.modules import UNITS, Unit, architecture
from kernelproof.impl.gating.feature import Feature

BY_NAME = {unit.name: unit for unit in UNITS}
PAGE = """\
import os
class Module:
    name = "page"
    def get_compile_commands(self):
        arch = os.environ["FLASHINFER_CUDA_ARCH_LIST"].replace(".", "")
        flags = f"-gencode=arch=compute_{arch}a,code=sm_{arch}a " + os.getenv("FLASHINFER_X", "")
        return [{"file": f, "command": f"nvcc -c {f} {flags} -o x.o"} for f in (SOURCE, "a.cpp")]
def gen_page_module():
    return Module()
"""
CASCADE = """\
def gen_cascade_module():
    raise RuntimeError("No supported CUDA architectures found for major versions [10].")
"""
FP4 = """\
from .page import Module
class Elsewhere(Module):
    def get_compile_commands(self):
        return [{"file": "k.cu", "command": "nvcc -c k.cu -gencode=arch=compute_90a,code=sm_90a"}]
def gen_fp4_kv_quantization_module():
    return Elsewhere()
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Nvcc:
    """A compiler that knows its version and nothing else: nothing is compiled here."""
    program = tmp_path / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n", encoding="utf-8")
    program.chmod(0o755)
    return Nvcc(program, "13.0.88", tmp_path / "cuda")


@pytest.fixture
def release(tmp_path: Path) -> Release:
    folder = tmp_path / "release"
    jit = folder / "flashinfer" / "jit"
    jit.mkdir(parents=True)
    source = jit / "page.cu"
    source.write_text("// nothing\n", encoding="utf-8")
    (folder / "flashinfer" / "__init__.py").write_text("__version__ = '0.6.7'\n", encoding="utf-8")
    (jit / "__init__.py").touch()
    (jit / "page.py").write_text(f"SOURCE = {str(source)!r}\n{PAGE}", encoding="utf-8")
    (jit / "cascade.py").write_text(CASCADE, encoding="utf-8")
    (jit / "fp4_kv_quantization.py").write_text(FP4, encoding="utf-8")
    return Release("0.6.7", folder)


def ask(release: Release, sm: int, compiler: Nvcc, tmp_path: Path) -> dict[str, Plan]:
    workspace = tmp_path / "workspace" / str(sm)
    plans = plan_units(release, sm, UNITS, nvcc=compiler, workspace=workspace)
    return {plan.unit.name: plan for plan in plans}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_evidence_for_a_cell_that_there_can_be(unit: Unit) -> None:
    Feature(**unit.feature)  # type: ignore[arg-type]  # it checks them
    assert set(unit.feature) <= {each.name for each in dataclasses.fields(Feature)}
    assert unit.name == unit.name.lower()


def test_units_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(UNITS)


@pytest.mark.parametrize(("sm", "expected"), [(90, "9.0"), (103, "10.3"), (121, "12.1")])
def test_a_chip_as_flashinfer_lists_it(sm: int, expected: str) -> None:
    assert architecture(sm) == expected


def test_a_release_is_asked_in_a_process_of_its_own(
    release: Release, compiler: Nvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_X", "--flag-of-the-user")
    plans = ask(release, 103, compiler, tmp_path)
    page = plans["append-paged-kv"]
    assert (page.state, page.architectures) == ("generated", ("sm_103a",))
    [job] = page.jobs  # the host compiler's file is none
    assert (job.source, job.command[0]) == ("page.cu", "nvcc")
    assert "--flag-of-the-user" not in job.command
    merge = plans["merge-state"]
    assert (merge.state, merge.jobs) == ("refused", ())
    assert merge.message.startswith("RuntimeError: No supported CUDA architectures found")
    quantise = plans["nvfp4-kv-quantise"]
    assert quantise.state == "other-chip"
    assert quantise.message == "it is built for sm_90a whatever the chip"
    assert plans["xqa-bf16-hd128"].state == "absent"


@pytest.mark.parametrize(
    ("module", "state"), [("flashinfer.jit.page", "absent"), ("torch.flashinfer", "broken")]
)
def test_a_function_is_absent_where_a_module_of_flashinfer_lacks_it(
    module: str, state: str
) -> None:
    unit = dataclasses.replace(UNITS[0], generate=lambda _: ModuleType(module).generates)
    assert modules.generate(unit, 90)["state"] == state


def test_the_key_of_an_object_follows_what_is_compiled_and_not_where(
    release: Release, compiler: Nvcc, tmp_path: Path
) -> None:
    source = tmp_path / "unit.cu"
    source.write_text("// nothing\n", encoding="utf-8")

    def key(*flags: str, workspace: str = "/a/b", version: str = "13.0.88") -> str:
        words = ["nvcc", "-c", f"{workspace}/unit.cu", f"-I{workspace}/generated", *flags]
        newer = dataclasses.replace(compiler, version=version)
        roots = {workspace: "workspace"}
        return generating._key(release, UNITS[0], source, words, newer, roots)

    before = key()
    assert before == key(workspace="/c/d/e")
    assert before != key("-O0")
    assert before != key(version="13.1.48")
    source.write_text("// something\n", encoding="utf-8")
    assert before != key()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ImportError('no tvm_ffi')", "cannot be asked: ImportError: no tvm_ffi"),
        ("__version__ = '0.6.8'", "another release is in the way: 0.6.8"),
    ],
)
def test_a_release_that_cannot_be_asked(
    text: str, message: str, release: Release, compiler: Nvcc, tmp_path: Path
) -> None:
    (release.folder / "flashinfer" / "__init__.py").write_text(f"{text}\n", encoding="utf-8")
    plans = ask(release, 90, compiler, tmp_path)
    assert {plan.state for plan in plans.values()} == {"broken"}
    assert all(message in plan.message for plan in plans.values())


def test_the_installed_release_generates_for_chips_that_are_not_here(
    compiler: Nvcc, tmp_path: Path
) -> None:
    try:
        installed = metadata.distribution("flashinfer-python")
    except metadata.PackageNotFoundError:
        pytest.skip("flashinfer-python is not installed")
    release = Release(installed.version, Path(str(installed.locate_file(""))))
    plans = ask(release, 121, compiler, tmp_path)
    states = {name: plan.state for name, plan in plans.items()}
    assert states.pop("prefill-fa3-bf16-hd128") == "other-chip"
    assert set(states.values()) == {"generated"}, plans
    assert plans["moe-cutlass-bf16-relu2"].jobs[0].source == "moe_gemm_kernels_bf16_bf16.cu"
    assert {job.source for job in plans["decode-bf16-hd128"].jobs} >= {"batch_decode_kernel.cu"}
