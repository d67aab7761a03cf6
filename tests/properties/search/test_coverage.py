"""What a run has reached of an implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelproof.properties.findings.coverage import Coverage
from kernelproof.properties.findings.kernels import FileRun
from kernelproof.properties.findings.report import LawReport, ProblemVerdict
from kernelproof.properties.laws import Law, find_law
from kernelproof.properties.search.coverage import Reached
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.reference import AttentionProblem, MergeProblem, MoEProblem, Problem, RouteProblem

LAWS = [find_law("parity"), find_law("soak")]


def judged(*problems: Problem, law: str = "parity", status: str = "PASS") -> LawReport:
    seen = {each.id: ProblemVerdict(each, status, "", vacuous=False) for each in problems}
    count = 0 if status == "UNSUPPORTED" else len(problems)
    return LawReport(law, judged=count, problems=seen, floor=find_law(law).floor)


def attention(*seq_lens: int, **fields: Any) -> AttentionProblem:  # noqa: ANN401  any field
    queries = (1,) * len(seq_lens)
    return AttentionProblem(query_lens=queries, seq_lens=seq_lens, page_size=4, **fields)


def axes(**values: tuple[object, ...]) -> Axes:
    return Axes("paged_attention", values, 10_000)


def covered(
    claimed: Axes, laws: Sequence[Law], reports: Sequence[LawReport], declared: Mapping[str, Any]
) -> Coverage:
    reached = Reached(claimed, declared)
    for report in reports:
        reached.include(report)
    return reached.coverage(laws, reports)


def test_lengths_and_edges_are_counted() -> None:
    problems = [attention(n) for n in (1, 2, 4, 5, 100)] + [attention(0, 40)]
    found = covered(axes(), LAWS[:1], [judged(*problems)], {"tile": 32, "split": 64})
    assert found.lengths["keys"] == (1, 4, 40, 100)
    assert found.lengths["pages"] == (1, 1, 10, 25)
    assert found.edges == {
        "several_requests": 1, "request_without_keys": 1, "several_chunks": 0, "several_pages": 3,
        "several_tiles": 2, "several_splits": 1,
    }  # fmt: skip
    gaps = [(gap.code, gap.name, gap.judged, gap.floor) for gap in found.gaps]
    assert gaps == [("edge", "several_tiles", 2, 3), ("edge", "several_splits", 1, 3)]


def test_a_law_below_its_floor_is_a_gap_where_its_time_was_over() -> None:
    early = judged(attention(1), attention(2))
    early.ended, early.seconds = "time", 8.0
    found = covered(axes(), LAWS, [early], {})
    law, never = found.gaps
    assert (law.name, law.judged, law.floor, law.seconds) == ("parity", 2, 3, 4.0)
    assert (never.name, never.judged, never.seconds) == ("soak", 0, None)
    assert found.early == {"parity": "time"}
    for reason in ("idle", "rare", ""):
        early.ended = reason
        assert not covered(axes(), LAWS[:1], [early], {}).gaps


def test_claimed_names_that_nobody_saw_are_gaps_and_numbers_are_reported() -> None:
    claimed = axes(causal=(False, True), kv_layout=("NHD", "HND"), window_left=(-1, 7))
    seen = [*(attention(n) for n in range(1, 60)), attention(2, kv_layout="HND")]
    # Of one structure.
    again = [attention(2, regime="outlier_channels", seed=n) for n in range(100)]
    assert not covered(claimed, LAWS[:1], [judged(*seen[1:], *again)], {}).gaps  # none was due yet
    found = covered(claimed, LAWS[:1], [judged(*seen)], {})
    assert found.unseen == {"causal": ("True",), "window_left": ("7",)}
    assert [(gap.code, gap.name, gap.value) for gap in found.gaps] == [("axis", "causal", "True")]
    assert found.pairs == (5, 12)


def test_a_problem_that_two_laws_judge_counts_once() -> None:
    found = covered(axes(), LAWS, [judged(attention(40)), judged(attention(40), law="soak")], {})
    assert found.edges["several_pages"] == 1


def test_what_held_nothing_to_judge_reaches_nothing() -> None:
    report = judged(attention(1), attention(40))
    report.problems = {name: e._replace(vacuous=True) for name, e in report.problems.items()}
    found = covered(axes(causal=(False, True)), LAWS[:1], [report], {})
    assert (found.lengths, found.edges) == ({}, {})
    assert found.unseen == {"causal": ("False", "True")}


def test_what_is_refused_whenever_it_is_drawn_is_not_claimed() -> None:
    refused = judged(attention(1, causal=True), law="call_order", status="UNSUPPORTED")
    found = covered(
        axes(causal=(False, True)), LAWS[:1], [judged(*map(attention, range(70))), refused], {}
    )
    assert found.unseen == {"causal": ("True",)}
    assert not found.gaps


def test_axes_that_modules_fix_are_reported_only() -> None:
    claimed = Axes(
        "paged_attention",
        {"causal": (False, True), "kv_layout": ("NHD", "HND")},
        10_000,
        restrictions=({"kv_layout": ("NHD",)}, {"kv_layout": ("HND",)}),
    )
    due = judged(*map(attention, range(1, 70)), attention(1, causal=True))
    found = covered(claimed, LAWS[:1], [due], {})
    assert found.unseen == {"kv_layout": ("HND",)}
    assert not found.gaps
    free = covered(replace(claimed, restrictions=()), LAWS[:1], [due], {})
    assert [(gap.name, gap.value) for gap in free.gaps] == [("kv_layout", "HND")]


def test_what_no_module_can_have_is_no_gap() -> None:
    problems = [attention(n) for n in range(1, 71)]
    for values, part in (
        ({"mask_pattern": ("", "holes"), "custom_mask": (False, True)}, {"custom_mask": (False,)}),
        ({"kv_views": ("", "page"), "head_dims": ((64, 64), (576, 512, 128))},
         {"head_dims": ((576, 512, 128),)}),
        ({"regime": ("iid", "exact_grid"), "logits_soft_cap": (0.0, 30.0)},
         {"logits_soft_cap": (30.0,)}),
    ):  # fmt: skip
        name, missing = next(iter(values)), values[next(iter(values))][1]
        whole = axes(**values)
        for restrictions, gaps in (((), [missing]), ((part,), [])):
            claimed = replace(whole, restrictions=restrictions)
            found = covered(claimed, [], [judged(*problems)], {})
            assert [gap.value for gap in found.gaps if gap.name == name] == gaps
            assert found.unseen[name] == (missing,)


def test_head_dims_of_the_same_channels_are_told_apart() -> None:
    claimed = axes(head_dims=((24, 16), (24, 16, 0)))
    latent = attention(1, head_dim_qk=24, head_dim_vo=16, values_in_keys=True)
    found = covered(claimed, LAWS[:1], [judged(latent)], {})
    assert found.unseen == {"head_dims": ("(24, 16)",)}


def test_every_operation_has_lengths() -> None:
    merge = Axes("merge_state", all_axes("merge_state"), 10_000)
    found = covered(merge, LAWS[:1], [judged(MergeProblem(num_tokens=3))], {})
    assert found.lengths == {"tokens": (3, 3, 3, 3), "states": (2, 2, 2, 2)}
    assert found.to_json()["lengths"]["tokens"]["most"] == 3


def test_values_of_models_are_counted_and_those_of_many_families_are_asked_for() -> None:
    rows = all_axes("paged_attention")
    claimed = replace(axes(**rows), max_work=400_000)
    one = attention(4, head_dim_qk=128, head_dim_vo=128, group_size=4, causal=True)
    wide = attention(4, head_dim_qk=128, head_dim_vo=128, causal=True, window_left=1023)
    found = covered(claimed, LAWS[:1], [judged(one, wide)], {})
    assert found.real["head_dims"] == ("(128, 128)",)
    assert found.real["window_left"] == ("1023",)
    assert "4095" in found.real_unseen["window_left"]
    assert not [gap for gap in found.gaps if gap.code == "real"]  # none was due yet
    assert f"{sum(map(len, found.real.values()))} of" in found.text
    assert found.to_json()["real"]["window_left"] == ("1023",)
    windows = (0, 1, 2, 7, 15, 16, 127, 128)
    short = [attention(n, window_left=w) for n in range(1, 1001) for w in windows]
    late = covered(claimed, LAWS[:1], [judged(*short)], {})
    gaps = {(gap.name, gap.value) for gap in late.gaps if gap.code == "real"}
    assert ("window_left", "4095") in gaps
    assert ("window_left", "1023") not in gaps  # of fewer families
    assert "with window_left=4095, as models have" in next(
        gap.text for gap in late.gaps if gap.value == "4095"
    )
    refused = judged(attention(3, window_left=4095), law="soak", status="UNSUPPORTED")
    not_claimed = covered(claimed, LAWS[:1], [judged(*short), refused], {})
    assert "4095" not in {gap.value for gap in not_claimed.gaps}


def test_values_of_routers_and_experts_are_counted_too() -> None:
    claimed = Axes("route", all_axes("route"), 400_000)
    deepseek = RouteProblem(
        num_tokens=2,
        num_experts=256,
        top_k=8,
        num_groups=8,
        topk_groups=4,
        bias=True,
        method="deepseek_v3",
        scaling_factor=2.5,
    )
    found = covered(claimed, LAWS[:1], [judged(deepseek)], {})
    assert found.real["num_experts"] == ("256",)
    assert found.real["groups"] == ("(8, 4)",)
    assert found.real["scaling_factor"] == ("2.5",)
    assert "384" in found.real_unseen["num_experts"]
    few = [RouteProblem(num_tokens=n, num_experts=e, scaling_factor=s, dtype=dtype,
                        masked_groups=m)
           for n in (1, 2, 3, 4, 5, 7, 8, 9) for e in (2, 3, 4, 8, 16, 24, 32) for s in (1.0, 0.5)
           for dtype in ("float32", "float16", "bfloat16") for m in ("-inf", "zero")]  # fmt: skip
    late = covered(claimed, LAWS[:1], [judged(*few)], {})
    gaps = {(gap.name, gap.value) for gap in late.gaps if gap.code == "real"}
    assert {("num_experts", "256"), ("top_k", "8"), ("method", "deepseek_v3")} <= gaps
    assert ("num_experts", "384") not in gaps  # of fewer families
    experts = Axes("moe", all_axes("moe"), 400_000)
    qwen = MoEProblem(hidden=16, inter=16, num_experts=128, top_k=8)
    told = covered(experts, LAWS[:1], [judged(qwen)], {})
    assert told.real["num_experts"] == ("128",)
    assert "hidden" not in told.real_unseen  # too dear on a CPU


def test_a_declared_feature_that_no_problem_took_is_a_gap_where_a_run_is_thorough() -> None:
    every = all_axes("paged_attention")
    simplest = {name: values[0] for name, values in every.items()}
    claimed = replace(axes(alibi=(False, True), causal=(True,)), simplest=simplest)
    plain = [attention(length) for length in range(1, 70)]

    def missing(
        *problems: Problem, thorough: bool, status: str = "PASS", triton: bool = True
    ) -> list[str]:
        report = judged(*plain)
        if triton:
            report.kernels.files["kernel.py"] = FileRun()
        reached = Reached(claimed, {"features": ["alibi", "tree", "batch_invariant"]})
        reached.include(judged(*plain))
        reached.include(judged(*problems, status=status))
        gaps = reached.coverage(LAWS[:1], [report], thorough=thorough).gaps
        return [gap.text for gap in gaps if gap.code == "feature"]

    said = ["0 of 1 problem with the feature alibi, which is declared"]  # trees are not drawn
    assert missing(thorough=True) == said
    assert not missing(thorough=False)
    assert not missing(thorough=True, triton=False), "a rare feature is a kernel's alone"
    assert not missing(attention(3, alibi=True), thorough=True)
    assert not missing(attention(3, alibi=True), thorough=True, status="UNSUPPORTED")
