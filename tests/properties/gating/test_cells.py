"""Which cells of the support table an implementation tries, and what an outcome says of a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.gating import Feature, load_rules
from kernelproof.impl.gating.decision import refusing
from kernelproof.impl.protocol import EVERY_RULE
from kernelproof.impl.registry import registered
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.gating.cells import REFUSED, SUPPORTED, Cell, cells_of
from kernelproof.properties.gating.grouping import chosen_modules
from kernelproof.properties.gating.operations import OPERATIONS
from kernelproof.properties.gating.trials import outcome_of, status_of
from kernelproof.properties.isolation.workers import Outcome
from kernelproof.properties.verdicts.comparison import against_oracle
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, Problem, materialise, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

RELEASES = ("0.6.13", "0.7.2.post1")


def h200(flashinfer: str) -> Target:
    return Target(sm=90, flashinfer=flashinfer, cuda="13.0", triton="3.6.0", device="cuda")


@cache  # it judges thousands of calls, and half of the tests ask about the same implementations
def cells(name: str, flashinfer: str) -> list[Cell]:
    found, target = find_implementation(name), h200(flashinfer)

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        return [found.refusal(each, target, without_rules=[EVERY_RULE]) for each in problems]

    book = load_rules()
    return cells_of(
        found.operation,
        found.backend_on(target),
        target,
        book,
        probe,
        decodes=found.decodes,
        ruled_as=found.ruled_as,
    )


ELSEWHERE = {"flashinfer-mla-cutlass", "flashinfer-mla-trtllm", "flashinfer-mla-xqa",
             "flashinfer-trtllm-gen-routing",
             "flashinfer-trtllm-fp8-block-moe",
             "flashinfer-cute-dsl-moe-bf16",  # it needs a package of its own
             # No rule is about calls that quantise: their claims are their own.
             "flashinfer-rmsnorm-quant", "flashinfer-add-rmsnorm-quant",
             "flashinfer-add-rmsnorm-block-quant", "flashinfer-group-quant-8bit",
             "flashinfer-nvfp4-append", "flashinfer-nvfp4-append-slots",
             "flashinfer-rope-append", "flashinfer-mla-rope-quantize"}  # fmt: skip
PARTS = 8
"""Number of tests among which the implementations are shared: one took a busy machine minutes."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_implementation_with_a_backend_has_cells(part: int) -> None:
    for name in sorted(set(registered()) - ELSEWHERE)[part::PARTS]:
        if find_implementation(name).backend_on(h200("0.7.2.post1")) and "trace" not in name:
            assert cells(name, "0.7.2.post1"), name


def test_where_everything_is_refused_once_is_enough() -> None:
    found = cells("flashinfer-trtllm-decode", "0.7.2.post1")
    assert {cell.side for cell in found} == {REFUSED}
    assert len(found) < 6
    assert all(set(cell.rules) - set(found[0].rules) for cell in found[1:])


@pytest.mark.parametrize("flashinfer", RELEASES)
@pytest.mark.parametrize("name", ["flashinfer-prefill-fa2", "flashinfer-prefill-fa3",
                                  "flashinfer-decode", "flashinfer-ragged-fa3"])  # fmt: skip
def test_cells_are_on_the_side_that_the_gate_says(name: str, flashinfer: str) -> None:
    found, target = find_implementation(name), h200(flashinfer)
    mine = cells(name, flashinfer)
    assert {cell.side for cell in mine} >= {SUPPORTED}
    assert [cell.number for cell in mine] == list(range(len(mine)))
    assert len({cell.problem for cell in mine}) == len(mine)
    for cell in mine:
        refusal = found.refusal(cell.problem, target)
        assert (refusal is None) == (cell.side == SUPPORTED), cell.title
        assert found.refusal(cell.problem, target, without_rules=[EVERY_RULE]) is None
        if cell.side == REFUSED:
            assert any(rule in str(refusal) for rule in cell.rules), cell.title


def test_a_rule_about_two_things_at_once_has_its_cell() -> None:
    old, new = (
        {rule: cell for cell in cells("flashinfer-prefill-fa3", each) for rule in cell.rules}
        for each in RELEASES
    )
    hang = old["fa3-fp8-window-hang"]
    assert hang.called == ("hangs",)
    assert max(hang.problem.seq_lens) > 256  # type: ignore[union-attr]  # where it begins
    assert "fa3-fp8-window-hang" not in new
    assert new["fa3-fp8-soft-cap-ignored"].called == ("wrong",)
    assert old["fa3-paged-192-128"].called == new["fa3-paged-192-128"].called == ("raises",)
    fa2 = {rule for cell in cells("flashinfer-prefill-fa2", "0.7.2.post1") for rule in cell.rules}
    assert {
        "fa2-sinks-ignored",
        "fa2-fp8-kv-head-dim-192",
        "fa2-head-dim-192-is-192-128",
        "fa2-head-dims-equal-128",
        "fa2-head-dim-not-multiple-of-64",
    } <= fa2


