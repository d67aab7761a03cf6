"""Work that came late takes its turn."""

from __future__ import annotations

import threading

import pytest

from kernelproof.properties.search.priority_executor import PriorityExecutor


def test_the_lowest_rank_comes_first_whenever_it_came() -> None:
    started, order = threading.Event(), []
    with PriorityExecutor(1) as executor:
        executor.submit(0, started.wait)
        for rank, name in ((1, "early second"), (2, "early third"), (0, "late first")):
            executor.submit(rank, lambda name=name: order.append(name))  # type: ignore[misc]
        executor.submit(1, lambda: order.append("late second"))
        started.set()
    assert order == ["late first", "early second", "late second", "early third"]


def test_results_errors_and_cancelled_work() -> None:
    started = threading.Event()
    with PriorityExecutor(1) as executor:
        executor.submit(0, started.wait)
        right = executor.submit(1, lambda: 7)
        wrong = executor.submit(1, lambda: 1 // 0)
        never = executor.submit(1, lambda: 8)
        assert never.cancel()
        started.set()
        assert right.result() == 7
        with pytest.raises(ZeroDivisionError):
            wrong.result()
    assert never.cancelled()
