"""Decisions over books made by hand: what decides, what is quoted, what is offered instead."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl.gating import (
    Feature,
    Rule,
    RuleBook,
    RulesError,
    Target,
    UnsupportedError,
    decide,
    explain,
    load_rules,
    require,
)
from kernelproof.impl.gating.decision import DOUBT
from kernelproof.impl.gating.rules import version_matches

HASHES = {
    "0.6.6": {"TRTLLM_GEN_FMHA": "f1ed60e5"},
    "0.6.7": {"TRTLLM_GEN_FMHA": "e7afc413"},
    "0.6.7.post2": {"TRTLLM_GEN_FMHA": "55bba559"},
    "0.6.8": {"TRTLLM_GEN_FMHA": "55bba559"},
}


def rule(name: str, effect: str = "allow", **fields: Any) -> Rule:  # noqa: ANN401  fields of a rule
    given = {"operation": ("paged_attention",), "backend": ("fa2",), "chips": (90, 103)} | fields
    return Rule(name, effect, reason=f"{name} says so", source=f"https://{name}.test", **given)


ALLOW = rule("fa2")
TRTLLM = rule("trtllm", backend=("trtllm-gen",), chips=(100, 103))
HANG = rule(
    "hang",
    "refuse",
    backend=("trtllm-gen",),
    chips=(103,),
    versions={"flashinfer": ">=0.6.7.dev0,<0.6.7.post2"},
    artifacts={"TRTLLM_GEN_FMHA": "e7afc4"},
)
BOOK = RuleBook((ALLOW, TRTLLM, HANG), HASHES)
FA2 = Feature(backend="fa2")
GEN = Feature(backend="trtllm-gen")
HERE = Target(sm=103, flashinfer="0.6.7")


def test_a_permission_supports_and_is_quoted() -> None:
    decision = decide(FA2, HERE, book=BOOK)
    assert (decision.status, decision.rule, decision.evidence) == ("supported", "fa2", "declared")
    assert decision.source == "https://fa2.test"
    assert decision.alternatives == ()
    assert require(FA2, HERE, book=BOOK) == decision


def test_a_refusal_beats_a_permission_and_names_what_works() -> None:
    decision = decide(GEN, HERE, book=BOOK)
    assert (decision.status, decision.rule) == ("refused", "hang")
    assert [each.backend for each in decision.alternatives] == ["fa2"]
    with pytest.raises(UnsupportedError) as caught:
        require(GEN, HERE, book=BOOK)
    assert str(caught.value) == str(decision)
    for part in ("SM103", "0.6.7", "hang says so", "https://hang.test", "Use backend='fa2'"):
        assert part in str(decision)


def test_where_nothing_is_supported_it_says_so() -> None:
    decision = decide(GEN, replace(HERE, sm=80), book=BOOK)
    assert (decision.status, decision.alternatives) == ("unknown", ())
    assert str(decision).endswith("No alternative is supported there")


def test_unknown_is_refused_unless_asked_for() -> None:
    odd = replace(GEN, operation="mla")
    assert decide(odd, HERE, book=BOOK).status == "unknown"
    with pytest.raises(UnsupportedError, match="no rule allows mla with backend trtllm-gen"):
        require(odd, HERE, book=BOOK)
    assert require(odd, HERE, book=BOOK, allow_unknown=True).status == "unknown"
    with pytest.raises(UnsupportedError):
        require(GEN, HERE, book=BOOK, allow_unknown=True)


@pytest.mark.parametrize(
    ("version", "artifacts", "status"),
    [
        ("0.6.6", {}, "supported"),
        ("0.6.7", {}, "refused"),
        ("0.6.7.post1", {}, "refused"),
        ("0.6.7.dev20260401", {}, "refused"),
        ("0.6.7.post2", {}, "supported"),
        ("0.6.8", {}, "supported"),
        ("0.6.7", {"TRTLLM_GEN_FMHA": "55bba559"}, "supported"),
        ("0.6.8", {"TRTLLM_GEN_FMHA": "e7afc413"}, "refused"),
    ],
)
def test_a_known_hash_decides_and_else_the_version(
    version: str, artifacts: dict[str, str], status: str
) -> None:
    target = Target(sm=103, flashinfer=version, artifacts=artifacts)
    assert decide(GEN, target, book=BOOK).status == status


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.6.7.post2.dev20260301", "unknown"),
        ("0.6.7.post2.dev20260401", "supported"),
        ("0.6.7.post2+cu130", "supported"),
        ("0.6.8.dev20260301", "supported"),
        ("0.6.7.dev20260301", "refused"),
    ],
)
def test_a_development_release_has_a_fix_from_its_day_on(version: str, status: str) -> None:
    hang = replace(HANG, artifacts={}, fixed=date(2026, 4, 1))
    book = RuleBook((ALLOW, TRTLLM, hang), HASHES)
    decision = decide(GEN, Target(sm=103, flashinfer=version), book=book)
    assert decision.status == status
    if status == "unknown":
        assert decision.reason == f"{DOUBT}hang says so"
        assert decision.alternatives[0].backend == "fa2"
    without_a_day = RuleBook((ALLOW, TRTLLM, replace(hang, fixed=None)), HASHES)
    undated = decide(GEN, Target(sm=103, flashinfer=version), book=without_a_day)
    assert undated.status == ("unknown" if ".post2.dev" in version else status)


@pytest.mark.parametrize("version", ["0.6.7.post9", "0.6.7.5", "0.6.8rc1", "0.6.9.dev20260301"])
def test_a_number_that_is_no_release_is_unknown(version: str) -> None:
    decision = decide(FA2, Target(sm=90, flashinfer=version), book=BOOK)
    assert decision.status == "unknown"
    between = "" if version.startswith("0.6.9") else ", which is none of them"
    assert decision.reason.endswith(f"0.6.6 to 0.6.8, not {version}{between}")


@pytest.mark.parametrize("version", ["0.6.5", "0.6.9", "0.7.0"])
def test_a_release_that_the_rules_do_not_know_is_unknown(version: str) -> None:
    decision = decide(FA2, Target(sm=90, flashinfer=version), book=BOOK)
    assert decision.status == "unknown"
    assert f"0.6.6 to 0.6.8, not {version}" in decision.reason


def test_an_unknown_chip_is_named() -> None:
    decision = decide(FA2, Target(sm=104, flashinfer="0.6.7"), book=BOOK)
    assert (decision.status, "SM104 is a chip that the rules do not know" in decision.reason) == (
        "unknown",
        True,
    )


def test_a_near_miss_says_which_condition_was_missed() -> None:
    book = RuleBook((rule("narrow", when={"head_dim_qk": [64, 128], "sinks": False}),), HASHES)
    decision = decide(replace(FA2, head_dim_qk=96), HERE, book=book)
    assert "narrow, differs in head_dim_qk must be 64 or 128, not 96" in decision.reason


@pytest.mark.parametrize(
    ("wanted", "value", "holds"),
    [
        (64, 64, True),
        ([64, 128], 96, False),
        ({"min": 16, "max": 256, "multiple_of": 16}, 48, True),
        ({"min": 16, "max": 256, "multiple_of": 16}, 40, False),
        ({"max": 256}, 512, False),
        ({"not": [5, 7]}, 7, False),
        ({"not": 5}, 7, True),
    ],
)
def test_conditions(wanted: object, value: int, holds: bool) -> None:
    book = RuleBook((rule("only", when={"head_dim_qk": wanted}),), HASHES)
    asked = replace(FA2, head_dim_qk=value, head_dim_vo=64)
    assert decide(asked, HERE, book=book).supported is holds


def test_auto_takes_the_first_backend_that_is_supported() -> None:
    asked = Feature()
    assert decide(asked, HERE, book=BOOK).feature.backend == "fa2"
    assert decide(asked, replace(HERE, sm=100), book=BOOK).feature.backend == "trtllm-gen"
    nowhere = decide(asked, replace(HERE, sm=80), book=BOOK)
    assert nowhere.status == "unknown"
    assert nowhere.reason.startswith("no backend is supported; of ")


def test_a_mixed_batch_needs_both_phases() -> None:
    book = RuleBook((ALLOW, rule("xqa", backend=("xqa",), when={"phase": "decode"})), HASHES)
    mixed = Feature(backend="xqa", phase="mixed")
    decision = decide(mixed, HERE, book=book)
    assert decision.reason == f"the prefill part of a mixed batch: {decision.why}"
    assert [each.backend for each in decision.alternatives] == ["fa2"]
    assert decision.alternatives[0].phase == "mixed"
    assert decide(replace(mixed, backend="fa2"), HERE, book=book).feature.phase == "mixed"


def test_a_lighter_cache_is_offered_where_no_backend_reads_this_one() -> None:
    book = RuleBook((rule("fp8", when={"kv_dtype": ["float8_e4m3fn", "bfloat16"]}),), HASHES)
    decision = decide(replace(FA2, kv_dtype="nvfp4"), HERE, book=book)
    assert decision.instead == "Use kv_dtype='float8_e4m3fn'"


def test_the_narrowest_of_several_rules_is_quoted_whatever_their_order() -> None:
    wide, narrow = rule("a-wide", "refuse", chips=()), rule("z", "refuse", when={"page_size": 16})
    for rules in ((wide, narrow, ALLOW), (ALLOW, narrow, wide)):
        assert decide(FA2, HERE, book=RuleBook(rules, HASHES)).rule == "z"


def test_explain_walks_the_rules_of_a_backend_with_what_each_lacks() -> None:
    walked = explain(GEN, Target(sm=100, flashinfer="0.6.7"), book=BOOK)
    assert [(each.id, machine, fields) for each, machine, fields in walked] == [
        ("trtllm", [], []),
        ("hang", ["chips"], []),
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"operation": "attention"}, "operation is 'attention'; did you mean paged_attention or"),
        ({"backend": "fa4"}, "backend is 'fa4'"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'"),
        ({"kv_dtype": "uint8"}, "vLLM stores FP8 caches in uint8, FlashInfer from 0.6.8 reads"),
        ({"head_dim_qk": 0}, "head_dim_qk is 0; it must be an integer of at least 1"),
        ({"head_dim_qk": True}, "head_dim_qk is True"),
        ({"sinks": 1}, "sinks is 1; it must be true or false"),
    ],
)
def test_a_feature_that_no_call_can_ask_for_is_refused(fields: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=r"must be|does not say") as caught:
        Feature(**fields)
    assert said in str(caught.value)


def test_dtypes_have_their_usual_aliases() -> None:
    feature = Feature(q_dtype="bf16", kv_dtype="fp8")
    assert (feature.q_dtype, feature.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    assert Feature(q_dtype="torch.float16").kv_dtype == "float16"
    assert hash(feature) == hash(Feature(q_dtype="bfloat16", kv_dtype="fp8_e4m3"))


def test_none_numbers_and_spellings_of_backends_are_read() -> None:
    plain = Feature(backend="trtllm-gen")
    assert Feature(backend="trtllm_gen", activation=None, kv_dtype=None) == plain  # type: ignore[arg-type]
    assert Feature(backend="trtllm", window=-1, soft_cap=0.0) == plain  # type: ignore[arg-type]
    assert Feature(window=127, soft_cap=30.0) == Feature(window=True, soft_cap=True)  # type: ignore[arg-type]


def test_a_target_takes_every_spelling_and_refuses_what_is_none() -> None:
    assert Target(sm=(10, 3)) == Target(sm="sm_103a")
    assert hash(Target(sm=90, artifacts={"A": "b"}))
    with pytest.raises(ValueError, match="ambiguous"):
        Target(sm=10)


def test_a_version_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"'latest' is no version by PEP 440"):
        decide(FA2, Target(sm=90, flashinfer="latest"), book=BOOK)


def test_versions_compare_as_numbers_and_local_parts_do_not_count() -> None:
    assert version_matches("0.6.13", ">=0.6.8")
    assert version_matches("0.6.7.post1+cu130", "<=0.6.7.post1")
    assert not version_matches("0.6.7.post1", "<=0.6.7")
    assert not version_matches(None, ">=0")


GOOD = """
[[rule]]
id = "one"
effect = "allow"
operation = ["paged_attention"]
backend = ["fa2"]
chips = [90, "10.3", "cpu"]
when = { head_dim_qk = { min = 64, multiple_of = 64 }, kv_dtype = ["bfloat16"] }
flashinfer = ">=0.6.7"
reason = "It works"
source = "https://example.test"
"""


def write(folder: Path, text: str, name: str = "rules.toml") -> Path:
    folder.joinpath(name).write_text(text, encoding="utf-8")
    return folder


def test_rules_are_read_from_every_file_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    write(tmp_path, GOOD.replace('"one"', '"two"'), "more.toml")
    write(tmp_path, '"0.6.7" = { TRTLLM_GEN_FMHA = "e7afc413" }', "versions.toml")
    book = load_rules(tmp_path)
    assert [each.id for each in book.rules] == ["one", "two"]
    assert book.rules[0].chips == (90, 103, None)
    assert (book.oldest, book.newest) == ("0.6.7", "0.6.7")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[rule]]", "[[rule", "rules.toml: "),
        ("[[rule]]", "[[rules]]", "rules.toml: Object contains unknown field `rules`"),
        ('id = "one"', "", "rules.toml: Object missing required field `id` - at `$.rule[0]`"),
        (
            'source = "https://example.test"',
            "",
            "'one': Object missing required field `source` - at `$.rule[0]`",
        ),
        ("chips =", "chip =", "'one': Object contains unknown field `chip` - at `$.rule[0]`"),
        (
            'chips = [90, "10.3", "cpu"]',
            "",
            "'one': chips is missing: a permission lists its exact chips - at `$.rule[0]`",
        ),
        ("[90,", "[10,", "'one': chips[0]: 10 is ambiguous"),
        ('"allow"', '"permit"', "'one': Invalid value 'permit' - at `$.rule[0].effect`"),
        ('["fa2"]', '"fa2"', "'one': Expected `array`, got `str` - at `$.rule[0].backend`"),
        ('["fa2"]', '["fa9"]', "'one': Invalid value 'fa9' - at `$.rule[0].backend[0]`"),
        (
            "head_dim_qk =",
            "head_dim =",
            "'one': Object contains unknown field `head_dim` - at `$.rule[0].when`",
        ),
        (
            "min = 64",
            "least = 64",
            "'one': Object contains unknown field `least` - at `$.rule[0].when.head_dim_qk`",
        ),
        (
            "min = 64",
            'min = "64"',
            "'one': Expected `int`, got `str` - at `$.rule[0].when.head_dim_qk.min`",
        ),
        (
            '["bfloat16"]',
            '["bf16"]',
            "'one': Invalid enum value 'bf16' - at `$.rule[0].when.kv_dtype[0]`",
        ),
        (
            '["bfloat16"]',
            "[]",
            "'one': Expected `array` of length >= 1 - at `$.rule[0].when.kv_dtype`",
        ),
        (
            ">=0.6.7",
            "=>0.6.7",
            "'one': flashinfer is '=>0.6.7', no PEP 440 specifier - at `$.rule[0]`",
        ),
    ],
)
def test_a_rules_file_with_a_typo_names_file_rule_and_field(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in GOOD
    with pytest.raises(RulesError) as caught:
        load_rules(write(tmp_path, GOOD.replace(old, new, 1)))
    assert said in str(caught.value)
    assert "rules.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (
            '{ vllm = "=>1" }',
            "'one': versions.vllm is '=>1', no PEP 440 specifier - at `$.rule[0]`",
        ),
        (
            '{ "v llm" = ">=1" }',
            "'one': Expected `str` that names a distribution, such as vllm - at `key`",
        ),
    ],
)
def test_a_rule_names_any_distribution(tmp_path: Path, versions: str, said: str) -> None:
    line = 'flashinfer = ">=0.6.7"'
    assert line in GOOD
    right = f'{line}\nversions = {{ Some_Engine = ">=0.33", FlashInfer-Python = "<9" }}'
    rule = load_rules(write(tmp_path, GOOD.replace(line, right, 1))).find("one")
    assert rule is not None
    assert rule.versions == {"flashinfer": ">=0.6.7,<9", "Some_Engine": ">=0.33"}
    machine = Target(sm=rule.chips[0], flashinfer="0.7.2")
    for version, unmet in (("0.33.1", []), ("0.32", ["Some_Engine"])):
        given = replace(machine, providers=(("some-engine", version),))
        assert rule.unmet_by(given, {}) == unmet
    assert rule.unmet_by(machine, {}) == ["Some_Engine"]  # which is not installed
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    with pytest.raises(RulesError) as caught:
        load_rules(write(wrong, GOOD.replace(line, f"{line}\nversions = {versions}", 1)))
    assert said in str(caught.value)


def test_two_rules_with_one_id_and_a_bad_version_are_refused(tmp_path: Path) -> None:
    write(write(tmp_path, GOOD), GOOD, "twice.toml")
    with pytest.raises(RulesError, match=r"rule one: rules\.toml has the same id"):
        load_rules(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write(write(other, GOOD), '"0.6.x" = {}', "versions.toml")
    with pytest.raises(RulesError, match=r"versions.toml: '0.6.x' is no version"):
        load_rules(other)
    with pytest.raises(RulesError, match="there are no support rules"):
        load_rules(tmp_path / "nowhere")


def test_importing_the_gate_touches_neither_cuda_nor_flashinfer() -> None:
    code = (
        "import sys, kernelproof.impl.gating as g, torch; "
        "g.decide(g.Feature(), g.Target(sm=90, flashinfer='0.6.13')); "
        "assert not torch.cuda.is_initialized(); assert 'flashinfer' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


CPU = Target(sm=90, flashinfer="0.7.2.post1", triton="3.6.0")


@pytest.mark.parametrize("operation", ["build_metadata", "route", "merge_state", "moe"])
def test_our_own_kernels_are_no_answer_unless_named(operation: str) -> None:
    asked = Feature(operation, q_dtype="float32")
    own = ("triton", "reference")
    try:
        assert require(asked, CPU).feature.backend not in own
    except UnsupportedError as error:
        assert not any(f"backend='{each}'" in str(error) for each in own)  # noqa: PT017
    if operation != "route":  # which no rule of `auto` has in float32
        named = require(asked, CPU, backends=["triton"])
        assert named.feature.backend == "triton"
        assert "kernelproof" in named.source


def test_triton_experts_of_an_engine_are_not_ours() -> None:
    relu2 = Feature("moe", "cutlass", activation="relu2")
    target = Target(sm=120, flashinfer="0.6.7")
    with pytest.raises(UnsupportedError, match="Use backend='engine-triton'"):
        require(relu2, target)
    with pytest.raises(UnsupportedError, match="Use backend='triton'"):
        require(replace(relu2, backend="cutlass"), target, backends=["cutlass", "triton"])
    assert "vllm" in require(replace(relu2, backend="engine-triton"), target).source
    assert "kernelproof" in require(replace(relu2, backend="triton"), target).source


def test_what_an_engine_lacks_is_neither_chosen_nor_offered() -> None:
    both = replace(HERE, sm=100)
    book = RuleBook((replace(ALLOW, chips=(90, 100, 103)), TRTLLM, HANG), HASHES)
    assert require(Feature(), both, book=book).feature.backend == "trtllm-gen"
    assert require(Feature(), both, book=book, backends=["fa2"]).feature.backend == "fa2"
    with pytest.raises(UnsupportedError, match=r"not among the backends .*Use backend='fa2'"):
        require(GEN, both, book=book, backends=["fa2"])
    with pytest.raises(UnsupportedError, match="No alternative is supported there"):
        require(GEN, HERE, book=book, backends=["trtllm"])
    with pytest.raises(ValueError, match="backend is 'fa9'"):
        require(Feature(), both, backends=["fa9"])
