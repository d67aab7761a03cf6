"""Problems that cover pairs of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from kernelproof.properties.space.axes import all_axes
from kernelproof.properties.space.axis_values import Axes
from kernelproof.properties.space.pairs import Taken, kinds_of_features, pairs_of_features
from kernelproof.reference import AttentionProblem

Covering = Callable[[Axes, Taken], list[AttentionProblem]]

CLAIMED = {
    "head_dims": ((16, 16), (64, 64), (80, 80), (24, 16, 0)),
    "group_size": (1, 2, 3, 16, 20, 32),
    "caches": (("", ""), ("float8_e4m3fn", ""), ("float8_e4m3fn", "float8_e4m3fn")),
    "window_left": (-1, 0, 1, 2, 127),
    "sinks": (False, True),
    "k_scale": (1.0, 0.5, 2.0),
    "logits_bias": ("", "dense", "near"),
    "two_sided_window": (False, True),
    "causal_by_request": (False, True),
}


@pytest.fixture(scope="module")
def axes() -> Axes:
    off = {name: values[:1] for name, values in all_axes("paged_attention").items()}
    some: dict[str, tuple[object, ...]] = {
        "phase": ("decode", "prefill", "chunk"),
        "causal": (False, True),
        "verify": (0,),
    }
    some["num_kv_heads"] = (1, 2)
    values = {**off, **some, **CLAIMED}
    return Axes("paged_attention", values, 400_000, simplest={n: v[0] for n, v in values.items()})


def _taken(problem: AttentionProblem) -> bool:
    """Whether a kernel takes a problem: scales with FP8 only, whose queries have many channels."""
    two_sided = problem.two_sided_window and not problem.causal_flags[0]
    return (
        (problem.k_scale == 1 or bool(problem.kv_cache))
        and not (problem.q_dtype and problem.head_dim_qk < 32)
        # A known failure.
        and not (two_sided and problem.group_size <= 16)
    )


FACTS: dict[str, Callable[[AttentionProblem], object]] = {
    "padded": lambda p: p.head_dim_qk == 80,
    "latent": lambda p: p.values_in_keys,
    "part of a tile": lambda p: p.group_size == 3,
    "several tiles": lambda p: p.group_size == 20,
    "fp8": lambda p: p.kv_cache and not p.q_dtype,
    "fp8 queries": lambda p: p.q_dtype,
    "window": lambda p: p.window_left in {1, 2},
    "sinks": lambda p: p.sinks,
    "scale": lambda p: p.k_scale != 1,
    "dense": lambda p: p.logits_bias == "dense",
    "near": lambda p: p.logits_bias == "near",
    "two sides": lambda p: p.two_sided_window,
    "by request": lambda p: p.causal_by_request,
}
EXCLUSIVE = [{"padded", "latent"}, {"part of a tile", "several tiles"}, {"fp8", "fp8 queries"},
             {"dense", "near"}, {"fp8", "latent"}, {"fp8 queries", "latent"}]  # fmt: skip


def test_each_pair_of_claimed_kinds_meets(axes: Axes) -> None:
    found = pairs_of_features(axes, lambda problems: [_taken(each) for each in problems])
    met = [{name for name, fact in FACTS.items() if fact(each)} for each in found]
    for pair in map(set, itertools.combinations(FACTS, 2)):
        assert pair in EXCLUSIVE or any(pair <= each for each in met), pair
    assert len(found) <= 24
    assert all(map(_taken, found))
    assert all(each.num_requests > 1 for each in found[1:])
    assert found == pairs_of_features(axes, lambda problems: [_taken(each) for each in problems])


def test_each_claimed_kind_is_in_one_of_a_few_problems(axes: Axes) -> None:
    found = kinds_of_features(axes, lambda problems: [_taken(each) for each in problems])
    met = {name for name, fact in FACTS.items() if any(map(fact, found))}
    assert met == set(FACTS)
    assert len(found) <= 7
    assert all(map(_taken, found))
    assert any(each.num_kv_heads > 1 for each in found)
    assert [each.work for each in found] == sorted(each.work for each in found)
    *several, tiles = sorted(found, key=lambda each: -each.num_requests)
    assert all(len({-(-keys // 16) for keys in each.seq_lens}) > 1 for each in several)
    assert {each.seq_lens[0] > each.seq_lens[1] for each in several} == {True, False}
    assert tiles.query_lens == (65,)
    assert tiles.window_left == 1
    assert tiles.group_size > 1


@pytest.mark.parametrize("phase", ["decode", "prefill", "chunk"])
def test_the_shortest_requests_have_a_key_for_each_query(axes: Axes, phase: str) -> None:
    """Of many channels and heads, the fewest keys are chosen."""
    heads = {"head_dims": ((512, 512),), "group_size": (32,), "phase": (phase,)}
    for work in (2**12, 2**20, 2**22, 2**24):
        dear = replace(axes, values={**axes.values, **heads}, max_work=work)
        assert kinds_of_features(dear, lambda problems: [True] * len(problems)) or work < 2**20


def test_each_side_of_a_window_has_tiles_of_queries(axes: Axes) -> None:
    """Some engines call a kernel that takes no group with a window on the right."""
    right = replace(axes, values={**axes.values, "window_right": (-1, 1)})
    for covering in (kinds_of_features, pairs_of_features):
        found = covering(right, lambda problems: [_without_group(each) for each in problems])
        tiles = [each for each in found if each.query_lens == (65,)]
        assert {(each.window_left, each.window_right) for each in tiles} == {(1, -1), (-1, 1)}
        assert all(not each.causal for each in tiles if each.window_right == 1)
    decode = replace(axes, values={**axes.values, "phase": ("decode",)})
    found = kinds_of_features(decode, lambda problems: [_taken(each) for each in problems])
    assert all(each.num_requests > 1 for each in found)


def _without_group(problem: AttentionProblem) -> bool:
    return _taken(problem) and problem.group_size == 1


@pytest.mark.parametrize("covering", [kinds_of_features, pairs_of_features])
def test_the_slowest_kernel_has_these_problems_too(axes: Axes, covering: Covering) -> None:
    slow = replace(axes, max_work=256, max_heads=4)
    found = covering(slow, lambda problems: [_taken(each) for each in problems])
    met = {name for name, fact in FACTS.items() if any(map(fact, found))}
    assert met == set(FACTS)
    assert max(sum(each.seq_lens) for each in found) > 48
    assert max(each.work for each in found) <= 330_000


def test_nothing_is_covered_where_nothing_is_taken(axes: Axes) -> None:
    assert pairs_of_features(axes, lambda problems: [False] * len(problems)) == []
