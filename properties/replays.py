"""Replaying the stored cases of an implementation, the corpus's and the ledger's, in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..reference import Problem
from .cases import replay_command
from .corpus import Case, load_case
from .isolation import Worker
from .ledger import Entry
from .pace import COMPILE_SECONDS
from .quarry import Quarry, probe_device, verdict_of, warm_up
from .report import Finding, ImplementationReport
from .verdict import Verdict

Explain = Callable[[str, Verdict, Problem], Entry | None]
"""Gives the ledger entry that explains a verdict under a law, if one does."""


@dataclass(frozen=True)
class Stored:
    """The stored cases of one implementation.

    Attributes:
        cases: of the corpus: they must pass, or fail as the ledger knows.
        entries: of the ledger: their cases must still fail as they say.
    """

    cases: Sequence[Case]
    entries: Sequence[Entry]

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self.cases or self.entries)

    def problems(self) -> list[Problem]:
        """Give the problem of each."""
        entries = [load_case(entry.case) for entry in self.entries]
        return [case.problem for case in (*entries, *self.cases)]


def replay(
    stored: Stored,
    worker: Worker,
    quarry: Quarry,
    report: ImplementationReport,
    explain: Explain,
) -> Iterator[Finding]:
    """Judge each case again, and give what is not as it should be; counts them in the report.

    Raises:
        DeviceLostError: a case took the device with it.
        HarnessError: the suite itself failed.
    """
    started, counts = time.monotonic(), report.corpus
    try:
        warm_up(worker, quarry)
        for entry in stored.entries:
            case = load_case(entry.case)
            verdict = judge_stored(case, worker, quarry)
            if not entry.explains(case.law, verdict, case.problem):
                worker.renew()  # it may fail in the first calls of a process alone
                verdict = judge_stored(case, worker, quarry)
            counts.replayed += 1
            counts.of_ledger += 1
            if not entry.explains(case.law, verdict, case.problem):
                retired = entry.retired(case.law, verdict)
                yield Finding(report.name, case.law, retired, case.problem)
        for case in stored.cases:
            verdict = judge_stored(case, worker, quarry)
            counts.replayed += 1
            if not verdict.bad:
                counts.unjudged += verdict.status != "PASS" or verdict.vacuous
            elif explain(case.law, verdict, case.problem):
                counts.known += 1
            else:
                found = Finding(report.name, case.law, verdict, case.problem)
                found.replay = replay_command(case.path)
                yield found
    finally:
        counts.seconds += time.monotonic() - started


def judge_stored(case: Case, worker: Worker, quarry: Quarry) -> Verdict:
    """Judge a stored case again.

    Raises:
        DeviceLostError: it took the device with it.
        HarnessError: the suite itself failed.
    """
    address = quarry.address
    # A case's module need not be one of those that were built before.
    deadlines = replace(quarry.pace.deadlines(case.problem), compile=COMPILE_SECONDS)
    outcome = worker.run(case.request(address), deadlines)
    verdict = verdict_of(outcome, address.tool)
    if outcome.died:
        probe_device(worker, address.device)
    return verdict
