"""A run: every law on every implementation, several at a time, each in an isolated worker.

Of each implementation, a worker is asked what it supports and costs, and has its modules built;
then stored cases are replayed; then the deck is dealt; then each law is searched. Where modules
take long to build, the first one is searched early, with a few problems a law, while the others are
built.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import BoundedSemaphore
from types import MappingProxyType

from ...impl import Target
from ...impl.registry import resolve_name
from ...reference import Problem
from ..findings.corpus import Case, cases_of
from ..findings.coverage import Coverage, Gap
from ..findings.ledger import Entry
from ..findings.names import Names, tell_apart
from ..findings.report import (
    FOUND,
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
    Separation,
)
from ..isolation.gpus import processes_for, visible_devices
from ..isolation.machine import cores
from ..isolation.mps import NOT_SHARED, is_of_use, share_gpu
from ..isolation.reads import Read
from ..isolation.workers import Worker
from ..laws import Law
from ..space.drawers import drawers_for
from ..space.profiles import Cost
from ..verdicts.operations import OPERATIONS as ANSWERS
from ..verdicts.verdict import Verdict
from ..worker.pools import open_pool
from ..worker.requests import DeviceLostError, HarnessError
from .building import Builder, Claim, compilers
from .candidate import Candidate
from .causes.experiments import experiments_on
from .coverage import Reached
from .deck import Dealt, DeckEntry, deal, entries_for, finding_of
from .drawing import SearchOptions, Suspect
from .ending import Ending
from .examples import examples_on
from .law_search import LawSearch
from .module_plan import BUILD_SHARE, LONGEST_SHARE, ModulePlan
from .pace import Pace
from .plan import (
    Plan,
    is_thorough,
    laws_planned,
    light_of,
    of_operation,
    options_of,
    problems_of,
)
from .preparation import Setting, prepare
from .progress import Progress
from .replays import NOT_REPLAYED, Replayed, Stored, replay
from .scheduler import Lease, Question, Scheduler

REPLAY_RANK = 0
"""Rank of stored cases and of the deck, before all laws; the laws have 1, 2, 3, ..."""
SURVEYS_A_WORKER = 3
"""Surveys for each worker that wait in line for one on a GPU, beside the laws of what is known: the
first law need not wait for the last survey. Elsewhere all surveys come first, so that a run whose
time ends early has judged something of each implementation."""
LEAST_DEALT = 10
"""Entries of the deck that are worth a worker of their own, and fewest that are asked of one."""
DECK_SHARE = 0.1
"""Entries of the deck at most, as a share of the problems that all laws are to judge."""
REPLAY_SHARE = 0.1
"""Largest share of a run under a sanitizer that goes to the replay of stored cases."""
LATER_PROBLEMS = 20
"""Most problems of a law after the implementation's first finding, where not all are shrunk."""
EARLY_PROBLEMS = 3
"""Problems per law on the first module while the others compile. They do not count towards the
law's plan; laws not started when building ends skip this step."""
FIRST_PROBLEMS = 12
"""Problems per law before all others, in a run that its first finding ends: of eight faults that
only a late law sees, three problems showed four, six showed six, and twelve all."""
FIRST_SECONDS = 5.0
"""Seconds that all laws have for them: of a slow kernel, parity's own problems find most."""


def usual_jobs(device: str) -> int:
    """Return the number of workers of a run on this machine, where none is asked for."""
    if device == "cuda":
        return max(1, processes_for(visible_devices()[:1], cores()))
    return max(1, min(cores(), 8))


@dataclass(frozen=True)
class Prepared:
    """An implementation that can be searched: in its first module only, or in all of them.

    Attributes:
        report: what the run says of it.
        candidate: what all searches share.
        laws: laws that are planned for it.
        reached: what its problems have reached so far.
        early: reports of the laws that were searched in its first module only.
        stored: its stored cases.
        replayed: what became of those of them that were replayed, by their place.
        asked: names of the laws that were asked for.
        dealt: what laws have judged of the deck, by law, until their own report includes it.
        suspects: what has failed in the deck, by law, until the law was searched.
    """

    report: ImplementationReport
    candidate: Candidate
    laws: Sequence[Law]
    reached: Reached
    early: list[LawReport]
    stored: Sequence[Entry | Case] = ()
    replayed: dict[int, Replayed] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    dealt: dict[str, LawReport] = field(default_factory=dict)
    suspects: dict[str, list[Suspect]] = field(default_factory=dict)

    def was_shown(self, law: str) -> bool:
        """Whether a law has found a failure in the first module already."""
        return any(each.law == law and each.finding for each in self.early)


