"""Disagreements between the rules and a release are found, each way, and nothing else is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.ci.console.outputs import Outputs
from kernelproof.ci.releases.sandboxes import SandboxError
from kernelproof.ci.support import declared as declared_module
from kernelproof.ci.support.claims import claims
from kernelproof.ci.support.declared import (
    Disagreement,
    compare,
    compare_releases,
    disagreements,
)
from kernelproof.impl.gating import Rule, RuleBook, load_rules

CHIPS = [90, 100, 103, 107, 120]


def release(**sections: Any) -> dict[str, Any]:  # noqa: ANN401  sections of the declarations
    """Make the declarations of a release that says nothing but what is given."""
    tables = (
        "dispatch",
        "fmha_runner",
        "activations",
        "enums",
        "signatures",
        "xqa",
        "fa3",
        "targets",
    )
    lists = ("capabilities", "runners", "jit_filters", "fixed_flags", "python_checks", "configs")
    empty: dict[str, Any] = {
        "flashinfer": "0.6.7",
        "chips": CHIPS,
        "artifacts": {"paths": {}, "source": "flashinfer/artifacts.py:1"},
        "fused_moe_modules": {"modules": {}, "source": ""},
        **{name: {} for name in tables},
        **{name: [] for name in (*lists, "launcher_majors")},
    }
    return {**empty, **sections}


RUNNER = {"chips": {"values": [100, 103], "source": "fmhaRunner.cuh:30"}}


def allow(*chips: int, **fields: Any) -> Rule:  # noqa: ANN401  fields of a rule
    given: dict[str, Any] = {
        "id": "allow",
        "effect": "allow",
        "operation": ("mla",),
        "backend": ("trtllm-gen",),
        "reason": "it may",
        "source": "somewhere",
        "chips": chips,
    }
    return Rule(**{**given, **fields})


def found(declared: dict[str, Any], *rules: Rule) -> list[Disagreement]:
    """Compare about MLA alone, of which the runner's chips are all that is declared."""
    book = RuleBook(rules, {"0.6.7": {}})
    return [each for each in disagreements(declared, book) if "MLA" in each.topic]


def test_rules_that_say_the_same_disagree_in_nothing() -> None:
    assert found(release(fmha_runner=RUNNER), allow(100, 103)) == []


def test_a_rule_that_allows_too_much_is_found() -> None:
    (each,) = found(release(fmha_runner=RUNNER), allow(100, 103, 120))
    assert (each.kind, each.chip, each.rule, each.explained) == ("allowed", 120, "allow", False)
    assert each.declared == "TllmGenFmhaRunner checks for 100, 103"
    assert each.declared_in == "fmhaRunner.cuh:30"
    assert (
        "SM120 is supported by the rules (allow, declared), but flashinfer 0.6.7" in each.sentence
    )


def test_a_rule_that_refuses_without_a_report_is_found() -> None:
    refusal = allow(103, id="no", effect="refuse", evidence="declared")
    (each,) = found(release(fmha_runner=RUNNER), allow(100, 103), refusal)
    assert (each.kind, each.chip, each.rule, each.explained) == ("refused", 103, "no", False)


def test_a_rule_that_knows_of_a_report_is_explained() -> None:
    refusal = allow(103, id="hang", effect="refuse", evidence="reported")
    (each,) = found(release(fmha_runner=RUNNER), allow(100, 103), refusal)
    assert each.explained
    assert each.evidence == "reported"


def test_what_no_rule_speaks_of_is_found() -> None:
    (each,) = found(release(fmha_runner=RUNNER), allow(100))
    assert (each.kind, each.chip, each.rule, each.explained) == ("unknown", 103, "", False)


def test_a_filter_by_major_declares_nothing_of_chips_that_it_does_not_name() -> None:
    check = {"module": "xqa", "function": "xqa_mla", "test": "not in", "majors": [10]}
    declared = release(python_checks=[{**check, "message": "", "source": "xqa.py:1"}])
    assert [each.chip for each in found(declared)] == [100]
    named = [{**check, "message": "only on SM100 and SM103", "source": "xqa.py:1"}]
    assert [each.chip for each in found(release(python_checks=named))] == [100, 103]
    allowed = allow(100, 107, 120, backend=("xqa",))
    assert [(each.kind, each.chip) for each in found(declared, allowed)] == [("allowed", 120)]


def test_what_a_release_says_nothing_of_is_not_compared() -> None:
    everything = tuple(
        allow(id=backend, operation=("paged_attention", "mla"), backend=(backend,))
        for backend in ("fa3", "xqa", "cuda-core", "cutlass")
    )
    book = RuleBook(everything, {"0.6.7": {}})
    assert disagreements(release(), book) == []


def test_every_fact_about_one_call_counts() -> None:
    modules = {"modules": {"90": "gen_a", "100": "gen_b"}, "source": "core.py:1"}
    filters = {
        "generator": "gen_b",
        "chips": [120],
        "text": "[12]",
        "map_sm107_to_100f": False,
        "source": "jit.py:1",
    }
    activation: dict[str, Any] = {"cutlass": {"values": ["Relu2"], "source": "dispatch.h:1"}}
    enum: dict[str, Any] = {"ActivationType": {"members": {"Relu2": 6}, "source": "enums.py:1"}}
    declared = release(
        fused_moe_modules=modules, jit_filters=[filters], activations=activation, enums=enum
    )
    assert moe_admitted(declared, "relu2") == [90]  # 100's module compiles for major 12 alone
    activation["cutlass"]["values"] = []
    assert moe_admitted(declared, "relu2") == []
    assert moe_admitted(declared, "swiglu") == []  # the enum has no such member
    enum["ActivationType"]["members"]["Swiglu"] = 3
    assert moe_admitted(declared, "swiglu") == [90]


