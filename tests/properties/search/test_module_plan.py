"""Which modules are built, for several implementations together and within the time of a run."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.search import module_plan
from kernelproof.properties.search.module_plan import Chosen, ModulePlan
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.module_selection import Selection, find_modules
from kernelproof.reference import AttentionProblem, Problem

ALL_AXES = narrow("paged_attention", lambda problems: [None] * len(problems), 10**9)


def axes(*names: str) -> Axes:
    assert ALL_AXES is not None
    return replace(ALL_AXES, values={name: ALL_AXES.values[name] for name in names})


AXES = axes("dtype", "head_dims")
BY_TOKENS = axes("verify", "dtype")


def key(problem: Problem, *, tokens: bool = False) -> str:
    assert isinstance(problem, AttentionProblem)
    more = f" {problem.most_queries}" if tokens else ""
    return f"{problem.dtype} {problem.head_dim_qk}{more}"


def selection(
    backend: str, most: int = 8, exist: Sequence[str] = (), stored: Sequence[Problem] = ()
) -> Selection:
    """Stand for an implementation whose modules differ in dtype and head dim."""
    modules = find_modules(
        AXES,
        lambda problems: [key(each) for each in problems],
        stored=stored,
        libraries=lambda problems: [
            (f"{backend} {key(each)}", f"{backend} {key(each)}" in exist) for each in problems
        ],
    )
    return Selection(modules, AXES.simplest, most)


def chosen_together(
    plan: ModulePlan, wishes: dict[str, tuple[Selection, float]]
) -> dict[str, Chosen]:
    def choose(name: str) -> Chosen:
        return plan.choose(ImplementationReport(name, name), *wishes[name])

    with ThreadPoolExecutor(len(wishes)) as threads:
        return dict(zip(wishes, threads.map(choose, wishes), strict=True))


def libraries(chosen: Chosen) -> set[str]:
    return {module.library for module in chosen.modules}


def test_implementations_share_what_is_built() -> None:
    wishes = {name: (selection("fa2"), 5.5) for name in ("decode", "prefill", "mixed")}
    found = chosen_together(ModulePlan(3), wishes)
    every = set.union(*map(libraries, found.values()))
    assert every == libraries(found["decode"]) == libraries(found["mixed"])
    assert len(every) == 8
    assert sum(each.minutes for each in found.values()) == len(every) * 5.5


def test_each_has_one_module_before_any_has_its_second() -> None:
    wishes = {name: (selection(name), 10.0) for name in ("fa2", "fa3", "xqa")}
    found = chosen_together(ModulePlan(3, minutes=40.0), wishes)
    assert sorted(len(each.modules) for each in found.values()) == [1, 1, 2]


def test_several_query_tokens_come_before_other_seconds() -> None:
    modules = find_modules(
        BY_TOKENS, lambda problems: [key(each, tokens=True) for each in problems]
    )
    decodes = Selection(modules, BY_TOKENS.simplest, 8)
    wishes = {"fa2": (selection("fa2"), 10.0), "xqa": (decodes, 10.0)}
    found = chosen_together(ModulePlan(2, minutes=30.0), wishes)
    assert len(found["fa2"].modules) == 1
    assert [each.values["verify"][0] > 0 for each in found["xqa"].modules] == [False, True]


def test_what_exists_is_preferred_and_costs_nothing() -> None:
    exist = [f"fa2 {dtype} 256" for dtype in ("float16", "bfloat16")]
    plan = ModulePlan(1, minutes=5.0)
    found = chosen_together(plan, {"fa2": (selection("fa2", exist=exist), 5.5)})["fa2"]
    assert libraries(found) == set(exist)
    assert found.minutes == 0.0


def test_what_an_earlier_run_built_is_its_share() -> None:
    """The same command again builds nothing, though it has the same time."""
    cold = chosen_together(ModulePlan(1, minutes=30.0), {"fa2": (selection("fa2"), 10.0)})["fa2"]
    assert len(cold.modules) == 3
    built = selection("fa2", exist=[*libraries(cold)])
    warm = chosen_together(ModulePlan(1, minutes=30.0), {"fa2": (built, 10.0)})["fa2"]
    assert (libraries(warm), warm.minutes) == (libraries(cold), 0.0)


def test_what_exists_is_taken_where_a_stored_problem_needs_too_much() -> None:
    stored = [AttentionProblem(dtype="bfloat16", head_dim_qk=64, head_dim_vo=64)]
    assert key(stored[0]) in {key(each.first) for each in selection("fa2")._left}
    wished = selection("fa2", exist=["fa2 float16 256"], stored=stored)
    found = chosen_together(ModulePlan(1, minutes=5.0), {"fa2": (wished, 5.5)})["fa2"]
    assert libraries(found) == {"fa2 float16 256"}
    assert found.missing == 5.5


def test_a_module_that_was_begun_with_is_chosen_once() -> None:
    exist = [f"fa2 {selection('fa2').simplest}", "fa2 bfloat16 256"]
    wished = selection("fa2", exist=exist)
    (ready,) = wished.ready()
    assert ready.library == exist[0]
    wished.take([ready])
    assert wished.ready() == []
    found = chosen_together(ModulePlan(1, minutes=1.0), {"fa2": (wished, 5.5)})["fa2"]
    assert [each.library for each in found.modules] == exist
    assert selection("fa2", exist=exist[1:]).ready() == []


def test_a_module_that_is_dearer_than_all_there_is_is_named() -> None:
    plan = ModulePlan(2, minutes=144.0)
    wishes = {"moe": (selection("cutlass"), 432.0), "fa2": (selection("fa2"), 5.5)}
    found = chosen_together(plan, wishes)
    assert (found["moe"].modules, found["moe"].missing) == ([], 432.0)
    assert len(found["fa2"].modules) == 8


def test_a_module_that_takes_longer_than_the_run_is_named_and_one_that_exists_is_not() -> None:
    def found(*exist: str | None) -> Chosen:
        plan = ModulePlan(1, minutes=144.0, longest=12.0)
        wished = selection("topk", 1, [f"topk {each}" for each in exist])
        return plan.choose(ImplementationReport("topk", "topk"), wished, 60.0, 4)

    assert (found().modules, found().missing) == ([], 60.0)
    assert len(found(selection("topk").simplest).modules) == 1
    assert (
        len(chosen_together(ModulePlan(1, longest=12.0), {"": (selection(""), 5.5)})[""].modules)
        == 8
    )


def test_what_earlier_runs_learned_counts_and_not_what_is_declared() -> None:
    first = chosen_together(ModulePlan(1), {"fa2": (selection("fa2", 1), 5.5)})["fa2"]
    (library,) = libraries(first)
    plan = ModulePlan(1, minutes=6.0, learned={library: 7.0})
    found = chosen_together(plan, {"fa2": (selection("fa2", 1), 5.5)})["fa2"]
    assert (found.modules, found.missing) == ([], 7.0)


def test_who_comes_late_is_not_waited_for_without_end() -> None:
    completed = threading.Event()
    plan = ModulePlan(2, minutes=math.inf, complete=completed.set)
    plan._until -= module_plan.PATIENCE_SECONDS
    found = plan.choose(ImplementationReport("fa2", "fa2"), selection("fa2", 2), 5.5)
    assert len(found.modules) == 2
    assert completed.is_set()
    late = plan.choose(ImplementationReport("late", "late"), selection("fa2", 2), 5.5)
    assert late.minutes == 0.0


def test_who_comes_late_finds_its_share_left() -> None:
    plan = ModulePlan(2, minutes=40.0)
    plan._until -= module_plan.PATIENCE_SECONDS
    reports = [ImplementationReport(name, name) for name in ("first", "late")]
    first = plan.choose(reports[0], selection("first"), 5.0)
    assert first.minutes == 20.0
    late = plan.choose(reports[1], selection("late"), 5.0)
    assert late.minutes == 20.0


def test_the_first_module_may_take_the_share_of_who_comes_late() -> None:
    plan = ModulePlan(2, minutes=40.0)
    plan._until -= module_plan.PATIENCE_SECONDS
    first = plan.choose(ImplementationReport("dear", "dear"), selection("dear"), 30.0)
    assert len(first.modules) == 1
    late = plan.choose(ImplementationReport("late", "late"), selection("late"), 12.0)
    assert (late.modules, late.missing, late.left) == ([], 12.0, 10.0)
