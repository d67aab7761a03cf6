"""Shrinking a confirmed failure: by Hypothesis, then field by field; from below where it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from ...reference import Problem
from ..space.axes import Axes, keeps
from ..space.operations import on_fewer_pages, simplify
from ..space.rounds import Counterexample, Enough
from ..verdicts.verdict import Verdict
from .case_runner import Attempt, CaseRunner
from .confirmation import Failure
from .simplify import Limit
from .simplify import simplify as simplified

MAX_DEATHS = 20
"""Most processes that may die while one failure is shrunk."""
# Each attempt that hangs costs its deadline, and on a GPU a process, as each crash does.
FACTOR_OF_DEATHS = 6.0
"""Factor on the profile's seconds for shrinking a hang or a crash."""
MAX_SECONDS_OF_DEATHS = 30.0
"""Most seconds for shrinking a hang or a crash."""
SIMPLIFYING_SHARE = 0.5
"""Share of the profile's seconds for shrinking that simplifying may take after it."""
MOST_SIMPLIFYING = 400
"""Most problems that simplifying may judge."""
LITTLE_SECONDS = 0.1
"""Mean seconds of a passing problem below which shrinking tries many of them to avoid a failure."""


class Failing(Protocol):
    """A problem that has failed, with the verdict that says how."""

    @property
    def problem(self) -> Problem:
        """The problem on which it failed."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the problem."""


T = TypeVar("T", bound=Failing)


class ShrinkBudget:
    """What shrinking may cost, and what it has cost since its failure was confirmed.

    Attributes:
        begun: monotonic time at which the failure was confirmed.
    """

    def __init__(self, runner: CaseRunner, seconds: float, *, costly: bool) -> None:
        self.begun = time.monotonic()
        self._runner, self._seconds, self._costly = runner, seconds, costly
        # The runner counts for the whole law; what shrinking cost is the difference.
        self._before = len(runner.attempts)
        self._until = 0.0

    @property
    def attempts(self) -> int:
        """Number of problems that were judged."""
        return len(self._since)

    @property
    def deaths(self) -> int:
        """Number of those that ended a process."""
        return sum(each.died for each in self._since)

    @property
    def _since(self) -> Sequence[Attempt]:
        return self._runner.attempts[self._before :]

    def extend(self) -> Limit:
        """Return a budget of its own for simplifying, whatever shrinking has taken."""
        seconds = SIMPLIFYING_SHARE * self._seconds
        self._until = time.monotonic() + seconds
        return Limit(seconds, MOST_SIMPLIFYING)

    def spent(self) -> bool:
        """Whether the budget is used up."""
        now, limit = time.monotonic(), self._seconds
        if self._costly or self.deaths:
            limit = min(FACTOR_OF_DEATHS * limit, MAX_SECONDS_OF_DEATHS)
        return now > max(self.begun + limit, self._until) or self.deaths >= MAX_DEATHS

    def passing_is_cheap(self) -> bool:
        """Whether problems that pass have cost little so far."""
        passed = [each.seconds for each in self._since if not each.bad]
        return not passed or sum(passed) / len(passed) < LITTLE_SECONDS


class Shrink(Generic[T]):
    """Looks for the smallest problem that fails as the first one did.

    What fails alike is for others to say: verdicts of one law, or of a law with two releases.

    Args:
        first: the confirmed failure.
        axes: what may be asked for.
        again: judges another problem; returns its failure, None where it does not fail alike, and
            once the budget is spent.
        cheap: whether problems that pass have cost little so far.

    Attributes:
        first: the confirmed failure.
        smallest: the last one that was found to fail alike.
    """

    def __init__(
        self,
        first: T,
        axes: Axes,
        again: Callable[[Problem], T | None],
        cheap: Callable[[], bool] = lambda: True,
    ) -> None:
        self.first = self.smallest = first
        self._axes, self._again, self._cheap = axes, again, cheap

    def fails(self, problem: Problem) -> bool:
        """Whether a problem fails as the first one did; False too once the budget is spent."""
        failure = self._again(problem)
        if failure is not None:
            self.smallest = failure
        return failure is not None

    def simplify(self) -> None:
        """Take away what the problem does not need to fail, in few failures."""
        simplify(self.smallest.problem, self._axes, self.fails, self._cheap)

    def by_fields(self, budget: Limit) -> None:
        """Put options back and lower lengths one by one, while the same fault is found."""
        fault = self.smallest.verdict
        simplified(self.smallest.problem, lambda problem: self._is_fault(problem, fault), budget)

    def _is_fault(self, problem: Problem, fault: Verdict) -> bool:
        """Whether a problem fails by this fault; if not, the smallest stays what it was."""
        before = self.smallest
        # Simplest values may lie outside of a restricted space, such as that of ``--only``.
        if not keeps(self._axes, problem, before.problem):
            return False
        if self.fails(problem) and _alike(self.smallest.verdict, fault):
            return True
        self.smallest = before
        return False

    def on_fewer_pages(self) -> None:
        """Take larger pages where the problem still fails on them."""
        any(map(self.fails, on_fewer_pages(self.smallest.problem, self._axes)))


class LawShrink(Shrink[Failure]):
    """Shrinks the failure of a law, within a budget.

    Attributes:
        budget: what it may cost.
    """

    def __init__(
        self,
        runner: CaseRunner,
        first: Failure,
        seconds: float,
        stopped: Callable[[], bool],
    ) -> None:
        self.budget = ShrinkBudget(runner, seconds, costly=first.costly)
        self._runner, self._stopped = runner, stopped
        super().__init__(first, runner.candidate.axes, self._judge, self.budget.passing_is_cheap)

    def _judge(self, problem: Problem) -> Failure | None:
        # A verdict that is known costs nothing, so it is given after the budget too: Hypothesis,
        # which replays its examples, would call a changed answer flaky.
        if problem.id not in self._runner.verdicts and (self.budget.spent() or self._stopped()):
            return None
        # The smallest is confirmed with the full deadline.
        verdict = self._runner.judge(problem, hurried=self.first.costly)
        # Another bug: shrinking must not slip from one into the other.
        if not self.first.verdict.is_like(verdict):
            return None
        return replace(self.first, problem=problem, verdict=verdict)

    def show(self, problem: Problem) -> None:
        """Have Hypothesis shrink a problem that fails; not a costly one, as it begins from above.

        Raises:
            Counterexample: the problem fails.
            Enough: it fails, and that costs a process each time.
        """
        if self.fails(problem):
            raise Enough if self.first.costly else Counterexample


def _alike(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts of one kind accuse the same options, and the same call of a law."""
    return set(one.ignored) == set(other.ignored) and bool(one.about) == bool(other.about)
