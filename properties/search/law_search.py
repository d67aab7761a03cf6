"""The search for a counterexample to one law, from the first draw to the finding.

It walks one way: ``Search`` draws and yields suspects, ``Confirmation`` makes failures of them,
``Shrink`` makes one smaller, ``Confirmation`` judges the smallest once more. All of them ask the
same ``CaseRunner``, which counts in the law's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...reference import Problem
from ..findings.report import Finding, LawReport
from ..isolation.workers import Worker
from ..laws import Law
from ..space.rounds import Enough
from ..verdicts.verdict import Verdict
from ..worker.requests import DeviceLostError, HarnessError
from .candidate import Candidate
from .case_runner import CaseRunner
from .confirmation import Confirmation
from .drawing import Search, SearchOptions
from .hang_location import where_stuck
from .shrink_budget import ShrinkBudget
from .shrinking import Shrink


class LawSearch:
    """The search for a counterexample to one law on one implementation, in one worker."""

    def __init__(
        self,
        worker: Worker,
        candidate: Candidate,
        law: Law,
        options: SearchOptions,
        *,
        judged: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._worker, self._candidate, self._options = worker, candidate, options
        self._stopped = stopped
        self._budget = ShrinkBudget(options.profile)
        self._runner = CaseRunner(worker, candidate, law, self._budget, judged)
        self._runner.report.floor = options.floor
        self._search = Search(self._runner, options, stopped)
        self._confirmation = Confirmation(self._runner)
        self._shrink: Shrink | None = None
        self._seconds = 0.0

    def run(self) -> LawReport:
        """Search, and report."""
        start, candidate, report = time.monotonic(), self._candidate, self._runner.report
        if candidate.started is None:
            candidate.started = start
        self._seconds = candidate.searched_seconds - start
        try:
            self._find()
            report.finding = self._finding()
        except DeviceLostError as error:
            report.lost = str(error)
            report.finding = self._last_words(str(error))
        except (HarnessError, RuntimeError) as error:
            # RuntimeError: the pool was closed. What was learned until then is kept.
            report.error = str(error)
        finally:
            self._runner.stop()
        report.seconds = time.monotonic() - start
        candidate.searched_seconds += report.seconds
        return report

    def _find(self) -> None:
        """Find a failure and shrink it."""
        self._runner.warm_up()
        for problem in list(self._candidate.smallest):
            if (shrink := self._confirm(problem)) is not None:
                if self._options.shrink and not shrink.first.costly:
                    shrink.simplify()  # this law may not need what another one did
                return
        if self._options.examples is not None:
            self._search.show_kept(self._look_at_kept)
        shown = self._shrink is not None
        if not shown:
            for problem in self._search.suspects():
                if (shrink := self._confirm(problem)) is not None:
                    shown = self._search.show_again(shrink.show)
                    break
        if self._shrink is not None and self._options.shrink:
            self._end_shrinking(self._shrink, shown=shown)

    def _confirm(self, problem: Problem) -> Shrink | None:
        failure = self._confirmation.confirm(problem)
        if failure is not None:
            self._shrink = Shrink(self._runner, failure, self._budget, self._stopped)
        return self._shrink

    def _look_at_kept(self, problem: Problem) -> None:
        """Judge what was kept: Hypothesis keeps what fails at once, and forgets the rest."""
        new = problem.id not in self._runner.verdicts
        if self._shrink is None and new and self._search.enough():
            raise Enough
        shrink = self._shrink or self._confirm(problem)
        if shrink is not None:
            shrink.show(problem)

    def _end_shrinking(self, shrink: Shrink, *, shown: bool) -> None:
        """Shrink what Hypothesis does not: costly failures, and what it has not drawn again."""
        if shrink.first.costly or not shown:
            shrink.simplify()
        if shrink.first.costly:
            shrink.smallest = self._confirmation.smallest(shrink.first, shrink.smallest)
        else:
            shrink.on_fewer_pages()

    def _finding(self) -> Finding | None:
        if self._shrink is not None:
            return self._of_smallest(self._shrink)
        if (flaky := self._confirmation.flaky) is not None:
            return self._found(flaky.problem, flaky.verdict)
        if self._runner.known:
            known = self._runner.known.values()
            problem, verdict, entry = min(known, key=lambda each: each[0].work)
            return replace(self._found(problem, verdict), entry=entry.id)
        return None

    def _of_smallest(self, shrink: Shrink) -> Finding:
        problem, verdict = shrink.smallest.problem, shrink.smallest.verdict
        if self._runner.always_fresh or (self._options.confirm and verdict.status == "FAIL"):
            verdict = self._confirmation.in_fresh_process(shrink.smallest)
        if verdict.status == "HANG":
            where = where_stuck(self._runner, problem, verdict.trace)
            verdict = replace(verdict, message="; ".join(filter(None, (verdict.message, where))))
        self._candidate.smallest.append(problem)
        return self._found(problem, verdict)

    def _found(self, problem: Problem, verdict: Verdict) -> Finding:
        budget = self._budget
        return Finding(
            self._candidate.name,
            self._runner.law.name,
            verdict,
            problem,
            seconds=0.0 if budget.begun is None else self._seconds + budget.begun,
            attempts=budget.attempts,
            deaths=budget.deaths,
        )

    def _last_words(self, why: str) -> Finding | None:
        """Report what there is when the device is gone: what took it, or what was found before."""
        found = self._runner.in_hand
        if self._shrink is not None:
            found = (self._shrink.smallest.problem, self._shrink.smallest.verdict)
        if found is None:
            return None
        problem, verdict = found
        entry = self._candidate.explanation(self._runner.law.name, verdict, problem)
        verdict = replace(verdict, message=f"{verdict.message}; then {why}")
        return replace(self._found(problem, verdict), entry=entry.id if entry else None)
