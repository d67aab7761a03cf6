"""Counterexamples on fewer pages, and those that are too dear to shrink step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.operations import on_fewer_pages, simplify
from kernelproof.properties.space.simplifying import FEW_PAGES
from kernelproof.reference import AttentionProblem, MergeProblem, MetadataProblem, Problem

AXES = Axes("paged_attention", all_axes("paged_attention"), 10**6)


def test_many_small_pages_become_a_few_larger_ones_the_smallest_that_do_first() -> None:
    found = list(on_fewer_pages(AttentionProblem(seq_lens=(66,), page_size=1), AXES))
    assert found
    assert all(each.num_pages <= FEW_PAGES for each in found)
    assert all(each.seq_lens == (66,) for each in found)
    sizes = [each.page_size for each in found]
    assert sizes == sorted(sizes)
    smaller = [size for size in AXES.allows("page_size") if size < sizes[0]]
    assert all(-(-66 // size) > FEW_PAGES for size in smaller)


def test_each_of_several_requests_keeps_a_page() -> None:
    problem = AttentionProblem(query_lens=(1, 1, 1), seq_lens=(4, 4, 4), page_size=1)
    assert next(each.num_pages for each in on_fewer_pages(problem, AXES)) == 3


def test_what_has_few_pages_or_none_stays() -> None:
    assert not list(on_fewer_pages(AttentionProblem(seq_lens=(2,), page_size=1), AXES))
    assert not list(on_fewer_pages(AttentionProblem("ragged_attention", seq_lens=(66,)), AXES))
    assert not list(on_fewer_pages(MergeProblem(), AXES))


class Counted:
    """Fails where a predicate says so, and counts the tries and the failures."""

    def __init__(self, predicate: Callable[[Problem], bool], most_failures: int = 99) -> None:
        self.tried: list[Problem] = []
        self.failures = 0
        self._predicate, self._most = predicate, most_failures

    def __call__(self, problem: Problem) -> bool:
        if self.failures >= self._most:
            return False
        self.tried.append(problem)
        failed = self._predicate(problem)
        self.failures += failed
        return failed


LARGE = AttentionProblem(
    query_lens=(1, 300, 612, 5),
    seq_lens=(900, 300, 612, 700),
    num_kv_heads=8,
    group_size=4,
    head_dim_qk=128,
    head_dim_vo=128,
    dtype="bfloat16",
    page_size=16,
    kv_layout="HND",
    page_order=1,
    shared_prefix_pages=1,
    causal=True,
    window_left=127,
    logits_soft_cap=30.0,
    sinks=True,
    strided_kv=True,
    regime="outlier_channels",
    seed=77,
)


def smallest(fails: Counted, axes: Axes = AXES, start: Problem = LARGE) -> Problem:
    return simplify(start, axes, fails, lambda: True)


@pytest.mark.parametrize("least_tokens", [1, 2, 77, 257, 600])
def test_a_length_is_found_exactly_after_few_failures(least_tokens: int) -> None:
    def hangs(problem: Problem) -> bool:
        assert isinstance(problem, AttentionProblem)
        return problem.window_left >= 0 and max(problem.query_lens) >= least_tokens

    fails = Counted(hangs)
    found = smallest(fails)
    assert isinstance(found, AttentionProblem)
    assert found.query_lens == found.seq_lens == (least_tokens,)
    assert replace(found, query_lens=(1,), seq_lens=(1,), page_size=1) == AttentionProblem(
        window_left=0
    )
    assert fails.failures <= 8
    assert len(fails.tried) < 80


def test_what_a_failure_needs_is_kept_at_its_simplest_value() -> None:
    def hangs(problem: Problem) -> bool:
        assert isinstance(problem, AttentionProblem)
        return problem.window_left >= 16 and problem.causal and max(problem.seq_lens) >= 300

    fails = Counted(hangs)
    found = smallest(fails)
    assert isinstance(found, AttentionProblem)
    assert (found.query_lens, found.seq_lens) == ((1,), (300,))
    assert (found.causal, found.window_left, found.sinks, found.dtype) == (
        True,
        16,
        False,
        "float32",
    )
    assert fails.failures <= 10


def test_many_causes_and_several_requests_are_reduced_from_above() -> None:
    def hangs(problem: Problem) -> bool:
        assert isinstance(problem, AttentionProblem)
        return (
            len(problem.seq_lens) >= 3
            and problem.sinks
            and problem.causal
            and problem.kv_layout == "HND"
        )

    found = smallest(Counted(hangs))
    assert found == AttentionProblem(
        query_lens=(1, 1, 1), seq_lens=(1, 1, 1), sinks=True, causal=True, kv_layout="HND"
    )


def test_only_values_of_one_module_are_tried_together() -> None:
    parts = (
        {"dtype": ("float16",), "window_left": (-1,)},
        {"dtype": ("bfloat16",), "window_left": (7, 127)},
    )
    axes = replace(AXES, restrictions=parts)
    fails = Counted(lambda problem: problem.window_left >= 0)  # type: ignore[union-attr]
    found = smallest(fails, axes)
    assert isinstance(found, AttentionProblem)
    assert (found.dtype, found.window_left, found.seq_lens) == ("bfloat16", 7, (1,))
    for problem in fails.tried[4:]:
        assert isinstance(problem, AttentionProblem)
        assert any(
            problem.dtype in part["dtype"] and problem.window_left in part["window_left"]
            for part in parts
        )


def test_latent_heads_are_simplified_with_what_they_bring() -> None:
    """Their values are three numbers, and those of a problem two."""
    axes = replace(
        AXES,
        values={**AXES.values, "head_dims": ((576, 512, 0), (576, 512, 128))},
        simplest={"head_dims": (576, 512, 0)},
        restrictions=(),
    )
    latent = AttentionProblem(
        query_lens=(3, 1),
        seq_lens=(40, 2),
        num_kv_heads=1,
        group_size=128,
        head_dim_qk=576,
        head_dim_vo=512,
        values_in_keys=True,
        dtype="bfloat16",
        sm_scale=0.1,
        k_scale=2.0,
        seed=5,
    )

    def fails(problem: Problem) -> bool:
        return isinstance(problem, AttentionProblem) and problem.values_in_keys

    found = simplify(latent, axes, fails, lambda: True)
    assert found == AttentionProblem(
        num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, values_in_keys=True, dtype="float32"
    )


def test_a_limit_of_failures_leaves_the_last_problem_that_failed() -> None:
    fails = Counted(lambda problem: problem.work > 10**6, most_failures=2)
    found = smallest(fails)
    assert fails.failures == 2
    assert found.work > 10**6
    assert found == [problem for problem in fails.tried if problem.work > 10**6][-1]


def test_merges_are_simplified_and_metadata_is_left() -> None:
    axes = Axes("merge_state", all_axes("merge_state"), 10**6)
    start = MergeProblem(num_states=4, num_tokens=40, num_heads=7, head_dim=80, empty="some")
    found = smallest(Counted(lambda problem: problem.num_tokens >= 9), axes, start)  # type: ignore[union-attr]
    assert found == MergeProblem(num_tokens=9, head_dim=4)
    assert smallest(Counted(lambda _: True), start=MetadataProblem()) == MetadataProblem()


def test_appended_keys_stay_among_those_of_their_request() -> None:
    axes = Axes("append_paged_kv", all_axes("append_paged_kv"), 10**6)
    problem = AttentionProblem("append_paged_kv", query_lens=(3, 4), seq_lens=(5, 90), page_size=2)

    def predicate(tried: Problem) -> bool:
        assert isinstance(tried, AttentionProblem)
        return any(s > t > 2 for t, s in zip(tried.query_lens, tried.seq_lens, strict=True))

    found = simplify(problem, axes, Counted(predicate), lambda: True)
    assert isinstance(found, AttentionProblem)
    assert (found.query_lens, found.seq_lens) == ((3,), (4,))
