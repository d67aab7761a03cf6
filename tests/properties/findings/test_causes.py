"""Findings with one cause are one, and two faults of one kernel stay two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from kernelproof.properties.findings import report
from kernelproof.properties.findings.causes import Cause, causes_of, shared_values
from kernelproof.properties.findings.ledger import holds
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    ProblemVerdict,
)
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.profiles import Profile
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem

Fault = Callable[[AttentionProblem], bool]
PROFILE = Profile("tiny", problems=150, max_work=20_000, shrink_seconds=1.0, seconds=60.0)
AXES = Axes("paged_attention", all_axes("paged_attention"), 20_000, {})


@cache
def drawn(seed: int) -> list[AttentionProblem]:
    """Draw problems in four runs, as one has few lengths, and those often."""
    runs = [draw_problems(AXES, PROFILE, 4 * seed + run, 150) for run in range(4)]
    drawn = {each.id: each for run in runs for each in run}
    return [each for each in drawn.values() if isinstance(each, AttentionProblem)]


def law(
    name: str, fault: Fault, seed: int, *, status: str = "FAIL", kind: str = "numeric"
) -> LawReport:
    """Judge drawn problems under a law that finds a fault."""
    report = LawReport(name)
    for problem in drawn(seed):
        bad = fault(problem)
        verdict = (status, kind) if bad else ("PASS", "")
        report.problems[problem.id] = ProblemVerdict(problem, *verdict, vacuous=False)
    failing = [each.problem for each in report.problems.values() if each.status == status]
    smallest = min(failing, key=lambda each: each.work)
    report.finding = Finding("mine", name, Verdict(status, kind), smallest)  # type: ignore[arg-type]
    return report


def causes(*laws: LawReport) -> list[Cause]:
    return causes_of(ImplementationReport("mine", "mine.py:mine", laws=[*laws]))


@pytest.mark.parametrize(
    ("fault", "values"),
    [
        (lambda p: p.sinks, {"sinks": True}),
        (lambda p: p.window_left >= 0, {"window_left": {"min": 0}}),
        (lambda p: p.logits_soft_cap > 0, {"logits_soft_cap": {"min": 1.0}}),
        (lambda p: p.dtype == "bfloat16", {"dtype": "bfloat16"}),
        (lambda p: not p.causal, {"causal": False}),
        (lambda p: p.page_size >= 16, {"page_size": {"min": 16}}),
        (lambda p: p.sinks and p.causal, {"causal": True, "sinks": True}),
        (lambda p: p.more_queries_than_keys, {"more_queries_than_keys": True}),
        (lambda p: p.empty_requests, {"empty_requests": True}),
        (lambda p: 7 in p.seq_lens, {"seq_lens": {"has": 7}}),
        (lambda p: p.seed >= 0, {}),
    ],
)
def test_what_failing_problems_share(fault: Fault, values: dict[str, object]) -> None:
    found = law("parity", fault, 1)
    (cause,) = causes(found)
    assert cause.values == values
    count = sum(map(fault, drawn(1)))
    assert (cause.failing, cause.passing, cause.others) == (count, 0, len(drawn(1)) - count)


def test_few_problems_of_a_law_that_has_ended_tell_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "MOST_REMEMBERED", 30)
    found = law("parity", lambda p: p.sinks, 1)
    last = list(found.problems)[-1]
    found.forget(all_of_them=False)
    assert len(found.problems) == 60
    assert last in found.problems
    (cause,) = causes(found)
    assert cause.values == {"sinks": True}
    found.forget(all_of_them=True)
    assert not found.problems


def test_two_laws_that_see_one_fault() -> None:
    def windows(problem: AttentionProblem) -> bool:
        return problem.window_left >= 0

    numeric, stuck = law("parity", windows, 1), law("sensitivity", windows, 2, kind="insensitive")
    (cause,) = causes(numeric, stuck)
    assert cause.laws == ("parity", "sensitivity")
    assert cause.kinds == ("insensitive", "numeric")
    assert cause.values == {"window_left": {"min": 0}}
    assert numeric.finding
    assert stuck.finding
    assert cause.finding.problem.work == min(
        numeric.finding.problem.work, stuck.finding.problem.work
    )
    told = cause.to_json()
    assert {"law", "status", "kind", "problem", "message", "replay"} <= set(told)
    assert told["cause"]["failing"] == cause.failing
    assert f"with window_left of 0 and more, in 0 of {cause.others} without" in cause.sentence


def test_a_law_that_sees_the_fault_in_few_problems_belongs_to_it() -> None:
    wide = law("parity", lambda p: p.window_left >= 0, 1)
    narrow = law("chunked_prefill", lambda p: p.window_left >= 0 and p.most_keys >= 6, 2)
    (cause,) = causes(wide, narrow)
    assert cause.laws == ("parity", "chunked_prefill")
    assert (cause.values, cause.passing) == ({"window_left": {"min": 0}}, 0)


def test_two_faults_of_one_kernel_stay_two() -> None:
    def of_sinks(problem: AttentionProblem) -> bool:
        return problem.sinks

    def of_pages(problem: AttentionProblem) -> bool:
        return problem.page_size >= 16

    sinks, pages = law("parity", of_sinks, 1), law("page_relabelling", of_pages, 2)
    again = law("soak", of_sinks, 3)
    first, second = causes(sinks, pages, again)
    assert (first.laws, first.values) == (("parity", "soak"), {"sinks": True})
    assert (second.laws, second.values) == (("page_relabelling",), {"page_size": {"min": 16}})


def test_laws_that_see_a_feature_fail_now_and_then_see_one_fault() -> None:
    """Some problems with a sink pass, as where the values hide it."""
    first = law("parity", lambda p: p.sinks and p.seed % 3 != 0, 1)
    second = law("request_order", lambda p: p.sinks and p.seed % 3 != 1, 2)
    (one,) = causes(first, second)
    assert one.laws == ("parity", "request_order")
    assert "sinks" in one.values
    assert one.passing


def test_a_law_that_never_passes_does_not_speak_of_other_problems() -> None:
    """It judges only problems with a window; that a scale is ignored too is another fault."""

    def windows(problem: AttentionProblem) -> bool:
        return problem.window_left >= 0

    whole = law("parity", lambda p: windows(p) or p.k_scale != 1, 1)
    assert whole.finding
    whole.finding = replace(whole.finding, problem=AttentionProblem(seq_lens=(2,), k_scale=2.0))
    narrow = law("keys_behind_window", windows, 2)
    narrow.problems = {n: each for n, each in narrow.problems.items() if each.status != "PASS"}
    scale, window = causes(whole, narrow)
    assert (scale.laws, window.laws) == (("parity",), ("keys_behind_window",))
    everything = law("sensitivity", lambda _: True, 3)
    (one,) = causes(law("parity", lambda _: True, 1), everything)
    assert (one.values, one.passing) == ({}, 0)


def test_a_hang_and_a_wrong_answer_are_two() -> None:
    def long(problem: AttentionProblem) -> bool:
        return problem.most_keys >= 9

    wrong = law("parity", long, 1)
    hangs = law("well_formed", long, 2, status="HANG", kind="run")
    changed = law("inputs_unchanged", long, 3, kind="mutated_input")
    assert [each.laws for each in causes(wrong, hangs, changed)] == [
        ("parity",),
        ("well_formed",),
        ("inputs_unchanged",),
    ]


def test_hangs_in_one_place_are_one() -> None:
    """Doubled keys are not those of the problem, and say nothing of its values."""
    direct = law("parity", lambda p: 7 in p.seq_lens, 1, status="HANG", kind="run")
    # Of three lengths, so that those that fail share none; the smallest has no 7.
    doubled = law(
        "doubled_keys",
        lambda p: 7 in p.seq_lens or max(p.seq_lens, default=0) in (2, 6),
        3,
        status="HANG",
        kind="run",
    )
    assert direct.finding
    assert doubled.finding
    assert len(causes(direct, doubled)) == 2
    direct.finding.place = doubled.finding.place = "loop (mine.py)"
    (cause,) = causes(direct, doubled)
    assert cause.laws == ("parity", "doubled_keys")
    assert cause.values == {"seq_lens": {"has": 7}}
    stuck = {each.id: each for each in [*drawn(1), *drawn(3)] if 7 in each.seq_lens}
    assert cause.failing == len(stuck)
    passing = {
        each.problem.id
        for one in (direct, doubled)
        for each in one.problems.values()
        if each.status == "PASS"
    }
    assert cause.passing + cause.others == len(passing), "those of both laws count"
    doubled.finding.place = "other (mine.py)"
    assert len(causes(direct, doubled)) == 2


def test_a_kernel_that_dies_in_every_call_has_one_fault() -> None:
    """Laws that refuse each other's problems have none in common."""

    def dies(name: str, number: int) -> LawReport:
        one = law(name, lambda _: True, number, status="CRASH", kind="exit 3")
        first = next(iter(one.problems.values()))
        one.problems = {first.problem.id: first}
        return one

    laws = [dies("parity", 1), dies("chunked_prefill", 2), dies("split_kv", 3)]
    (cause,) = causes(*laws)
    assert cause.laws == ("parity", "chunked_prefill", "split_kv")
    assert cause.sentence == f"fails in {cause.failing} of {cause.failing} problems"
    wrong = law("request_order", lambda _: True, 4)
    assert len(causes(*laws, wrong)) == 2
    wrong.finding = None
    wrong.problems = {name: each._replace(status="PASS") for name, each in wrong.problems.items()}
    assert len(causes(*laws, wrong)) == 3, "not each call dies"
    stored = ImplementationReport("mine", "mine.py:mine")
    stored.replayed += [each.finding for each in laws[:2] if each.finding]
    assert len(causes_of(stored)) == 2, "two stored cases may have two reasons"


