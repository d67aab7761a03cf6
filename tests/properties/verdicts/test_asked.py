"""Findings show the problems that were judged, whatever a law made of the one it was given."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from kernelproof.properties.findings.cases import case_of
from kernelproof.properties.findings.report import Finding
from kernelproof.properties.findings.text_format import finding_lines
from kernelproof.properties.seeded import BUGS
from kernelproof.properties.verdicts.asked import CALLS, MOST_KEPT, MOST_SHOWN, Calls, with_calls
from kernelproof.properties.verdicts.verdict import PASS, Verdict
from kernelproof.properties.worker import tasks
from kernelproof.properties.worker.requests import read_answer
from kernelproof.reference import AttentionProblem, problem_from_json

PROBLEM = AttentionProblem(
    query_lens=(3, 2), seq_lens=(40, 20), causal=True, page_size=4, num_kv_heads=2, group_size=2
)
BATCH = "call 2: the problem with query_lens=(2,), seq_lens=(20,), seed=1"


class Stages:
    """Nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Be in a stage."""
        return nullcontext()


def judged(law: str, bug: str) -> Verdict:
    reference = next(each.reference for each in BUGS if each.name == bug)
    payload: dict[str, Any] = {"law": law, "implementation": reference, "device": "cpu"}
    verdict = read_answer(tasks.judge({**payload, "problem": PROBLEM.to_json()}, Stages()))
    assert isinstance(verdict, Verdict)
    assert verdict.status == "FAIL"
    return verdict


@pytest.mark.parametrize(
    ("law", "bug", "said"),
    [
        ("sensitivity", "options-of-first-plan", "call 2: the problem with window_left=20"),
        ("layout_invariance", "layout-of-first-plan", "call 2: the problem with kv_layout='HND'"),
        ("page_size_invariance", "last-page-modulo", "call 2: the problem with page_size=1"),
        ("contiguity", "strides-of-first-plan", "call 1: the problem with strided_q=True, "),
        ("call_order", "plan-taken-up-again", f"call 1: the problem; {BATCH}; call 3: the problem"),
        ("split_kv", "prefix-taken-as-done", "the problem with seq_lens=(20, 8), causal=False"),
        ("doubled_keys", "repeated-pages-once", "call 2: the problem with seq_lens=(80, 40), caus"),
        ("request_order", "schedule-by-lengths", "with query_lens=(2, 3), seq_lens=(20, 40)"),
        ("keys_behind_window", "positions-of-first-plan", "call 1: the problem with window_left="),
        ("batch_independence", "causal-from-longest", "query_lens=(2,), seq_lens=(20,), request"),
    ],
)
def test_every_law_shows_the_calls_that_it_compares(law: str, bug: str, said: str) -> None:
    verdict = judged(law, bug)
    calls = verdict.message.splitlines()[-1]
    assert said in calls
    problems = [problem_from_json(each["problem"]) for each in verdict.compared]
    assert [each["call"] for each in verdict.compared] == sorted(
        each["call"] for each in verdict.compared
    )
    changed = [name for each in verdict.compared for name in each["fields"]]
    assert changed, "the fields or inputs that the law changed"
    assert all(name in calls for name in changed if len(verdict.compared) <= MOST_SHOWN)
    assert problems[-1] != PROBLEM or problems[0] != PROBLEM or len(problems) > 2
    finding = Finding("mine", law, verdict, PROBLEM)
    case = case_of(finding, "mine", operation=None, seed=0, target={})
    assert calls in case["description"]
    assert [each["problem"] for each in case["verdict"]["compared"]] == [
        each.to_json() for each in problems
    ]
    assert f"  {calls}" in finding_lines(finding)


def test_a_law_that_judges_the_problem_itself_says_nothing_more() -> None:
    verdict = judged("parity", "causal-from-start")
    assert verdict.compared == ()
    assert "\n" not in verdict.message


def test_calls_without_end_are_not_kept() -> None:
    calls = Calls()
    for seed in range(3 * MOST_KEPT):
        calls.note(AttentionProblem(seed=seed), None)
        calls.note(AttentionProblem(seed=seed), None)
    assert calls.count == 6 * MOST_KEPT
    assert len(calls.kept) == MOST_KEPT
    assert calls.kept[0].number == 1
    assert calls.kept[-1].problem.seed == 3 * MOST_KEPT - 1


def test_a_death_shows_the_call_that_it_was_in() -> None:
    CALLS.begin()
    CALLS.note(AttentionProblem(seed=1), None)
    crash = with_calls(Verdict("CRASH", "ValueError", "no"), AttentionProblem())
    assert crash.message == "no\njudged: call 1: the problem with seed=1"
    assert with_calls(PASS, AttentionProblem()) == PASS
