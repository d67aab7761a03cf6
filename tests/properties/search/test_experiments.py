"""What a failing problem needs is found by taking it away, and two faults are two findings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kernelproof.properties.findings.causes import causes_of
from kernelproof.properties.findings.ledger import holds
from kernelproof.properties.findings.report import Finding, ImplementationReport
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.search.causes.ablation import Needs, condition, needs_of
from kernelproof.properties.search.causes.experiments import (
    CALLS,
    SHARE,
    Experiments,
    _problems_of,
    experiments_on,
)
from kernelproof.properties.search.causes.faults import (
    Fault,
    alike,
    further_conditions,
    is_certain,
    merge,
)
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.profiles import Cost, Profile
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem, MergeProblem, Problem

KERNELS = Path(__file__).parents[1] / "two_fault_kernels.py"
AXES = Axes("paged_attention", all_axes("paged_attention"), 100_000)
TINY = Profile("tiny", problems=30, max_work=20_000, shrink_seconds=30.0, seconds=60.0)


@pytest.mark.parametrize(
    ("fault", "smallest", "values"),
    [
        (lambda p: p.sinks, {"sinks": True}, {"sinks": True}),
        # A wide window hides nothing from one key: with more keys it does.
        (lambda p: 0 <= p.window_left < p.most_keys, {"window_left": 0},
         {"window_left": {"min": 0}}),
        # Right of a query are keys of later queries only: a wider window hides none of them.
        (
            lambda p: 0 <= p.window_right < p.most_queries - 1 and not p.causal,
            {"window_right": 0, "query_lens": (2,), "seq_lens": (16,)},
            {"causal": False, "window_right": {"min": 0}, "most_queries": {"min": 2}},
        ),
        (lambda p: not p.causal, {}, {"causal": False}),
        (lambda p: p.page_size == 1, {}, {"page_size": 1}),
        (lambda p: p.head_dim_qk > 128, {"head_dim_qk": 256}, {"head_dim_qk": {"min": 192}}),
        (lambda p: p.k_scale != 1, {"k_scale": 2.0}, {"k_scale": [0.5, 1.25, 2.0]}),
        (
            lambda p: p.num_kv_heads > 1 and p.group_size > 1,
            {"num_kv_heads": 3, "group_size": 2},
            {"num_kv_heads": {"min": 2}, "group_size": {"min": 2}},
        ),
        # No query shows it: that such a batch passes says nothing of the lengths.
        (
            lambda p: p.most_keys > 64 and p.num_tokens > 0,
            {"seq_lens": (65,)},
            {"most_keys": {"min": 65}},
        ),
        (lambda p: p.empty_requests, {"seq_lens": (0,)}, {"empty_requests": True}),
        (lambda p: p.num_requests > 1, {"query_lens": (1, 1), "seq_lens": (1, 1)},
         {"num_requests": {"min": 2}}),
        (
            lambda p: p.causal and p.partial_last_page,
            {"causal": True, "page_size": 16},
            {"causal": True, "page_size": {"min": 2}, "partial_last_page": True},
        ),
        (
            lambda p: p.causal and holds(p, {"unequal_lengths": True}),
            {"causal": True, "query_lens": (2,)},
            {"causal": True, "unequal_lengths": True},
        ),
        (lambda p: p.sinks and p.most_queries > 1,
         {"sinks": True, "query_lens": (2,), "seq_lens": (2,)},
         {"sinks": True, "most_queries": {"min": 2}}),
        # 0 taken for no window: a wider one is tried with more queries, of which it hides some.
        (lambda p: p.window_right == 0 and p.most_queries > 1 and not p.causal,
         {"window_right": 0, "query_lens": (2,), "seq_lens": (16,)},
         {"causal": False, "window_right": 0, "most_queries": {"min": 2}}),
        (lambda _: True, {}, {}),
    ],
)  # fmt: skip
def test_what_a_problem_needs(
    fault: Callable[[Problem], bool], smallest: dict[str, object], values: dict[str, object]
) -> None:
    problem = replace(AttentionProblem(), **smallest)  # type: ignore[arg-type]
    assert fault(problem)
    assert needs_of(problem, AXES, fault).values == values


def test_a_value_of_which_nothing_is_known_is_not_needed() -> None:
    """Another fault hides what an option would show, in most of what could be asked."""

    def fails(problem: AttentionProblem) -> bool | None:
        hidden = problem.window_left >= 0 and problem.most_keys > 1
        return None if hidden else problem.sinks and problem.window_left < 0

    found = needs_of(AttentionProblem(sinks=True), AXES, fails)  # type: ignore[arg-type]
    assert found.values == {"sinks": True}


def test_more_keys_that_show_another_fault_say_nothing_of_a_value() -> None:
    """With many keys each group size fails, so what is wrong with sizes is seen in few keys."""

    def fails(problem: Problem) -> bool:
        assert isinstance(problem, AttentionProblem)
        return problem.group_size in (3, 5, 6) or problem.most_keys > 64

    found = needs_of(AttentionProblem(group_size=3), AXES, fails)
    assert found.values == {"group_size": [3, 5, 6]}


@pytest.mark.parametrize(
    "needed",
    [
        {"page_size": 1},
        {"causal": False},
        {"causal": False, "sinks": True},
        {"group_size": 1},
        {"causal": True, "more_queries_than_keys": True},
    ],
    ids=str,
)
def test_more_keys_that_show_another_fault_hide_no_need(needed: dict[str, object]) -> None:
    """A value may be the simplest that there is: only other values show that it is needed."""

    def fails(problem: Problem) -> bool:
        assert isinstance(problem, AttentionProblem)
        return holds(problem, needed) or problem.most_keys > 64

    lengths = {"query_lens": (2,), "seq_lens": (1,)} if "more_queries_than_keys" in needed else {}
    fields = {name: each for name, each in needed.items() if name != "more_queries_than_keys"}
    problem = replace(AttentionProblem(), **{**fields, **lengths})  # type: ignore[arg-type]
    assert needs_of(problem, AXES, fails).values == needed


def test_the_shortest_condition_is_told() -> None:
    sizes = frozenset({3, 5, 7})
    assert condition(frozenset({16, 32}), frozenset({1, 8}), 1) == {"min": 16}
    assert condition(sizes, frozenset({1, 2, 4}), 1) == [3, 5, 7]
    assert condition(frozenset({"relu2"}), frozenset({"swiglu"}), "swiglu") == "relu2"


def fault(*names: str, symptom: str = "answer out", size: str = "most_keys") -> Fault:
    fields = {name: frozenset({1}) for name in names}
    needs = Needs(fields, dict.fromkeys(names, frozenset({0})), {size: {"min": 2}}, {})
    return Fault(AttentionProblem(), Verdict("FAIL", "numeric"), needs, {symptom})


def test_a_cause_in_some_of_the_fields_of_another_is_that_one() -> None:
    """What needs hidden keys needs a window, or a window beside the causal mask."""
    window, both = fault("window_left", "regime"), fault("window_left", "regime", "causal")
    assert alike(window, both)
    assert alike(both, window)
    merge(both, window)
    assert both.needs.fields.keys() == {"window_left", "regime"}
    assert not alike(window, fault("window_left", "causal", symptom="answer lse"))
    assert not alike(window, fault("sinks", "regime"))
    assert not alike(fault("regime"), fault("regime", "sinks")), "a regime makes faults visible"


def test_a_cause_that_explains_nothing_by_itself_is_not_told() -> None:
    first, second = fault("causal"), fault("causal", "sinks")
    examined = object.__new__(Experiments)
    problems = [AttentionProblem(seq_lens=(keys,), causal=True, sinks=True) for keys in (2, 3)]
    examined._seen = {each.id: (each, "answer out") for each in problems}
    examined._faults = [first, second]
    examined._drop_what_others_explain()
    assert examined._faults == [first]
    assert examined._counted(first)[0] == problems


def test_causes_in_one_option_that_explain_little_apart_are_one() -> None:
    """Pages in a wrong order show behind a window or under a causal mask, each seldom."""
    window, causal = fault("page_order", "window_left"), fault("page_order", "causal")
    examined = object.__new__(Experiments)
    plain = [AttentionProblem(seq_lens=(n,), causal=True, page_order=1) for n in range(2, 12)]
    hidden = [replace(each, causal=False, window_left=1) for each in plain]
    both = [replace(each, window_left=1) for each in plain]
    answers = {"": [*plain[1:], *hidden[1:]], "answer out": [plain[0], hidden[0], *both]}
    examined._seen = {p.id: (p, answer) for answer, found in answers.items() for p in found}
    examined._faults = [window, causal]
    examined._unite_undecided()
    assert examined._faults == [window]
    assert window.needs.fields.keys() == {"page_order"}
    decided, other = fault("page_order", "window_left"), fault("page_order", "causal")
    examined._seen = {p.id: (p, "answer out") for p in [*plain, *hidden]}
    examined._faults = [decided, other]
    examined._unite_undecided()
    assert examined._faults == [decided, other], "each explains its problems by itself"
    sinks, cap = fault("page_order", "sinks"), fault("page_order", "logits_soft_cap")
    examined._seen, examined._faults = {}, [sinks, cap]
    examined._unite_undecided()
    assert examined._faults == [sinks, cap], "an option beside the order is a fault of its own"


def test_causes_of_which_none_decides_are_one() -> None:
    """What an error near its bound seems to need is chance, and differs each time."""
    apart = [fault("sinks", "regime"), fault("k_scale"), fault("strided_q")]
    problems = [AttentionProblem(seq_lens=(3,), seed=seed) for seed in range(4)]
    examined = object.__new__(Experiments)
    answers = ["answer out", "", "", ""]
    examined._seen = {p.id: (p, a) for p, a in zip(problems, answers, strict=True)}
    examined._faults = list(apart)
    assert examined._take_for_one()
    (one,) = examined._faults
    assert one is apart[0]
    assert not one.needs.fields
    assert examined._counted(one)[0] == problems[:1]
    unlike = [fault("sinks"), fault("k_scale", symptom="answer lse")]
    examined._faults = list(unlike)
    assert not examined._take_for_one()
    assert examined._faults == unlike


def test_nothing_is_decided_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause that was not tried with other tensors is none that does not decide."""
    examined = object.__new__(Experiments)
    causes = [fault("sinks"), fault("k_scale")]
    for over, decided, left in ((True, False, 2), (False, True, 1)):
        examined._faults, examined._seen = list(causes), {}
        monkeypatch.setattr(examined, "_over", lambda over=over: over)
        monkeypatch.setattr(examined, "_decides", lambda _: False)
        assert examined._is_decided() is decided
        assert len(examined._faults) == left


