"""Judging with both releases: what has no module, or has it already, while others are compiled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from ....properties.laws import Law
from ....properties.search.building import compilers
from ....properties.verdicts.text import count_of
from ..sides.ending import JUDGED, EndedError, Ending
from ..sides.journal import Journal
from ..sides.plan import Plan
from ..sides.releases import SIDES, Release
from .building import Wanted, ask_keys, build_all
from .comparison import (
    Compared,
    Sides,
    Tried,
    cases_to_judge,
    draw,
    judge,
    judge_case,
    laws_to_judge,
)
from .turns import Task, Turns
from .unjudged import DEAR
from .watching import Progress

DRAWING = 2
"""Threads that draw problems, which are one thread's work in Python."""
STORED, DRAWN, QUARANTINED = range(3)


@dataclass
class Judging:
    """Judges problems with both releases, and builds what they need.

    Attributes:
        sides: that judge.
        releases: by side, whose modules are built.
        journal: of the run.
        plan: of it.
        ending: of it: problems that nobody has judged by then are left out.
        progress: is told.
    """

    sides: Sides
    releases: Mapping[str, Release]
    journal: Journal
    plan: Plan
    ending: Ending
    progress: Progress
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _errors: list[BaseException] = field(default_factory=list)

    def run(self, compared: Sequence[Compared], wanted: Sequence[Wanted]) -> None:
        """Build modules, and judge all that can be judged meanwhile; fills ``tried`` of each.

        Args:
            compared: implementations that run with a release.
            wanted: modules that they need.
        """
        ordered = sorted(compared, key=lambda each: bool(each.modules))
        turns = Turns(ordered, self.ending)
        judged: dict[str, list[tuple[tuple[int, ...], Tried]]] = {each.name: [] for each in ordered}
        # Each thread waits for one side at a time: on a GPU two keep the workers of both busy.
        size = self.plan.jobs * (len(SIDES) if self.plan.device == "cuda" else 1)
        feeding = (lambda: self._build(wanted, turns), lambda: self._draw(ordered, turns))
        with ThreadPoolExecutor(size) as judges, ThreadPoolExecutor(len(feeding)) as feeders:
            try:
                judge_them = partial(self._judge, turns, judged)
                ended = [judges.submit(self._guarded, turns, judge_them) for _ in range(size)]
                for fed in [feeders.submit(self._guarded, turns, feed) for feed in feeding]:
                    fed.result()
                turns.close()
                for each in ended:
                    each.result()
            except BaseException:  # what other threads still ask for is not waited for
                self._drop(turns)
                raise
        for found in compared:
            answers = sorted(judged[found.name], key=lambda answer: answer[0])
            found.tried = [tried for _, tried in answers]
        if self._errors:
            raise self._errors[0]

    def _guarded(self, turns: Turns, do: Callable[[], None]) -> None:
        """Do something in a thread; its first error ends the others, but the end is none."""
        try:
            with suppress(EndedError):
                do()
        except BaseException as error:  # noqa: BLE001  it is raised again once all have ended
            self._errors.append(error)
            self._drop(turns)

    def _drop(self, turns: Turns) -> None:
        turns.drop()
        for side in self.sides.values():
            side.close()

    def _judge(
        self, turns: Turns, judged: Mapping[str, list[tuple[tuple[int, ...], Tried]]]
    ) -> None:
        while (task := turns.take()) is not None:
            with suppress(EndedError):
                tried = task.ask()
                with self._lock:
                    judged[task.found.name].append((task.place, tried))
                self.progress.judged.add()

    def _build(self, wanted: Sequence[Wanted], turns: Turns) -> None:
        build_all(
            wanted,
            self.releases,
            self.journal,
            self.plan,
            self.ending,
            count=self.progress.compiled,
            built=turns.built,
        )

    def _draw(self, compared: Sequence[Compared], turns: Turns) -> None:
        turns.add(task for each in compared for task in _stored(each, self.sides, self.plan))
        with ThreadPoolExecutor(DRAWING) as threads:
            for tasks in threads.map(self._drawn, _by_law(compared, self.plan)):
                turns.add(tasks)

    def _drawn(self, drawn: tuple[Compared, int, Law, int]) -> list[Task]:
        """Draw the problems of a law, the module of each noted; none once the time is over."""
        found, number, law, count = drawn
        if self.ending.over:
            return []
        problems = draw(law, count, found, self.plan)
        found.planned[law.name] = len(problems)
        self.progress.judged.expect(len(problems) - count)
        keys: list[str | None] = [None] * len(problems)
        if found.modules and problems:
            keys = ask_keys(found, self.sides, problems)
        return [
            Task(
                found,
                (DRAWN, number, place),
                (DRAWN, place, number),
                partial(judge, law, problem, found, self.sides, self.plan),
                key,
            )
            for place, (problem, key) in enumerate(zip(problems, keys, strict=True))
        ]


