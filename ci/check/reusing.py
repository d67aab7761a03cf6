"""What passed in the check before and is not asked again, where all that it depends on is equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...impl.registry import resolve_name
from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.search.engine import Run
from ...properties.search.plan import Plan
from ...properties.space.profiles import Cost
from ..answers.identity import journal_path, machine_identity, plan_identity
from ..answers.journal import Journal, JournalError
from ..answers.records import from_data, to_data
from ..answers.surroundings import as_before, fingerprints, surroundings
from ..console.errors import MachineError
from ..reports.summary import state
from .repeated import drop_oldest

PASSED = "passed-"
"""Beginning of the names of files that hold what passed in a check."""
COSTS = {"costs": ""}
"""The question of which cost classes implementations have: what is drawn depends on it."""


def passed_path(cases: Path, plan: Plan) -> Path:
    """Return the path of what passed in the last check that was asked for the same."""
    return cases / journal_path(cases, plan).name.replace("journal-", PASSED)


@dataclass(frozen=True)
class Passed:
    """What passed in the check before.

    Attributes:
        whole: reports of implementations of which all laws passed, by the names in the plan.
        costs: cost classes by which the problems of implementations were drawn.
        dates: the date of the check, by the references of implementations of which all is equal.
        answers: journal of that check.
        around: what the results of this check depend on besides, see ``surroundings``.
    """

    whole: Mapping[str, ImplementationReport] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    dates: Mapping[str, str] = field(default_factory=dict)
    answers: Journal = field(default_factory=lambda: Journal(None))
    around: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read(self) -> dict[str, str]:
        """Fingerprints of what the implementations have read that are not asked about again."""
        known = (self.answers.recall(_read_by(report), dict) for report in self.whole.values())
        return {what: how for each in known if each for what, how in each["read"].items()}

    def recall(self, reference: str, question: Mapping[str, Any]) -> LawReport | None:
        """Return what a law found of an implementation, if it passed."""
        if reference not in self.dates:
            return None
        answer = self.answers.recall(question, from_data)
        law: LawReport | None = answer and answer["law"]
        if law is None or law.verdict != "PASS":
            return None
        return replace(law, reused=law.reused or self.dates[reference])

    def keep(self, journal: Journal) -> None:
        """Keep what is not asked again in the journal of this check, for the next one."""
        for report in self.whole.values():
            read = self.answers.recall(_read_by(report), dict)
            journal.keep(_read_by(report), read)
            journal.keep(_whole(report), to_data(report))


def _read_by(report: ImplementationReport) -> dict[str, str]:
    return {"read by": report.reference}


def _whole(report: ImplementationReport) -> dict[str, str]:
    return {"whole": report.reference}


def can_be_reused(plan: Plan) -> bool:
    """Whether another check may take the results: not where it draws others, or trusts none."""
    return not (plan.profile.explore or plan.distrust)


def passed_before(cases: Path, plan: Plan, identity: Mapping[str, Any], *, reuse: bool) -> Passed:
    """Return what passed in the last check that was asked for the same; nothing if that changed.

    Args:
        cases: the folder of the check's cases.
        plan: the plan of the check.
        identity: what the results of the plan depend on here.
        reuse: whether what passed is asked for.
    """
    path, around = passed_path(cases, plan), surroundings(plan.jobs, plan.seconds)
    if not (reuse and can_be_reused(plan) and path.exists()):
        return Passed(around=around)
    try:
        with Journal(path, flag="--cases") as answers:
            answers.start(identity, resume=True)
            answers.require("surroundings", around)
            return _equal(plan, answers, around)
    except (JournalError, MachineError):  # of other code, or unreadable: all is asked again
        return Passed(around=around)


def _equal(plan: Plan, answers: Journal, around: Mapping[str, Any]) -> Passed:
    whole, dates = {}, {}
    for name in plan.implementations:
        blank = ImplementationReport(name, resolve_name(name))
        about = answers.recall(_read_by(blank), dict)
        if about is None or not as_before(about["read"]):
            continue
        dates[blank.reference] = about["date"]
        report: ImplementationReport | None = answers.recall(_whole(blank), from_data)
        if report is not None:
            laws = [replace(law, reused=law.reused or about["date"]) for law in report.laws]
            whole[name] = replace(report, laws=laws)
    return Passed(whole, answers.recall(COSTS, from_data) or {}, dates, answers, around)


def passed_next(cases: Path, plan: Plan) -> Passed:
    """Return what the next equal check takes, if nothing changes until then."""
    identity = {**plan_identity(plan), **machine_identity(plan.device)}
    return passed_before(cases, plan, identity, reuse=True)


def keep_passed(
    cases: Path, plan: Plan, journal: Journal, run: Run, around: Mapping[str, Any]
) -> None:
    """Keep the journal of a check that has ended, for the next one that is asked for the same.

    Args:
        cases: the folder of the check's cases.
        plan: the plan of the check, as it was asked for.
        journal: its journal, which has what each law found.
        run: the check.
        around: its surroundings when it began.
    """
    started = run.report.milestones.started
    date = datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="minutes")
    for report in run.asked:
        read = fingerprints(run.read(report), started)
        if read is not None:
            journal.keep(_read_by(report), {"date": date, "read": read})
            if state(report) == "PASS":
                journal.keep(_whole(report), to_data(report))
    journal.require("surroundings", around)
    journal.move(passed_path(cases, plan))
    drop_oldest(cases, PASSED)
