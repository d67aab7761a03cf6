"""FlashInfer's plan functions as implementations: refusals anywhere, plans where nvcc is."""

from __future__ import annotations

import shutil
from importlib import util
from pathlib import Path

import pytest

from kernelproof.impl import Target, UnsupportedError, find_implementation
from kernelproof.impl.flashinfer import planning
from kernelproof.impl.targets.cache import CACHE_VARIABLE
from kernelproof.reference import PlanProblem, materialise
from kernelproof.reference.problems.plan import FAMILIES
from kernelproof.reference.tensors.plan import LAYOUTS

CPU = Target.here("cpu")
needs_release = pytest.mark.skipif(
    shutil.which("nvcc") is None or util.find_spec("flashinfer") is None,
    reason="there is no nvcc on the PATH, or no FlashInfer",
)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    planning.compiler.cache_clear()
    monkeypatch.setattr(planning, "version", lambda: "0.7.2")
    monkeypatch.setattr(planning, "_data", Path)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_without_nvcc_it_is_unsupported(family: str) -> None:
    found = find_implementation(f"flashinfer-plan-{family}")
    refusal = found.refusal(PlanProblem(family), CPU)
    planning.compiler.cache_clear()
    assert refusal == "there is no nvcc: install CUDA's compiler, or set CUDA_HOME"
    assert (refusal.code, refusal.about) == ("package", "nvcc")


def test_other_machines_and_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = planning.unavailable(Target(sm=90))
    assert gpu == "plan functions are host code: a CPU judges them"
    monkeypatch.setattr(planning, "_data", Path)
    monkeypatch.setattr(planning, "version", lambda: "0.6.7")
    old = planning.unavailable(CPU)
    assert old == "plans of flashinfer 0.6.7 have another layout: >=0.6.13,<0.8 is known"
    monkeypatch.setattr(planning, "version", lambda: "0.9.0")
    assert "another layout" in (planning.unavailable(CPU) or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_has_what_the_planner_reads(family: str) -> None:
    arrays, numbers = planning._call(PlanProblem(family))
    assert len(numbers) == {"decode": 7, "fa2": 13, "fa3": 10, "mla": 4}[family]
    assert len(arrays) == {"decode": 1, "fa2": 2, "fa3": 3, "mla": 3}[family]


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho 'x.cu(1): error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    header = tmp_path / "include" / "flashinfer" / "attention" / "scheduler.cuh"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "compiler", lambda: str(script))
    monkeypatch.setattr(planning, "_data", lambda: tmp_path)
    planning.library.cache_clear()
    place = planning.library()
    planning.library.cache_clear()
    assert place.parent.parent == tmp_path / "cache" / "launchers"
    with pytest.raises(UnsupportedError, match=r"cannot be built: x.cu\(1\): error: no such thing"):
        planning.build(place)
    assert not place.exists()


@needs_release
@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_release_plans(family: str) -> None:
    planning.compiler.cache_clear()
    found = find_implementation(f"flashinfer-plan-{family}")
    problem = PlanProblem(family, (1,), (300,), group_size=8)
    assert found.refusal(problem, CPU) is None
    vector = found(materialise(problem))
    assert len(vector) == len(LAYOUTS[family])
    assert Path(planning.library()).is_file()