EARLY, LATE = RELEASES
FEW = "decode, 4 query tokens"
RAGGED = "decode, 4, 1 and 2 query tokens"
NO_KEYS, NO_QUERY = "decode, a request without keys", "decode, a request without a query"


@pytest.mark.parametrize(
    ("name", "release", "sides"),
    [
        ("decode", LATE, {FEW: "decode-several-queries-on-fa2", NO_KEYS: ""}),
        ("decode-fa2", "0.6.7", {FEW: "decode-wrapper-one-query-before-0.6.13"}),
        ("decode-fa2", EARLY, {FEW: "fa2-decode-queries-dropped", NO_KEYS: ""}),
        ("decode-fa2", LATE, {FEW: "", NO_KEYS: "",
                              f"{NO_KEYS}, 4 query tokens": "fa2-decode-fewer-keys-than-queries"}),
        ("xqa-decode", EARLY, {FEW: "", "decode, draft trees": "", NO_KEYS: "",
                               "decode, window, 4 query tokens": "xqa-window-several-queries"}),
        ("xqa-decode", LATE, {FEW: "", "decode, draft trees": "", "decode, window": ""}),
        ("decode-fa2-graph", LATE, {FEW: "", NO_KEYS: ""}),
        ("xqa-decode-fp8", EARLY, {FEW: "", "decode": "",
                                   "decode, draft trees": "xqa-draft-tree-fp8-few-rows",
                                   "decode, window, 4 query tokens": "xqa-window-several-queries"}),
        ("xqa-decode-fp8", LATE, {FEW: "", "decode": "", "decode, draft trees": ""}),
        ("trtllm-decode-auto", LATE, {FEW: "", "decode, window": ""}),
        ("xqa-ragged", EARLY, {FEW: "", RAGGED: "xqa-ragged-queries-before-0.6.16",
                               NO_QUERY: "xqa-ragged-queries-before-0.6.16"}),
        ("xqa-ragged", LATE, {RAGGED: "", NO_QUERY: "", "decode, draft trees of 4, 1 and 2": ""}),
        ("prefill-fa2", LATE, {FEW: "", RAGGED: "", "decode, draft trees of 4, 1 and 2": "",
                               NO_QUERY: "", "prefill, a request without keys": "",
                               "prefill, custom mask, a request without keys":
                                   "fa2-mask-request-without-keys"}),
    ],
)  # fmt: skip
def test_several_tokens_trees_and_padding_have_cells_on_both_sides(
    name: str, release: str, sides: dict[str, str]
) -> None:
    found = {cell.title: cell for cell in cells(f"flashinfer-{name}", release)}
    for title, rule in sides.items():
        cell = found[title]
        assert cell.side == (REFUSED if rule else SUPPORTED), title
        assert not rule or cell.rules == (rule,)


def test_a_module_of_several_tokens_is_built_by_as_many() -> None:
    found = {cell.title: cell for cell in cells("flashinfer-xqa-decode", LATE)}
    smallest = OPERATIONS["paged_attention"].smallest
    for title in (FEW, "decode, draft trees"):
        problem = found[title].problem
        first, xqa = smallest(problem, "decode"), find_implementation("flashinfer-xqa-decode")
        assert xqa.module_of(first) == xqa.module_of(problem)
        assert first.seq_lens == (4,)  # type: ignore[union-attr]


def test_all_rules_that_refuse_a_call_are_named_and_a_mixed_batch_has_two_phases() -> None:
    target = h200("0.6.13")
    fp8: Any = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "window": True}
    both = Feature(backend="fa3", phase="mixed", **fp8, soft_cap=True)
    assert {rule.id for rule in refusing(both, target)} == {
        "fa3-fp8-window-hang",
        "fa3-fp8-soft-cap-ignored",
    }
    assert refusing(Feature(backend="fa3", phase="decode", **fp8), target) == ()


def cell(side: str = REFUSED, called: tuple[str, ...] = ("raises",), number: int = 0) -> Cell:
    return Cell(f"{number}", None, Feature(), side, (f"r{number}",), called, number)  # type: ignore[arg-type]  # not called


