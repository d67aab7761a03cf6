"""The suite in one process of a pytest run: it judges items in one isolated worker."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hypothesis.database import ExampleDatabase

from ...impl import Target
from ...reference import Problem
from ..findings.cases import CaseWriter, replay_command
from ..findings.corpus import Case, load_case
from ..findings.expectations import read_expectations
from ..findings.ledger import Entry, LedgerError
from ..findings.not_run import BROKEN, ENDED, JUDGED, Reason, reason_of
from ..findings.report import (
    EARLY,
    INTERRUPTED,
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from ..findings.text_format import finding_lines
from ..isolation.workers import Worker
from ..laws import find_law, laws_of
from ..search.building import Builder
from ..search.candidate import Candidate, warm_up
from ..search.costs import CostsError
from ..search.ending import Ending
from ..search.examples import ExamplesError, examples_on, open_examples
from ..search.law_search import LawSearch
from ..search.module_plan import ModulePlan
from ..search.plan import Plan, light_of, of_operation, options_of, seconds_of
from ..search.preparation import Setting, prepare
from ..search.replays import replay
from ..space.profiles import GATE_SHARE
from ..verdicts.text import compact
from ..worker.pools import open_pool
from ..worker.requests import DeviceLostError, HarnessError
from .surveying import Choices, Item, Survey, Surveyed, items_of, take_survey
from .xdist_lock import BUSY, STOP, SuiteRefusedError, once, shared

MARGIN_SECONDS = 300.0
"""Most seconds for starting workers, timing, and confirming a finding in a fresh process."""
COMPILE_SECONDS = 900.0
"""Most seconds for compiling a configuration before its search."""
BUILD_SECONDS = 3600.0
"""Most seconds for building modules ahead on a GPU, or waiting for the processes that do."""


@dataclass(frozen=True)
class Judged:
    """What became of an item.

    Attributes:
        outcome: pytest's word for it.
        text: why, where it did not pass.
        properties: counts and the finding, for JUnit and for the summary.
    """

    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    text: str = ""
    properties: Mapping[str, str | int | float] = field(default_factory=dict)


class Interruption(Ending):
    """The end of a run by a lost device or by a SIGINT, in this process or, under xdist, in any.

    Args:
        folder: folder that the processes share; None if there is one process.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder

    @property
    def interrupted(self) -> bool:
        """Whether a SIGINT came while a process searched."""
        elsewhere = self._folder is not None and (self._folder / STOP).exists()
        return bool(self.asked) or elsewhere

    def stopped(self) -> bool:
        """Whether no search is to go on."""
        return super().stopped() or self.interrupted

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Have the first SIGINT end the search that runs meanwhile; a second one raises."""
        mark = None if self._folder is None else self._folder / f"{BUSY}-{os.getpid()}"
        if mark is not None and mark.parent.is_dir():
            mark.touch()
        mine = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, self._note) if mine else None
        try:
            yield
        finally:
            if mine:
                signal.signal(signal.SIGINT, before)
            if mark is not None:
                mark.unlink(missing_ok=True)

    def _note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.end(INTERRUPTED)


class Suite:
    """What is judged, and the worker that does it.

    Args:
        choices: what was asked for.
        common: folder that all processes of the run share, if there are several.
        environment: further variables for the worker.
        jobs: processes of the run.

    Raises:
        SuiteRefusedError: it cannot be done.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        common: Path | None = None,
        environment: Mapping[str, str] | None = None,
        jobs: int = 1,
    ) -> None:
        try:
            self._ledger = read_expectations(choices.expectations)
            database = _examples_of(choices)
            costs = choices.read_costs()
        except (LedgerError, ExamplesError, CostsError) as error:
            raise SuiteRefusedError(str(error)) from error
        self._choices, self._jobs = choices, jobs
        self.ending = Interruption(common)
        # Where other processes keep the cores busy, a spare worker would only take time from them.
        self._pool = open_pool(choices.device, standby=jobs == 1, environment=environment)
        self._builder = Builder()
        try:
            self.survey = Survey.from_json(shared(common, self._take_survey))
        except BaseException:
            self.close()
            raise
        self.items = items_of(self.survey)
        target = Target(**self.survey.target)
        plan = Plan(
            [each.name for each in self.survey.implementations],
            choices.profile,
            operation=choices.operation,
            device=choices.device,
            seed=self.survey.seed,
            ledger=self._ledger,
            share=1.0 if choices.implementations else GATE_SHARE,
            examples=database,
            only=choices.only,
            costs=costs,
            environment=environment or {},
            distrust=choices.distrust,
        )
        self._setting = Setting(
            plan, target, self._builder, once=partial(once, common), stored=self._stored
        )
        self._examples = examples_on(plan.examples, target)
        self._writer = CaseWriter(
            choices.cases, choices.operation, self._ledger, flag="--kernelproof-cases"
        )
        self._prepared: dict[str, tuple[ImplementationReport, Candidate | None]] = {}
        self._parts: dict[tuple[str, str], Candidate] = {}

    def close(self) -> None:
        """End the worker."""
        self._builder.close()
        self._pool.close()

    def left(self) -> list[str]:
        """Return what implementations have left behind; all of it is known after ``close``."""
        return [
            f"{each.label or each.name}: it left {left.text}"
            for each in self.survey.implementations
            for left in self._pool.left(each.name)
        ]

    def _take_survey(self) -> dict[str, Any]:
        with self._pool.lease() as worker:
            return take_survey(worker, self._choices, self._ledger).to_json()

    def seconds(self, item: Item) -> float:
        """Return the seconds after which an item has surely gone wrong."""
        plan, law = self._setting.plan, item.law and find_law(item.law)
        most = MARGIN_SECONDS + 10 * plan.profile.shrink_seconds
        if item.configuration.fixed:
            most += COMPILE_SECONDS
        if self._choices.device == "cuda":
            most += BUILD_SECONDS
        if not law:
            return most
        surveyed = item.implementation
        laws, parts = laws_of(surveyed.operation), len(surveyed.configurations)
        return most + seconds_of(plan, law, laws, self._jobs, parts)

    def judge(self, item: Item) -> Judged:
        """Search for a failure, or replay one."""
        surveyed = item.implementation
        base: dict[str, str | int | float] = {
            "implementation": surveyed.name,
            "operation": surveyed.operation,
            "law": item.law,
            "configuration": item.configuration.id,
            "items": sum(each.implementation is surveyed for each in self.items),
        }
        with self._pool.lease(surveyed.name) as worker:
            try:
                judged = self._judge(worker, item)
            except DeviceLostError as error:
                self.ending.lose(str(error))
                judged = Judged("failed", f"LOST  {surveyed.label}\n  {error}")
            except (HarnessError, LedgerError, LookupError) as error:
                judged = Judged("failed", f"{surveyed.label}: the suite failed: {error}")
        return replace(judged, properties={**base, **judged.properties})

    def _judge(self, worker: Worker, item: Item) -> Judged:
        surveyed = item.implementation
        if surveyed.error:
            failed = Judged("failed", f"{surveyed.name}: {surveyed.error}")
            left_out = Judged("skipped", surveyed.error, _not_run((BROKEN, "")))
            return left_out if surveyed.left_out else failed
        ended = f"the device was lost: {self.ending.lost}" if self.ending.lost else ""
        ended = "the run was interrupted" if self.ending.interrupted else ended
        if ended or surveyed.unsupported:
            text = f"{surveyed.label}: {ended or surveyed.unsupported}"
            return Judged("skipped", text, _not_run((ENDED, "") if ended else surveyed.reason))
        report, candidate = self._prepare(worker, surveyed)
        if candidate is None:
            if report.error:
                return Judged("failed", f"{surveyed.label}: {report.error}")
            reason = reason_of(report.refusal) if report.refusal else (JUDGED, "")
            return Judged("skipped", f"{surveyed.label}: {report.refusal}", _not_run(reason))
        if item.case:
            return self._replay(worker, item, candidate, report)
        return self._search(worker, item, self._part(item, candidate), report)

    def _prepare(
        self, worker: Worker, surveyed: Surveyed
    ) -> tuple[ImplementationReport, Candidate | None]:
        """Prepare an implementation at its first item."""
        if surveyed.name not in self._prepared:
            report = ImplementationReport(surveyed.name, surveyed.reference)
            # By itself: modules are chosen alike whatever this process has judged before, and no
            # implementation is waited for.
            setting = replace(self._setting, together=ModulePlan(1))
            candidate = prepare(setting, report, lambda: nullcontext(worker))
            self._prepared[surveyed.name] = report, candidate
            if candidate is not None:
                self._choices.keep_cost(candidate)
        return self._prepared[surveyed.name]

    def _stored(self, report: ImplementationReport) -> list[Problem]:
        """Return the problems of an implementation's stored cases."""
        return [
            load_case(Path(each.case)).problem
            for each in self.items
            if each.case and each.implementation.reference == report.reference
        ]

    def _search(
        self,
        worker: Worker,
        item: Item,
        candidate: Candidate,
        report: ImplementationReport,
    ) -> Judged:
        plan, operation = self._setting.plan, item.implementation.operation
        law, laws = find_law(item.law), laws_of(operation)
        parts = len(item.implementation.configurations)
        options = replace(
            options_of(
                of_operation(plan, operation),
                law,
                laws,
                candidate.cost,
                seed=self._seed(item),
                jobs=self._jobs,
                parts=parts,
                alike=light_of(plan, operation) is not None,
            ),
            examples=self._examples and replace(self._examples, part=item.configuration.id),
        )
        if item.configuration.fixed:
            warm_up(worker, candidate)  # a compile is no part of the search's time
        with self.ending.awaited():
            stopped = self.ending.stopped
            found = LawSearch(worker, candidate, law, options, stopped=stopped).run()
        if found.lost:
            return self._lose(found, report)
        if found.error:
            raise HarnessError(found.error)
        if found.finding:
            return self._tell(found, found.finding, report)
        if found.ended == "stopped":
            text = f"{report.name}: {law.name} was interrupted, with no finding until then"
            return Judged("skipped", text, {**_counts(found), **_not_run((ENDED, ""))})
        return without_finding(found, report.name, allow_incomplete=self._choices.allow_incomplete)

    def _lose(self, found: LawReport, report: ImplementationReport) -> Judged:
        """Report a device that is gone, and the finding that took it."""
        self.ending.lose(found.lost)
        text = f"LOST  {report.name}\n  {found.lost}"
        if found.finding is None:
            return Judged("failed", text)
        told_of = self._tell(found, found.finding, report)
        return replace(told_of, outcome="failed", text=f"{text}\n{told_of.text}")

    def _replay(
        self, worker: Worker, item: Item, candidate: Candidate, report: ImplementationReport
    ) -> Judged:
        case = load_case(Path(item.case))
        replayed = replay(self._owner(case, report.name) or case, worker, candidate)
        verdict, finding = replayed.verdict, replayed.finding
        if verdict.status == "UNSUPPORTED" or verdict.vacuous:
            why = verdict.message or "nothing to judge"
            return Judged("skipped", f"{report.name}: {case.law}: {why}", _not_run((JUDGED, "")))
        found = LawReport(case.law, judged=1, interpreted=verdict.interpreted)
        if finding is None:
            return Judged("passed", properties=_counts(found))
        found.known.update([finding.entry] if finding.entry else [])
        finding.replay = replay_command(case.path)
        return self._tell(found, finding, report)

    def _owner(self, case: Case, label: str) -> Entry | None:
        """Return the entry that says that a case fails here, if one does."""
        for entry in self._ledger.entries:
            mine = entry.applies_to(label, self._setting.target) and entry.of_law(case.law)
            if mine and entry.owns(case.path):
                return entry
        return None

    def _tell(self, found: LawReport, finding: Finding, report: ImplementationReport) -> Judged:
        profile = self._setting.plan.profile
        run = RunReport(
            profile.name,
            self._setting.plan.seed,
            self._setting.target.to_json(),
            soak=profile.soak,
            distrust=self._choices.distrust,
        )
        self._writer.write(finding, report, run)
        properties = {
            **_counts(found),
            "status": "KNOWN" if finding.entry else finding.verdict.status,
            "problem": compact(finding.problem),
            "replay": finding.replay,
        }
        if finding.entry:
            entry = next(each for each in self._ledger.entries if each.id == finding.entry)
            issue = f" ({entry.issue})" if entry.issue else ""
            text = f"KNOWN {entry.id}: {' '.join(entry.reason.split())}{issue}"
            cause = {"entry": entry.id, "cause": " ".join(entry.reason.split())}
            return Judged("xfailed", text, {**properties, **cause, "issue": entry.issue})
        unwritten = [self._writer.failed] if self._writer.failed else []
        return Judged("failed", "\n".join([*finding_lines(finding), *unwritten]), properties)

    def _part(self, item: Item, candidate: Candidate) -> Candidate:
        """Restrict a search to the item's configuration; its laws share what they have found."""
        if not item.configuration.fixed:
            return candidate
        key = (item.implementation.name, item.configuration.id)
        if key not in self._parts:
            self._parts[key] = candidate.restricted_to(item.configuration.fixed)
        return self._parts[key]

    def _seed(self, item: Item) -> int:
        """Return the seed of the search; a configuration without one has `kernelproof check`'s."""
        if not item.configuration.fixed:
            return self._setting.plan.seed
        text = f"{self._setting.plan.seed}|{item.configuration.id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def without_finding(found: LawReport, name: str, *, allow_incomplete: bool) -> Judged:
    """Return what became of an item whose law has found nothing."""
    if found.incomplete:
        counts = f"{found.judged} of {found.floor} problems in {found.seconds:.0f} s"
        text = f"INCOMPLETE  {name}: {found.law} judged {counts}"
        properties = {**_counts(found), "status": found.verdict}
        return Judged("skipped" if allow_incomplete else "failed", text, properties)
    if found.judged:
        return Judged("passed", properties=_counts(found))
    counts = f"{found.unsupported} unsupported, {found.vacuous} with nothing to judge"
    reason = f": {found.unsupported_reason}" if found.unsupported_reason else ""
    text = f"{name}: {found.law} judged no problem ({counts}){reason}"
    return Judged("skipped", text, {**_counts(found), **_not_run((JUDGED, ""))})


def _not_run(reason: Reason) -> dict[str, str]:
    """Return the properties of an item that was not run."""
    return dict(zip(("code", "needs"), reason, strict=True))


def _examples_of(choices: Choices) -> ExampleDatabase | None:
    """Open the example database of a profile that explores.

    Raises:
        ExamplesError: see ``open_examples``.
    """
    if not choices.profile.explore:
        return None
    try:
        return open_examples(choices.examples, choices.cases / "examples")
    except ExamplesError as error:
        message = f"--kernelproof-examples: {error}"
        raise ExamplesError(message) from error


def _counts(found: LawReport) -> dict[str, str | int | float]:
    return {
        "law": found.law,
        "judged": found.judged,
        "unsupported": found.unsupported,
        "rejected": found.rejected,
        "known": sum(found.known.values()),
        "worst_ratio": round(found.worst_ratio, 4),
        "seconds": round(found.seconds, 3),
        **({"ended": found.ended} if found.ended in EARLY else {}),
        **({"interpreted": True} if found.interpreted else {}),
    }