def _stored(found: Compared, sides: Sides, plan: Plan) -> Iterator[Task]:
    for number, (case, entry) in enumerate(cases_to_judge(found, plan)):
        stage = QUARANTINED if entry is not None and entry.quarantine else STORED
        place = (stage, 0, number)
        ask = partial(judge_case, case, entry, found, sides)
        yield Task(found, place, place, ask, found.keys.get(case.problem.id))


def _by_law(compared: Sequence[Compared], plan: Plan) -> list[tuple[Compared, int, Law, int]]:
    """Return each law of each implementation: the first ones of all before any second."""
    columns = []
    for found in compared:
        laws = laws_to_judge(found, plan)
        columns.append(
            [(found, number, law, count) for number, (law, count) in enumerate(laws.items())]
        )
    return [each for row in itertools.zip_longest(*columns) for each in row if each is not None]


def planned(found: Compared, plan: Plan) -> dict[str, int]:
    """Return the number of problems that each law is to judge, and of stored cases under ``""``."""
    laws = {law.name: count for law, count in laws_to_judge(found, plan).items()}
    return {"": len(cases_to_judge(found, plan)), **laws}


def is_dear(found: Compared, wanted: Sequence[Wanted], ending: Ending) -> bool:
    """Whether compiling one module takes all compilers longer than the whole comparison may."""
    if ending.minutes is None or all(each.exists for each in wanted):
        return False
    return found.build_minutes / compilers() > ending.minutes


def plan_told(
    compared: Sequence[Compared],
    judged: Sequence[Compared],
    wanted: Sequence[Wanted],
    ending: Ending,
) -> Iterator[str]:
    """Say what will be built and judged, what not, and until when."""
    ahead = {each.found.name for each in wanted}
    yield (
        f"{len(judged)} of {len(compared)} implementations will be judged: "
        f"{len(judged) - len(ahead)} need no module"
        + (f", {len(ahead)} need {count_of(len(wanted), 'module')} of each release" * bool(ahead))
    )
    if wanted:
        costs = {
            (side, library or id(each)): each.found.build_minutes
            for each in wanted
            for side, (library, exists) in each.libraries.items()
            if not exists
        }
        yield (
            f"{count_of(len(costs), 'compilation')} of them, about "
            f"{sum(costs.values()) / compilers():.0f} minutes of "
            f"{count_of(compilers(), 'compiler')}, and less where a cache has them; the first "
            "module of each implementation comes first"
        )
    dear = [each for each in compared if each.left_out == DEAR]
    for each in dear:
        yield (
            f"not built, and not judged: {each.name}: one module takes about "
            f"{each.build_minutes / compilers():.0f} minutes"
        )
    problems = sum(sum(each.planned.values()) for each in judged)
    yield f"about {problems:,} problems will be judged with both releases, {_until(ending)}"


def _until(ending: Ending) -> str:
    if ending.minutes is None:
        return "however long it takes (--minutes sets a limit)"
    now = datetime.now().astimezone()
    judged, end = (
        (now + timedelta(seconds=max(0.0, ending.seconds_until(share)))).strftime("%H:%M:%S")
        for share in (JUDGED, 1.0)
    )
    return f"until {judged}; the report comes by {end} (--minutes {ending.minutes:g})"
