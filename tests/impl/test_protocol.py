"""The protocol: what the decorator refuses, and how an implementation refuses a problem."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelproof
from kernelproof.impl import (
    OPERATIONS,
    Arithmetic,
    Implementation,
    Target,
    UnsupportedError,
    implementation,
)
from kernelproof.impl.protocol import EVERY_RULE, Operation
from kernelproof.impl.targets.optional import missing, require
from kernelproof.impl.targets.target import installed_version
from kernelproof.properties.laws.general import expectation_of
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem, MergeProblem, Problem, materialise, oracle

HERE = Target.here()
PAGED = AttentionProblem()


def nothing(inputs: Any) -> None:  # noqa: ANN401  any record
    del inputs


class Anywhere:
    """Stages that nobody watches."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        del name
        yield


def made(operation: Operation = "paged_attention", **options: Any) -> Implementation:  # noqa: ANN401
    return implementation(operation, name="mine", **options)(nothing)


class TestDecorator:
    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_it_makes_an_implementation_that_can_be_called(self, operation: Operation) -> None:
        @implementation(operation, name="doubles")
        def double(inputs: int) -> int:
            return 2 * inputs

        assert isinstance(double, Implementation)
        assert (double.operation, double.name) == (operation, "doubles")
        assert double(4) == 8
        assert double.function(4) == 8

    def test_what_is_not_said_is_plain(self) -> None:
        plain = made()
        assert plain.features == frozenset()
        assert plain.arithmetic == Arithmetic()
        assert (plain.writes_out, plain.supports, plain.compile_key) == (False, None, None)
        assert (plain.tile, plain.split) == (0, 0)

    @pytest.mark.parametrize("operation", ["", "attention", "paged_attention ", "PAGED_ATTENTION"])
    def test_an_unknown_operation_is_refused(self, operation: Operation) -> None:
        with pytest.raises(ValueError, match=r"operation is .*.* it must be one of ") as caught:
            made(operation)
        assert "merge_state" in str(caught.value)

    @pytest.mark.parametrize("features", [["sinks"], ("custom_mask", "causal"), {"Custom_mask"}])
    def test_an_unknown_feature_is_refused(self, features: Any) -> None:  # noqa: ANN401
        with pytest.raises(ValueError, match=r"features names \['") as caught:
            made(features=features)
        assert "fields.md" in str(caught.value)

    @pytest.mark.parametrize("given", [{"tile": -1}, {"split": -64}])
    def test_fewer_keys_than_none_are_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="they must be numbers of keys, or 0"):
            made("paged_attention", **given)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"build_ahead": "gpu"}, "build_ahead is 'gpu'; it must be True, False, 'cpu' or"),
            ({"build_compilers": 0}, "build_compilers is 0 and build_minutes 1.0; they must be at"),
            ({"build_minutes": 0.0}, "build_compilers is 4 and build_minutes 0.0; they must be at"),
        ],
    )
    def test_modules_that_nobody_can_build_are_refused(
        self, given: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ValueError, match=said):
            implementation("merge_state", name="mine", **given)

    def test_a_flag_is_unset_by_a_line_of_the_engine_only(self) -> None:
        line = {"USE_TD": "vllm/attention.py:12"}
        assert made(unset_flags=line).unset_flags == line
        with pytest.raises(TypeError, match="it must be a mapping of flags to an engine's FILE:L"):
            made(unset_flags={"USE_TD": "nobody sets it"})

    @pytest.mark.parametrize("name", ["a\nCONFORMING", "\x1b[2K", "\ud800"])
    def test_a_name_that_steers_a_terminal_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="it must hold no control characters"):
            implementation("merge_state", name=name)

    def test_an_unknown_arithmetic_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Arithmetic\.accumulate is 'fp32'"):
            Arithmetic(accumulate="fp32")

    def test_options_are_given_by_name(self) -> None:
        with pytest.raises(TypeError):
            implementation("paged_attention", "mine")  # type: ignore[call-arg]