def moe_admitted(declared: dict[str, Any], activation: str) -> list[int | None]:
    return [
        claim.sm
        for claim in claims(declared)
        if (claim.feature.operation, claim.feature.backend) == ("moe", "cutlass")
        and (claim.feature.activation, claim.feature.quantisation) == (activation, "none")
        and claim.supported
    ]


def test_each_call_is_compared_once() -> None:
    seen = [(each.feature, each.sm) for each in claims(release(fmha_runner=RUNNER))]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("known", "kinds"),
    [
        ({"0.6.7": {"TRTLLM_GEN_FMHA": "e7afc4134"}}, []),
        ({"0.6.7": {"TRTLLM_GEN_FMHA": "55bba5592"}}, ["artifact/TRTLLM_GEN_FMHA"]),
        ({"0.6.7": {"GONE": "55bba5592"}}, ["artifact/GONE"]),
        ({"0.6.8": {}}, ["version"]),
    ],
)
def test_artifacts_and_versions_are_compared(known: dict[str, Any], kinds: list[str]) -> None:
    paths = {"TRTLLM_GEN_FMHA": "e7afc4134bb53eaab63fb85163d5943fb190621c/fmha/trtllm-gen/"}
    declared = release(artifacts={"paths": paths, "source": "flashinfer/artifacts.py:135"})
    listed = disagreements(declared, RuleBook((), known))
    assert [each.id for each in listed] == kinds
    assert all(each.kind == "data" and "flashinfer 0.6.7 says" in each.sentence for each in listed)


def test_what_cannot_be_had_does_not_keep_the_rest_from_being_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake_sandbox(given: str, *, tell: Callable[[str], None]) -> Path:
        tell(given)
        if given == "9.9":
            message = "9.9: there is none"
            raise SandboxError(message)
        return tmp_path

    monkeypatch.setattr(declared_module, "sandbox", fake_sandbox)
    monkeypatch.setattr(declared_module, "declarations", lambda _: release(fmha_runner=RUNNER))
    book = RuleBook((allow(100, 103, 120),), {"0.6.7": {}})
    path = tmp_path / "new" / "out.json"
    code = compare_releases(["9.9", "0.6.7"], book=book, outputs=Outputs({"--json": path}))
    printed = capsys.readouterr().out
    assert code == 2
    assert "9.9: there is none" in printed
    assert "allowed  trtllm-gen MLA  SM120  (allow, declared: somewhere)" in printed
    assert "flashinfer 0.6.7:" in printed
    written = json.loads(path.read_text())
    assert written["schema"] == "kernelproof/declared/1"
    assert [each["flashinfer"] for each in written["releases"]] == ["", "0.6.7"]
    kinds = {each["kind"] for each in written["releases"][1]["disagreements"]}
    assert "allowed" in kinds


def test_a_release_that_does_not_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise OSError('libcuda is gone')")
    told = compare(str(tmp_path), book=RuleBook(()))
    assert told.code == 3
    assert told.failure.endswith("cannot be introspected: OSError: libcuda is gone")


@pytest.fixture(scope="module")
def installed(installed_declarations: dict[str, Any]) -> dict[str, Any]:
    return installed_declarations


def test_the_shipped_rules_allow_nothing_that_the_installed_release_refuses(
    installed: dict[str, Any],
) -> None:
    bad = [each for each in disagreements(installed) if not each.explained]
    assert [each.sentence for each in bad] == []


LIES: dict[str, Callable[[Rule], bool]] = {
    "trtllm-gen attention": lambda rule: (
        "trtllm-gen" in rule.backend and "paged_attention" in rule.operation
    ),
    "XQA": lambda rule: "xqa" in rule.backend and "paged_attention" in rule.operation,
    "group sizes without tensor cores": lambda rule: "cuda-core" in rule.backend,
    "CUTLASS MoE by activation": lambda rule: "cutlass" in rule.backend and "moe" in rule.operation,
    "trtllm-gen MoE by quantisation": lambda rule: (
        "trtllm-gen" in rule.backend and "moe" in rule.operation
    ),
    "b12x MoE": lambda rule: "b12x" in rule.backend,
}


@pytest.mark.parametrize("topic", LIES)
def test_rules_that_forget_their_conditions_are_found(
    installed: dict[str, Any], topic: str
) -> None:
    book = load_rules()
    rules = [
        replace(rule, chips=(), when={}, versions={})
        if rule.effect == "allow" and LIES[topic](rule)
        else rule
        for rule in book.rules
        if rule.effect == "allow" or not LIES[topic](rule)
    ]
    told = disagreements(installed, RuleBook(tuple(rules), book.versions))
    assert any(each.kind == "allowed" and each.topic == topic for each in told)


def test_rules_that_forget_a_permission_are_found(installed: dict[str, Any]) -> None:
    book = load_rules()
    rules = tuple(rule for rule in book.rules if "xqa" not in rule.backend)
    told = disagreements(installed, RuleBook(rules, book.versions))
    assert any(each.kind == "unknown" and each.topic == "XQA" for each in told)


def test_a_stale_artifact_hash_is_found(installed: dict[str, Any]) -> None:
    changed = copy.deepcopy(installed)
    paths = changed["artifacts"]["paths"]
    paths["TRTLLM_GEN_FMHA"] = "0" * 40 + "/fmha/trtllm-gen/"
    told = [each.id for each in disagreements(changed) if each.kind == "data"]
    assert told == ["artifact/TRTLLM_GEN_FMHA"]
