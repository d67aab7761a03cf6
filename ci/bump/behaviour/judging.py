"""Judging with both releases: each problem as soon as it is drawn and its module is built.

The order of asking depends on the clock: on which module is built first, and on which
implementation is quick. The records do not: each problem has its place there, and its answer is the
journal's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ....impl.registry import resolve_name
from ....properties.findings.corpus import Case
from ....properties.findings.ledger import Entry
from ....properties.laws import Law, laws_of
from ....properties.search.building import compilers
from ....properties.search.ending import EndedError, Ending
from ....properties.search.priority_executor import FairQueue, for_each
from ....properties.search.scheduler import Question, Scheduler
from ....properties.space.drawers import drawers_for
from ....properties.verdicts.text import count_of
from ....properties.verdicts.verdict import Verdict
from ....properties.worker.requests import HarnessError
from ....reference import Problem
from ...console.errors import MachineError
from ..sides.plan import DEADLINES, JUDGED, minutes_of
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from .asking import OWNER, Bench, answer_of
from .building import Builders, Wanted, ask_keys, choose_modules, ordered_builds
from .numbers import build_cost
from .preparing import cases_to_judge, draw, laws_to_judge, refuse_laws, survey_both, to_judge
from .records import CORPUS, DEAR, UNREACHED, Compared, Planned, Surveyed, Tried

DRAWING = 2
"""Threads that draw problems, or wait for processes that do."""
STORED, DRAWN, QUARANTINED = range(3)
Seen = Callable[[Tried, Planned], None]
"""Function that is shown each problem that was judged."""
Ask = Callable[[Planned, Bench], Tried]
"""Function that judges a problem of an implementation with both releases."""
Place = tuple[int, int, int]
"""Place of a problem in the report: its stage, the number of its law or case, and its own."""
Asking = tuple[Question, str | None]
"""A question, and the key of the module that must be built before; None if it needs none."""


class Subject(NamedTuple):
    """An implementation by its name, and the function that takes a failure of the suite in it."""

    reference: str
    fail: Callable[[Exception], None]


class Judging:
    """Judges problems with both releases, while implementations are surveyed and modules built.

    Args:
        bench: the bench of the comparison: problems that nobody has judged by its end are left out.
        builders: workers that build.
        seen: function that is called with each problem that was judged.

    Attributes:
        error: why it ended early, where neither a device nor a worker failed; None otherwise.
    """

    def __init__(self, bench: Bench, builders: Builders, seen: Seen = lambda *_: None) -> None:
        self._bench, self._builders, self._seen = bench, builders, seen
        threads = bench.plan.threads
        self._drawers = drawers_for(threads)  # processes, as many as there are cores for
        # Its ending is its own: after the end of the comparison, the journal refuses what it does
        # not know, and what it knows is still taken.
        self._scheduler = Scheduler(
            bench,
            threads,
            Ending(),
            beside=1 + max(DRAWING, self._drawers.processes),
            close=builders.bench.close,
            queue=FairQueue(),
        )
        self._known: dict[str, Planned] = {}
        self._drawn: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._judged: defaultdict[str, list[tuple[Place, Tried]]] = defaultdict(list)
        self._waiting: defaultdict[tuple[str, str], list[Asking]] = defaultdict(list)
        self._built: set[tuple[str, str]] = set()
        self.error: Exception | None = None

    def run(self) -> tuple[Compared, ...]:
        """Judge all that can be judged; return the surveyed implementations in the plan's order."""
        bench, building, ending = self._bench, self._builders.bench, self._scheduler.ending
        try:
            self._scheduler.ask_beside(self._subject(), self._prepare, lambda _: building.close())
            with ending.closing(building.close), ending.closing(bench.close):
                self._scheduler.run(self._ask_waiting)
        finally:
            self._drawers.close()
        if ending.asked:  # by an interrupt that only the scheduler has seen
            bench.ending.end(ending.asked)
        if ending.lost:  # what was learned stays, and findings are made of it
            bench.ending.lose(ending.lost)
        known = filter(None, map(self._known.get, bench.plan.implementations))
        return tuple(map(self._compared, known))

    def _compared(self, found: Planned) -> Compared:
        return Compared.after(
            found,
            planned={**found.planned, **self._drawn[found.name]},
            tried=tuple(tried for _, tried in sorted(self._judged[found.name], key=itemgetter(0))),
            builds=self._builders.seconds.get(found.name, {}),
        )

    def _subject(self, name: str = "") -> Subject:
        return Subject(name, self._fail)

    def _fail(self, error: Exception) -> None:
        """End the comparison with the first error: it says nothing of a release."""
        ending = self._scheduler.ending
        if isinstance(error, (HarnessError, MachineError)):
            ending.lose(str(error))
        elif not ending.stopped():  # else it may be the doing of an error before it
            self.error = error
        ending.stop()
        self._scheduler.withdraw()

    def _prepare(self, _: object) -> None:
        """Survey all implementations, choose and build their modules; hand over what is ready."""
        bench, progress = self._bench, self._bench.progress
        names = bench.plan.implementations
        # A GPU is not to wait for surveys; on a CPU more processes would only share the cores.
        apart = bench.plan.device == "cuda"
        asking = self._builders.bench if apart else bench
        threads = len(SIDES) * (self._builders.at_a_time if apart else bench.plan.jobs)
        progress.tell(
            "asking what each implementation supports; what needs no module is judged at once"
        )
        progress.surveyed.expect(len(names))
        for_each(names, threads, partial(self._survey, asking), failed=asking.close)
        refuse_laws([*self._known.values()], bench.plan.laws)
        wanted = self._choose([self._known[name] for name in names], asking)
        for line in announced([self._known[name] for name in names], wanted, bench.ending):
            progress.tell(line)
        self._builders.build(wanted, self._release)

    def _survey(self, asking: Bench, name: str) -> None:
        """Learn what an implementation supports; what needs no module is judged at once."""
        reference = resolve_name(name)
        try:
            found = survey_both(name, reference, asking)
        except EndedError:
            self._known[name] = Planned(name, reference, left_out=UNREACHED)
            return
        finally:
            self._bench.progress.surveyed.add()
        self._known[name] = Planned.after(found)
        if found.runs and not found.build_minutes:
            self._add(to_judge(found, self._bench.plan))

    def _choose(self, surveyed: Sequence[Surveyed], asking: Bench) -> list[Wanted]:
        building = [each for each in surveyed if each.runs and each.build_minutes]
        if building:
            asking.progress.tell("choosing modules for all implementations together")
        try:
            planned, wanted = choose_modules(building, asking)
        except EndedError:
            plan = asking.plan
            planned, wanted = [to_judge(each, plan, left_out=UNREACHED) for each in building], []
        for each in planned:
            self._add(each)
        return wanted

    def _add(self, found: Planned) -> None:
        """Have an implementation's problems drawn and judged, from any thread."""
        self._known[found.name] = found
        if not found.left_out:
            self._bench.progress.judged.expect(sum(found.planned.values()))
            self._scheduler.post(self._subject(found.name), partial(self._begin, found))

    def _begin(self, found: Planned) -> None:
        """Have an implementation's problems drawn and judged: first laws before any second."""
        subject = self._subject(found.name)
        self._submit(self._stored(found))
        for number, (law, count) in enumerate(laws_to_judge(found, self._bench.plan).items()):
            ask = partial(self._draw, found, number, law, count)
            self._scheduler.ask_beside(subject, ask, self._submit, number)

    def _draw(self, found: Planned, number: int, law: Law, count: int, _: object) -> list[Asking]:
        """Draw the problems of a law, the module of each noted; none once the time is over."""
        bench = self._bench
        bench.ending.refuse()
        problems = draw(law, count, found, bench.plan, self._drawers)
        self._drawn[found.name][law.name] = len(problems)
        bench.progress.judged.expect(len(problems) - count)
        keys: Sequence[str | None] = [None] * len(problems)
        if found.modules and problems:
            keys = ask_keys(found, bench, problems)
        return [
            self._asking(found, (DRAWN, number, place), partial(judge, law, problem), key)
            for place, (problem, key) in enumerate(zip(problems, keys, strict=True))
        ]

    def _stored(self, found: Planned) -> Iterator[Asking]:
        for number, (case, entry) in enumerate(cases_to_judge(found, self._bench.plan)):
            stage = QUARANTINED if entry is not None and entry.quarantine else STORED
            key = found.keys.get(case.problem.id)
            yield self._asking(found, (stage, number, 0), partial(judge_case, case, entry), key)

    def _asking(self, found: Planned, place: Place, ask: Ask, key: str | None) -> Asking:
        """Return the question about a problem, and the key of the module that it needs."""
        owner = f"{found.name} {key}" if key else ""
        subject, take = self._subject(found.name), partial(self._take, found, place)
        stage, law, number = place
        rank = (stage, number, law)  # the first problem of each law before any second
        return Question(subject, partial(_judged, ask, found, owner), take, rank), key

    def _submit(self, asked: Iterable[Asking]) -> None:
        """Queue problems, or keep them until their module is built."""
        for question, key in asked:
            place = (question.about.reference, key or "")
            if key is None or place in self._built:
                self._scheduler.ask(question)
            else:
                self._waiting[place].append((question, key))

    def _release(self, module: Wanted) -> None:
        """Queue the problems of a module that is now built for both releases, from any thread."""
        place = (module.found.name, module.key)
        self._scheduler.post(self._subject(place[0]), partial(self._ask_built, place))

    def _ask_built(self, place: tuple[str, str]) -> None:
        self._built.add(place)
        self._submit(self._waiting.pop(place, ()))

    def _ask_waiting(self) -> None:
        """Queue, at last, the problems of modules that were never built.

        The journal may have their answers, and what could not be built is left to the laws.
        """
        for place in [*self._waiting]:
            self._ask_built(place)

    def _take(self, found: Planned, place: Place, tried: Tried) -> None:
        self._judged[found.name].append((place, tried))
        self._bench.progress.judged.add()
        self._seen(tried, found)