@dataclass
class Examined:
    """One implementation of a run, from its preparation to the end.

    Attributes:
        report: what the run says of it.
        early: reports of the laws that were searched in its first module only.
        prepared: what can be searched of it; None before.
        ready: whether its preparation has ended, also where it can not be searched.
        begun: whether it is searched in all of its modules, not in its first one only.
    """

    report: ImplementationReport
    early: list[LawReport] = field(default_factory=list)
    prepared: Prepared | None = None
    ready: bool = False
    begun: bool = False


def _backend(report: ImplementationReport) -> str:
    return str(report.declared.get("backend", ""))


def _known(found: LawReport, lease: Lease) -> LawReport:
    del lease  # nobody is asked
    return found


class Kept:
    """What a run keeps for one that goes on from it, and has of the run before: here, nothing.

    The methods are called in the thread that takes answers.

    Attributes:
        whole: reports of implementations of which nothing is asked again, by the names in the plan.
    """

    whole: Mapping[str, ImplementationReport] = MappingProxyType({})

    def recall(self, candidate: Candidate, law: str) -> LawReport | None:
        """Return what a law found in the run before; the candidate learns what it left to others.

        None where it has not ended there.
        """
        del candidate, law
        return None

    def keep_costs(self, costs: Mapping[str, Cost]) -> None:
        """Receive the cost classes by which the problems of implementations are drawn."""

    def keep(self, candidate: Candidate, found: LawReport) -> None:
        """Receive what a law has found, with all the problems that it has judged."""


def not_begun(law: Law, declares: Collection[str] | None) -> LawReport:
    """Return the report of a law that has not begun when the run ends early.

    One that has nothing to judge of the implementation owes no problem then either.

    Args:
        law: the law.
        declares: what the implementation declares that laws may need; None if it is not known.
    """
    if declares is not None and not law.concerns(declares):
        return LawReport(law.name, ended="idle")
    return LawReport(law.name, floor=law.floor, ended="stopped")


