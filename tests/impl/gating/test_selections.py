"""Rules are held to what releases select on chips, and a kept selection is evidence of a call."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproof.fixtures import EVIDENCE, files_of
from kernelproof.impl.gating import Feature, Target, decide, load_rules
from kernelproof.impl.gating.knowledge import EvidenceError
from kernelproof.impl.gating.rules import CALLED, SELECTED
from kernelproof.impl.gating.selections import (
    ATTENTION,
    GEMM,
    MOE,
    RAISES,
    RAISES_FOR_SOME,
    RUNS,
    packed,
    read_selections,
)

DECODE = Feature("paged_attention", "trtllm-gen", kv_layout="HND", group_size=8)
MLA = Feature("mla", "trtllm-gen", head_dim_qk=576, head_dim_vo=512, page_size=64, group_size=16)
EXPERTS = Feature("moe", "trtllm-gen", quantisation="nvfp4")
SWEEP = "kernelproof: support --binaries"
KEPT = files_of(EVIDENCE, "selected-*.json")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_no_rule_contradicts_what_a_release_selects(path: Path) -> None:
    selections = read_selections(path, EvidenceError)
    target = Target(sm=selections.sm, flashinfer=selections.flashinfer)
    wrong = []
    for feature, outcome in selections.kinds():
        decision = decide(feature, target)
        rule = decision.ruling.rule
        if outcome != RUNS:
            agrees = not decision.supported
        else:
            # A rule that knows of hangs or wrong values is not refuted by a launch.
            agrees = decision.supported or (rule is not None and rule.called != CALLED[:1])
        if not agrees:
            wrong.append((outcome, str(feature), decision.status, decision.rule))
    assert wrong == []


def test_both_chips_of_a_release_before_and_after_the_hang_are_kept() -> None:
    kept = {path.stem for path in KEPT}
    assert kept >= {
        f"{part}-sm{sm}-{of}"
        for part in ("selected", "selected-moe", "selected-gemm")
        for sm in (100, 103)
        for of in ("0.6.7", "0.6.13")
    }


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_the_launcher_answers_is_of_its_own_level(path: Path) -> None:
    selections = read_selections(path, EvidenceError)
    target = Target(sm=selections.sm, flashinfer=selections.flashinfer)
    levels = Counter[tuple[bool, bool]]()
    for feature, outcome in selections.kinds():
        decision = decide(feature, target)
        rule = decision.ruling.rule
        # No rule need speak of what raises, and a hang or wrong values are nobody's selection.
        if rule is None or (not decision.supported and CALLED[0] not in rule.called):
            continue
        if decision.supported == (outcome == RUNS):
            levels[decision.supported, decision.evidence == SELECTED] += 1
    assert not levels[True, False]
    assert not levels[False, False]
    hangs = (selections.sm, selections.flashinfer) == (103, "0.6.7")
    attention = selections.part == ATTENTION
    least = {ATTENTION: -1 if hangs else 3000, MOE: 70, GEMM: 3}[selections.part]
    assert levels[True, True] > least
    # Of MoE and GEMMs, no rule speaks of most of what raises.
    assert levels[False, True] > (100 if attention and not hangs else -1)


def test_a_rule_that_rests_on_a_sweep_says_so() -> None:
    swept = [each for each in load_rules().rules if each.source.startswith(SWEEP)]
    assert len(swept) > 10
    assert [each.id for each in swept if each.evidence != SELECTED] == []


def test_what_is_packed_is_read_again(tmp_path: Path) -> None:
    outcomes = {
        DECODE: RUNS,
        replace(DECODE, page_size=128, group_size=1): RAISES,
        replace(DECODE, window=True): RAISES_FOR_SOME,
        MLA: RUNS,
    }
    file = tmp_path / "selected.json"
    file.write_text(json.dumps(packed(103, "0.6.13", "ab" * 20, outcomes)), encoding="utf-8")
    read = read_selections(file, EvidenceError)
    assert (read.sm, read.flashinfer, read.artifact) == (103, "0.6.13", "ab" * 20)
    for feature, outcome in outcomes.items():
        assert read.outcome(feature) == outcome
    # Latent attention has no layout, and paged attention was asked about one.
    assert read.outcome(replace(MLA, kv_layout="HND")) == RUNS
    for other in (
        replace(DECODE, kv_layout="NHD"),
        replace(DECODE, page_size=128),  # a combination that was not asked about
        replace(DECODE, page_size=32),
        replace(DECODE, sinks=True),
        replace(DECODE, q_dtype="float16", kv_dtype="float16"),
    ):
        assert read.outcome(other) == ""
    data = json.loads(file.read_text(encoding="utf-8"))
    for spoilt, said in (
        ({**data, "schema": "other"}, "schema is not"),
        ({**data, "kinds": [{**data["kinds"][0], "outcomes": "rx"}]}, r"kinds\[0\]\.outcomes"),
        ({**data, "sm": "103"}, "sm"),
    ):
        file.write_text(json.dumps(spoilt), encoding="utf-8")
        with pytest.raises(EvidenceError, match=said):
            read_selections(file, EvidenceError)


def test_moe_is_packed_by_its_own_fields(tmp_path: Path) -> None:
    outcomes = {EXPERTS: RUNS, replace(EXPERTS, activation="gelu", routing="topk"): RAISES}
    file = tmp_path / "selected.json"
    file.write_text(json.dumps(packed(100, "0.6.13", "ab" * 20, outcomes)), encoding="utf-8")
    read = read_selections(file, EvidenceError)
    assert dict(read.kinds()) == outcomes
    assert read.outcome(EXPERTS) == RUNS
    for other in (
        replace(EXPERTS, num_experts=128),
        replace(EXPERTS, routing="topk"),
        replace(EXPERTS, quantisation="mxfp4"),
    ):
        assert read.outcome(other) == ""


def test_a_kept_selection_is_the_evidence_of_a_permission() -> None:
    asked = Target(sm=103, flashinfer="0.6.13")
    assert decide(DECODE, asked).evidence == SELECTED
    assert decide(DECODE, Target(sm=103, flashinfer="0.6.12")).evidence == "declared"
    assert decide(replace(DECODE, sinks=True), asked).evidence == "declared"
    # A rule's evidence is of the releases that were asked.
    fp8 = replace(MLA, head_dim_qk=320, head_dim_vo=256, page_size=32)
    levels = [decide(fp8, Target(sm=100, flashinfer=each)).evidence for each in ("0.6.13", "0.6.9")]
    assert levels == [SELECTED, "declared"]
