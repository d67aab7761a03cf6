"""The search for a counterexample to one law, from the first draw to the finding.

It walks one way: ``Search`` draws and yields suspects, ``Confirmation`` makes failures of them,
``LawShrink`` makes one smaller, ``Confirmation`` judges the smallest once more. All of them ask the
same ``CaseRunner``, which counts in the law's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...reference import Problem
from ..findings.causes import telling_values
from ..findings.report import Finding, LawReport
from ..isolation.workers import Worker
from ..laws import Law
from ..space.rounds import Enough
from ..verdicts.memory_need import NO_ROOM
from ..verdicts.verdict import Verdict
from ..worker.requests import DeviceLostError, HarnessError
from .candidate import Candidate, Deadly
from .case_runner import CaseRunner
from .confirmation import Confirmation, Failure
from .drawing import Search, SearchOptions
from .hang_location import place_of, where_stuck
from .shrinking import LawShrink

PATIENCE_SECONDS, TICK_SECONDS = 60.0, 0.05
"""Most seconds that a law waits until another one has shrunk the hang that both found, and seconds
between two checks."""
OUT_OF_TIME = "the run's time was over"
NOT_OFFERED = "its calls have fewer requests, or take too long"
"""Why a kind of full batch was not judged."""
MOST_NOTED = 2
"""Failures known from another law after which a law ends, unless it can avoid them; each costs a
process."""


class LawSearch:
    """The search for a counterexample to one law on one implementation, in one worker."""

    def __init__(
        self,
        worker: Worker,
        candidate: Candidate,
        law: Law,
        options: SearchOptions,
        *,
        again: Sequence[Problem] = (),
        judged: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        failing: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self._worker, self._candidate, self._options = worker, candidate, options
        self._stopped, self._failing, self._again = stopped, failing, again
        self._runner = CaseRunner(worker, candidate, law, judged, confirms=options.confirm)
        self._runner.report.floor = options.floor
        self._search = Search(self._runner, options, stopped)
        self._confirmation = Confirmation(self._runner)
        self._shrink: LawShrink | None = None
        self._deadly: Deadly | None = None
        self._noted: list[Failure] = []
        self._clock_offset = 0.0

    def run(self) -> LawReport:
        """Search, and report."""
        start, candidate, report = time.monotonic(), self._candidate, self._runner.report
        if candidate.started is None:
            candidate.started = start
        # Added to a monotonic time, it gives how long the implementation was searched until then.
        self._clock_offset = candidate.searched_seconds - start
        try:
            self._find()
            report.finding = self._finding()
        except DeviceLostError as error:
            report.lost = str(error)
            report.finding = self._last_words(str(error))
        except (HarnessError, RuntimeError) as error:
            # RuntimeError: the pool was closed. What was learned until then is kept.
            report.error = str(error)
            report.finding = self._last_words("the law ended before it was judged again")
        finally:
            if self._deadly is not None:  # also where an error ended this law: others wait for it
                self._deadly.shrunk = True
            self._runner.stop()
        report.seconds = time.monotonic() - start
        candidate.searched_seconds += report.seconds
        return report

    def _find(self) -> None:
        """Find a failure and shrink it."""
        declared, report = self._candidate.declares, self._runner.report
        undeclared = declared is not None and not self._runner.law.concerns(declared)
        if undeclared or not self._search.has_something:
            # Without a draw: no problem would hold anything for it, so it owes none.
            report.ended, report.floor = "idle", 0
            return
        self._runner.warm_up()
        if self._again:
            self._look_again()
            return
        if self._fails_in_deck() or self._fails_as_others():
            return
        if self._options.kinds:
            for _ in self._judge_each(self._runner.kinds()):
                pass
            self._end_shrinking(shown=False)
            return
        if self._options.examples is not None:
            self._search.show_kept(self._look_at_kept)
        shown = self._shrink is not None or self._draw()
        # Drawn problems come first, being cheap; these batches cost most, and only show what
        # drawing cannot: many keys, many requests, very long ones.
        for look in (
            self._look_at_pairs, self._look_at_wide, self._look_at_full, self._look_at_longest,
        ):  # fmt: skip
            if self._shrink is None and not self._noted:
                look()
        self._end_shrinking(shown=shown)

    def _fails_in_deck(self) -> bool:
        """Confirm what has failed in the deck; whether it is this law's finding."""
        if self._options.suspect is None:
            return False
        problem, verdict = self._options.suspect
        self._runner.verdicts[problem.id] = verdict
        if not self._noted_already(problem):
            self._confirm(problem)
        self._end_shrinking(shown=False)
        return self._shrink is not None

    def _fails_as_others(self) -> bool:
        """Try the smallest problems of other laws; whether one of them is this law's finding."""
        # Laws of one implementation fail for the same fault most of the time. Its smallest problem
        # is tried before anything is drawn: one call where a search would take seconds.
        for deadly in [each for each in self._candidate.deadly if each.shrunk]:
            verdict = self._runner.judge(deadly.problem, hurried=True)
            if deadly.is_seen_in(deadly.problem, verdict):
                self._note(deadly, deadly.problem, verdict)
                continue
            self._confirm(deadly.problem)
            if self._shrink is not None:
                return True
        for problem in list(self._candidate.smallest):
            self._confirm(problem)
            if self._shrink is not None:
                if self._options.shrink and not self._shrink.first.costly:
                    self._shrink.simplify()  # this law may not need what another one did
                    self._shrink.by_fields(self._shrink.budget.extend())
                return True
        return False

    def _judge_each(self, problems: Iterable[Problem]) -> Iterator[Verdict]:
        """Yield the verdict on each problem, until one fails for sure or the run ends."""
        for problem in problems:
            if self._stopped() or self._shrink is not None:
                return
            verdict = self._runner.judge(problem)
            if verdict.bad:
                self._confirm(problem)
            yield verdict

    def _look_again(self) -> None:
        """Judge the problems that had no room, and none besides."""
        judged = len(list(self._judge_each(self._again)))
        if judged < len(self._again) and self._shrink is None:
            self._runner.report.ended = "stopped"
            return
        self._end_shrinking(shown=False)

    def _look_at_pairs(self) -> None:
        """Judge the problems that cover pairs of features, until one fails."""
        for _ in self._judge_each(self._search.pairs()):
            pass

    def _look_at_wide(self) -> None:
        """Judge the requests beyond windows of models and with hidden tiles, until one fails."""
        for _ in self._judge_each(self._search.wide()):
            pass

    def _look_at_full(self) -> None:
        """Judge a batch of each kind that fills a GPU: the first that the implementation takes."""
        missing = {name: self._look_at_one_of(each) for name, each in self._search.full().items()}
        self._runner.report.without_full = "; ".join(
            f"no batch of {name}: {why}" for name, why in missing.items() if why
        )

    def _look_at_one_of(self, choices: Sequence[Problem]) -> str:
        """Judge the first problem that is taken, and return why there is none."""
        refused = []
        for verdict in self._judge_each(choices):
            if verdict.status != "UNSUPPORTED" or verdict.kind == NO_ROOM:
                return ""  # what had no room is tried again
            refused.append(verdict.message)
        if self._shrink is not None:
            return ""
        if len(refused) < len(choices):
            return OUT_OF_TIME
        if not choices:
            return NOT_OFFERED
        why = next(filter(None, refused), "")
        return f"each of {len(choices)} was refused, the first because {why}"

    def _look_at_longest(self) -> None:
        """Judge the very long problems of the law, after all others: they cost most."""
        problems, why = self._search.longest()
        judged = False
        for verdict in self._judge_each(problems):
            if verdict.status == "UNSUPPORTED":
                why = verdict.message
            judged |= verdict.status != "UNSUPPORTED"
        self._runner.report.without_long = "" if judged else why

    def _draw(self) -> bool:
        """Draw until a problem fails; whether it was shown to Hypothesis again."""
        for problem in self._search.suspects():
            if not self._noted_already(problem):
                self._confirm(problem)
            if self._shrink is not None:
                # What is not shrunk is drawn again for what runs keep only.
                again = self._options.shrink or self._options.examples is not None
                return again and self._search.show_again(self._shrink.show)
            if len(self._noted) >= MOST_NOTED and not self._avoids_more():
                break
        return False

    def _avoids_more(self) -> bool:
        """Whether other problems can be drawn now, once other laws have shrunk what was noted."""
        start = time.monotonic()
        for deadly in self._candidate.deadly:
            while not deadly.shrunk and time.monotonic() - start < PATIENCE_SECONDS:
                if self._stopped():
                    return False
                time.sleep(TICK_SECONDS)
        # What other laws have found out in the meantime: problems with these values are not asked
        # about any more, and the search goes on behind them.
        values = [each.values for each in self._candidate.deadly if each.values]
        new = [each for each in values if each not in self._runner.avoided]
        self._runner.avoided += new
        self._runner.starting_seconds += time.monotonic() - start  # no part of this law's time
        return bool(new)

    def _confirm(self, problem: Problem) -> None:
        """Confirm a failure, and begin to shrink it unless another law has found the same."""
        failure = self._confirmation.confirm(problem)
        # Meanwhile another law, beside this one, may have found it.
        if failure is None or self._noted_already(problem):
            return
        seconds = self._options.profile.shrink_seconds
        self._shrink = LawShrink(self._runner, failure, seconds, self._stopped)
        # Announced at once, not when it is shrunk: laws beside this one would otherwise each lose
        # processes to the same hang.
        if failure.costly and failure.verdict.status in ("HANG", "CRASH"):
            place = place_of(self._candidate, failure.verdict)
            self._deadly = Deadly(problem, failure.verdict, place=place)
            self._candidate.deadly.append(self._deadly)
        if self._deadly is not None or not self._candidate.announced:
            self._candidate.announced = True
            self._failing(failure.verdict)

    def _noted_already(self, problem: Problem) -> bool:
        """Whether a failure costs a process and was found by another law; it is then recorded."""
        verdict = self._runner.verdicts[problem.id]
        place = place_of(self._candidate, verdict)
        for deadly in self._candidate.deadly:
            if deadly.is_seen_in(problem, verdict, place):
                self._note(deadly, problem, verdict)
                return True
        return False

    def _note(self, deadly: Deadly, problem: Problem, verdict: Verdict) -> None:
        self._noted.append(Failure(problem, verdict, costly=True))
        if deadly.values and deadly.values not in self._runner.avoided:
            self._runner.avoided.append(deadly.values)

    def _look_at_kept(self, problem: Problem) -> None:
        """Judge what was kept: Hypothesis keeps what fails at once, and forgets the rest."""
        new = problem.id not in self._runner.verdicts
        if self._shrink is None and new and self._search.enough():
            raise Enough
        if self._shrink is None:
            self._confirm(problem)
        if self._shrink is not None:
            self._shrink.show(problem)

    def _end_shrinking(self, *, shown: bool) -> None:
        """Shrink what Hypothesis does not: costly failures, and what it has not drawn again."""
        shrink = self._shrink
        if shrink is None or not self._options.shrink:
            return
        if shrink.first.costly or not shown:
            shrink.simplify()
        if shrink.first.costly:
            shrink.smallest = self._confirmation.smallest(shrink.first, shrink.smallest)
        else:
            shrink.by_fields(shrink.budget.extend())
            shrink.on_fewer_pages()

    def _finding(self) -> Finding | None:
        if self._shrink is not None:
            return self._of_smallest(self._shrink)
        # Reported although another law reports it: this law fails on it as well.
        if self._noted:
            first = self._noted[0]
            return self._found(first.problem, self._with_place(first.problem, first.verdict))
        if (flaky := self._confirmation.flaky) is not None:
            return self._found(flaky.problem, flaky.verdict)
        if self._runner.known:
            known = self._runner.known.values()
            problem, verdict, entry = min(known, key=lambda each: each[0].work)
            return replace(self._found(problem, verdict), entry=entry.id)
        return None

    def _of_smallest(self, shrink: LawShrink) -> Finding:
        problem, verdict = shrink.smallest.problem, shrink.smallest.verdict
        # A HANG or a crash was judged in a fresh process by its confirmation.
        if self._runner.always_fresh or (self._options.confirm and verdict.status == "FAIL"):
            verdict = self._confirmation.in_fresh_process(shrink.smallest)
            verdict = self._confirmation.explained_as_drawn(verdict, shrink.first)
        if (deadly := self._deadly) is None:
            self._candidate.smallest.append(problem)
        else:
            deadly.values = telling_values(self._runner.report, verdict)
            deadly.problem, deadly.verdict, deadly.shrunk = problem, verdict, True
        first = (shrink.first.problem, shrink.first.verdict)
        return replace(self._found(problem, self._with_place(problem, verdict)), first=first)

    def _with_place(self, problem: Problem, verdict: Verdict) -> Verdict:
        """Return the verdict on a HANG with the place where it is stuck."""
        if verdict.status != "HANG":
            return verdict
        where = where_stuck(self._runner, problem, verdict.trace)
        return replace(verdict, message="; ".join(filter(None, (verdict.message, where))))

    def _found(self, problem: Problem, verdict: Verdict) -> Finding:
        budget = self._shrink and self._shrink.budget
        return Finding(
            self._candidate.name,
            self._runner.law.name,
            verdict,
            problem,
            seconds=self._clock_offset + budget.begun if budget else 0.0,
            attempts=budget.attempts if budget else 0,
            deaths=budget.deaths if budget else 0,
            place=place_of(self._candidate, verdict),
        )

    def _last_words(self, why: str) -> Finding | None:
        """Report what there is when the device is gone or the run was cut off.

        That is what took the device, what was not confirmed yet, or what was found before.
        """
        found = self._runner.in_hand or self._confirmation.unsure
        if self._shrink is not None:
            found = (self._shrink.smallest.problem, self._shrink.smallest.verdict)
        if found is None:
            return None
        problem, verdict = found
        entry = self._candidate.explanation(self._runner.law.name, verdict, problem)
        verdict = replace(verdict, message=f"{verdict.message}; then {why}")
        return replace(self._found(problem, verdict), entry=entry.id if entry else None)