class Run:
    """Carries out a plan.

    Args:
        plan: what to do.
        progress: receives what it does.
        claimed: asks the other machines of a run before modules are built; an implementation whose
            modules another one builds is not judged here.
        kept: receives what laws have found, and has that of the run that this one goes on from.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None = None,
        claimed: Claim = lambda _: True,
        kept: Kept | None = None,
    ) -> None:
        self.plan, self._kept = plan, kept or Kept()
        self.progress = progress or Progress()
        self.target = Target.here(plan.device)
        seed = plan.seed
        if plan.profile.explore and not seed:
            seed = secrets.randbelow(2**31)
        self.report = RunReport(
            plan.profile.name,
            seed,
            self.target.to_json(),
            soak=plan.profile.soak,
            sanitizer=plan.sanitizer,
            distrust=plan.distrust,
        )
        self.ending = Ending(plan.seconds)
        self._examined: list[Examined] = []
        self._without_room: list[tuple[Prepared, LawReport]] = []
        self._below_floor: list[tuple[Prepared, LawReport]] = []
        count = sum(name not in self._kept.whole for name in plan.implementations)
        self._jobs = plan.jobs or usual_jobs(plan.device)
        self._pace = Pace(self.ending, self._jobs, count)
        self._builder = Builder(count, claimed)
        modules = ModulePlan(
            count,
            minutes=BUILD_SHARE * compilers() * plan.seconds / 60,
            longest=LONGEST_SHARE * plan.seconds / 60,
            learned=plan.builds,
            complete=lambda: self.progress.planned(self.report.implementations, modules.chosen),
        )
        names = Names()
        for report in self._kept.whole.values():
            names.tell(report.name, report.reference)
        in_line = SURVEYS_A_WORKER * self._jobs if plan.device == "cuda" else max(count, 1)
        self._setting = Setting(
            plan,
            self.target,
            self._builder,
            modules,
            stored=lambda report: self._stored(report).problems(),
            named=lambda report: names.tell(report.name, report.reference),
            # Asked for each time: whoever shows the run sets its progress later.
            built=lambda *counted: self.progress.building(*counted),  # noqa: PLW0108
            surveys=BoundedSemaphore(in_line),
        )
        # Each worker costs seconds to start: none more than there are laws to run.
        size = min(self._jobs, count * len(plan.laws) or self._jobs)
        # A tool and a process that judges have one process of a GPU in mind.
        self._sharing = 0 if plan.sanitizer or plan.distrust or not plan.mps else size
        self._gpu = share_gpu(plan.device, self._sharing)
        self._pool = open_pool(
            plan.device,
            size=size,
            tool=plan.sanitizer,
            started=count > 0,
            preload=plan.preload,
            gpu=self._gpu,
        )
        self._scheduler = Scheduler(
            self._pool, self._jobs, self.ending, beside=count, close=self._builder.close
        )
        self._examples = examples_on(plan.examples, self.target)
        self._drawers = drawers_for(self._jobs)

    @property
    def builds(self) -> Mapping[str, float]:
        """Minutes of one core that each library took to build in this run, by its name."""
        return self._builder.minutes

    @property
    def candidates(self) -> dict[str, Candidate]:
        """What is known of each implementation that was prepared, by its name."""
        prepared = [each.prepared for each in self._examined if each.begun and each.prepared]
        return {each.candidate.name: each.candidate for each in prepared}

    @property
    def costs(self) -> dict[str, Cost]:
        """The cost class of each implementation that was prepared, by its name."""
        return {name: candidate.cost for name, candidate in self.candidates.items()}

    @property
    def asked(self) -> list[ImplementationReport]:
        """Reports of the implementations that were asked about, not those that were known."""
        return [each.report for each in self._examined]

    def read(self, report: ImplementationReport) -> set[Read]:
        """Return what the processes have read that an implementation's code ran in."""
        return self._pool.read(report.reference)

    def execute(self) -> RunReport:
        """Run everything, and report what was learned even if the run ends early."""
        start, run = time.monotonic(), self.report
        for name in self.plan.implementations:
            if name in self._kept.whole:
                run.implementations.append(self._kept.whole[name])
                continue
            examined = Examined(ImplementationReport(name, resolve_name(name)))
            self._examined.append(examined)
            run.implementations.append(examined.report)
            self._scheduler.ask_beside(
                examined.report, partial(self._prepare, examined), partial(self._begin, examined)
            )
        try:
            with self._gpu or nullcontext(), self._pool:
                self._scheduler.run(self._ask_rest)
        finally:
            self.ending.stop()
            run.ended, run.lost = self.ending.ended, self.ending.lost
            run.respawns = self._pool.respawns
            if self._gpu is not None:
                run.target["mps"] = self._gpu.text(self._sharing)
            elif is_of_use(self.plan.device, self._sharing):
                run.target["mps"] = NOT_SHARED
            run.seconds = time.monotonic() - start
            for examined in self._examined:
                self._complete(examined)
            self._drawers.close()
        tell_apart(run.implementations)
        for examined in self._examined:
            examined.report.left = self._pool.left(examined.report.reference)
        run.left = self._pool.left(None)
        return run

    def _complete(self, examined: Examined) -> None:
        """Name the laws that have not run, add what was judged early, and measure coverage."""
        report, laws = examined.report, laws_planned(self.plan, examined.report.operation)
        judgeable = not (report.error or report.refusal)
        if self.ending.ended and judgeable:  # what those laws would have found is not known
            found = {law.law: law for law in report.laws}
            declares = examined.prepared.candidate.declares if examined.prepared else None
            report.laws = [found.get(law.name) or not_begun(law, declares) for law in laws]
        # Where the run ended early, a law's part of the deck is in no report yet.
        dealt = examined.prepared.dealt.values() if examined.prepared else ()
        early_reports = [*examined.early, *dealt]
        for early in early_reports:
            whole = next((law for law in report.laws if law.law == early.law), None)
            if whole is None:
                report.laws.append(early)
            else:
                whole.include(early)
        if examined.prepared is not None:
            self._complete_suspects(examined.prepared)
            reached = examined.prepared.reached
            for early in early_reports:
                reached.include(early)
            thorough = is_thorough(self.plan) and not self.ending.ended
            report.coverage = reached.coverage(laws, report.laws, thorough=thorough)
            report.claimed_space = reached.claimed_space()
        elif judgeable:  # the run ended while it was prepared
            report.coverage = Coverage(len(laws), gaps=(Gap("law", "any law"),))

    def _complete_suspects(self, prepared: Prepared) -> None:
        """Report what has failed in the deck under laws that the end has kept from beginning."""
        for law in prepared.report.laws:
            suspects = prepared.suspects.get(law.law)
            if suspects and (law.finding is None or law.finding.entry):
                why = "the run ended before it was judged again"
                law.finding = finding_of(prepared.candidate, law.law, *suspects[0], why)

    # The preparation

    def _prepare(self, examined: Examined, lease: Lease) -> Candidate | None:
        """Prepare an implementation; most of the time it waits for compilers."""
        report = examined.report
        try:
            return prepare(
                self._setting,
                report,
                lease,
                begun=lambda candidate: self._scheduler.post(
                    report, partial(self._begin_early, examined, candidate)
                ),
            )
        except DeviceLostError:
            self.ending.stop()  # here: the thread that takes answers may be too late
            raise
        finally:
            examined.ready = True
            self._setting.together.leave(report)

    def _begin_early(self, examined: Examined, candidate: Candidate) -> None:
        """Search an implementation's first module while its others are built."""
        if not examined.ready:  # else all of its modules existed
            self._ask_laws(self._prepared(examined, candidate), early=True)

    def _begin(self, examined: Examined, candidate: Candidate | None) -> None:
        """Ask about an implementation that is prepared: its stored cases first, then its laws."""
        report, part = examined.report, self.plan.part
        self._scheduler.withdraw(report)  # early searches that have not begun only filled the time
        if candidate is None:
            self._pace.skip()
            self.progress.skipped(report)
            return
        examined.begun = True
        self._kept.keep_costs(self.costs)
        stored: Sequence[Entry | Case] = ()
        if part is not None:
            candidate.smallest += part.learned.smallest
            candidate.deadly += part.learned.deadly
        candidate.smallest += [case.problem for case in self._failed(report)]
        if part is None or part.replays:
            stored = self._stored(report).each()
        prepared = self._prepared(examined, candidate, stored)
        # Under a sanitizer all is slow, and stored cases were judged without it: laws come first.
        if self.plan.sanitizer or not stored:
            self._ask_deck(prepared)
        else:
            # A question each: a case that kills its process holds up no other.
            for number in range(len(stored)):
                self._ask_replay(prepared, number)

    def _prepared(
        self, examined: Examined, candidate: Candidate, stored: Sequence[Entry | Case] = ()
    ) -> Prepared:
        report = examined.report
        laws = laws_planned(self.plan, report.operation)
        plan = of_operation(self.plan, report.operation, _backend(report))
        planned = sum(problems_of(plan, law, candidate.cost) for law in laws)
        if examined.begun:
            planned += len(self._deck_of(report, candidate, laws))
            declares = candidate.declares
            weights = {
                law.name: law.weight for law in laws if declares is None or law.concerns(declares)
            }
            self._pace.plan(report.name, weights)
        self.progress.prepared(report, planned)
        reached = Reached(candidate.axes, report.declared)
        examined.prepared = Prepared(report, candidate, laws, reached, examined.early, stored)
        return examined.prepared

    # The replay of stored cases

    def _stored(self, report: ImplementationReport) -> Stored:
        """Return an implementation's cases: of the ledger's entries that hold here, and all others.

        An entry's case is replayed under any law, for the entry may be retired by it.
        """
        plan, name = self.plan, report.declared_name
        entries = [e for e in plan.ledger.entries if e.applies_to(name, self.target)]
        return Stored(
            [
                case
                for case in cases_of(report.reference, plan.corpus, entries)
                if not plan.laws or case.law in plan.laws
            ],
            [e for e in entries if e.case and (plan.profile.explore or not e.quarantine)],
        )

    def _ask_replay(self, prepared: Prepared, number: int) -> None:
        ask = partial(self._replay, prepared, number)
        take = partial(self._take_replay, prepared, number)
        self._scheduler.ask(Question(prepared.report, ask, take, (REPLAY_RANK,)))

    def _replay(self, prepared: Prepared, number: int, worker: Worker) -> Replayed:
        """Replay a stored case; a failure of the suite in it leaves the laws to be run."""
        begun = time.monotonic()
        try:
            replayed = replay(prepared.stored[number], worker, prepared.candidate)
        except HarnessError as error:
            prepared.report.fail(error)
            replayed = NOT_REPLAYED
        return replace(replayed, begun=begun, seconds=time.monotonic() - begun)

    def _take_replay(self, prepared: Prepared, number: int, replayed: Replayed) -> None:
        report, done = prepared.report, prepared.replayed
        done[number] = replayed
        report.corpus += replayed.counts
        report.corpus.seconds = time.monotonic() - min(each.begun for each in done.values())
        # In their order, and all of them each time: the run may end before the others.
        findings = [done[each].unknown for each in sorted(done)]
        report.replayed = [finding for finding in findings if finding is not None]
        if replayed.unknown is not None:
            self._announce(replayed.unknown)
        if self.plan.sanitizer:
            self._ask_next_replay(prepared)
        elif len(done) == len(prepared.stored):
            self._ask_deck(prepared)

    def _ask_next_replay(self, prepared: Prepared) -> None:
        """Replay one more case, if another as long as the longest leaves laws their share of time.

        Only under a sanitizer, after the laws.
        """
        taken = [each.seconds for each in prepared.replayed.values()]
        laws = sum(law.seconds for law in prepared.report.laws)
        left = len(prepared.stored) - len(taken)
        if left and taken and sum(taken) + max(taken) > REPLAY_SHARE / (1 - REPLAY_SHARE) * laws:
            prepared.report.corpus.left_out += left
        elif left:
            self._ask_replay(prepared, len(taken))

    # The deck

    def _deck_of(
        self, report: ImplementationReport, candidate: Candidate, laws: Sequence[Law]
    ) -> list[DeckEntry]:
        """Return the first entries of the deck for some laws; under a sanitizer all is slow."""
        plan = of_operation(self.plan, candidate.axes.operation, _backend(report))
        if not plan.deck or plan.sanitizer:
            return []
        # Of all laws: a run that is resumed, or a unit of a fleet, asks its part of the same ones.
        whole = laws_planned(replace(plan, part=None), candidate.axes.operation)
        planned = sum(problems_of(plan, law, candidate.cost) for law in whole)
        entries = entries_for(whole, candidate)
        if light := light_of(self.plan, candidate.axes.operation):
            entries = [entry for entry in entries if entry.problem.work <= light.max_work]
        entries = entries[: max(LEAST_DEALT, int(DECK_SHARE * planned))]
        names = {law.name for law in laws}
        return [entry for entry in entries if entry.law in names]

    def _ask_deck(self, prepared: Prepared) -> None:
        """Ask for the deck, and then for each law; laws that a run before has ended come first."""
        # Before the first question: the laws that are left know what all of these have found.
        known = {law.name: self._kept.recall(prepared.candidate, law.name) for law in prepared.laws}
        for name, found in known.items():
            if found:
                prepared.asked.add(name)
                again = partial(self._take_law, prepared, kept=True)
                self._scheduler.ask_beside(prepared.report, partial(_known, found), again)
        if any(found and self._is_enough(found) for found in known.values()):
            # What is known ends the run, and no other law begins.
            self.ending.ended = self.ending.ended or FOUND
            return
        left = [law for law in prepared.laws if law.name not in prepared.asked]
        entries = self._deck_of(prepared.report, prepared.candidate, left)
        failed = {case.law for case in self._failed(prepared.report)}
        compares = ANSWERS[prepared.report.operation].law
        for law in left:
            if law.name in failed:
                self._ask_law(prepared, law, REPLAY_RANK)
            elif law.name == compares and self.plan.exit_first:
                self._ask_law(prepared, law, REPLAY_RANK, early=True, kinds=True)
        # Every nth entry for each of n workers: all of them begin with the cheapest.
        parts = min(self._jobs, -(-len(entries) // LEAST_DEALT))
        ended: list[Dealt] = []
        for part in range(parts):
            self._scheduler.ask(
                Question(
                    prepared.report,
                    partial(self._deal, prepared, entries[part::parts]),
                    partial(self._take_dealt, prepared, ended, parts),
                    (REPLAY_RANK,),
                )
            )
        if not parts:
            self._ask_laws(prepared)

    def _deal(self, prepared: Prepared, entries: Sequence[DeckEntry], worker: Worker) -> Dealt:
        """Judge entries of the deck; a failure of the suite in them leaves the laws to be run."""
        candidate = prepared.candidate
        dealt = deal(
            worker,
            candidate,
            {law.name: law for law in prepared.laws},
            entries,
            confirms=self.plan.confirm,
            judged=partial(self._judged, candidate.name),
            stopped=self.ending.stopped,
        )
        if dealt.lost:
            self.ending.stop()  # here: the thread that takes answers may be too late
        return dealt

    def _take_dealt(self, prepared: Prepared, ended: list[Dealt], parts: int, dealt: Dealt) -> None:
        """Take a part of the deck; the law of its failure is asked for at once."""
        ended.append(dealt)
        for name, report in dealt.reports.items():
            if name in prepared.dealt:
                report.include(prepared.dealt[name])
            prepared.dealt[name] = report
        if dealt.lost:
            raise DeviceLostError(dealt.lost)
        if dealt.error and not self.ending.cut_off:  # else its worker was ended
            prepared.report.fail(dealt.error)
        if dealt.suspect is not None:
            name, problem, verdict = dealt.suspect
            suspect = problem, verdict
            prepared.suspects.setdefault(name, []).append(suspect)
            if name not in prepared.asked:
                law = next(law for law in prepared.laws if law.name == name)
                self._ask_law(prepared, law, REPLAY_RANK, suspect=suspect)
        if len(ended) == parts:
            self._ask_laws(prepared)

    def _failed(self, report: ImplementationReport) -> list[Case]:
        """Return the cases of an implementation whose laws are to begin."""
        return cases_of(report.reference, self.plan.failed, ())

    # The search under each law

    def _ask_laws(self, prepared: Prepared, *, early: bool = False) -> None:
        """Ask for a search under each law that was not asked for yet.

        Where the first finding ends the run, a few problems of each law come before all others:
        some faults show in any problem, but under one law only, which may be the last.
        """
        if self.plan.exit_first and not early:
            self._ask_laws(prepared, early=True)
        for rank, law in enumerate(prepared.laws, REPLAY_RANK + 1):
            if law.name not in prepared.asked:
                self._ask_law(prepared, law, rank, early=early)

    def _ask_law(
        self,
        prepared: Prepared,
        law: Law,
        rank: int,
        *,
        early: bool = False,
        kinds: bool = False,
        suspect: Suspect | None = None,
    ) -> None:
        """Ask for a search under a law; an early one comes before all others and is short.

        With ``kinds`` it has the few problems that cover each feature, and no other.
        """
        operation = prepared.report.operation
        plan = of_operation(self.plan, operation, _backend(prepared.report))
        take = self._take_early if early else self._take_law
        # A law of a part has the seconds that it has in the whole.
        whole = laws_planned(replace(plan, part=None), operation)
        jobs, cost = plan.part.jobs if plan.part else self._jobs, prepared.candidate.cost
        alike = light_of(self.plan, operation) is not None
        options = options_of(plan, law, whole, cost, seed=self.report.seed, jobs=jobs, alike=alike)
        options = replace(
            options, examples=self._examples, drawers=self._drawers, suspect=suspect, kinds=kinds
        )
        if early:
            most = FIRST_PROBLEMS if plan.exit_first else EARLY_PROBLEMS
            fewer = min(options.problems, most)
            options = replace(options, problems=fewer, floor=0, examples=None, longest=False)
            if plan.exit_first:
                options = replace(options, seconds=FIRST_SECONDS * jobs / len(whole))
        else:
            prepared.asked.add(law.name)
        self._scheduler.ask(
            Question(
                prepared.report,
                partial(self._judge, prepared.candidate, law, options),
                partial(take, prepared),
                (REPLAY_RANK if early else rank,),
            )
        )

    def _judge(
        self, candidate: Candidate, law: Law, options: SearchOptions, worker: Worker
    ) -> LawReport:
        """Search under a law, or less than that where the implementation has failed already."""
        if candidate.smallest and self.plan.first_only:
            return LawReport(law.name)
        options = replace(options, seconds=min(options.seconds, self._pace.seconds(law.weight)))
        if self.plan.exit_first and not self.plan.profile.shrink_seconds:
            options = replace(options, shrink=False)  # the finding is all that is asked for
        if candidate.smallest and not self.plan.shrink_all:
            # Once an implementation has failed, each further law costs little: what it could add
            # are other faults.
            fewer = min(options.problems, LATER_PROBLEMS)
            options = replace(options, shrink=False, problems=fewer, longest=False)
        return self._search(worker, candidate, law, options)

    def _search(
        self,
        worker: Worker,
        candidate: Candidate,
        law: Law,
        options: SearchOptions,
        again: Sequence[Problem] = (),
    ) -> LawReport:
        self.progress.law_begun(candidate.name, law.name)
        try:
            found = LawSearch(
                worker,
                candidate,
                law,
                options,
                again=again,
                judged=partial(self._judged, candidate.name),
                stopped=self.ending.stopped,
                failing=partial(self._failing, candidate.name, law.name),
            ).run()
        finally:
            self.progress.law_ended(candidate.name, law.name)
        if found.lost:
            self.ending.stop()  # here: the thread that takes answers may be too late
        return found

    def _judged(self, name: str, count: int) -> None:
        reached = self.report.milestones
        reached.reach("judged")
        if reached.failing is None:
            reached.problems += count  # threads may lose one: it is a figure of a benchmark
        self.progress.judged(name, count)

    def _failing(self, name: str, law: str, verdict: Verdict) -> None:
        self.report.milestones.reach("failing")
        self.progress.failing(name, law, verdict)

    def _announce(self, finding: Finding) -> None:
        """Show a finding, which ends a run that looks for one only."""
        self.report.milestones.reach("failing")  # a stored case is not made smaller
        self.progress.found(finding)
        if self.plan.exit_first:
            self.ending.end(FOUND)

    def _is_enough(self, found: LawReport) -> bool:
        """Whether a run that looks for one finding has it in what a law has found."""
        return self.plan.exit_first and found.finding is not None and not found.finding.entry

    def _take_early(self, prepared: Prepared, found: LawReport) -> None:
        """Take what a law has found in the first module; its search in all modules comes later."""
        prepared.early.append(found)
        self._take_finding(prepared, found)

    def _take_law(self, prepared: Prepared, found: LawReport, *, kept: bool = False) -> None:
        """Take what a law has found in all modules, in this run or in the one before it."""
        if kept and self._is_enough(found) and self.ending.asked == FOUND:  # at another finding
            return
        if not kept and (dealt := prepared.dealt.pop(found.law, None)):
            found.include(dealt)
        # One whose shrinking the end of the run has cut off may not say so.
        if not (kept or self.ending.stopped()):
            self._kept.keep(prepared.candidate, found)
        report, shown = prepared.report, prepared.was_shown(found.law)
        names = [law.name for law in prepared.laws]
        report.laws.append(found)
        report.laws.sort(key=lambda each: names.index(each.law))
        prepared.reached.include(found)
        if found.finding is None:
            if found.with_room_later:
                self._without_room.append((prepared, found))
            if found.ended == "time" and found.drawn < found.floor:
                self._below_floor.append((prepared, found))
        self._look_at_suspects(prepared, found)
        if self.plan.part is None:  # else the whole is measured by them
            found.forget(all_of_them=found.finding is None and not shown)
        self._take_finding(prepared, found, shown=shown)
        self._pace.end(report.name, found.law)
        now = time.monotonic()
        report.seconds = now - (prepared.candidate.started or now)
        self.progress.law_done(report, found)
        if len(report.laws) == len(names):
            self._ask_last(prepared)

    def _look_at_suspects(self, prepared: Prepared, found: LawReport) -> None:
        """Ask for what other parts of the deck have seen fail, where the law has found nothing.

        Its search began with the first of them, which may be a known failure, or pass now.
        """
        suspects = prepared.suspects.pop(found.law, [])[1:]
        if suspects and (found.finding is None or found.finding.entry):
            if self.ending.stopped():
                prepared.suspects[found.law] = suspects
            else:
                self._ask_again(prepared, found, [problem for problem, _ in suspects])

    def _take_finding(self, prepared: Prepared, found: LawReport, *, shown: bool = False) -> None:
        """Report what a law has found, once its report is among the implementation's.

        Args:
            prepared: the implementation.
            found: the report of the law.
            shown: whether the law has shown a failure before.

        Raises:
            DeviceLostError: the law has lost the device.
        """
        if found.finding and not found.finding.entry and not shown:
            self._announce(found.finding)
        if found.lost:
            raise DeviceLostError(found.lost)
        if found.error and self.ending.cut_off:  # its worker was ended
            found.error, found.ended = "", "stopped"
        if found.error:
            prepared.report.fail(found.error)

    # What comes after all laws

    def _ask_last(self, prepared: Prepared) -> None:
        """Ask for the causes of an implementation's findings, and for replays that come last."""
        report, seed, stopped = prepared.report, self.report.seed, self.ending.stopped
        ask = experiments_on(report, prepared.candidate, self.plan, seed, stopped)
        if ask is not None:
            take = partial(self._take_causes, report)
            self._scheduler.ask(Question(report, ask, take, (REPLAY_RANK,)))
        if self.plan.sanitizer:
            self._ask_next_replay(prepared)

    def _take_causes(self, report: ImplementationReport, separation: Separation) -> None:
        report.separation = separation
        for finding in separation.further:
            self.progress.found(finding)

    def _ask_rest(self) -> None:
        """Ask for what had no room on the GPU, one law at a time: nothing else runs by now.

        Then for laws that their own time left below their floor: the run's is not over.
        """
        # One at a time: two problems that lacked room beside others may lack it beside each other.
        if self._without_room:
            prepared, found = self._without_room.pop(0)
            self._ask_again(prepared, found, found.with_room_later)
            return
        for prepared, found in self._below_floor:
            if found.drawn < found.floor and found.finding is None:
                self._ask_again(prepared, found)
        self._below_floor.clear()

    def _ask_again(
        self, prepared: Prepared, found: LawReport, again: Sequence[Problem] = ()
    ) -> None:
        """Ask for what a law has left: problems that had no room, or else further ones."""
        law = next(law for law in prepared.laws if law.name == found.law)
        # Another seed: those of the run's own were judged.
        seed, missing = self.report.seed, found.floor - found.drawn
        options = SearchOptions(
            self.plan.profile,
            seed if again else seed + 1,
            len(again) or missing,
            math.inf,
            confirm=self.plan.confirm,
            longest=bool(again),
        )
        ask = partial(self._search_again, prepared.candidate, law, options, tuple(again))
        take = partial(self._take_again, prepared, found)
        self._scheduler.ask(Question(prepared.report, ask, take, (REPLAY_RANK,)))

    def _search_again(
        self,
        candidate: Candidate,
        law: Law,
        options: SearchOptions,
        again: Sequence[Problem],
        worker: Worker,
    ) -> LawReport:
        worker.renew()  # it holds what other problems needed
        return self._search(worker, candidate, law, options, again=again)

    def _take_again(self, prepared: Prepared, found: LawReport, later: LawReport) -> None:
        found.include_later(later)
        prepared.reached.include(later)
        later.forget(all_of_them=later.finding is None)
        self._take_finding(prepared, later)
