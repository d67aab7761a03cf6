"""Has a worker judge problems under one law, and counts its verdicts in the law's report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...reference import Problem
from ..findings.ledger import Entry, holds
from ..findings.report import LawReport, ProblemVerdict
from ..isolation.workers import Deadlines, Outcome, Worker
from ..laws import Law
from ..verdicts.memory_need import NO_ROOM
from ..verdicts.verdict import Verdict
from ..worker.memory_deaths import has_room_later, of_earlier_calls
from ..worker.requests import probe_device, verdict_of
from .candidate import Candidate, warm_up

BEFORE_A_CASE = ("load", "judge")
"""Stages of a worker before it runs a case. If a worker with several cases queued dies in one of
them, the case before may be the cause."""


SHARED_PATIENCE = 3.0
"""Multiplier on the deadline of a call whose process shares its GPU: kernels of others run beside
it, and its end would cost all of them their work."""


class Attempt(NamedTuple):
    """A problem that was judged while others waited: how long it took, and how it ended."""

    seconds: float
    bad: bool
    died: bool


class CaseRunner:
    """Asks one worker about problems, one at a time or ahead, and counts the verdicts.

    What is asked and counted is the same either way: only how many problems wait in the worker
    depends on how long they take.

    Attributes:
        candidate, law: who is judged by what.
        report: the report in which verdicts are counted.
        verdicts: the verdicts by problem id, of the first time that it was judged, or of its
            confirmation.
        known: the smallest problem of each ledger entry that explains a failure, by its id.
        died: whether the last case cost the process.
        in_hand: what was judged when the device was lost.
        always_fresh: whether each case gets a fresh process.
        attempts: problems that were judged one at a time.
        starting_seconds: seconds in which processes were started and warmed up, or waited for
            memory of the GPU: no part of the law's time.
        avoided: predicates on problems that are not asked about, for they cost a process each.
    """

    def __init__(
        self,
        worker: Worker,
        candidate: Candidate,
        law: Law,
        judged: Callable[[int], None] = lambda _: None,
        *,
        confirms: bool = True,
    ) -> None:
        self.candidate, self.law, self.report = candidate, law, LawReport(law.name)
        self.verdicts: dict[str, Verdict] = {}
        self.known: dict[str, tuple[Problem, Verdict, Entry]] = {}
        self.died = self.always_fresh = False
        self.attempts: list[Attempt] = []
        self.starting_seconds = 0.0
        self.avoided: list[Mapping[str, Any]] = []
        self.in_hand: tuple[Problem, Verdict] | None = None
        self._worker, self._judged, self._confirms = worker, judged, confirms
        self._asked: dict[str, Problem] = {}

    def kinds(self) -> Sequence[Problem]:
        """Return the few problems that cover each of the implementation's features."""
        return self.candidate.find_kinds(self._worker)

    def pairs(self) -> Sequence[Problem]:
        """Return the problems that cover pairs of the implementation's features."""
        return self.candidate.pairs(self._worker)

    def judge(
        self,
        problem: Problem,
        *,
        again: bool = False,
        hurried: bool = False,
        explains: bool = False,
    ) -> Verdict:
        """Return the verdict on a problem, which is judged and counted the first time only.

        Args:
            problem: the problem that is judged.
            again: judge and count it in any case; the verdict is not remembered.
            hurried: a HANG or a CRASH is expected: see ``DeadlineModel.of``, and on a CPU the
                worker judges in a fork, for which no other process must be started.
            explains: the message says what explains a wrong answer, which takes longer than to find
                that it is wrong; only of what is judged again.
        """
        # A second verdict is not remembered: the first one decides what is drawn next, and a search
        # must not depend on how often a failure was looked into.
        if again:
            return self._judge_now(problem, hurried=hurried, explains=explains)
        if problem.id not in self.verdicts:
            self.verdicts[problem.id] = self._judge_now(problem, hurried=hurried)
        return self.verdicts[problem.id]

    def _judge_now(self, problem: Problem, *, hurried: bool, explains: bool = False) -> Verdict:
        if self.always_fresh:
            self.renew()
        deadlines = self._deadlines(problem, hurried=hurried)
        request, address = self._request(problem, explains=explains), self.candidate.address
        if hurried and address.device == "cpu":
            request = address.attempt(self.law.name, problem, deadlines)
            # The worker itself stands still while its fork goes through all stages.
            deadlines = replace(deadlines, load=sum(vars(deadlines).values()))
        start = time.monotonic()
        outcome = self._worker.run(request, deadlines)
        seconds = time.monotonic() - start
        verdict = self._learn(problem, outcome)
        self.attempts.append(Attempt(seconds, verdict.bad, self.died))
        return self._count(problem, verdict)

    @property
    def waiting(self) -> int:
        """How many problems were asked about ahead, and are not counted yet."""
        return len(self._asked)

    @property
    def full(self) -> bool:
        """Whether a verdict is to be taken before more is drawn."""
        return self._worker.full

    def ask(self, problem: Problem) -> None:
        """Ask about a problem, unless that was done before, and do not wait."""
        if any(holds(problem, values) for values in self.avoided):
            return
        # Hypothesis repeats itself; small spaces are exhausted within some rounds.
        if problem.id not in self.verdicts and problem.id not in self._asked:
            self._asked[problem.id] = problem
            deadlines = self._deadlines(problem)
            self._worker.ask(self._request(problem), deadlines)

    def take(self) -> Problem | None:
        """Wait for the verdict on the oldest problem that was asked about ahead, and count it.

        Returns:
            The problem if it fails: then nothing is left of what was asked after it.
        """
        problem, outcome = self._answer()
        verdict = self._learn(problem, outcome)
        # It died while it loaded or compared: with cases queued, that may be the doing of the case
        # before, so this one is judged by itself.
        if self.died and outcome.stage in BEFORE_A_CASE:
            verdict = self.judge(problem, again=True)
        else:
            verdict = self._count(problem, verdict)
        self.verdicts[problem.id] = verdict
        if not verdict.bad:
            return None
        # The cases behind a failure were asked on the guess that it would pass: Hypothesis is to
        # draw them anew once the failure is confirmed or was none.
        self._abandon()
        return problem

    def stop(self) -> None:
        """Ask no more, whatever the worker is busy with."""
        self._asked.clear()
        self._worker.forget()

    def renew(self) -> None:
        """Go on in a fresh process."""
        start = time.monotonic()
        self._worker.renew()
        self.starting_seconds += time.monotonic() - start
        self.warm_up()

    def warm_up(self) -> None:
        """Make the first call of the implementation, where the process has made none."""
        start = time.monotonic()
        candidate = self.candidate
        worker, deadly = self._worker, candidate.is_deadly(self.law.name)
        lonely = candidate.alone and worker.shared_with_others(candidate.address.reference)
        if lonely or (deadly and worker.shares_gpu):  # it would end the others' work on the GPU
            worker.renew(keep=True)
        warm_up(self._worker, self.candidate)
        self.starting_seconds += time.monotonic() - start

    def probe_device(self) -> None:
        """Check in a fresh process that the device still works.

        Raises:
            DeviceLostError: the device does not respond.
        """
        probe_device(self._worker, self.candidate.address.device)

    def _deadlines(self, problem: Problem, *, hurried: bool = False) -> Deadlines:
        found = self.candidate.deadlines_of(self.law, problem, hurried=hurried)
        if not self._worker.shares_gpu:
            return found
        return replace(found, run=SHARED_PATIENCE * found.run)

    def _request(self, problem: Problem, *, explains: bool = False) -> dict[str, object]:
        case = self.candidate.address.case(self.law.name, problem)
        if self.candidate.named:
            case["named"] = sorted(self.candidate.named)
        return case if explains else {**case, "explains": False}

    def _answer(self) -> tuple[Problem, Outcome]:
        outcome = self._worker.answer()
        return self._asked.pop(next(iter(self._asked))), outcome

    def _abandon(self) -> None:
        """Have the worker end what it was asked ahead; nothing of it is counted."""
        # Each answer is waited for, since the process must be idle before it is asked again; a
        # death among them still costs a probe of the device.
        while self._worker.busy:
            problem, outcome = self._answer()
            if outcome.died:
                self._learn(problem, outcome)
        self.stop()

    def _learn(self, problem: Problem, outcome: Outcome) -> Verdict:
        """Return the verdict, and note how long calls took; after a death, warm up a process."""
        outcome, verdict = self._with_memory(problem, outcome)
        self.starting_seconds += verdict.waited
        self.died = outcome.died
        if self.died:
            self.in_hand = (problem, verdict)
            self.probe_device()
            self.in_hand = None
            self.warm_up()
        elif verdict.calls:
            self.candidate.deadlines.record(problem, verdict.seconds / verdict.calls)
        # Before it is counted: the verdict of a process that others have used accuses nobody yet.
        # After a fault not even what is known to fail: the fault may be the doing of another.
        accused = self._accused(problem, verdict) or (outcome.faulted and verdict.bad)
        if outcome.shared and self._confirms and accused:
            return self._judged_alone(problem, faulted=outcome.faulted)
        return verdict

    def _with_memory(self, problem: Problem, outcome: Outcome) -> tuple[Outcome, Verdict]:
        """Judge again what found no memory: others may have left the process, or machine, full.

        What asked for too much is not judged again here: it is a CRASH, to be confirmed like
        another. On a GPU the worker itself has tried again, unless its process has died.

        Returns:
            The outcome that counts, and the verdict on it.
        """
        address = self.candidate.address
        verdict = verdict_of(outcome, address.tool)
        tried = address.device != "cpu" and outcome.status == "done"
        if tried or (verdict.status, verdict.kind) != ("UNSUPPORTED", NO_ROOM):
            return outcome, verdict
        self.warm_up()  # the worker has a fresh process by now
        deadlines = self._deadlines(problem)
        again = self._worker.run(self._request(problem), deadlines)
        now = verdict_of(again, address.tool)
        blamed = of_earlier_calls(outcome, verdict) if now.status == "PASS" else None
        if blamed and outcome.shared:  # by whom is unknown; from now on it is seen
            self.candidate.alone = True
            blamed = None
        return again, blamed or now

    def _accused(self, problem: Problem, verdict: Verdict) -> bool:
        return verdict.bad and self.candidate.explanation(self.law.name, verdict, problem) is None

    def _judged_alone(self, problem: Problem, *, faulted: bool) -> Verdict:
        """Judge again what failed in a process in which code of others ran: it may be their doing.

        Where it is, the implementation has processes of its own from now on, so that what it does
        itself after many calls is seen. Not so after a fault that has ended the work of all that
        share the GPU, in which most have no part: only whose problem fails again has them then.
        """
        if not self.died:  # else it has a fresh process already
            self.renew()
        deadlines = self._deadlines(problem)
        verdict = self._learn(problem, self._worker.run(self._request(problem), deadlines))
        self.candidate.alone = self.candidate.alone or verdict.bad == faulted
        return verdict

    def _count(self, problem: Problem, verdict: Verdict) -> Verdict:
        self.report.kernels.add(verdict.kernels)
        self.report.launched.add(verdict.launched)
        self.candidate.named.update(verdict.launched.get("known", ()))
        called = {"called": verdict.launched["called"]} if verdict.bad and verdict.launched else {}
        # What is too large to remember goes.
        verdict = self._counted(problem, replace(verdict, kernels={}, launched=called))
        seen = ProblemVerdict(problem, verdict.status, verdict.kind, verdict.vacuous)
        self.report.problems[problem.id] = seen
        return verdict

    def _counted(self, problem: Problem, verdict: Verdict) -> Verdict:
        report = self.report
        report.count_answered((problem.id,))
        report.interpreted = report.interpreted or verdict.interpreted
        if verdict.bad:
            entry = self.candidate.explanation(self.law.name, verdict, problem)
            if entry is not None:
                report.count_ratio(verdict)
                report.known[entry.id] += 1
                report.judged += 1
                self._judged(1)
                known = self.known.get(entry.id)
                if known is None or problem.work < known[0].work:
                    self.known[entry.id] = (problem, verdict, entry)
                return replace(verdict, status="KNOWN")
        if verdict.status == "UNSUPPORTED":
            report.unsupported_reason = report.unsupported_reason or verdict.message
            if verdict.kind == NO_ROOM:
                later = has_room_later(verdict, self.candidate.address.device)
                report.count_without_room(problem, too_large=not later)
            else:
                report.unsupported += 1
        elif verdict.vacuous:
            report.vacuous += 1
        else:
            report.judged += 1
            report.count_ratio(verdict)
            report.rejected += verdict.status == "REJECTED"
            if not verdict.bad and verdict.ratio is not None:
                report.passing_ratio = max(report.passing_ratio, verdict.ratio)
            self._judged(1)
        return verdict
