"""Replaying the stored cases of an implementation, the corpus's and the ledger's, in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...reference import Problem
from ..findings.cases import replay_command
from ..findings.corpus import Case, load_case
from ..findings.ledger import Entry
from ..findings.report import CorpusReport, Finding
from ..isolation.workers import Worker
from ..laws import find_law
from ..verdicts.memory_need import NO_ROOM
from ..verdicts.verdict import Verdict
from ..worker.requests import probe_device, verdict_of
from .candidate import Candidate, warm_up
from .deadlines import COMPILE_SECONDS


@dataclass(frozen=True)
class Stored:
    """The stored cases of one implementation.

    Attributes:
        cases: of the corpus: they must pass, or fail as the ledger knows.
        entries: of the ledger: their cases must still fail as they say.
    """

    cases: Sequence[Case]
    entries: Sequence[Entry]

    def each(self) -> list[Entry | Case]:
        """Return all of them, one by one."""
        return [*self.entries, *self.cases]

    def problems(self) -> list[Problem]:
        """Return the problem of each, for the modules that they need.

        What a case leaves out of the support rules is not among what a run builds ahead.
        """
        return [_case(one).problem for one in self.each()]


def replay(
    one: Entry | Case, worker: Worker, candidate: Candidate
) -> tuple[CorpusReport, Finding | None]:
    """Judge a stored case again; count it, and return what is not as it should be.

    Args:
        one: a case, or an entry of the ledger, whose case must still fail as it says.
        worker: that judges.
        candidate: what is known of the implementation.

    Raises:
        DeviceLostError: it took the device with it.
        HarnessError: the suite itself failed.
    """
    warm_up(worker, candidate)
    case, name = _case(one), candidate.name
    counts = CorpusReport(replayed=1)
    if isinstance(one, Entry):
        counts.of_ledger = 1
        verdict = judge_known(one, case, worker, candidate)
        if one.explains(case.law, verdict, case.problem):
            return counts, None
        if verdict.status == "UNSUPPORTED" and verdict.kind == NO_ROOM:
            counts.unjudged = 1  # it says nothing of the implementation
            return counts, None
        if not verdict.bad:
            retired = one.retired(case.law, verdict)
            return counts, Finding(name, case.law, retired, case.problem, contradicts=one.id)
    else:
        verdict = judge_stored(case, worker, candidate)
        if not verdict.bad:
            counts.unjudged = int(verdict.status != "PASS" or verdict.vacuous)
            return counts, None
    if candidate.explanation(case.law, verdict, case.problem):  # an entry's case may fail otherwise
        counts.known = int(not counts.of_ledger)
        return counts, None
    found = Finding(name, case.law, verdict, case.problem)
    found.replay = replay_command(case.path)
    return counts, found


def _case(one: Entry | Case) -> Case:
    if isinstance(one, Case):
        return one
    assert one.case is not None, one.id  # noqa: S101  an entry without a case is not replayed
    return load_case(one.case)


def judge_known(entry: Entry, case: Case, worker: Worker, candidate: Candidate) -> Verdict:
    """Judge the case of an entry; in a fresh process too where it does not fail as the entry says.

    It may fail only in the first calls of a process.

    Raises:
        DeviceLostError: it took the device with it.
        HarnessError: the suite itself failed.
    """
    verdict = judge_stored(case, worker, candidate)
    if not entry.explains(case.law, verdict, case.problem):
        worker.renew()
        warm_up(worker, candidate)
        verdict = judge_stored(case, worker, candidate)
    return verdict


def judge_stored(case: Case, worker: Worker, candidate: Candidate) -> Verdict:
    """Judge a stored case again.

    Raises:
        DeviceLostError: it took the device with it.
        HarnessError: the suite itself failed.
    """
    address = candidate.address
    # A case's module need not be one of those that were built before.
    deadlines = replace(
        candidate.deadlines_of(find_law(case.law), case.problem), compile=COMPILE_SECONDS
    )
    outcome = worker.run(case.request(address), deadlines)
    verdict = verdict_of(outcome, address.tool)
    if outcome.died:
        probe_device(worker, address.device)
    known = candidate.explanation(case.law, verdict, case.problem)
    if outcome.shared and verdict.bad and not known:  # it may be the doing of others in the process
        if not outcome.died:
            worker.renew()
        warm_up(worker, candidate)
        return judge_stored(case, worker, candidate)
    return verdict
