"""Simplifying a failing problem field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl.protocol import OPERATIONS
from kernelproof.properties.search.causes.ablation import needs_of
from kernelproof.properties.search.simplify import Limit, options_of, simplify
from kernelproof.properties.space.axes import Axes, all_axes, keeps
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
)

LARGE = AttentionProblem(
    query_lens=(1, 7, 4),
    seq_lens=(5, 129, 80),
    num_kv_heads=4,
    group_size=3,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="bfloat16",
    page_size=16,
    kv_layout="HND",
    page_order=3,
    causal=True,
    window_left=40,
    logits_soft_cap=5.0,
    sinks=True,
    k_scale=2.0,
    regime="outlier_channels",
    seed=77,
    request_ids=(3, 9, 4),
)


def simplified(problem: Any, fails: Callable[[Any], bool], tries: int = 400) -> tuple[Any, int]:  # noqa: ANN401  any problem
    asked: list[Problem] = []

    def still(other: Problem) -> bool:
        asked.append(other)
        return fails(other)

    found = simplify(problem, still, Limit(60.0, tries))
    assert found == problem or fails(found)
    return found, len(asked)


@pytest.mark.parametrize("least", [2, 9, 33, 65, 100])
def test_the_fewest_keys_are_found_and_nothing_else_is_kept(least: int) -> None:
    found, tries = simplified(LARGE, lambda p: max(p.seq_lens) >= least)
    assert found == AttentionProblem(seq_lens=(least,), page_size=16)
    assert tries < 120


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 40},
        {"sinks": True, "kv_layout": "HND"},
        {"group_size": 3, "logits_soft_cap": 5.0},
        {"dtype": "bfloat16", "regime": "outlier_channels"},
    ],
)
def test_options_that_matter_are_kept_alone(options: dict[str, Any]) -> None:
    def fails(problem: AttentionProblem) -> bool:
        return all(getattr(problem, name) == value for name, value in options.items())

    found, _ = simplified(LARGE, fails)
    assert found == AttentionProblem(page_size=16, **options)


def test_options_that_need_each_other_go_together() -> None:
    problem = replace(LARGE, alibi=True, alibi_function="sqrt", causal=True)
    found, _ = simplified(problem, lambda p: p.alibi or p.seq_lens[0] >= 3)
    assert options_of(found) in ({}, {"alibi": True})
    found, _ = simplified(problem, lambda p: p.sinks)
    assert options_of(found) == {"sinks": True}


def test_a_problem_of_two_requests_keeps_two() -> None:
    found, _ = simplified(LARGE, lambda p: len(p.seq_lens) > 1 and max(p.seq_lens) > 16)
    assert (found.query_lens, found.seq_lens) == ((1, 1), (1, 17))


@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_it_ends_with_its_budget_and_is_the_same_each_time(most: int) -> None:
    def fails(problem: Any) -> bool:  # noqa: ANN401  any problem
        return bool(max(problem.seq_lens) >= 33)

    first, tries = simplified(LARGE, fails, most)
    assert tries <= most
    assert simplified(LARGE, fails, most) == (first, tries)
    assert simplify(LARGE, fails, Limit(0.0)) == LARGE


def test_experts_are_simplified_too() -> None:
    problem = MoEProblem(
        num_tokens=90,
        hidden=256,
        inter=128,
        num_experts=16,
        top_k=4,
        biases=True,
        seed=5,
        routed_scaling_factor=2.5,
    )
    found, _ = simplified(problem, lambda p: p.num_tokens >= 17 and p.biases)
    assert found == MoEProblem(num_tokens=17, biases=True)
    batched = BatchedMoEProblem(counts=(3, 40, 0, 12), most_rows=64)
    found, _ = simplified(batched, lambda p: max(p.counts) >= 9)
    assert found.counts == (9,)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_problems_of_every_operation_are_simplified_and_taken_apart(operation: str) -> None:
    axes = Axes(operation, all_axes(operation), 100_000)
    for problem in draw_problems(axes, PROFILES["quick"], 3, 12):
        half = int(problem.id, 16) % 2

        def fails(other: Problem, half: int = half) -> bool:
            return int(other.id, 16) % 2 == half

        found, _ = simplified(problem, fails, tries=60)
        needs_of(found, axes, fails)


def test_a_smaller_problem_stays_within_what_may_be_drawn() -> None:
    every = all_axes("merge_state")
    four = Axes("merge_state", {**every, "num_states": (2, 4)}, 100_000)
    problem = MergeProblem(num_states=4, num_tokens=40)
    assert not keeps(four, replace(problem, num_states=3), problem)
    assert keeps(four, replace(problem, num_states=2), problem)
    assert keeps(four, replace(problem, num_tokens=33), problem)
    heads = all_axes("paged_attention")
    wide = Axes("paged_attention", {**heads, "head_dims": ((64, 64),)}, 100_000)
    attention = AttentionProblem(head_dim_qk=64, head_dim_vo=64)
    assert not keeps(wide, replace(attention, head_dim_qk=16, head_dim_vo=16), attention)
    assert keeps(wide, replace(attention, seq_lens=(9,), query_lens=(1,)), attention)