def _judged(ask: Ask, found: Planned, owner: str, bench: Bench) -> Tried:
    OWNER.set(owner)
    return ask(found, bench)


def judge(law: Law, problem: Problem, found: Surveyed, bench: Bench) -> Tried:
    """Judge a drawn problem with both releases; under the first law, compare the results too."""
    if law is laws_of(found.operation)[0]:
        return _answered(law, problem, found, bench)
    return Tried(law.name, problem, _verdicts(Tried(law.name, problem, {}), found, bench))


def judge_case(case: Case, entry: Entry | None, found: Surveyed, bench: Bench) -> Tried:
    """Judge a stored case with both releases."""
    tried = Tried(case.law, case.problem, {}, CORPUS, case=case, entry=entry)
    return replace(tried, verdicts=_verdicts(tried, found, bench))


def _verdicts(tried: Tried, found: Surveyed, bench: Bench) -> dict[str, Verdict]:
    return {
        side: answer_of(bench.sides[side].ask(tried.request(found.addresses[side]), DEADLINES))
        for side in found.runs
    }


def _answered(law: Law, problem: Problem, found: Surveyed, bench: Bench) -> Tried:
    """Judge a problem, and compare the bits of both sides' inputs and results."""
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in found.name)
    kept = bench.plan.tensors / f"{name}-{problem.id}.pt"
    answers: dict[str, dict[str, Any]] = {}
    verdicts: dict[str, Verdict] = {}

    def request(side: str) -> dict[str, Any]:
        files = {"keep" if side == BASELINE else "compare": str(kept)}
        return found.addresses[side].request("answer", problem=problem.to_json(), **files)

    def again() -> None:
        """Make the baseline's result anew: a run that was killed may have taken it along."""
        if found.runs == SIDES and not kept.exists():
            bench.sides[BASELINE].run(request(BASELINE), DEADLINES)

    for side in found.runs:
        before = again if side == CANDIDATE else None
        outcome = bench.sides[side].ask(request(side), DEADLINES, before=before)
        if outcome.status == "done":
            answers[side] = outcome.result or {}
            verdicts[side] = Verdict.from_json(answers[side]["verdict"])
        else:
            verdicts[side] = answer_of(outcome)
    kept.unlink(missing_ok=True)
    tried = Tried(law.name, problem, verdicts)
    if not all(answers.get(side, {}).get("given") for side in SIDES):
        return tried
    one, other = (answers[side] for side in SIDES)
    return replace(
        tried,
        same_inputs=one["given"] == other["given"],
        same_bits=one["gave"] == other["gave"],
        difference=other.get("difference"),
    )