class TestRefusal:
    def test_of_another_operation(self) -> None:
        assert made().refusal(PAGED, HERE) is None
        said = made().refusal(MergeProblem(), HERE)
        assert said == "mine implements paged_attention, not merge_state"
        assert (said.code, said.about) == ("operation", "merge_state")

    @pytest.mark.parametrize("feature", ["custom_mask", "per_head_scales"])
    def test_of_a_feature_that_it_does_not_name(self, feature: str) -> None:
        options: dict[str, Any] = {feature: True}
        problem = AttentionProblem(**options)
        said = made().refusal(problem, HERE)
        assert said == f"mine does not name the feature {feature}"
        assert (said.code, said.about) == ("feature", feature)
        assert made(features=[feature]).refusal(problem, HERE) is None

    @pytest.mark.parametrize(
        ("answer", "refusal"),
        [
            (True, None),
            ("no bf16 on sm_70", "no bf16 on sm_70"),
            (False, "mine.supports said no"),
            ("", "mine.supports said no"),
        ],
    )
    def test_of_its_own(self, answer: bool | str, refusal: str | None) -> None:
        said = made(supports=lambda _p, _t: answer).refusal(PAGED, HERE)
        assert said == refusal
        assert said is None or (said.code, said.about) == ("supports", "")

    def test_of_its_own_that_has_a_code(self) -> None:
        absent = missing("surely_not_installed", "triton")
        said = made(supports=lambda _p, _t: absent or True).refusal(PAGED, HERE)
        assert said is not None
        assert said is absent
        assert (said.code, said.about) == ("package", "surely_not_installed")

    def test_of_the_rules(self) -> None:
        fp8 = replace(PAGED, kv_cache="float8_e4m3fn")
        asked = made(features=["fp8_kv"], backend="fa3")
        said = asked.refusal(fp8, Target(sm=103, flashinfer="0.6.7", cuda="13.0"))
        assert said is not None
        assert (said.code, said.about) == ("machine", "")  # no rule allows any call there

        latent = replace(PAGED, head_dim_qk=24, head_dim_vo=16, values_in_keys=True)
        said = made(features=["mla"], backend="triton").refusal(latent, Target(sm=90))
        assert said is not None
        assert (said.code, said.about) == ("rules", "")  # but calls that are not latent

        said = made(backend="fa2").refusal(PAGED, Target(sm=90, flashinfer="0.6.13", cuda="13.0"))
        assert said is not None
        assert (said.code, said.about) == ("rules", "fa2-head-dim-not-multiple-of-64")

    def test_rules_are_asked_of_the_backend_that_the_chip_gets(self) -> None:
        asked = made(chosen_backend=lambda target: "fa3" if target.sm == 90 else "fa2")
        hopper, ada = (Target(sm=sm, flashinfer="0.6.13", cuda="13.0") for sm in (90, 89))
        assert [asked.backend_on(each) for each in (hopper, ada)] == ["fa3", "fa2"]
        said = asked.refusal(PAGED, ada)
        assert said is not None
        assert (said.code, said.about) == ("rules", "fa2-head-dim-not-multiple-of-64")
        assert asked.refusal(PAGED, ada, without_rules=[EVERY_RULE]) is None
        with pytest.raises(ValueError, match="there is a chosen_backend; name one of the two"):
            made(backend="fa2", chosen_backend=lambda _: "fa2")

    def test_rules_are_asked_of_the_call_that_is_made(self) -> None:
        target = Target(sm=90, flashinfer="0.6.13", cuda="13.0")
        wide = replace(
            PAGED,
            head_dim_qk=128,
            head_dim_vo=128,
            q_dtype="float8_e4m3fn",
            kv_cache="float8_e4m3fn",
            dtype="bfloat16",
        )
        features = ["fp8_kv", "fp8_q"]
        assert made(features=features, backend="fa2").refusal(wide, target) is not None
        given = made(features=features, backend="fa2", ruled_as={"q_dtype": "", "q_scale": 1.0})
        assert given.refusal(wide, target) is None
        assert given.feature_of(wide, target).q_dtype == "bfloat16"

    def test_it_is_asked_about_this_problem_on_this_target(self) -> None:
        asked: list[tuple[Problem, Target]] = []

        def supports(problem: Problem, target: Target) -> bool:
            asked.append((problem, target))
            return True

        made(supports=supports).refusal(PAGED, HERE)
        assert asked == [(PAGED, HERE)]

    def test_nothing_is_asked_about_a_problem_of_another_operation(self) -> None:
        def attention_only(problem: AttentionProblem, *_: Target) -> Any:  # noqa: ANN401
            return problem.head_dim_qk

        mine = made(
            supports=attention_only, compile_key=attention_only, kernels=lambda problem: [problem]
        )
        assert (
            mine.refusal(MergeProblem(), HERE) == "mine implements paged_attention, not merge_state"
        )
        assert mine.module_of(MergeProblem()) == ""
        assert mine.module_of(PAGED) == repr(PAGED.head_dim_qk)


