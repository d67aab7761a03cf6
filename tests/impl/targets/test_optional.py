"""Optional packages: whether one is installed is asked without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.targets.optional import absent, missing
from kernelproof.reference import MoEProblem


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("whole_package/inner", "half_package"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    (tmp_path / "whole_package" / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    (tmp_path / "one_file.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("module", ["whole_package", "whole_package.inner", "one_file"])
@pytest.mark.usefixtures("packages")
def test_what_is_installed_is_found_without_an_import(module: str) -> None:
    assert absent(module, "dist") is None
    assert not {"whole_package", "one_file"} & sys.modules.keys()


@pytest.mark.parametrize("module", ["nowhere_x", "nowhere_x.y", "half_package.inner", "one_file.y"])
@pytest.mark.usefixtures("packages")
def test_what_is_not_is_named_with_its_distribution(module: str) -> None:
    """A package of another distribution may have the same name, without the inner module."""
    said = absent(module, "a-distribution")
    assert said == (f"{module} is not installed: it comes with the optional package a-distribution")
    assert (said.code, said.about) == ("package", "a-distribution")


@pytest.mark.skipif(missing("flashinfer", "flashinfer") is not None, reason="no FlashInfer")
def test_a_call_that_needs_one_is_unsupported_before_its_first_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = MoEProblem(dtype="bfloat16", hidden=64, inter=64, num_experts=4, top_k=2)
    target = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
    found = find_implementation("flashinfer-cute-dsl-moe-bf16")
    claims = "kernelproof.impl.flashinfer.claims"
    monkeypatch.setattr(f"{claims}.absent", lambda *_: None)
    name = "flashinfer.fused_moe.cute_dsl_fused_moe_bf16"
    monkeypatch.setattr(name, print, raising=False)
    assert found.refusal(problem, target) is None
    monkeypatch.delattr(name)
    said = found.refusal(problem, target)
    assert said is not None
    assert (said.code, "has no cute_dsl_fused_moe_bf16" in said) == ("package", True)
    monkeypatch.setattr(f"{claims}.absent", lambda *_: absent("nowhere_x", "cutlass-x"))
    said = found.refusal(problem, target)
    assert said is not None
    assert (said.code, said.about) == ("package", "cutlass-x")
