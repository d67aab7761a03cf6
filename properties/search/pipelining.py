"""Asking a worker ahead: it judges while this process draws the next problems.

What is asked and what comes of it is the same as one problem at a time; only how many wait depends
on how long they take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ...reference import Problem
from ..isolation.workers import Deadlines, Outcome, Worker

DEPTH = 4
"""Problems that wait at most: one drawn structure has two or three, and the next takes as long to
draw as these take to judge."""
QUICK_SECONDS = 0.1
"""Where a problem takes longer, none waits: drawing is no part of its time worth sparing, and a
search whose time is over would have to wait for all of them."""


class Ahead:
    """Problems that a worker was asked about, until their outcomes are taken in the same order."""

    def __init__(self, worker: Worker, depth: int = DEPTH) -> None:
        self._worker, self._depth = worker, depth
        self._asked: deque[Problem] = deque()
        self._quick = False

    def __len__(self) -> int:
        """Count the problems whose outcomes were not taken."""
        return len(self._asked)

    def __contains__(self, problem: Problem) -> bool:
        """Tell whether the outcome of this problem is to be taken yet."""
        return problem in self._asked

    @property
    def full(self) -> bool:
        """Whether an outcome is to be taken before more is drawn."""
        return len(self) > (self._depth if self._quick else 0)

    def ask(self, problem: Problem, request: Mapping[str, object], deadlines: Deadlines) -> None:
        """Ask about a problem; the worker takes it up after those before it."""
        self._asked.append(problem)
        self._worker.ask(request, deadlines)

    def take(self) -> tuple[Problem, Outcome]:
        """Wait for the outcome of the oldest problem.

        After a death the worker is free for `run`; later problems are sent at the next `ask` or
        `take`.
        """
        outcome = self._worker.answer()
        self._quick = outcome.seconds < QUICK_SECONDS
        return self._asked.popleft(), outcome

    def forget(self) -> None:
        """Take no more outcomes. What the worker is busy with costs it its process."""
        self._asked.clear()
        self._worker.forget()
