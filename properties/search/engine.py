"""A run: every law on every implementation, several at a time, each in an isolated worker."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ...impl import Target
from ...impl.registry import resolve_name
from ...reference import Problem
from ..findings.corpus import Case, cases_of
from ..findings.coverage import Coverage, Gap
from ..findings.ledger import Entry
from ..findings.names import Names, tell_apart
from ..findings.report import (
    INTERRUPTED,
    TIME,
    CorpusReport,
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
    Separation,
)
from ..isolation.gpus import processes_for, visible_devices
from ..isolation.machine import cores
from ..isolation.workers import Worker
from ..laws import Law
from ..space.drawers import drawers_for
from ..space.profiles import Cost
from ..worker.pools import open_pool
from ..worker.requests import DeviceLostError, HarnessError
from .building import Builder, Claim, compilers
from .candidate import Candidate
from .causes.experiments import experiments_on
from .coverage import Reached
from .drawing import SearchOptions
from .examples import examples_on
from .law_search import LawSearch
from .module_plan import BUILD_SHARE, LONGEST_SHARE, ModulePlan
from .plan import Plan, floor_of, laws_planned, problems_of, seconds_of
from .preparation import prepare
from .priority_executor import PriorityExecutor
from .progress import Progress
from .replays import Stored, replay

Submit = Callable[[int, ImplementationReport, Callable[[Worker], Any], Callable[[Any], None]], None]
"""Function that queues work for a worker: priority, report, work, and a callback for the result."""
Pending = dict["Future[Any]", tuple[ImplementationReport, Callable[[Any], None]]]
"""Work under way, with its implementation's report and the callback for the result."""
REPLAY_PRIORITY = 0
"""Priority of the replay of stored cases, before all laws; the laws have 1, 2, 3, ..."""
GRACE_SECONDS = 4.0
"""Seconds that a run which ends early waits for the laws in progress."""
REPLAY_SHARE = 0.1
"""Most of a run under a sanitizer that replays of stored cases take."""
LAST_SECONDS = 2.0
"""Seconds that it then waits for laws whose workers were ended."""
TICK_SECONDS = 0.2
"""Most seconds between two checks whether the run is to end early."""
LATER_PROBLEMS = 20
"""Most problems of a law after the implementation's first finding, where not all are shrunk."""
FIRST_PROBLEMS = 3
"""Problems that each law judges of an implementation's first module while its others are built;
they are drawn besides those of all modules. Laws that have not begun by then are left to these."""


def usual_jobs(device: str) -> int:
    """Return the number of workers of a run on this machine, where none is asked for."""
    if device == "cuda":
        return max(1, processes_for(visible_devices()[:1], cores()))
    return max(1, min(cores(), 8))