@pytest.mark.parametrize(
    ("side", "called", "outcome", "status"),
    [
        (SUPPORTED, ("right",), "right", "ok"),
        (SUPPORTED, ("right",), "raises", "finding"),
        (SUPPORTED, ("right",), "hangs", "finding"),
        (REFUSED, ("raises",), "raises", "ok"),
        (REFUSED, ("raises",), "wrong", "finding"),
        (REFUSED, ("raises",), "right", "finding"),
        (REFUSED, ("wrong",), "wrong", "known"),
        (REFUSED, ("wrong",), "crashes", "finding"),
        (REFUSED, ("wrong",), "raises", "ok"),
        (REFUSED, ("hangs", "right"), "right", "known"),
        (REFUSED, ("hangs",), "", "not run"),
    ],
)
def test_what_is_as_the_rules_say(
    side: str, called: tuple[str, ...], outcome: str, status: str
) -> None:
    assert status_of(cell(side, called), outcome) == status


@pytest.mark.parametrize(
    ("status", "verdict", "word"),
    [
        ("done", Verdict("PASS"), "right"),
        ("done", Verdict("FAIL", "nan"), "wrong"),
        ("done", Verdict("REJECTED"), "raises"),
        ("done", Verdict("CRASH", "ValueError", "Unsupported group_size: 5"), "raises"),
        ("done", Verdict("CRASH", "RuntimeError", "CUDA error: invalid argument"), "crashes"),
        ("done", Verdict("CRASH", "RuntimeError", "an illegal memory access"), "crashes"),
        ("done", Verdict("UNSUPPORTED"), ""),
        ("crash", Verdict("CRASH", "SIGABRT"), "crashes"),
        ("hang", Verdict("HANG", "run"), "hangs"),
    ],
)
def test_what_became_of_a_call(status: str, verdict: Verdict, word: str) -> None:
    assert outcome_of(Outcome(status), verdict) == word  # type: ignore[arg-type]  # of its words


def test_modules_that_show_most_rules_are_built_first() -> None:
    by_key = {
        "many": [cell(number=0), *(cell(number=1) for _ in range(9))],
        "other": [cell(number=2), cell(number=3)],
        "again": [cell(number=1) for _ in range(20)],
    }
    assert chosen_modules(by_key, 2) == ["many", "other"]
    assert chosen_modules(by_key, 0) == ["many", "other", "again"]


def test_experts_and_routing_have_cells_on_both_sides() -> None:
    """The call of vLLM #39825 is among them: what 0.6.7 does with Relu2 can be seen on an H200."""
    by_title = {cell.title: cell for cell in cells("flashinfer-cutlass-moe", "0.6.7")}
    assert by_title["experts, relu2"].rules == ("cutlass-moe-relu2",)
    assert by_title["experts, relu2"].called == ("raises",)
    assert by_title["experts, geglu"].side == SUPPORTED
    later = {cell.title: cell for cell in cells("flashinfer-cutlass-moe", "0.6.13")}
    assert later["experts, relu2"].side == SUPPORTED
    (block,) = cells("flashinfer-cutlass-moe-fp8-block", "0.7.2.post1")
    assert block.feature.quantisation == "fp8_block"
    routed = [cell.feature.routing for cell in cells("flashinfer-top-k-route", "0.7.2.post1")]
    assert {"llama4", "sigmoid_renorm", "deepseek_v4"} <= set(routed)
    assert "deepseek_v3" not in routed


IGNORED: Mapping[str, Mapping[str, Any]] = {
    "window": {"window_left": -1},
    "soft cap": {"logits_soft_cap": 0.0},
    "sinks": {"sinks": None},
    "no mask": {"causal": True},
    "custom mask": {"custom_mask": None},
    "KV float8_e4m3fn": {"v_scale": 1.0},
}
"""What a kernel computes that takes a feature and ignores it."""


@pytest.mark.parametrize("name", ["flashinfer-prefill-fa2", "flashinfer-prefill-fa3"])
def test_an_answer_shows_whether_a_feature_was_heeded(name: str) -> None:
    arithmetic = find_implementation(name).arithmetic
    shown = set()
    for cell in cells(name, "0.7.2.post1"):
        phase, *features = cell.title.split(", ")
        problem = cell.problem
        assert isinstance(problem, AttentionProblem)
        for feature in set(features) & set(IGNORED):
            if feature == "no mask" and phase == "decode":
                continue  # one token sees all keys either way
            inputs = materialise(problem)
            assert isinstance(inputs, PagedAttentionInputs)
            ignoring = oracle.attention(replace(inputs, **IGNORED[feature]))
            bounded = oracle.bounded_attention(inputs, arithmetic)
            said = against_oracle((ignoring.out, ignoring.lse), bounded, exact=False)
            assert said.status == "FAIL", cell.title
            shown.add(feature)
    assert shown >= {"window", "soft cap", "KV float8_e4m3fn"}
