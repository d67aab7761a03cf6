"""The nearest problem that an implementation's claims allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.neighbours import may_be_drawn, neighbours
from kernelproof.properties.space.operations import OPERATIONS
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import AttentionProblem, Problem, RouteProblem

EVERYTHING = AttentionProblem(
    query_lens=(1, 5),
    seq_lens=(40, 64),
    head_dim_qk=128,
    head_dim_vo=128,
    num_kv_heads=2,
    group_size=4,
    custom_mask=True,
    mask_pattern="holes",
    window_left=15,
)


def axes_of(operation: str, **values: tuple[Any, ...]) -> Axes:
    allowed = {**all_axes(operation), **values}
    return Axes(operation, allowed, 10**7, {}, {name: each[0] for name, each in allowed.items()})


def nearest(problem: Problem, axes: Axes) -> Any:  # noqa: ANN401  a problem
    return next(neighbours(problem, axes))


def test_a_problem_that_may_be_drawn_is_its_own_nearest_neighbour() -> None:
    assert nearest(EVERYTHING, axes_of("paged_attention")) == EVERYTHING


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"head_dims": ((64, 64), (256, 256))}, {"head_dim_qk": 64, "head_dim_vo": 64}),
        ({"group_size": (1, 3, 16)}, {"group_size": 3}),
        ({"window_left": (-1,)}, {"window_left": -1}),
        ({"custom_mask": (False,)}, {"custom_mask": False, "mask_pattern": ""}),
        ({"phase": ("decode",), "verify": (0,)}, {"query_lens": (1, 1), "seq_lens": (40, 64)}),
        ({"phase": ("prefill",), "verify": (0,)}, {"query_lens": (1, 5), "seq_lens": (1, 5)}),
    ],
)
def test_only_what_is_refused_becomes_the_nearest_claimed(
    values: dict[str, tuple[Any, ...]], expected: dict[str, Any]
) -> None:
    axes = axes_of("paged_attention", **values)
    found = nearest(EVERYTHING, axes)
    assert found == replace(EVERYTHING, **expected)
    assert may_be_drawn(found, axes)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (lambda axes: replace(axes, max_requests=1), (40,)),
        (lambda axes: replace(axes, max_heads=8), (40,)),
        (lambda axes: replace(axes, max_work=EVERYTHING.work - 1), (40,)),
    ],
)
def test_a_batch_that_is_too_large_is_halved(
    limit: Callable[[Axes], Axes], expected: tuple[int, ...]
) -> None:
    axes = limit(axes_of("paged_attention"))
    assert not may_be_drawn(EVERYTHING, axes)
    assert nearest(EVERYTHING, axes).seq_lens == expected


def test_given_lengths_stay_as_they_are_given() -> None:
    axes = axes_of("paged_attention", seq_lens=((77,),))
    found = nearest(replace(EVERYTHING, dtype="float16"), replace(axes, values={
        **axes.values, "dtype": ("float32",),
    }))  # fmt: skip
    assert set(found.seq_lens) == {77}


def test_neighbours_come_nearest_first_and_once() -> None:
    axes = axes_of("paged_attention", group_size=(1, 3, 16))
    found: list[Any] = list(neighbours(EVERYTHING, axes))
    assert len({each.id for each in found}) == len(found) > 2
    assert found[0] == replace(EVERYTHING, group_size=3)
    assert found[-1].window_left == -1  # the simplest of all values comes last


def test_another_operation_has_no_neighbour() -> None:
    assert not list(neighbours(RouteProblem(), axes_of("merge_state")))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_drawn_may_be_drawn_and_has_a_neighbour_where_less_is_claimed(
    operation: str,
) -> None:
    whole = axes_of(operation)
    drawn = draw_problems(whole, PROFILES["quick"], 3, 12)
    assert all(may_be_drawn(each, replace(whole, max_work=each.work)) for each in drawn)
    half = {name: values[: -(-len(values) // 2)] for name, values in whole.values.items()}
    narrow = replace(whole, values=half)
    for each in drawn:
        for found in neighbours(each, narrow):
            assert may_be_drawn(found, narrow)
