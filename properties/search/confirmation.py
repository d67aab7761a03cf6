"""Judging a failure again, before it is shrunk and before it is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from ...reference import Problem
from ..verdicts.verdict import Verdict
from .case_runner import CaseRunner

T = TypeVar("T")
PASSES_AFTERWARDS = 2
"""Passing retries required in one process to call a failure first-call-only."""
SLOW_SHARE = 0.2
"""Share of the deadline above which a call that passes counts as slow, so that it did not hang when
it overran the deadline: on a busy machine a call takes several times as long."""


@dataclass(frozen=True)
class Failure:
    """A problem that has failed.

    Attributes:
        problem: the problem on which it failed.
        verdict: the verdict on the problem.
        costly: each time that it fails costs a process.
    """

    problem: Problem
    verdict: Verdict
    costly: bool = False


def first_again(
    failures: Iterable[T],
    afresh: Callable[[T], Verdict],
    *,
    most: int = 1,
    shows: Callable[[Verdict], bool] = lambda verdict: verdict.bad,
) -> tuple[T | None, int]:
    """Return the first failure that shows again, and how many before it did not; None if none does.

    One failure that comes and goes must not speak for others that stay.

    Args:
        failures: the failures in the order in which they are judged again.
        afresh: judges one again in a fresh process.
        most: most failures that are judged again.
        shows: whether a verdict is the failure that is looked for.
    """
    missed = 0
    for failure in islice(failures, most):
        if shows(afresh(failure)):
            return failure, missed
        missed += 1
    return None, missed


class Confirmation:
    """Judges again what has failed.

    Attributes:
        flaky: the first failure that was not confirmed.
        unsure: the failure that is being confirmed.
    """

    def __init__(self, runner: CaseRunner) -> None:
        self.flaky: Failure | None = None
        self.unsure: tuple[Problem, Verdict] | None = None
        self._runner = runner

    def confirm(self, problem: Problem) -> Failure | None:
        """Judge a problem, and again if it fails; None where it passes, is FLAKY or KNOWN."""
        verdict = self._runner.judge(problem)
        if not verdict.bad:
            return None
        self.unsure = (problem, verdict)
        verdict = self._runner.verdicts[problem.id] = self._again(problem, verdict)
        self.unsure = None
        costly = self._runner.died or self._runner.always_fresh
        return Failure(problem, verdict, costly) if verdict.bad else None

    def smallest(self, first: Failure, smallest: Failure) -> Failure:
        """Judge the smallest problem of a costly failure in a fresh process, with full deadlines.

        Where that is not the failure that was shrunk, the first one is returned.
        """
        if smallest == first:
            return first
        again = self._afresh(smallest.problem)
        return replace(smallest, verdict=again) if first.verdict.is_like(again) else first

    def in_fresh_process(self, failure: Failure) -> Verdict:
        """Return the verdict to report on a FAIL: FLAKY where it passes in a fresh process."""
        verdict, again = failure.verdict, self._afresh(failure.problem)
        # This one says what explains it.
        verdict = again if verdict.is_like(again) else verdict
        if self._runner.always_fresh:
            message = f"in the first calls of a process alone: {verdict.message}"
            return replace(verdict, message=message)
        if again.bad:
            return verdict
        message = "passes in a fresh process, fails after other calls in the same one: "
        return replace(verdict, status="FLAKY", message=message + verdict.message)

    def explained_as_drawn(self, verdict: Verdict, first: Failure) -> Verdict:
        """Return a verdict without the faults that do not explain the failure that was shrunk.

        On the smallest problem many faults look alike.
        """
        if not verdict.faults:
            return verdict
        drawn = self._runner.judge(first.problem, again=True, explains=True)
        return verdict.explained_by([each for each in verdict.faults if each in drawn.faults])

    def _again(self, problem: Problem, verdict: Verdict) -> Verdict:
        """Judge again: a HANG or a CRASH in a fresh process, a FAIL in the same one.

        What passes there may fail in the first calls of a process only. Fresh processes tell,
        once in a search: each costs a start, and what comes and goes may do so often.
        """
        limit = self._runner.candidate.deadlines_of(self._runner.law, problem).run
        # After a death the process is a new one in any case; a kernel that raised still has its
        # own.
        if verdict.status in ("HANG", "CRASH"):
            self._runner.renew()
        again = self._runner.judge(problem, again=True)
        # Per call: a law makes several, and the deadline is that of one.
        slow = again.seconds > SLOW_SHARE * limit * max(again.calls, 1)
        if verdict.status == "HANG" and not again.bad and slow:
            return again
        # What is wrong may show itself in several ways, a HANG and a FAIL by turns.
        if again.bad or again.status == "KNOWN":
            return again
        if verdict.status == "FAIL" and self.flaky is None:
            afresh = self._in_first_calls(problem)
            if afresh is not None:
                return afresh
        self._runner.report.flaky += 1
        message = f"{verdict.status} at first, {again.status} when confirmed: {verdict.message}"
        flaky = replace(verdict, status="FLAKY", message=message)
        self.flaky = self.flaky or Failure(problem, flaky)
        return flaky

    def _afresh(self, problem: Problem) -> Verdict:
        """Judge a problem again in a fresh process."""
        if not self._runner.always_fresh:  # else each case has one
            self._runner.renew()
        return self._runner.judge(problem, again=True, explains=True)

    def _in_first_calls(self, problem: Problem) -> Verdict | None:
        """Return the FAIL of a fresh process's first call, if its later calls are right."""
        first = self._afresh(problem)
        if first.status == "KNOWN":
            return first
        if first.status != "FAIL":
            return None
        # Wrong in the first call and right in all later ones is a fault of state. A failure by
        # chance in half of all calls looks like that once in eight times.
        if any(self._runner.judge(problem, again=True).bad for _ in range(PASSES_AFTERWARDS)):
            return None
        self._runner.always_fresh = True
        return first