def test_the_problem_that_a_law_made_counts() -> None:
    """Sensitivity takes the mask away of a kernel that is wrong without one."""
    wrong = law("parity", lambda p: not p.causal, 1)
    made = AttentionProblem(query_lens=(2,), seq_lens=(2,))
    masked = replace(made, causal=True)
    verdict = Verdict("FAIL", "insensitive", about=made.to_json())
    switched = LawReport("sensitivity", finding=Finding("mine", "sensitivity", verdict, masked))
    (cause,) = causes(wrong, switched)
    assert cause.laws == ("parity", "sensitivity")


def test_a_stored_case_joins_what_a_law_finds() -> None:
    found = law("parity", lambda p: p.sinks, 1)
    assert found.finding
    report = ImplementationReport("mine", "mine.py:mine", laws=[found])
    report.replayed = [replace(found.finding, replay="kernelproof replay stored.json")]
    (cause,) = causes_of(report)
    assert cause.finding.replay == "kernelproof replay stored.json"
    report.replayed = [replace(found.finding, contradicts="an-entry")]
    assert len(causes_of(report)) == 2


def test_simplest_values_are_not_named_where_they_tell_nothing() -> None:
    few = [AttentionProblem(seq_lens=(3,), sinks=True)]
    passing = [AttentionProblem(seq_lens=(3,)), AttentionProblem(seq_lens=(3,), causal=True)]
    assert shared_values(few, passing) == {"sinks": True}
    assert not holds(AttentionProblem(seq_lens=(3,)), {"seq_lens": {"has": 4}})


def test_limits_of_lengths_hold_for_one_of_them() -> None:
    some = AttentionProblem(query_lens=(1, 1), seq_lens=(3, 90))
    assert holds(some, {"seq_lens": {"max": 8}})
    assert not holds(some, {"seq_lens": {"min": 4, "max": 8}})
    assert not holds(some, {"sm_scale": {"min": 0}}), "the default scale is no number"
