"""Questions are asked by rank and answered in one thread, until all are or the run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from kernelproof.properties.findings.report import INTERRUPTED, TIME
from kernelproof.properties.gating.trials import Tried
from kernelproof.properties.search.ending import TICK_SECONDS, Ending
from kernelproof.properties.search.scheduler import Question, Scheduler
from kernelproof.properties.worker.requests import DeviceLostError, HarnessError


class NoProcesses:
    """A pool of workers that are no processes."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    @contextmanager
    def lease(self, owner: str) -> Iterator[str]:
        """Lend one by the name of its owner."""
        yield owner

    def close(self) -> None:
        """End what waits."""
        self.closed.set()


@dataclass
class About:
    """An implementation."""

    reference: str
    errors: list[str] = field(default_factory=list)

    def fail(self, error: object) -> None:
        """Record an error."""
        self.errors.append(str(error))


@pytest.fixture
def pool() -> Any:  # noqa: ANN401  what is needed of a WorkerPool
    return NoProcesses()


def test_answers_are_taken_in_the_thread_of_the_run(pool: Any) -> None:  # noqa: ANN401
    asked, taken = Scheduler(pool, 2, Ending()), list[tuple[str, int]]()
    about, other = About("a"), About("b")

    def take(answer: str) -> None:
        taken.append((answer, threading.get_ident()))
        if len(taken) == 1:
            asked.ask(Question(about, lambda worker: f"{worker} later", take))

    def wrong(worker: str) -> None:
        message = f"{worker} is wrong"
        raise ValueError(message)

    asked.ask(Question(about, lambda worker: worker, take))
    asked.ask(Question(other, wrong, take))
    asked.ask_beside(about, lambda _: "beside", take)
    asked.run()
    assert sorted(answer for answer, _ in taken) == ["a", "a later", "beside"]
    assert {thread for _, thread in taken} == {threading.get_ident()}
    assert (about.errors, other.errors) == ([], ["b is wrong"])
    assert asked.ending.ended == ""


def test_nothing_is_asked_once_the_device_is_lost(pool: Any) -> None:  # noqa: ANN401
    asked, taken, about = Scheduler(pool, 1, Ending()), list[object](), About("a")

    def lose(_: object) -> None:
        message = "it did not come back"
        raise DeviceLostError(message)

    asked.ask(Question(about, lose, taken.append, (0,)))
    asked.ask(Question(about, lambda _: "later", taken.append, (1,)))
    asked.run(lambda: asked.ask(Question(about, lambda _: "idle", taken.append)))
    assert taken == []
    assert asked.ending.lost == "it did not come back"
    assert about.errors == []


def test_an_end_is_noted_however_late_the_run_sees_it(pool: Any) -> None:  # noqa: ANN401
    ending, about = Ending(), About("a")
    asked = Scheduler(pool, 1, ending)

    def take(_: object) -> None:
        ending.end(INTERRUPTED)
        time.sleep(4 * TICK_SECONDS)

    def until_stopped(_: object) -> None:
        while not ending.stopped():
            time.sleep(TICK_SECONDS / 10)

    asked.ask(Question(about, lambda _: None, take))
    asked.ask(Question(about, until_stopped, lambda _: None))
    asked.run()
    assert ending.ended == INTERRUPTED


@pytest.mark.parametrize("why", [TIME, INTERRUPTED])
def test_what_is_in_progress_at_the_end_is_waited_for_and_then_cut_off(
    pool: Any,  # noqa: ANN401
    why: str,
) -> None:
    ending = Ending(0.0 if why == TIME else 600.0)
    closed = list[str]()
    asked = Scheduler(pool, 2, ending, grace=0.2, close=partial(closed.append, "builds"))
    about, taken = About("a"), list[object]()

    def never_ends(_: object) -> None:
        assert pool.closed.wait(60)
        message = "the worker pool is closed"
        raise RuntimeError(message)

    asked.ask(Question(about, never_ends, taken.append))
    asked.ask(Question(about, lambda _: ending.stopped(), taken.append))
    if why == INTERRUPTED:
        ending.end(why)
    asked.run()
    assert (ending.ended, ending.cut_off) == (why, True)
    assert taken in ([], [False], [True])  # it may have begun by then
    assert about.errors == []  # its worker was ended
    assert closed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HarnessError("the worker answers\nnothing"), "the worker answers"),
        (TimeoutError(), "TimeoutError()"),
        (KeyError("x"), "KeyError('x')"),
        ("", "''"),
    ],
)
def test_an_error_without_a_message_is_said_too(error: object, said: str) -> None:
    tried = Tried("mine", "made.up:mine")
    tried.fail(error)
    assert tried.error == said


def test_events_that_come_as_fast_as_they_are_taken_keep_no_run_from_its_end(
    pool: Any,  # noqa: ANN401
) -> None:
    ending, about = Ending(0.3), About("a")
    asked = Scheduler(pool, 1, ending, grace=0.2)

    def again() -> None:
        asked.post(about, again)

    asked.ask(Question(about, lambda _: pool.closed.wait(60), lambda _: None))
    asked.post(about, again)
    asked.run()
    assert ending.ended == TIME
