"""Looking for a counterexample to one law: Hypothesis draws and shrinks, the worker judges."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis
from hypothesis import Phase

from ..reference import Problem
from .effort import Effort
from .examples import Examples
from .hanging import stuck_in, stuck_in_launch
from .isolation import Deadlines, Worker
from .laws import Law
from .ledger import Entry
from .profiles import Profile
from .quarry import (
    DeviceLostError,
    HarnessError,
    Quarry,
    probe_device,
    verdict_of,
    warm_up,
)
from .report import Finding, LawReport
from .settings import settings_of
from .simplify import on_fewer_pages, simplify
from .strategies import problems, variations
from .verdict import Verdict

EXAMPLES_A_ROUND = 40
"""Hypothesis mutates what it has drawn: a single long run stays near its first examples."""
VARIATIONS = 3
"""Most value regimes that one drawn structure is tried with, besides its own."""


class _Counterexample(Exception):  # noqa: N818  the signal that Hypothesis shrinks on
    """A problem on which the law fails."""


class _Enough(BaseException):
    """The law has seen its share of problems: drawing more would only cost time."""


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
        self._explain, self._judged, self._stopped = explain, judged, stopped
        self._verdicts: dict[str, Verdict] = {}
        self._known: dict[str, tuple[Problem, Verdict, Entry]] = {}
        self._first: tuple[Problem, Verdict] | None = None
        self._last: tuple[Problem, Verdict] | None = None
        self._flaky: tuple[Problem, Verdict] | None = None
        self._broken: Exception | None = None
        self._found_after = self._started = self._hunted_before = 0.0
        self._effort = Effort(search.profile)
        self._dear = False
        self._died = False
        self._in_hand: tuple[Problem, Verdict] | None = None
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
        self.report.seconds = time.monotonic() - start
        self._quarry.hunted += self.report.seconds
        return self.report

    def _hunt(self, start: float) -> None:
        warm_up(self._worker, self._quarry)
        for problem in list(self._quarry.smallest):
            if self._fails(problem):
                break
        else:
            self._search_space(start)
        if self._last is not None:
            self.report.finding = self._finding()
        elif self._flaky is not None:
            problem, verdict = self._flaky
            self.report.finding = Finding(self._quarry.name, self._law.name, verdict, problem)
        elif self._known:
            problem, verdict, entry = min(self._known.values(), key=lambda each: each[0].work)
            self.report.finding = Finding(
                self._quarry.name, self._law.name, verdict, problem, entry=entry.id
            )

    def _search_space(self, start: float) -> None:
        """Let Hypothesis draw and shrink, round after round, until a failure or enough problems."""
        rounds = -(-10 * self._search.problems // EXAMPLES_A_ROUND)
        for number in range(rounds):
            ended = self._round(start, number)
            if ended or self._first is not None:
                break
        if self._last is None or not self._search.shrink:
            return
        if self._dear:
            simplify(self._last[0], self._quarry.axes, self._fails, self._effort.passing_is_cheap)
            self._confirm_smallest()
        else:
            for problem in on_fewer_pages(self._last[0], self._quarry.axes):
                if self._fails(problem):
                    return

    def _round(self, start: float, number: int) -> bool:
        """Look at some examples; True if no more need be drawn.

        What others have kept is tried in the first round; what fails is kept in any.
        """
        search, axes = self._search, self._quarry.axes
        phases = [Phase.generate, *([Phase.shrink] if search.shrink else [])]
        database = None
        if search.examples is not None:
            phases += [] if number else [Phase.reuse]
            database = search.examples.of(self._law.name, self._quarry.name)
        settings = hypothesis.settings(
            settings_of(search.profile),
            max_examples=EXAMPLES_A_ROUND,
            database=database,
            phases=phases,
        )

        @settings  # after the seed, which takes the database away from the settings before it
        @hypothesis.seed(self._seed(number))
        @hypothesis.given(variations(problems(axes), axes, VARIATIONS))
        def law_holds(drawn: list[Problem]) -> None:
            for problem in drawn:
                if self._first is None and self._enough(start):
                    raise _Enough
                try:
                    failing = self._fails(problem)
                except RuntimeError as error:  # The suite's fault: not for Hypothesis to shrink.
                    self._broken = error
                    raise _Enough from error
                if failing:
                    # Hypothesis shrinks from above, at the price of a process a step.
                    raise _Enough if self._dear else _Counterexample

        try:
            law_holds()
        except (_Counterexample, _Enough):
            if self._broken is not None:
                raise self._broken from None
            return True
        except hypothesis.errors.Flaky:
            # Verdicts are remembered, so only a truncated search can look flaky to Hypothesis.
            self.report.truncated = True
            return True
        return False

    def _enough(self, start: float) -> bool:
        report = self.report
        if report.judged >= self._search.problems:
            return True
        if time.monotonic() - start > self._search.seconds or self._stopped():
            report.truncated = True
            return True
        # Nothing to look at, time and again: the law says nothing about this implementation.
        idle = report.vacuous + report.unsupported
        # Of several modules, a law may have something to say about one alone.
        patience = 4 * max(1, len(self._quarry.axes.restrictions))
        return idle > patience * self._search.problems and not report.judged

    def _seed(self, number: int) -> int:
        text = f"{self._law.name}|{self._quarry.name}|{self._search.seed}|{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _fails(self, problem: Problem) -> bool:
        """Tell whether this problem is a counterexample, to be shrunk further."""
        verdict = self._verdicts.get(problem.id)
        if verdict is None:
            if self._first is not None and (self._effort.enough() or self._stopped()):
                return False
            verdict = self._judge(problem)
            if verdict.bad and self._first is None:
                verdict = self._confirm(problem, verdict)
            self._verdicts[problem.id] = verdict
        if not verdict.bad:
            return False
        if self._first is None:
            self._first, self._dear = (problem, verdict), self._died
            self._found_after = self._hunted_before + time.monotonic() - self._started
            self._effort.begin()
        if not _alike(verdict, self._first[1]):
            return False  # Another bug: shrinking must not slip from one into the other.
        self._last = (problem, verdict)
        return True

    def _confirm(self, problem: Problem, verdict: Verdict) -> Verdict:
        """Look again: in a fresh process at a HANG or a CRASH, in the same one at a FAIL."""
        if verdict.status in ("HANG", "CRASH"):
            self._renew()
        again = self._judge(problem)
        if again.status == verdict.status:
            return again
        self.report.flaky += 1
        message = f"{verdict.status} at first, {again.status} when confirmed: {verdict.message}"
        flaky = replace(verdict, status="FLAKY", message=message)
        self._flaky = self._flaky or (problem, flaky)
        return flaky

    def _confirm_smallest(self) -> None:
        """See the smallest HANG or death once more, in a fresh process that has all its time."""
        if self._last is None or self._last == self._first:
            return
        self._simplified = True
        self._renew()
        again = self._judge(self._last[0])
        if self._first is not None and not _alike(again, self._first[1]):
            again = self._first[1]
            self._last = self._first
        self._last = (self._last[0], again)

    def _deadlines(self, problem: Problem) -> Deadlines:
        hurried = self._dear and not self._simplified and self._quarry.address.device != "cpu"
        return self._quarry.pace.deadlines(problem, hurried=hurried)

    def _renew(self) -> None:
        """Go on in a fresh process."""
        self._worker.renew()
        warm_up(self._worker, self._quarry)

    def _finding(self) -> Finding:
        problem, verdict = self._last or self._first  # type: ignore[misc]  # run() has checked
        if self._search.confirm and verdict.status == "FAIL":
            self._renew()
            again = self._judge(problem)
            if not again.bad:
                verdict = replace(
                    verdict,
                    status="FLAKY",
                    message="passes in a fresh process, fails after other calls in the same one: "
                    + verdict.message,
                )
        if verdict.status == "HANG":
            verdict = self._where(problem, verdict)
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

    def _where(self, problem: Problem, verdict: Verdict) -> Verdict:
        """Say where a HANG is stuck: on a GPU, a look of its own tells which launch never ends."""
        known, device = self._quarry.stuck, self._quarry.address.device
        if device == "cpu":
            where = stuck_in(verdict.trace)
            known[problem.id] = where and f"stuck in {where}"
        elif problem.id not in known:
            known[problem.id] = stuck_in_launch(self._quarry, self._law, problem)
            probe_device(self._worker, device)
        where = known[problem.id]
        return replace(verdict, message=f"{verdict.message}; {where}") if where else verdict

    def _last_words(self, why: str) -> Finding | None:
        """Report what there is when the device is gone: what took it, or what was found before."""
        found = self._last or self._in_hand
        if found is None:
            return None
        problem, verdict = found
        entry = self._explain(self._law.name, verdict, problem)
        verdict = replace(verdict, message=f"{verdict.message}; then {why}")
        return replace(self._tell(problem, verdict), entry=entry.id if entry else None)

    def _judge(self, problem: Problem) -> Verdict:
        """Ask the worker, and count."""
        request = self._quarry.address.case(self._law.name, problem)
        start = time.monotonic()
        outcome = self._worker.run(request, self._deadlines(problem))
        verdict = verdict_of(outcome, self._quarry.address.tool)
        self._died = outcome.died
        seconds = time.monotonic() - start
        self._effort.note(seconds, died=self._died, passed=not verdict.bad)
        if self._died:
            self._in_hand = (problem, verdict)
            probe_device(self._worker, self._quarry.address.device)
            self._in_hand = None
            warm_up(self._worker, self._quarry)
        elif verdict.calls:
            self._quarry.pace.record(problem.work, verdict.seconds / verdict.calls)
        return self._count(problem, verdict)

    def _count(self, problem: Problem, verdict: Verdict) -> Verdict:
        report = self.report
        if verdict.bad:
            entry = self._explain(self._law.name, verdict, problem)
            if entry is not None:
                report.known[entry.id] += 1
                report.judged += 1
                self._judged(1)
                known = self._known.get(entry.id)
                if known is None or problem.work < known[0].work:
                    self._known[entry.id] = (problem, verdict, entry)
                return replace(verdict, status="KNOWN")
        if verdict.status == "UNSUPPORTED":
            report.unsupported += 1
            report.unsupported_reason = report.unsupported_reason or verdict.message
        elif verdict.vacuous:
            report.vacuous += 1
        else:
            report.judged += 1
            report.rejected += verdict.status == "REJECTED"
            if not verdict.bad and verdict.ratio is not None:
                report.worst_ratio = max(report.worst_ratio, verdict.ratio)
            self._judged(1)
        return verdict


def _alike(verdict: Verdict, first: Verdict) -> bool:
    """Tell whether two verdicts speak of one bug; where a HANG stood is where the process began."""
    return verdict.status == first.status and (
        verdict.kind == first.kind or verdict.status == "HANG"
    )