class TestProvider:
    def test_is_the_distribution_that_installed_the_module(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def from_module(name: str) -> Implementation:
            monkeypatch.setattr(nothing, "__module__", name)
            return made()

        assert from_module("torch.nn.functional").provider == "torch"
        assert from_module("torch.nn.functional").provider_version == installed_version("torch")
        assert from_module("kernelproof.anything").provider == "kernelproof"
        assert from_module("kernelproof.anything").provider_version == kernelproof.__version__
        assert from_module("my_kernels").provider == ""
        assert from_module("my_kernels").provider_version is None

    def test_may_be_named(self) -> None:
        adapter = made(provider="torch")
        assert adapter.provider == "torch"
        assert adapter.provider_version == installed_version("torch")
        assert replace(adapter, backend="fa2").provider == "torch"
        absent = made(provider="surely-not-installed")
        assert (absent.provider, absent.provider_version) == ("surely-not-installed", None)


class TestTarget:
    def test_here(self) -> None:
        assert HERE.device == "cpu"
        assert HERE.sm is None
        assert HERE.torch == installed_version("torch")
        assert HERE.to_json()["device"] == "cpu"
        assert set(HERE.to_json()) == set(vars(HERE)) - {"providers", "cpu", "_asked"}

    def test_the_versions_of_providers_are_those_that_were_asked_for(self) -> None:
        here = Target.here("cpu")
        assert here.version_of("PyTest") == pytest.__version__
        assert here.version_of("surely-not-installed") is None
        asked = {"pytest": pytest.__version__, "surely-not-installed": None}
        assert here.to_json()["providers"] == asked
        assert here == HERE
        there = Target(**here.to_json())  # type: ignore[arg-type]  # fields by name
        assert there.version_of("pytest") == pytest.__version__
        assert there.version_of("flashinfer-python") == here.flashinfer

    def test_no_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(UnsupportedError, match="torch sees no CUDA device"):
            Target.here("cuda")

    def test_a_distribution_that_is_absent_has_no_version(self) -> None:
        assert installed_version("surely-not-installed") is None


class TestOptional:
    def test_what_is_there(self) -> None:
        assert missing("json", "suite") is None
        assert require("json", "suite").__name__ == "json"

    def test_what_is_not(self) -> None:
        said = missing("surely_not_installed.kernels", "flashinfer")
        assert said == (
            "surely_not_installed.kernels cannot be imported (surely_not_installed is missing): "
            "python -m pip install '.[flashinfer]' in a clone of kernelproof brings it"
        )
        with pytest.raises(UnsupportedError, match="cannot be imported"):
            require("surely_not_installed.kernels", "flashinfer")

    def test_what_fails_on_import(self, tmp_path: Any, monkeypatch: Any) -> None:  # noqa: ANN401
        (tmp_path / "fails_on_import.py").write_text("raise OSError('libcuda.so.1: not found')")
        monkeypatch.syspath_prepend(tmp_path)
        said = missing("fails_on_import", "triton")
        assert said == "fails_on_import fails on import: OSError: libcuda.so.1: not found"


IMPORTS = """
import sys, torch
def refuse(*args, **kwargs):
    raise AssertionError("CUDA was asked about")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refuse
import kernelproof.impl
import kernelproof.impl.registry
for name in kernelproof.impl.BUILT_IN:
    kernelproof.impl.find_implementation(name)
assert not torch.cuda.is_initialized()
loaded = {name.partition(".")[0] for name in sys.modules}
found = loaded & {"flashinfer", "triton", "hypothesis", "pytest", "click", "rich"}
print(sorted(found))
"""


def test_importing_touches_neither_cuda_nor_what_is_optional() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_wide_values_may_be_rounded_otherwise() -> None:
    plain, wide = Arithmetic(probabilities="inputs"), Arithmetic(exponent="fused")
    mine = made(arithmetic=plain, wide_arithmetic=((64, wide),))
    given = [mine.arithmetic_of(channels) for channels in (16, 63, 64, 512)]
    assert given == [plain, plain, wide, wide]
    subject = Subject(mine, Target.here("cpu"), Anywhere())
    grid = AttentionProblem(regime="exact_grid")
    assert subject.exact(grid)
    assert not subject.exact(replace(grid, head_dim_qk=64, head_dim_vo=64))
    for operation in ("paged_attention", "ragged_attention"):
        for channels, rounds in ((16, plain), (64, wide)):
            problem = replace(grid, operation=operation, head_dim_vo=channels, dtype="bfloat16")
            inputs: Any = materialise(problem)
            expected = oracle.bounded_attention(inputs, rounds)
            found = expectation_of(subject, problem, inputs)
            assert torch.equal(found.bound.out, expected.bound.out)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"name": object()}, "name is <object object at .*>; it must be str"),
        ({"arithmetic": "float32"}, "arithmetic is 'float32'; it must be Arithmetic"),
        ({"provider": ["a"]}, r"provider is \['a'\]; it must be str"),
        ({"split": float("nan")}, "split is nan; it must be int"),
    ],
)
def test_what_is_declared_has_its_type(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        implementation("merge_state", **{"name": "mine", **declared})
