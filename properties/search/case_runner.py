"""Asking a worker about problems under one law, and counting its verdicts in the law's report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ...reference import Problem
from ..findings.ledger import Entry
from ..findings.report import LawReport
from ..isolation.workers import Outcome, Worker
from ..laws import Law
from ..verdicts.verdict import Verdict
from ..worker.requests import probe_device, verdict_of
from .candidate import Quarry, warm_up
from .pipelining import DEPTH, Ahead
from .shrink_budget import Effort

BEFORE_A_CASE = ("load", "judge")
"""Phases in which a process that was asked ahead may not have taken up the next case yet: its death
may be the doing of the one before."""


class Inquiry:
    """Asks one worker about problems, one at a time or ahead, and counts the verdicts.

    Attributes:
        known: the smallest problem of each ledger entry that explains a failure, by its id.
        died: whether the last case cost the process.
        in_hand: what was judged when the device was lost.
    """

    def __init__(
        self,
        worker: Worker,
        quarry: Quarry,
        law: Law,
        report: LawReport,
        effort: Effort,
        *,
        explain: Callable[[str, Verdict, Problem], Entry | None],
        judged: Callable[[int], None],
    ) -> None:
        self.known: dict[str, tuple[Problem, Verdict, Entry]] = {}
        self.died = False
        self.in_hand: tuple[Problem, Verdict] | None = None
        self._worker, self._quarry, self._law = worker, quarry, law
        self._report, self._effort = report, effort
        self._explain, self._judged = explain, judged
        # A sanitizer's log says nothing of where one case ends and the next begins.
        self._ahead = Ahead(worker, 0 if quarry.address.tool else DEPTH)

    def judge(self, problem: Problem, *, hurried: bool = False) -> Verdict:
        """Ask about a problem, wait, and count; see ``Pace.deadlines`` for ``hurried``."""
        deadlines = self._quarry.pace.deadlines(problem, hurried=hurried)
        start = time.monotonic()
        outcome = self._worker.run(self._quarry.address.case(self._law.name, problem), deadlines)
        seconds = time.monotonic() - start
        verdict = self._learn(problem, outcome)
        self._effort.note(seconds, died=self.died, passed=not verdict.bad)
        return self._count(problem, verdict)

    @property
    def waiting(self) -> int:
        """How many problems were asked about ahead, and are not counted yet."""
        return len(self._ahead)

    @property
    def full(self) -> bool:
        """Whether a verdict is to be taken before more is drawn."""
        return self._ahead.full

    def waits_for(self, problem: Problem) -> bool:
        """Tell whether this problem was asked about ahead, and is not counted yet."""
        return problem in self._ahead

    def ask(self, problem: Problem) -> None:
        """Ask about a problem, and do not wait."""
        request = self._quarry.address.case(self._law.name, problem)
        self._ahead.ask(problem, request, self._quarry.pace.deadlines(problem))

    def take(self) -> tuple[Problem, Verdict]:
        """Wait for the verdict on the oldest problem that was asked about ahead, and count it."""
        problem, outcome = self._ahead.take()
        verdict = self._learn(problem, outcome)
        if self.died and outcome.phase in BEFORE_A_CASE:
            return problem, self.judge(problem)
        return problem, self._count(problem, verdict)

    def abandon(self) -> None:
        """Have the worker end what it was asked ahead; of what comes of it nothing is counted."""
        while self._worker.busy:
            problem, outcome = self._ahead.take()
            if outcome.died:
                self._learn(problem, outcome)
        self._ahead.forget()

    def stop(self) -> None:
        """Ask no more, whatever the worker is busy with."""
        self._ahead.forget()

    def renew(self) -> None:
        """Go on in a fresh process."""
        self._worker.renew()
        warm_up(self._worker, self._quarry)

    def look_for_device(self) -> None:
        """See that the device still works.

        Raises:
            DeviceLostError: it does not.
        """
        probe_device(self._worker, self._quarry.address.device)

    def _learn(self, problem: Problem, outcome: Outcome) -> Verdict:
        """Give the verdict, and note how long calls took; after a death, see to a warm process."""
        verdict = verdict_of(outcome, self._quarry.address.tool)
        self.died = outcome.died
        if self.died:
            self.in_hand = (problem, verdict)
            self.look_for_device()
            self.in_hand = None
            warm_up(self._worker, self._quarry)
        elif verdict.calls:
            self._quarry.pace.record(problem.work, verdict.seconds / verdict.calls)
        return verdict

    def _count(self, problem: Problem, verdict: Verdict) -> Verdict:
        report = self._report
        if verdict.bad:
            entry = self._explain(self._law.name, verdict, problem)
            if entry is not None:
                report.known[entry.id] += 1
                report.judged += 1
                self._judged(1)
                known = self.known.get(entry.id)
                if known is None or problem.work < known[0].work:
                    self.known[entry.id] = (problem, verdict, entry)
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
