"""Deadlines follow from what calls were measured to take."""

from __future__ import annotations

import pytest

from kernelproof.properties.search.deadlines import (
    DEADLINE_FACTOR,
    DEADLINE_FLOOR,
    HURRY,
    OUTLIER_FACTOR,
    DeadlineModel,
    size_of,
)
from kernelproof.reference import AttentionProblem

SMALL = AttentionProblem()
LARGE = AttentionProblem(seq_lens=(4000,), head_dim_qk=128, head_dim_vo=128)


def test_quick_calls_have_the_floor() -> None:
    model = DeadlineModel()
    assert model.of(SMALL).run == DEADLINE_FLOOR
    for _ in range(5):
        model.record(SMALL, 0.001)
    assert model.of(SMALL).run == DEADLINE_FLOOR
    assert model.of(SMALL, hurried=True).run == DEADLINE_FLOOR / HURRY


def test_slow_calls_have_so_many_times_the_median_of_their_size() -> None:
    model = DeadlineModel()
    for seconds in (1.0, 2.0, 3.0):
        model.record(SMALL, seconds)
        model.record(LARGE, 10 * seconds)
    assert model.of(SMALL).run == pytest.approx(max(DEADLINE_FACTOR * 2.0, OUTLIER_FACTOR * 20.0))
    assert model.of(LARGE).run == pytest.approx(DEADLINE_FACTOR * 20.0)
    assert model.of(LARGE, hurried=True).run == pytest.approx(DEADLINE_FACTOR * 20.0)


def test_one_slow_outlier_changes_nothing() -> None:
    model = DeadlineModel()
    for seconds in (0.01, 0.01, 0.01, 500.0):
        model.record(SMALL, seconds)
    assert model.of(SMALL).run == DEADLINE_FLOOR


def test_a_size_that_was_not_measured_grows_from_the_next_smaller_one() -> None:
    model = DeadlineModel()
    model.record(SMALL, 0.5)
    model.record(SMALL, 0.5)
    assert size_of(LARGE.work) > size_of(SMALL.work)
    assert model.of(LARGE).run == pytest.approx(DEADLINE_FACTOR * 0.5 * 64)
    other = DeadlineModel()
    other.record(LARGE, 0.5)
    assert other.usual_seconds(SMALL) == 0.5


def test_compiling_is_apart() -> None:
    model = DeadlineModel(compile_seconds=120.0)
    assert model.of(SMALL).compile == 120.0


def test_patience_is_no_longer_wait_where_a_hang_is_expected() -> None:
    """Each law tries the smallest problem of a hang that another one has found."""
    model = DeadlineModel(patience=4.0)
    assert model.of(SMALL).run == 4 * DEADLINE_FLOOR
    assert model.of(SMALL, hurried=True).run == DEADLINE_FLOOR / HURRY


def test_rows_count_too() -> None:
    """A reference that loops over the heads of query tokens takes as long with few keys."""
    model = DeadlineModel()
    few = AttentionProblem(seq_lens=(300,), query_lens=(1,))
    many = AttentionProblem(seq_lens=(40,), query_lens=(40,))
    assert size_of(many.work) == size_of(few.work)
    for _ in range(3):
        model.record(few, 0.01)
    assert model.usual_seconds(few) == 0.01
    assert model.usual_seconds(many) == pytest.approx(0.4)
