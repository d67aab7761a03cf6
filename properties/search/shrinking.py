"""Shrinking a confirmed failure: by Hypothesis, then field by field; from below where it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...reference import Problem
from ..space.axes import keeps
from ..space.operations import on_fewer_pages, simplify
from ..space.rounds import Counterexample, Enough
from ..verdicts.verdict import Verdict
from .case_runner import CaseRunner
from .confirmation import Failure
from .shrink_budget import ShrinkBudget
from .simplify import simplify as simplified


class Shrink:
    """Looks for the smallest problem that fails as the first one did.

    Attributes:
        first: the confirmed failure.
        smallest: the last one that was found to fail alike.
    """

    def __init__(
        self,
        runner: CaseRunner,
        first: Failure,
        budget: ShrinkBudget,
        stopped: Callable[[], bool],
    ) -> None:
        self.first = self.smallest = first
        self._runner, self._budget, self._stopped = runner, budget, stopped
        budget.begin(costly=first.costly)

    def fails(self, problem: Problem) -> bool:
        """Whether a problem fails as the first one did; False too once the budget is spent."""
        if problem.id not in self._runner.verdicts and (self._budget.spent() or self._stopped()):
            return False
        # The smallest is confirmed with the full deadline.
        verdict = self._runner.verdict(problem, hurried=self.first.costly)
        # Another bug: shrinking must not slip from one into the other.
        if not verdict.bad or not self.first.is_like(verdict):
            return False
        self.smallest = replace(self.first, problem=problem, verdict=verdict)
        return True

    def show(self, problem: Problem) -> None:
        """Have Hypothesis shrink a problem that fails; not a costly one, as it begins from above.

        Raises:
            Counterexample: the problem fails.
            Enough: it fails, and that costs a process each time.
        """
        if self.fails(problem):
            raise Enough if self.first.costly else Counterexample

    def simplify(self) -> None:
        """Take away what the problem does not need to fail, in few failures."""
        axes = self._runner.candidate.axes
        simplify(self.smallest.problem, axes, self.fails, self._budget.passing_is_cheap)

    def by_fields(self) -> None:
        """Put options back and lower lengths one by one, while the same fault is found."""
        fault = self.smallest.verdict
        simplified(
            self.smallest.problem,
            lambda problem: self._is_fault(problem, fault),
            self._budget.extend(),
        )

    def _is_fault(self, problem: Problem, fault: Verdict) -> bool:
        """Whether a problem fails by this fault; if not, the smallest stays what it was."""
        before, axes = self.smallest, self._runner.candidate.axes
        if not keeps(axes, problem, before.problem):
            return False
        if self.fails(problem) and _alike(self.smallest.verdict, fault):
            return True
        self.smallest = before
        return False

    def on_fewer_pages(self) -> None:
        """Take larger pages where the problem still fails on them."""
        any(map(self.fails, on_fewer_pages(self.smallest.problem, self._runner.candidate.axes)))


def _alike(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts of one kind accuse the same options, and the same call of a law."""
    return set(one.ignored) == set(other.ignored) and bool(one.about) == bool(other.about)
