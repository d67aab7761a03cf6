"""Work that came late takes its turn."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kernelproof.properties.search.priority_executor import (
    LEAD,
    FairQueue,
    PriorityExecutor,
)


def test_the_lowest_rank_comes_first_whenever_it_came() -> None:
    started, order = threading.Event(), []
    with PriorityExecutor(1) as executor:
        executor.submit(started.wait, 0)
        for rank, name in ((1, "early second"), (2, "early third"), (0, "late first")):
            executor.submit(lambda name=name: order.append(name), rank)  # type: ignore[misc]
        executor.submit(lambda: order.append("late second"), 1)
        started.set()
    assert order == ["late first", "early second", "late second", "early third"]


def test_results_errors_and_cancelled_work() -> None:
    started = threading.Event()
    with PriorityExecutor(1) as executor:
        executor.submit(started.wait, 0)
        right = executor.submit(lambda: 7, 1)
        wrong = executor.submit(lambda: 1 // 0, 1)
        never = executor.submit(lambda: 8, 1)
        assert never.cancel()
        started.set()
        assert right.result() == 7
        with pytest.raises(ZeroDivisionError):
            wrong.result()
    assert never.cancelled()


def test_a_thread_prefers_owners_that_it_knows_and_new_ones_before_those_of_others() -> None:
    order: list[str] = []
    all_there = threading.Barrier(3)
    begin, end = threading.Event(), threading.Event()

    def hold(until: threading.Event) -> None:
        all_there.wait()
        until.wait()

    with PriorityExecutor(2) as executor:
        # Two threads, each with an owner; the second of them then waits.
        executor.submit(partial(hold, begin), 0, owner="mine")
        executor.submit(partial(hold, end), 0, owner="theirs")
        all_there.wait()
        ahead = 2 + LEAD
        works = ((1, "theirs"), (1, "mine"), (1, "new"), (2, "mine"), (ahead, "mine"))
        for rank, owner in works:
            executor.submit(partial(order.append, f"{owner} {rank}"), rank, owner=owner)
        last = executor.submit(lambda: None, 9 + LEAD, owner="mine")
        begin.set()
        last.result()
        assert order == ["mine 1", "mine 2", "new 1", "theirs 1", f"mine {ahead}"]
        end.set()


def test_what_was_cancelled_is_nobodys_work() -> None:
    """Neither does its rank hold back what a thread prefers, nor is its owner known by it."""
    order: list[str] = []
    begun, begin = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        begin.wait()

    with PriorityExecutor(1) as executor:
        executor.submit(first, 1, owner="mine")
        begun.wait()
        assert executor.submit(lambda: None, 0, owner="theirs").cancel()
        for rank, owner in ((1 + LEAD, "theirs"), (2 + LEAD, "mine"), (1 + LEAD, "new")):
            executor.submit(partial(order.append, owner), rank, owner=owner)
        begin.set()
    assert order == ["mine", "theirs", "new"]


def test_what_comes_late_with_a_low_rank_is_not_behind_what_a_thread_prefers() -> None:
    begun, started, order = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        started.wait()

    with PriorityExecutor(1) as executor:
        executor.submit(first, LEAD + 1, owner="mine")
        begun.wait()
        executor.submit(lambda: order.append("mine"), LEAD + 1, owner="mine")
        executor.submit(lambda: order.append("late"), 0, owner="new")
        started.set()
    assert order == ["late", "mine"]


def test_what_is_slow_leaves_the_others_their_time() -> None:
    queue = FairQueue[int]()
    for owner in ("slow", "quick"):
        for number in range(30):
            queue.put(owner, (number,), number)
    taken = []
    for _ in range(22):
        queued = queue.take()
        assert queued is not None
        queue.end(queued.owner, 10.0 if queued.owner == "slow" else 1.0)
        taken.append((queued.owner, queued.item))
    assert [number for owner, number in taken if owner == "slow"] == [0, 1]
    assert [number for owner, number in taken if owner == "quick"] == [*range(20)]
    at_work = {queued.owner for queued in (queue.take(), queue.take()) if queued is not None}
    assert at_work == {"slow", "quick"}  # several threads do not wait for one owner


def test_fair_threads_do_the_lowest_rank_of_an_owner_first_and_hand_over_errors() -> None:
    started, order = threading.Event(), list[int]()
    with PriorityExecutor(1, FairQueue()) as executor:
        executor.submit(started.wait, 0, owner="other")
        for rank in (2, 1, 3):
            executor.submit(partial(order.append, rank), rank, 0, owner="mine")
        wrong = executor.submit(lambda: 1 // 0, 4, owner="mine")
        started.set()
        with pytest.raises(ZeroDivisionError):
            wrong.result()
    assert order == [1, 2, 3]