def test_what_a_law_changes_shows_the_cause_of_its_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scaling keys back shows that a scale is ignored, in a problem that has no scale itself."""
    scale, sinks = fault("k_scale"), fault("sinks")
    examined = object.__new__(Experiments)
    examined._faults = [sinks, scale]
    calls = ({"problem": AttentionProblem().to_json(), "fields": ["k_scale"]},)
    verdict = Verdict("FAIL", "numeric", compared=calls)
    finding = Finding("mine", "scale_homogeneity", verdict, AttentionProblem())
    monkeypatch.setattr(examined, "_answer", lambda _: "")
    assert examined._changed_by(finding) is scale
    assert examined._changed_by(replace(finding, verdict=Verdict("FAIL", "numeric"))) is None
    monkeypatch.setattr(examined, "_answer", lambda _: "answer out")
    assert examined._changed_by(finding) is None, "its own problem tells more"


def test_a_finding_is_of_the_problems_that_its_law_made() -> None:
    made = AttentionProblem(kv_layout="HND")
    verdict = Verdict("FAIL", "numeric", compared=({"problem": made.to_json()},))
    finding = Finding("mine", "layout_invariance", verdict, AttentionProblem())
    assert _problems_of(finding) == [made, AttentionProblem()]


def test_a_condition_that_few_failures_share_is_no_further_one() -> None:
    """Most problems have several keys anyway: that two which fail do says nothing."""
    several = [AttentionProblem(seq_lens=(3,), seed=seed) for seed in range(20)]
    one = [AttentionProblem(sinks=True, seed=seed) for seed in range(4)]
    few = [replace(each, sinks=True) for each in several[:2]]
    assert not further_conditions({"sinks": True}, few, one, [*several, *one])
    many = [replace(each, sinks=True) for each in several]
    others = [AttentionProblem(seed=seed) for seed in range(60)]
    found = further_conditions({"sinks": True}, many, one * 5, [*many, *one, *others])
    assert found == {"most_keys": {"min": 3}}


def test_a_condition_on_lengths_is_told_where_sizes_say_nothing() -> None:
    lengths = [((2,), (1,)), ((1,), (2,)), ((3,), (7,))]
    several = [
        AttentionProblem(query_lens=t, seq_lens=s, seed=n) for t, s in lengths for n in range(5)
    ]
    square = [AttentionProblem(query_lens=(n,), seq_lens=(n,)) for n in range(1, 16)]
    found = further_conditions({}, several, square, [*several, *square])
    assert found == {"unequal_lengths": True}
    found = further_conditions({}, several[5:], square, [*several, *square])
    assert found == {"earlier_keys": True}
    assert not holds(MergeProblem(), found)


def certain(fails: Callable[[AttentionProblem], bool]) -> bool:
    problem = AttentionProblem(seq_lens=(2,), window_left=0)
    assert fails(problem)
    needs = needs_of(problem, AXES, fails)  # type: ignore[arg-type]
    one = Fault(problem, Verdict("FAIL", "numeric"), needs, {"answer out"})
    return is_certain(one, fails)  # type: ignore[arg-type]


def test_a_cause_that_few_of_its_problems_show_is_certain_with_other_values() -> None:
    """A window hides nothing in most problems; an error near its bound depends on the seed."""
    assert certain(lambda p: 0 <= p.window_left < p.most_keys - 1)
    assert not certain(lambda p: 0 <= p.window_left < p.most_keys - 1 and not p.seed % 2)
    assert not certain(lambda p: p.window_left >= 0 or p.seed == 1)


def test_the_number_of_problems_ends_experiments_and_not_the_clock() -> None:
    """A busy machine takes as long as it takes: what is found does not depend on it."""
    address = Address("mine.py:mine", None, "cpu")
    fast = Candidate("mine", address, AXES, cost=Cost("fast", 1.0, 1000))
    slow = replace(fast, cost=Cost("slow", 0.2, 1000))

    def experiments(candidate: Candidate) -> Experiments:
        law = find_law("parity")
        return Experiments(Mock(), candidate, {law.name: law}, law, TINY, 0, lambda: False)

    start = time.monotonic()
    assert experiments(fast)._deadline - start >= 4 * SHARE * TINY.shrink_seconds
    assert experiments(slow)._deadline - start < 1.1 * SHARE * TINY.shrink_seconds
    one = experiments(slow)
    assert one._calls == CALLS // 5
    one._calls = 0
    assert one._answer(AttentionProblem()) is None


def test_experiments_draw_the_same_whichever_of_two_kernels_of_one_name_came_first() -> None:
    law = find_law("parity")

    def drawn(shown: str) -> list[AttentionProblem]:
        address = Address("mine.py:mine", None, "cpu")
        candidate = Candidate(shown, address, AXES, declared_name="mine")
        return Experiments(Mock(), candidate, {}, law, TINY, 0, lambda: False)._draw()  # type: ignore[return-value]

    assert drawn("mine") == drawn("mine (mine.py:mine)")


def test_conforming_kernels_cost_no_experiment() -> None:
    report = ImplementationReport("mine", "mine.py:mine", operation="paged_attention")
    candidate = Candidate("mine", Address("mine.py:mine", None, "cpu"), AXES)
    assert experiments_on(report, candidate, Plan(["mine"], TINY), 0, lambda: False) is None


def test_two_faults_are_two_findings() -> None:
    """The law ends with the window; that the soft cap is ignored is found without one."""
    report = Run(Plan([f"{KERNELS}:window_and_cap"], TINY, laws=("parity",))).execute()
    (one,) = report.implementations
    assert not one.error
    found = causes_of(one)
    assert sorted(map(str, (each.values for each in found))) == [
        "{'logits_soft_cap': {'min': 1.0}}",
        "{'window_left': {'min': 0}}",
    ]
    assert all(each.failing and each.finding.law == "parity" for each in found)
    (further,) = one.separation.further
    assert further in one.findings
    assert one.separation.unexplained == 0
