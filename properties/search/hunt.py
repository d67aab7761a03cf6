"""Looking for a counterexample to one law: Hypothesis draws and shrinks, the worker judges."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import hypothesis
from hypothesis import Phase

from ...reference import Problem
from ..findings.ledger import Entry
from ..findings.report import Finding, LawReport
from ..isolation.workers import Worker
from ..laws import Law
from ..space.profiles import Profile
from ..space.rounds import (
    EXAMPLES_A_ROUND,
    MOST_KEPT,
    Counterexample,
    Enough,
    draw_round,
    most_rounds,
    seed_of_round,
)
from ..space.simplify import on_fewer_pages, simplify
from ..verdicts.verdict import Verdict
from ..worker.requests import DeviceLostError, HarnessError
from .candidate import Quarry, warm_up
from .case_runner import Inquiry
from .examples import Examples
from .hang_location import where_stuck
from .shrink_budget import Effort

LATER_LOOKS = 2
"""That are right in a process whose first look is wrong: else the failure comes and goes."""


@dataclass(frozen=True)
class Search:
    """How one hunt goes about it."""

    profile: Profile
    seed: int
    problems: int
    seconds: float
    shrink: bool = True
    confirm: bool = True
    examples: Examples | None = None


class Hunt:
    """One law on one implementation, in one worker."""

    def __init__(
        self,
        worker: Worker,
        quarry: Quarry,
        law: Law,
        search: Search,
        *,
        explain: Callable[[str, Verdict, Problem], Entry | None],
        judged: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.report = LawReport(law.name)
        self._worker, self._quarry, self._law, self._search = worker, quarry, law, search
        self._explain, self._stopped = explain, stopped
        self._effort = Effort(search.profile)
        self._inquiry = Inquiry(
            worker, quarry, law, self.report, self._effort, explain=explain, judged=judged
        )
        self._verdicts: dict[str, Verdict] = {}
        self._suspect: Problem | None = None
        self._first: tuple[Problem, Verdict] | None = None
        self._last: tuple[Problem, Verdict] | None = None
        self._flaky: tuple[Problem, Verdict] | None = None
        self._found_after = self._started = self._hunted_before = 0.0
        self._kept = self._kept_idle = 0
        self._dear = self._unshrunk = self._first_calls = False
        self._simplified = False

    def run(self) -> LawReport:
        """Hunt, and report."""
        start = time.monotonic()
        if self._quarry.started is None:
            self._quarry.started = start
        self._started, self._hunted_before = start, self._quarry.hunted
        try:
            self._hunt(start)
        except DeviceLostError as error:
            self.report.lost = str(error)
            self.report.finding = self._last_words(str(error))
        except (HarnessError, RuntimeError) as error:
            # RuntimeError: the pool was closed. What was learned until then is kept.
            self.report.error = str(error)
        finally:
            self._inquiry.stop()
        self.report.seconds = time.monotonic() - start
        self._quarry.hunted += self.report.seconds
        return self.report

    def _hunt(self, start: float) -> None:
        warm_up(self._worker, self._quarry)
        for problem in list(self._quarry.smallest):
            if self._fails(problem):
                self._simplify_inherited()
                break
        else:
            self._search_space(start)
        if self._last is not None:
            self.report.finding = self._finding()
        elif self._flaky is not None:
            problem, verdict = self._flaky
            self.report.finding = Finding(self._quarry.name, self._law.name, verdict, problem)
        elif self._inquiry.known:
            known = self._inquiry.known.values()
            problem, verdict, entry = min(known, key=lambda each: each[0].work)
            self.report.finding = Finding(
                self._quarry.name, self._law.name, verdict, problem, entry=entry.id
            )

    def _simplify_inherited(self) -> None:
        """Take away what another law needed of its smallest problem, and this one does not."""
        if self._last is not None and self._search.shrink and not self._dear:
            simplify(self._last[0], self._quarry.axes, self._fails, self._effort.passing_is_cheap)

    def _search_space(self, start: float) -> None:
        """Let Hypothesis draw and shrink, round after round, until a failure or enough problems."""
        # What was kept comes by itself: among drawn ones Hypothesis tries few of it.
        kept = self._search.examples is not None
        ended = kept and self._show(start, 0, Phase.reuse, MOST_KEPT) and self._first is not None
        self._kept, self._kept_idle = self.report.judged, self._idle
        for number in range(most_rounds(self._search.problems)):
            ended = ended or self._round(start, number)
            if ended or self._first is not None:
                break
        if self._last is None or not self._search.shrink:
            return
        if self._dear or self._unshrunk:
            simplify(self._last[0], self._quarry.axes, self._fails, self._effort.passing_is_cheap)
        if self._dear:
            self._confirm_smallest()
        else:
            for problem in on_fewer_pages(self._last[0], self._quarry.axes):
                if self._fails(problem):
                    return

    def _round(self, start: float, number: int) -> bool:
        """Look at some examples; True if no more need be drawn."""
        self._suspect = None
        look = partial(self._look_ahead, start)
        ended = draw_round(self._quarry.axes, self._search.profile, self._seed(number), look)
        self._take_all()
        if self._suspect is None:
            return ended
        ended = self._show(start, number, Phase.generate, EXAMPLES_A_ROUND)
        if self._first is None:
            # It was not drawn again. It fails all the same, unless it is FLAKY.
            self._unshrunk = self._fails(self._suspect)
        return ended or self._unshrunk

    def _show(self, start: float, number: int, phase: Phase, most: int) -> bool:
        """Have Hypothesis shrink what fails of some examples, and keep it; True at the end."""
        search, phases = self._search, [phase]
        if search.shrink:
            phases.append(Phase.shrink)
        database = None
        if search.examples is not None:
            database = search.examples.of(self._law.name, self._quarry.name)
        look = partial(self._look, start)
        try:
            return draw_round(
                self._quarry.axes,
                search.profile,
                self._seed(number),
                look,
                phases=phases,
                database=database,
                most=most,
            )
        except hypothesis.errors.Flaky:
            # Verdicts are remembered, so only a truncated search can look flaky to Hypothesis.
            self.report.truncated = True
            return True

    def _look_ahead(self, start: float, problem: Problem) -> None:
        """Ask about a problem, and look at the next while the worker judges.

        To Hypothesis none fails. If one does, the same round is drawn again for ``_look``, which
        comes to it with all verdicts before it known.
        """
        enough = self._enough(start)  # takes verdicts, too
        if enough or self._suspect is not None:
            raise Enough
        if problem.id in self._verdicts or self._inquiry.waits_for(problem):
            return
        self._inquiry.ask(problem)
        while self._inquiry.full:
            self._take()

    def _look(self, start: float, problem: Problem) -> None:
        """Judge a problem; whatever fails is shrunk."""
        new = problem.id not in self._verdicts
        if new and self._first is None and self._enough(start):
            raise Enough
        if self._fails(problem):
            # Hypothesis shrinks from above, at the price of a process a step.
            raise Enough if self._dear else Counterexample

    def _take(self) -> None:
        problem, verdict = self._inquiry.take()
        self._verdicts[problem.id] = verdict
        if verdict.bad:
            self._suspect = problem
            self._inquiry.abandon()

    def _take_all(self) -> None:
        while self._inquiry.waiting:
            self._take()

    def _enough(self, start: float) -> bool:
        if self._inquiry.waiting and self._spent(self._inquiry.waiting):
            self._take_all()
        if self._spent():
            return True
        if time.monotonic() - start > self._search.seconds or self._stopped():
            self.report.truncated = True
            return True
        return False

    def _spent(self, more: int = 0) -> bool:
        """Tell whether the law has had its problems, if so many more were judged or idle.

        What other runs kept may have as many of its own.
        """
        judged, most = self.report.judged - self._kept, self._search.problems
        # Nothing to look at, time and again: the law says nothing about this implementation.
        idle = self._idle - self._kept_idle + more
        # Of several modules, a law may have something to say about one alone.
        patience = 4 * max(1, len(self._quarry.axes.restrictions))
        return judged + more >= most or (idle > patience * most and not judged)

    @property
    def _idle(self) -> int:
        return self.report.vacuous + self.report.unsupported

    def _seed(self, number: int) -> int:
        return seed_of_round(number, self._law.name, self._quarry.name, self._search.seed)

    def _fails(self, problem: Problem) -> bool:
        """Tell whether this problem is a counterexample, to be shrunk further."""
        verdict = self._verdicts.get(problem.id)
        if verdict is None:
            if self._first is not None and (self._effort.enough() or self._stopped()):
                return False
            verdict = self._verdicts[problem.id] = self._judge(problem)
        if verdict.bad and self._first is None:
            verdict = self._verdicts[problem.id] = self._confirm(problem, verdict)
        if not verdict.bad:
            return False
        if self._first is None:
            self._first = (problem, verdict)
            self._dear = self._inquiry.died or self._first_calls
            self._found_after = self._hunted_before + time.monotonic() - self._started
            self._effort.begin()
        if not _alike(verdict, self._first[1]):
            return False  # Another bug: shrinking must not slip from one into the other.
        self._last = (problem, verdict)
        return True

    def _confirm(self, problem: Problem, verdict: Verdict) -> Verdict:
        """Look again: in a fresh process at a HANG or a CRASH, in the same one at a FAIL.

        What passes there may fail in the first calls of a process alone: a fresh one tells, once in
        a search, for each look costs a process and what comes and goes may do so often.
        """
        if verdict.status in ("HANG", "CRASH"):
            self._inquiry.renew()
        again = self._judge(problem)
        # What the ledger knows may show itself in several ways, a HANG and a FAIL by turns.
        if again.status in (verdict.status, "KNOWN"):
            return again
        if verdict.status == "FAIL" and self._flaky is None:
            afresh = self._at_first_alone(problem)
            if afresh is not None:
                return afresh
        self.report.flaky += 1
        message = f"{verdict.status} at first, {again.status} when confirmed: {verdict.message}"
        flaky = replace(verdict, status="FLAKY", message=message)
        self._flaky = self._flaky or (problem, flaky)
        return flaky

    def _at_first_alone(self, problem: Problem) -> Verdict | None:
        """Give the FAIL of a fresh process's first look, if its later ones are right."""
        self._inquiry.renew()
        first = self._judge(problem)
        if first.status == "KNOWN":
            return first
        if first.status != "FAIL" or any(self._judge(problem).bad for _ in range(LATER_LOOKS)):
            return None
        self._first_calls = True
        return first

    def _confirm_smallest(self) -> None:
        """See the smallest of what costs a process a look once more, in a fresh one, unhurried."""
        if self._last is None or self._last == self._first:
            return
        self._simplified = True
        if not self._first_calls:  # each look is in a fresh one
            self._inquiry.renew()
        again = self._judge(self._last[0])
        if self._first is not None and not _alike(again, self._first[1]):
            again = self._first[1]
            self._last = self._first
        self._last = (self._last[0], again)

    def _judge(self, problem: Problem) -> Verdict:
        on_gpu = self._quarry.address.device != "cpu"
        hurried = self._dear and not self._simplified and on_gpu
        if self._first_calls:
            self._inquiry.renew()
        return self._inquiry.judge(problem, hurried=hurried)

    def _finding(self) -> Finding:
        problem, verdict = self._last or self._first  # type: ignore[misc]  # run() has checked
        if self._first_calls:
            message = f"in the first calls of a process alone: {verdict.message}"
            verdict = replace(verdict, message=message)
        elif self._search.confirm and verdict.status == "FAIL":
            self._inquiry.renew()
            again = self._judge(problem)
            if not again.bad:
                verdict = replace(
                    verdict,
                    status="FLAKY",
                    message="passes in a fresh process, fails after other calls in the same one: "
                    + verdict.message,
                )
        if verdict.status == "HANG":
            where = where_stuck(
                self._quarry, self._law, problem, verdict.trace, self._inquiry.look_for_device
            )
            verdict = replace(verdict, message="; ".join(filter(None, (verdict.message, where))))
        self._quarry.smallest.append(problem)
        return self._tell(problem, verdict)

    def _tell(self, problem: Problem, verdict: Verdict) -> Finding:
        return Finding(
            self._quarry.name,
            self._law.name,
            verdict,
            problem,
            seconds=self._found_after,
            attempts=self._effort.attempts,
            deaths=self._effort.deaths,
        )

    def _last_words(self, why: str) -> Finding | None:
        """Report what there is when the device is gone: what took it, or what was found before."""
        found = self._last or self._inquiry.in_hand
        if found is None:
            return None
        problem, verdict = found
        entry = self._explain(self._law.name, verdict, problem)
        verdict = replace(verdict, message=f"{verdict.message}; then {why}")
        return replace(self._tell(problem, verdict), entry=entry.id if entry else None)


def _alike(verdict: Verdict, first: Verdict) -> bool:
    """Tell whether two verdicts speak of one bug; where a HANG stood is where the process began."""
    return verdict.status == first.status and (
        verdict.kind == first.kind or verdict.status == "HANG"
    )