class Run:
    """Carries out a plan.

    Args:
        plan: what to do.
        progress: receives what it does.
        claimed: asks the other machines of a run before modules are built; an implementation whose
            modules another one builds is not judged here.
    """

    def __init__(
        self,
        plan: Plan,
        progress: Progress | None = None,
        claimed: Claim = lambda _: True,
    ) -> None:
        self.plan = plan
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
        self.costs: dict[str, Cost] = {}
        self.candidates: dict[str, Candidate] = {}
        self._stop = threading.Event()
        self._names, self._naming = Names(), threading.Lock()
        self._asked_to_end = ""
        self._begun: SimpleQueue[tuple[ImplementationReport, Candidate]] = SimpleQueue()
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()
        self._prepared: set[int] = set()
        self._after_laws: dict[int, Callable[[], None]] = {}
        self._without_room: list[tuple[ImplementationReport, Candidate, LawReport]] = []
        self._below_floor: list[tuple[ImplementationReport, Candidate, LawReport]] = []
        self._first: list[tuple[ImplementationReport, LawReport]] = []
        self._cut_off = False
        self._jobs = plan.jobs or usual_jobs(plan.device)
        # Each costs seconds to start: none more than there are laws to run.
        most = len(plan.implementations) * len(plan.laws) or self._jobs
        self._pool = open_pool(plan.device, size=min(self._jobs, most), tool=plan.sanitizer)
        self._builder = Builder(len(plan.implementations), claimed)
        self._modules = ModulePlan(
            len(plan.implementations),
            minutes=BUILD_SHARE * compilers() * plan.seconds / 60,
            longest=LONGEST_SHARE * plan.seconds / 60,
            learned=plan.builds,
            complete=self._planned,
        )
        self._examples = examples_on(plan.examples, self.target)
        self._drawers = drawers_for(self._jobs)
        self._reached: dict[int, Reached] = {}

    @property
    def builds(self) -> Mapping[str, float]:
        """Minutes of one core that each library took to build in this run, by its name."""
        return self._builder.minutes

    def end(self, why: str) -> None:
        """End the run early, from any thread or a handler of signals: ``execute`` returns soon.

        Args:
            why: one of ``ENDINGS``.
        """
        # A handler may interrupt any line of the main thread: it takes no lock.
        self._asked_to_end = why

    def execute(self) -> RunReport:
        """Run everything, and report what was learned even if the run ends early."""
        start = time.monotonic()
        pending: Pending = {}
        # Preparing is waiting for compilers: that must not keep laws from running meanwhile.
        each = max(1, len(self.plan.implementations))
        with self._pool, PriorityExecutor(self._jobs) as laws, ThreadPoolExecutor(each) as others:
            try:
                self._submit_all(laws, others, pending)
                while not self._asked_to_end and (pending or self._submit_again(laws, pending)):
                    self._collect(pending, TICK_SECONDS)
                    self._submit_begun(laws, pending)
                    if time.monotonic() - start > self.plan.seconds:
                        self.end(TIME)
                if pending:
                    self._end_early(pending)
            except KeyboardInterrupt:
                self.end(INTERRUPTED)
                self._end_early(pending)
            except BaseException:
                self._stop.set()
                raise
            finally:
                self.report.respawns = self._pool.respawns
                self.report.seconds = time.monotonic() - start
                self._include_first()
                self._measure_coverage()
                # Ends whatever still runs: the executors wait for their threads.
                self._builder.close()
                self._pool.close()
                self._drawers.close()
        tell_apart(self.report.implementations)
        for report in self.report.implementations:
            report.left = self._pool.left(report.reference)
        self.report.left = self._pool.left(None)
        return self.report

    def _end_early(self, pending: Pending) -> None:
        """Let laws in progress end after their case, and take what they have learned."""
        self.report.ended = self._asked_to_end
        self._stop.set()
        self._builder.close()
        for future in [future for future in pending if future.cancel()]:
            del pending[future]
        self._collect_for(GRACE_SECONDS, pending)
        self._cut_off = True
        self._pool.close()
        self._collect_for(LAST_SECONDS, pending)
        for report in self.report.implementations:
            self._add_laws_not_begun(report)

    def _planned(self) -> None:
        self.progress.planned(self.report.implementations, self._modules.chosen)

    def _collect_for(self, seconds: float, pending: Pending) -> None:
        deadline = time.monotonic() + seconds
        while pending and (left := deadline - time.monotonic()) > 0:
            self._collect(pending, left)

    def _add_laws_not_begun(self, report: ImplementationReport) -> None:
        """Name the laws that would have run: what they would have found is not known."""
        if report.error or report.refusal:
            return
        ended = {law.law: law for law in report.laws}
        report.laws = [
            ended.get(law.name, LawReport(law.name, floor=law.floor, ended="stopped"))
            for law in self._laws_of(report)
        ]

    def _measure_coverage(self) -> None:
        for report in self.report.implementations:
            laws = self._laws_of(report)
            if (reached := self._reached.get(id(report))) is not None:
                report.coverage = reached.coverage(laws, report.laws)
                report.claimed_space = reached.claimed_space()
            elif not (report.error or report.refusal):  # the run ended while it was prepared
                report.coverage = Coverage(len(laws), gaps=(Gap("law", "any law"),))

    def _laws_of(self, report: ImplementationReport) -> list[Law]:
        return laws_planned(self.plan, report.operation)

    def _submit_all(
        self, laws: PriorityExecutor, others: ThreadPoolExecutor, pending: Pending
    ) -> None:
        """Queue the preparation of each implementation, which queues its laws in their order."""
        submit = self._submit_to(laws, pending)
        for name in self.plan.implementations:
            report = ImplementationReport(name, resolve_name(name))
            self.report.implementations.append(report)

            def prepared(
                candidate: Candidate | None, report: ImplementationReport = report
            ) -> None:
                self._prepared.add(id(report))
                # Laws on its first problems that have not begun: they only filled the time.
                for future in [each for each, (of, _) in pending.items() if of is report]:
                    if future.cancel():
                        del pending[future]
                if candidate is None:
                    self.progress.skipped(report)
                else:
                    self.costs[candidate.name] = candidate.cost
                    self.candidates[candidate.name] = candidate
                    self._submit_stored(submit, report, candidate)

            future = others.submit(self._prepare, report)
            pending[future] = (report, prepared)
            future.add_done_callback(self._ended.put)

    def _submit_to(self, laws: PriorityExecutor, pending: Pending) -> Submit:
        def submit(
            rank: int,
            report: ImplementationReport,
            work: Callable[[Worker], Any],
            done: Callable[[Any], None],
        ) -> None:
            if not self._stop.is_set():
                leased = partial(self._leased, report, work)
                future = laws.submit(rank, leased, report.reference)
                pending[future] = (report, done)
                future.add_done_callback(self._ended.put)

        return submit

    def _submit_begun(self, laws: PriorityExecutor, pending: Pending) -> None:
        """Queue the first problems of implementations whose other modules are being built."""
        while not self._begun.empty():
            report, candidate = self._begun.get()
            if id(report) in self._prepared:  # all of its modules existed
                continue
            every = self._laws_of(report)
            planned = sum(problems_of(self.plan, law, candidate.cost) for law in every)
            self.progress.prepared(report, planned)
            self._reached[id(report)] = Reached(candidate.axes, report.declared)
            submit = self._submit_to(laws, pending)
            self._submit_laws(submit, report, candidate, every, first=True)

    def _submit_again(self, laws: PriorityExecutor, pending: Pending) -> bool:
        """Queue what had no room on the GPU, one law at a time: nothing else runs by now.

        Then laws that their own time left below their floor: the run's is not over.

        Returns:
            Whether there was something.
        """
        if self._stop.is_set():
            return False
        if self._without_room:
            report, candidate, found = self._without_room.pop(0)
            again = tuple(found.with_room_later)
            self._submit_rest(laws, pending, report, candidate, found, again)
            return bool(pending)
        while self._below_floor:
            report, candidate, found = self._below_floor.pop(0)
            if found.judged < found.floor and found.finding is None:
                self._submit_rest(laws, pending, report, candidate, found)
        return bool(pending)

    def _submit_rest(
        self,
        laws: PriorityExecutor,
        pending: Pending,
        report: ImplementationReport,
        candidate: Candidate,
        found: LawReport,
        again: Sequence[Problem] = (),
    ) -> None:
        """Queue what a law has left: problems that had no room, or else further ones."""
        law = next(law for law in self._laws_of(report) if law.name == found.law)
        # Another seed: those of the run's own were judged.
        seed, missing = self.report.seed, found.floor - found.judged
        options = SearchOptions(
            self.plan.profile, seed if again else seed + 1, len(again) or missing, math.inf,
            confirm=self.plan.confirm, longest=bool(again),
        )  # fmt: skip

        def work(worker: Worker) -> LawReport:
            worker.renew()  # it holds what other problems needed
            return self._search(worker, candidate, law, options, again=again)

        def done(later: LawReport) -> None:
            found.include_later(later)
            self._reached[id(report)].include(later)
            later.forget(all_of_them=later.finding is None)
            if later.finding and not later.finding.entry:
                self.progress.found(later.finding)
            if later.lost:
                raise DeviceLostError(later.lost)
            if later.error:
                report.fail(later.error)

        self._submit_to(laws, pending)(REPLAY_PRIORITY, report, work, done)

    def _include_first(self) -> None:
        """Add the verdicts on first problems to those of the laws' searches in all modules."""
        for report, first in self._first:
            self._reached[id(report)].include(first)
            for law in report.laws:
                if law.law == first.law:
                    law.include(first)
                    break
            else:
                report.laws.append(first)

    def _shown(self, report: ImplementationReport, found: LawReport) -> bool:
        """Whether a law's first problems have shown a failure already."""
        return any(
            of is report and first.law == found.law and first.finding for of, first in self._first
        )

    def _prepare(self, report: ImplementationReport) -> Candidate | None:
        def built(done: int, modules: int) -> None:
            self.progress.building(report.name, done, modules)

        try:
            return prepare(
                partial(self._lease, report),
                self.plan,
                report,
                self._builder,
                self.target,
                built=built,
                begun=lambda candidate: self._begun.put((report, candidate)),
                together=self._modules,
                stored=lambda report: self._stored(report).problems(),
                named=self._name_of,
            )
        except DeviceLostError:
            self._stop.set()
            raise
        finally:
            self._modules.leave(report)

    def _name_of(self, report: ImplementationReport) -> str:
        with self._naming:
            return self._names.tell(report.name, report.reference)

    def _collect(self, pending: Pending, timeout: float | None) -> None:
        """Wait for work to end, and take its results."""
        # Not ``concurrent.futures.wait``: it would look at each of a thousand futures each time.
        try:
            ended = [self._ended.get(timeout=timeout)]
        except Empty:
            return
        while not self._ended.empty():
            ended.append(self._ended.get())
        for future in ended:
            if future not in pending:  # it was cancelled
                continue
            report, done = pending.pop(future)
            try:
                done(future.result())
            except CancelledError:
                continue
            except DeviceLostError as error:
                self._lose_device(str(error), pending)
            except Exception as error:  # noqa: BLE001  one failure must not cost the others' results
                if not self._cut_off:  # else its worker was ended
                    report.fail(error)

    def _lose_device(self, why: str, pending: Pending) -> None:
        """Schedule nothing more on a device that is gone."""
        self.report.lost = self.report.lost or why
        self._stop.set()
        self._builder.close()
        for future in [future for future in pending if future.cancel()]:
            del pending[future]

    @contextmanager
    def _lease(self, report: ImplementationReport) -> Iterator[Worker]:
        with self._pool.lease(report.reference) as worker:
            if self._stop.is_set():  # since it was queued
                raise CancelledError
            try:
                yield worker
            except DeviceLostError:
                self._stop.set()
                raise

    def _leased(self, report: ImplementationReport, work: Callable[[Worker], Any]) -> Any:  # noqa: ANN401  whatever work gives
        with self._lease(report) as worker:
            return work(worker)

    def _submit_stored(
        self, submit: Submit, report: ImplementationReport, candidate: Candidate
    ) -> None:
        """Queue the replay of an implementation's stored cases; its laws come after it."""
        plan = self.plan
        if plan.part:
            candidate.smallest += plan.part.learned.smallest
            candidate.deadly += plan.part.learned.deadly
        laws = self._laws_of(report)
        planned = sum(problems_of(plan, law, candidate.cost) for law in laws)
        self.progress.prepared(report, planned)
        self._reached[id(report)] = Reached(candidate.axes, report.declared)
        search = partial(self._submit_laws, submit, report, candidate, laws)
        if not plan.sanitizer:
            self._submit_replays(submit, report, candidate, search)
            return
        # All is slow there, and stored cases were judged without the tool: laws come first.
        self._after_laws[id(report)] = partial(self._submit_replays, submit, report, candidate)
        search()

    def _submit_replays(
        self,
        submit: Submit,
        report: ImplementationReport,
        candidate: Candidate,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue the replay of each stored case: one that kills its process holds up no other.

        Under a sanitizer they come one after another, and take a tenth of the time at most.
        """
        part = self.plan.part
        stored = self._stored(report).each() if part is None or part.replays else []
        waiting = deque(enumerate(stored))
        found: dict[int, Finding | None] = {}
        began: list[float] = []
        taken: list[float] = []

        def work(worker: Worker, one: Entry | Case) -> tuple[CorpusReport, Finding | None]:
            start = time.monotonic()
            began.append(start)
            result = self._replay(worker, report, candidate, one)
            taken.append(time.monotonic() - start)
            return result

        def done(result: tuple[CorpusReport, Finding | None], number: int) -> None:
            counts, found[number] = result
            report.corpus += counts
            report.corpus.seconds = time.monotonic() - min(began)
            # In their order, and all of them each time: the run may end before the others.
            report.replayed = [each for _, each in sorted(found.items()) if each is not None]
            if (finding := found[number]) is not None:
                self.progress.found(finding)
            if waiting and self._may_replay_more(report, taken):
                submit_next()
            elif waiting:
                report.corpus.left_out += len(waiting)
                then()
            if len(found) == len(stored):
                then()

        def submit_next() -> None:
            number, one = waiting.popleft()
            submit(REPLAY_PRIORITY, report, partial(work, one=one), partial(done, number=number))

        for _ in stored[:1] if self.plan.sanitizer else stored:
            submit_next()
        if not stored:
            then()

    def _may_replay_more(self, report: ImplementationReport, taken: Sequence[float]) -> bool:
        """Whether a replay as long as the longest so far leaves the laws their share of time."""
        laws = sum(law.seconds for law in report.laws)
        return sum(taken) + max(taken) <= REPLAY_SHARE / (1 - REPLAY_SHARE) * laws

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

    def _submit_laws(
        self,
        submit: Submit,
        report: ImplementationReport,
        candidate: Candidate,
        laws: Sequence[Law],
        *,
        first: bool = False,
    ) -> None:
        plan = self.plan
        done = partial(self._take, submit, report, candidate, first=first)
        for rank, law in enumerate(laws, REPLAY_PRIORITY + 1):
            problems = problems_of(plan, law, candidate.cost)
            options = SearchOptions(
                plan.profile,
                self.report.seed,
                problems,
                self._seconds_of(law, report.operation),
                floor_of(law, problems),
                confirm=plan.confirm,
                examples=self._examples,
                drawers=self._drawers,
            )
            if first:
                fewer = min(options.problems, FIRST_PROBLEMS)
                options = replace(options, problems=fewer, floor=0, examples=None, longest=False)

            def work(worker: Worker, law: Law = law, options: SearchOptions = options) -> LawReport:
                if plan.first_only and candidate.smallest:
                    return LawReport(law.name)
                if not plan.shrink_all and candidate.smallest:
                    fewer = min(options.problems, LATER_PROBLEMS)
                    options = replace(options, shrink=False, problems=fewer, longest=False)
                return self._search(worker, candidate, law, options)

            submit(REPLAY_PRIORITY if first else rank, report, work, done)

    def _seconds_of(self, law: Law, operation: str) -> float:
        """Return a law's seconds; those of a part are the same as in the whole."""
        part = self.plan.part
        whole = laws_planned(replace(self.plan, part=None), operation)
        return seconds_of(self.plan, law, whole, part.jobs if part else self._jobs)

    def _take(
        self,
        submit: Submit,
        report: ImplementationReport,
        candidate: Candidate,
        found: LawReport,
        *,
        first: bool,
    ) -> None:
        """Take what a law has found, in all modules or in the first one."""
        shown = self._shown(report, found)
        if first:
            self._first.append((report, found))
        else:
            report.laws.append(found)
            self._reached[id(report)].include(found)
            self._note_rest(report, candidate, found)
            if self.plan.part is None:  # else the whole is measured by them
                found.forget(all_of_them=found.finding is None and not shown)
        # Among those of the report, its case is written, and its cause is known.
        if found.finding and not found.finding.entry and not shown:
            self.progress.found(found.finding)
        if found.lost:
            raise DeviceLostError(found.lost)
        if found.error and self._cut_off:  # its worker was ended
            found.error, found.ended = "", "stopped"
        if found.error:
            report.fail(found.error)
        if not first:
            names = [law.name for law in self._laws_of(report)]
            report.laws.sort(key=lambda each: names.index(each.law))
            report.seconds = time.monotonic() - (candidate.started or 0.0)
            self.progress.law_done(report, found)
            if len(report.laws) == len(names):
                self._end_laws(submit, report, candidate)

    def _note_rest(
        self, report: ImplementationReport, candidate: Candidate, found: LawReport
    ) -> None:
        """Note what a law without a finding has left for the end of the run."""
        if found.with_room_later and found.finding is None:
            self._without_room.append((report, candidate, found))
        if found.ended == "time" and found.judged < found.floor and found.finding is None:
            self._below_floor.append((report, candidate, found))

    def _end_laws(self, submit: Submit, report: ImplementationReport, candidate: Candidate) -> None:
        """Queue what comes after all laws on an implementation, where there is something."""
        experiments = experiments_on(
            report, candidate, self.plan, self.report.seed, self._stop.is_set
        )

        def done(separation: Separation) -> None:
            report.separation = separation
            for finding in separation.further:
                self.progress.found(finding)

        if experiments is not None:
            submit(REPLAY_PRIORITY, report, experiments, done)
        if then := self._after_laws.pop(id(report), None):
            then()

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
                judged=lambda count: self.progress.judged(candidate.name, count),
                stopped=self._stop.is_set,
                failing=partial(self.progress.failing, candidate.name, law.name),
            ).run()
        finally:
            self.progress.law_ended(candidate.name, law.name)
        if found.lost:
            self._stop.set()  # here: the thread that takes results may be too late for the next law
        return found

    def _replay(
        self, worker: Worker, report: ImplementationReport, candidate: Candidate, one: Entry | Case
    ) -> tuple[CorpusReport, Finding | None]:
        """Replay a stored case; a failure of the suite in it leaves the laws to be run."""
        try:
            return replay(one, worker, candidate)
        except HarnessError as error:
            report.fail(error)
            return CorpusReport(), None