def announced(
    planned: Sequence[Planned], wanted: Sequence[Wanted], ending: Ending
) -> Iterator[str]:
    """Return sentences: what will be built and judged, what will not, and until when."""
    judged = [each for each in planned if each.runs and not each.left_out]
    ahead = {each.found.name for each in wanted}
    yield (
        f"{len(judged)} of {len(planned)} implementations will be judged: "
        f"{len(judged) - len(ahead)} need no module"
        + (f", {len(ahead)} need {count_of(len(wanted), 'module')} of each release" * bool(ahead))
    )
    if wanted:
        builds = [each for each in ordered_builds(wanted) if not each.exists]
        minutes = sum(each.wanted[0].found.build_minutes for each in builds)
        yield (
            f"{count_of(len(builds), 'compilation')} of them, about {minutes / compilers():.0f} "
            f"minutes of "
            f"{count_of(compilers(), 'compiler')}, and less where a cache has them; the first "
            "module of each implementation comes first"
        )
    for each in planned:
        if each.build_minutes and each.left_out and each.left_out != UNREACHED:
            why = "" if each.left_out == DEAR else ", for which others leave no time"
            cost = build_cost(each.build_minutes, each.build_compilers)
            yield f"not built, and not judged: {each.name}: {cost}{why}"
    problems = sum(sum(each.planned.values()) for each in judged)
    yield f"about {problems:,} problems will be judged with both releases, {_until(ending)}"


def _until(ending: Ending) -> str:
    if ending.seconds == math.inf:
        return "without a limit of time (--minutes sets one)"
    now = datetime.now().astimezone()
    judged, end = (
        (now + timedelta(seconds=max(0.0, ending.seconds_until(share)))).strftime("%H:%M:%S")
        for share in (JUDGED, 1.0)
    )
    return f"until {judged}; the report comes by {end} ({minutes_of(ending)})"
