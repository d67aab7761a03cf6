"""What a run on one machine keeps of each law that has ended, so that a killed one can go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...impl import UnsupportedError
from ...properties.findings.report import LawReport
from ...properties.search.candidate import Candidate
from ...properties.search.engine import Kept, Run
from ...properties.search.plan import Learned, Plan
from ...properties.space.profiles import Cost
from ..answers.identity import journal_path, machine_identity, plan_identity, with_seed
from ..answers.journal import Journal, JournalError
from ..answers.records import from_data, to_data
from ..console.errors import MachineError
from ..console.lines import note
from .reusing import COSTS, Passed, can_be_reused, keep_passed, passed_before


@contextmanager
def kept_laws(
    cases: Path, plan: Plan, *, resume: bool, reuse: bool = False
) -> Iterator[tuple[Plan, KeptLaws]]:
    """Open the journal of a run; yield the plan that goes on from it, and what laws have found.

    Without ``resume``, a run that cannot use its journal keeps nothing.

    Args:
        cases: the folder of the run's cases.
        plan: the plan of the run.
        resume: go on with the answers of a run that did not reach its end.
        reuse: take what passed in a run that did, where all that it depends on is equal.

    Raises:
        JournalError: the run before was of other code, or its journal cannot be read.
        MachineError: the device is not there, or the journal that is asked for cannot be written.
    """
    try:
        identity = {**plan_identity(plan), **machine_identity(plan.device)}
    except UnsupportedError as error:
        raise MachineError(str(error)) from error
    with _started(cases, plan, identity, resume=resume) as journal:
        passed = passed_before(cases, plan, identity, reuse=reuse and not resume)
        costs = {**passed.costs, **(journal.recall(COSTS, from_data) or {}), **plan.costs}
        yield replace(with_seed(plan, journal), costs=costs), KeptLaws(journal, passed)


def _started(cases: Path, plan: Plan, identity: dict[str, Any], *, resume: bool) -> Journal:
    """Return the journal of a run, which has its seed; one that keeps nothing if it cannot."""
    journal = Journal(None)
    try:
        journal = Journal(journal_path(cases, plan), flag="--cases")
        journal.start(identity, resume=resume, tell=note)
        with_seed(plan, journal)
    except (JournalError, MachineError) as error:
        journal.close()
        if resume:
            raise
        note(f"this run keeps no journal: {error.message}")
        return Journal(None)
    return journal


class KeptLaws(Kept):
    """The laws of a journal.

    Args:
        journal: the journal of the run.
        passed: what passed in a run before that reached its end.
    """

    def __init__(self, journal: Journal, passed: Passed) -> None:
        self._journal, self._passed, self.whole = journal, passed, passed.whole

    def recall(self, candidate: Candidate, law: str) -> LawReport | None:
        """Return what a law found in the run before; see ``Kept.recall``."""
        question = _question(candidate, law)
        answer = self._journal.recall(question, from_data)
        if answer is None:
            known = self._passed.recall(candidate.address.reference, question)
            if known is not None:
                self._keep(question, {"law": known, "learned": Learned()})
            return known
        learned: Learned = answer["learned"]
        # Each answer has all that was learned until then: the most is the latest.
        if len(learned.smallest) + len(learned.deadly) >= _count(candidate):
            candidate.smallest[:], candidate.deadly[:] = learned.smallest, learned.deadly
        found: LawReport = answer["law"]
        return found

    def keep_costs(self, costs: Mapping[str, Cost]) -> None:
        """Keep the cost classes of implementations."""
        self._keep(COSTS, dict(costs))

    def keep(self, candidate: Candidate, found: LawReport) -> None:
        """Keep what a law has found, unless another run would find more."""
        if not (found.error or found.lost):
            # One that a law under way found would never be made small: that law begins anew.
            done = tuple(each for each in candidate.deadly if each.shrunk)
            learned = Learned(tuple(candidate.smallest), done)
            self._keep(_question(candidate, found.law), {"law": found, "learned": learned})

    def pass_on(self, cases: Path, plan: Plan, run: Run) -> None:
        """Keep what passed in a run, unless something ended it early or nothing was asked."""
        report = run.report
        if (
            run.asked
            and can_be_reused(plan)
            and not (report.ended or report.lost or report.failure)
        ):
            self._passed.keep(self._journal)
            keep_passed(cases, plan, self._journal, run, self._passed.around)

    def end(self, ended: str) -> None:
        """Remove the journal of a run that nothing ended early."""
        if not ended:
            self._journal.remove()

    def _keep(self, question: Mapping[str, Any], answer: object) -> None:
        self._journal.keep_or_stop(question, to_data(answer), note)


def _question(candidate: Candidate, law: str) -> dict[str, Any]:
    """Return the question that a law's result answers: what it judges, and on which problems.

    Another choice of modules is another question.
    """
    drawn = {"axes": to_data(candidate.axes), "cost": to_data(candidate.cost)}
    return {"law": law, "of": candidate.address.reference, **drawn}


def _count(candidate: Candidate) -> int:
    return len(candidate.smallest) + len(candidate.deadly)
