"""Disagreements between rules and what a release selects, with answers that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelproof.ci.binaries.flashinfer.asking import Answer, Selection
from kernelproof.ci.binaries.flashinfer.kernels import Kernel, KernelList
from kernelproof.ci.binaries.flashinfer.listing import LISTED
from kernelproof.ci.binaries.flashinfer.questions import calls_of
from kernelproof.ci.support import selected as selected_module
from kernelproof.ci.support.command import support
from kernelproof.ci.support.selected import Selected, compare_binaries, disagreements
from kernelproof.impl.gating import Feature, Rule, RuleBook, load_rules
from kernelproof.impl.gating.rules import SELECTED

DECODE = Feature("paged_attention", "trtllm-gen", kv_layout="HND", group_size=8)
ERROR = "RuntimeError: Missing TRTLLM-GEN kernel"


def kernel(name: str, digest: str = "ab") -> Kernel:
    return Kernel(name, "100f", 4096, digest * 32, {})


def listed(*kernels: Kernel) -> KernelList:
    return KernelList("0123abcd" * 5, Path("include"), Path("cubins"), kernels)


def selection(*raises: int, feature: Feature = DECODE, signal: int = 0) -> Selection:
    """Return the answers of a kind of which some calls, by their number, raise."""
    if signal:
        return Selection(feature, 103, (), signal)
    answers = [
        Answer(call, error=ERROR)
        if number in raises
        else Answer(call, "k", (2, 8, 1), cluster=1, block=384, shared=4096)
        for number, call in enumerate(calls_of(feature))
    ]
    return Selection(feature, 103, tuple(answers))


def answered(*selections: Selection, level: str = SELECTED, version: str = "0.6.13") -> Selected:
    return Selected(version, level, listed(kernel("k")), selections)


def rule(effect: str, **fields: Any) -> Rule:  # noqa: ANN401  fields of a rule
    given: dict[str, Any] = {
        "id": effect,
        "effect": effect,
        "operation": ("paged_attention",),
        "backend": ("trtllm-gen",),
        "chips": (103,),
        "reason": "it is so",
        "source": "somewhere",
    }
    return Rule(**{**given, **fields})


def found(answers: Selected, *rules: Rule) -> list[tuple[str, bool]]:
    book = RuleBook(rules, {"0.6.13": {}})
    return [(each.kind, each.explained) for each in disagreements(answers, book)]


def test_a_permission_is_held_to_every_call_of_a_kind() -> None:
    allow = rule("allow")
    assert found(answered(selection()), allow) == []
    for raises in ([0], range(5)):
        assert found(answered(selection(*raises)), allow) == [("allowed", False)]
    (some,) = disagreements(answered(selection(3)), RuleBook((allow,), {"0.6.13": {}}))
    assert "raises for 1 of 5 calls (batch 1, 1 query tokens, 32768 keys, 8 KV" in some.sentence


def test_a_refusal_is_held_to_a_launch_unless_a_launch_says_nothing_of_its_reason() -> None:
    allow = rule("allow")
    assert found(answered(selection()), allow, rule("refuse")) == [("refused", False)]
    for called in (("hangs",), ("wrong",)):
        assert found(answered(selection()), allow, rule("refuse", called=called)) == [
            ("refused", True)
        ]
    assert found(answered(selection(*range(5))), rule("refuse")) == []


def test_what_runs_and_no_rule_speaks_of_is_found_unless_it_is_only_listed() -> None:
    assert found(answered(selection())) == [("unknown", False)]
    assert found(answered(selection(), level=LISTED)) == []


def test_a_kind_in_which_the_host_dies_is_counted_and_not_named() -> None:
    dies = answered(selection(signal=8), selection())
    (one,) = disagreements(dies, RuleBook((rule("allow"),), {"0.6.13": {}}))
    assert (one.kind, one.feature) == ("allowed", None)
    assert "group_size" not in one.id + one.sentence
    kept = dies.to_json()
    assert kept["dies"] == {"103": 1}
    assert len(kept["cells"]) == 1


def test_what_the_machine_lacks_is_no_answer_of_the_release() -> None:
    error = "ModuleNotFoundError: No module named 'cutlass'"
    lacks = [Answer(call, error=error) for call in calls_of(DECODE)]
    assert found(answered(Selection(DECODE, 103, tuple(lacks))), rule("allow")) == []


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(support, list(words), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_launcher_that_passes_another_struct_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KernelList, "parameter_bytes", {"100f": 1280, "120": 1152})
    for passed, code in ((1280, 0), (1152, 1), (0, 0)):
        answers = replace(answered(selection()), passed_bytes=passed)
        monkeypatch.setattr(selected_module, "select", lambda *_, answers=answers, **__: answers)
        assert answers.misfits(103) == ({"100f": 1280} if code else {})
        book = RuleBook((rule("allow"),), {"0.6.13": {}})
        assert compare_binaries("0.6.13", [103], {}, book=book) == code
        told = capsys.readouterr().out
        assert ("SM103: the launcher passes 1,152 bytes" in told) == bool(code)


def test_only_what_the_api_can_be_asked_is_asked() -> None:
    for words, said in (
        (["--sm", "90"], "--sm: --binaries asks about SM100, SM103, not SM90"),
        (["--soft-cap"], "it asks trtllm-gen attention, MoE and GEMMs"),
        (["--backend", "fa2"], "it asks trtllm-gen attention, MoE and GEMMs"),
    ):
        code, printed = run("--binaries", "0.6.13", *words)
        assert (code, said in printed) == (2, True), printed


def test_one_call_is_answered_by_its_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def select(given: str, features: list[Feature], chips: list[int], **_: object) -> Selected:
        asked.append((given, features, chips))
        return answered(selection(0))

    monkeypatch.setattr(selected_module, "select", select)
    file = tmp_path / "selected.json"
    words = ["--binaries", "0.6.13", "--sm", "103", "--group-size", "8", "--json", str(file)]
    assert support.main(words, standalone_mode=False) == 1
    assert asked == [("0.6.13", [DECODE], [103])]
    data = json.loads(file.read_text(encoding="utf-8"))
    (cell,) = data["cells"]
    assert (data["level"], cell["outcome"]) == (SELECTED, "raises for some")
    assert data["kernels"] == {"k": {"build": "100f", "shared_memory": 4096, "sha256": "ab" * 32}}
    assert Feature(backend="trtllm-gen", **cell["feature"]) == DECODE
    assert len(cell["calls"]) == 5
    assert [each["kind"] for each in data["disagreements"]] == ["allowed"]
    _, printed = run(*words)
    assert "k, built for sm_100f, cluster 1, 4,096 bytes of shared memory, sha256 abab" in printed
    assert "batch 8, 1 query tokens, 1024 keys, 8 KV heads\n" in printed
    assert "32768 keys, 8 KV heads, grid 2x8x1" in printed
    assert "SM103: 1 raises for some" in printed


def test_a_hang_keeps_its_refusal_and_says_whether_the_fix_ships_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for digest, same in (("ab", 1), ("cd", 0)):
        monkeypatch.setattr(
            selected_module, "kernels_of", lambda *_, of=digest, **__: listed(kernel("k", of))
        )
        book = load_rules()
        hangs = answered(selection(), version="0.6.7")
        disagreement = disagreements(hangs, book)
        assert [(each.rule, each.explained) for each in disagreement] == [
            ("trtllm-gen-sm103-hang", True)
        ]
        (line,) = selected_module.same_bits(hangs, disagreement, book)
        assert line == (
            "trtllm-gen-sm103-hang: 0.6.7.post2, which is not refused, ships the same bits for "
            f"{same} of these 1 kind of call; only a run on the chip admits one"
        )
