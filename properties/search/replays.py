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
        cases: the cases of the corpus: they must pass, or fail as the ledger knows.
        entries: the entries of the ledger: their cases must still fail as they say.
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


@dataclass(frozen=True)
class Replayed:
    """The replay of one stored case.

    Attributes:
        verdict: verdict of the law on its problem.
        counts: what it adds to the report of stored cases.
        finding: failure, with the ledger entry that explains it, or pass of a case of the ledger
            that must fail; None where all is as it should be, or nothing was judged.
        begun, seconds: monotonic time at which a run began it, and how long it took.
    """

    verdict: Verdict
    counts: CorpusReport
    finding: Finding | None = None
    begun: float = 0.0
    seconds: float = 0.0

    @property
    def unknown(self) -> Finding | None:
        """The finding, unless the ledger explains it."""
        return None if self.finding is None or self.finding.entry else self.finding


NOT_REPLAYED = Replayed(Verdict("UNSUPPORTED"), CorpusReport())
"""Replay in which the suite itself failed."""


def replay(one: Entry | Case, worker: Worker, candidate: Candidate) -> Replayed:
    """Judge a stored case again.

    Args:
        one: a case, or an entry of the ledger, whose case must still fail as it says.
        worker: the worker that judges.
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
    else:
        verdict = judge_stored(case, worker, candidate)
    if verdict.bad:
        entry = candidate.explanation(case.law, verdict, case.problem)
        if isinstance(one, Entry) and one.explains(case.law, verdict, case.problem):
            entry = one
        counts.known = int(entry is not None and not counts.of_ledger)
        finding = Finding(name, case.law, verdict, case.problem, entry.id if entry else None)
        finding.replay = replay_command(case.path)
        return Replayed(verdict, counts, finding)
    if isinstance(one, Case):
        counts.unjudged = int(verdict.status != "PASS" or verdict.vacuous)
    elif verdict.status == "UNSUPPORTED" and verdict.kind == NO_ROOM:
        counts.unjudged = 1  # it says nothing of the implementation
    else:
        retired = one.retired(case.law, verdict)
        finding = Finding(name, case.law, retired, case.problem, contradicts=one.id)
        return Replayed(verdict, counts, finding)
    return Replayed(verdict, counts)


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
    if entry.is_forceful and worker.shares_gpu:
        worker.renew()  # its fault would end the work of all that share the GPU
        warm_up(worker, candidate)
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
