"""Judging with both releases: each problem as soon as it is drawn and its module is built."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ....properties.laws import Law
from ....properties.search.priority_executor import PriorityExecutor
from ....properties.space.drawers import drawers_for
from ..sides.ending import EndedError, Ending
from ..sides.plan import Plan
from .asking import OWNER
from .building import Builders, Wanted, ask_keys
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
from .problem_queue import ProblemQueue, Task
from .watching import Progress

DRAWING = 2
"""Threads that draw problems, or wait for processes that do."""
STORED, DRAWN, QUARANTINED = range(3)
Ready = Callable[[Compared], None]
"""Takes an implementation whose problems can be drawn."""


@dataclass
class Judging:
    """Judges problems with both releases, while implementations are surveyed and modules built.

    Attributes:
        sides: workers that judge.
        builders: workers that build.
        plan: of the comparison.
        ending: of it: problems that nobody has judged by then are left out.
        progress: counts problems and modules.
        seen: takes each problem that was judged.
    """

    sides: Sides
    builders: Builders
    plan: Plan
    ending: Ending
    progress: Progress
    seen: Callable[[Tried, Compared], None] = lambda *_: None
    _judged: defaultdict[str, list[tuple[tuple[int, ...], Tried]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _ready: list[Compared] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _errors: list[BaseException] = field(default_factory=list)
    _dropped: bool = False

    def __post_init__(self) -> None:
        """Draw with as many processes as there are cores for."""
        self._drawers = drawers_for(self.plan.threads)

    def run(self, prepare: Callable[[Ready], Sequence[Wanted]]) -> None:
        """Judge all that can be judged; fills ``tried`` of each implementation.

        Args:
            prepare: surveys implementations, hands over each that can be judged, and returns the
                modules that they need.
        """
        try:
            self._run(prepare, ProblemQueue(self.ending))
        finally:
            self._drawers.close()
            for found in self._ready:
                answers = sorted(self._judged[found.name], key=lambda answer: answer[0])
                found.tried = [tried for _, tried in answers]
        if self._errors:
            raise self._errors[0]

    def _run(self, prepare: Callable[[Ready], Sequence[Wanted]], queue: ProblemQueue) -> None:
        size = self.plan.threads
        drawn: list[Future[None]] = []
        with (
            ThreadPoolExecutor(size) as judges,
            PriorityExecutor(max(DRAWING, self._drawers.processes)) as drawers,
        ):
            try:
                judge_them = partial(self._guarded, queue, partial(self._judge, queue))
                ended = [judges.submit(judge_them) for _ in range(size)]
                with suppress(EndedError):
                    wanted = prepare(partial(self._submit, queue, drawers, drawn))
                    self.builders.build(wanted, self.progress.compiled, queue.built)
                self.builders.close()
                for each in drawn:
                    each.result()
                queue.close()
                for each in ended:
                    each.result()
            except BaseException:  # what other threads still ask for is not waited for
                self._drop(queue)
                raise

    def _submit(
        self,
        queue: ProblemQueue,
        drawers: PriorityExecutor,
        drawn: list[Future[None]],
        found: Compared,
    ) -> None:
        """Have the problems of an implementation drawn: the first laws of all before any second."""
        found.planned = planned(found, self.plan)
        self.progress.judged.expect(sum(found.planned.values()))
        self._ready.append(found)
        queue.add(_stored(found, self.sides, self.plan))
        for number, (law, count) in enumerate(laws_to_judge(found, self.plan).items()):
            work = partial(self._draw, queue, found, number, law, count)
            drawn.append(drawers.submit(number, partial(self._guarded, queue, work)))

    def _guarded(self, queue: ProblemQueue, do: Callable[[], None]) -> None:
        """Do something in a thread; its first error ends the others, but the end is none."""
        try:
            with suppress(EndedError):
                do()
        except BaseException as error:  # noqa: BLE001  it is raised again once all have ended
            self._errors.append(error)
            self._drop(queue)

    def _drop(self, queue: ProblemQueue) -> None:
        self._dropped = True
        queue.drop()
        self.builders.close()
        for side in self.sides.values():
            side.close()

    def _judge(self, queue: ProblemQueue) -> None:
        while (task := queue.take()) is not None:
            started = time.monotonic()
            OWNER.set(f"{task.found.name} {task.module}" if task.module else "")
            with suppress(EndedError):
                tried = task.ask()
                with self._lock:
                    self._judged[task.found.name].append((task.place, tried))
                self.progress.judged.add()
                self.seen(tried, task.found)
            queue.judged(task, time.monotonic() - started)

    def _draw(
        self, queue: ProblemQueue, found: Compared, number: int, law: Law, count: int
    ) -> None:
        """Draw the problems of a law, the module of each noted; none once the time is over."""
        if self._dropped or self.ending.over:
            return
        problems = draw(law, count, found, self.plan, self._drawers)
        found.planned[law.name] = len(problems)
        self.progress.judged.expect(len(problems) - count)
        keys: list[str | None] = [None] * len(problems)
        if found.modules and problems:
            keys = ask_keys(found, self.sides, problems)
        queue.add(
            Task(
                found,
                (DRAWN, number, place),
                (DRAWN, place, number),
                partial(judge, law, problem, found, self.sides, self.plan),
                key,
            )
            for place, (problem, key) in enumerate(zip(problems, keys, strict=True))
        )


def _stored(found: Compared, sides: Sides, plan: Plan) -> Iterator[Task]:
    for number, (case, entry) in enumerate(cases_to_judge(found, plan)):
        stage = QUARANTINED if entry is not None and entry.quarantine else STORED
        place = (stage, 0, number)
        ask = partial(judge_case, case, entry, found, sides)
        yield Task(found, place, place, ask, found.keys.get(case.problem.id))


def planned(found: Compared, plan: Plan) -> dict[str, int]:
    """Return the number of problems that each law is to judge, and of stored cases under ``""``."""
    laws = {law.name: count for law, count in laws_to_judge(found, plan).items()}
    return {"": len(cases_to_judge(found, plan)), **laws}
