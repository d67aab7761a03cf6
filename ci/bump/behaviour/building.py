"""Compiling the modules that both releases are compared on, while problems are judged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ....impl.protocol import COMPILERS_A_BUILD
from ....properties.search.building import (
    BUILD_DEADLINES,
    builds_at_a_time,
    compilers,
    compilers_of_a_build,
    limited_to,
)
from ....properties.search.preparation import module_keys, module_libraries
from ....properties.space.axes import Axes
from ....properties.space.module_selection import Module, Selection, further
from ....reference import Problem, problem_from_json
from ..sides.ending import Ending
from ..sides.journal import Journal
from ..sides.plan import Plan
from ..sides.releases import BASELINE, CANDIDATE, Release
from .asking import Asker, Side
from .comparison import Compared, Sides, cases_to_judge
from .surveying import tuples
from .watching import Count


@dataclass(frozen=True)
class Wanted:
    """A module that an implementation needs.

    Attributes:
        found: the implementation.
        key: of the module.
        problem: whose call compiles it.
        turn: how many modules of the implementation come before it.
        libraries: by side, what is compiled for it, under a name that all implementations have in
            common, and whether that exists.
    """

    found: Compared
    key: str
    problem: Problem
    turn: int
    libraries: Mapping[str, tuple[str, bool]]

    @property
    def exists(self) -> bool:
        """Whether no side compiles anything for it."""
        return all(exists for _, exists in self.libraries.values())


class Queue:
    """Modules that wait for a builder, each once for a side.

    What exists, or was built for another implementation, comes first. What another builder is
    compiling waits until it exists.

    Args:
        jobs: modules with a side, in their order.
    """

    def __init__(self, jobs: Iterable[tuple[Wanted, str]]) -> None:
        self._left = [*jobs]
        self._there = {self._library(job) for job in self._left if job[0].libraries[job[1]][1]}
        self._compiled: set[tuple[str, str]] = set()
        self._changed = threading.Condition()

    @contextmanager
    def take(self) -> Iterator[tuple[Wanted, str] | None]:
        """Lend the next one until its library exists; None where none is left."""
        with self._changed:
            while self._left and (found := self._next()) is None:
                self._changed.wait()
            job = found if self._left else None
            if job is not None:
                self._left.remove(job)
                self._compiled.add(self._library(job))
        try:
            yield job
        finally:
            if job is not None:
                with self._changed:
                    self._compiled.discard(self._library(job))
                    self._there.add(self._library(job))
                    self._changed.notify_all()

    def drop(self) -> None:
        """Leave the rest."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()

    def _next(self) -> tuple[Wanted, str] | None:
        free = [job for job in self._left if self._library(job) not in self._compiled]
        there = (job for job in free if self._library(job) in self._there)
        return next(there, free[0] if free else None)

    @staticmethod
    def _library(job: tuple[Wanted, str]) -> tuple[str, str]:
        wanted, side = job
        return side, wanted.libraries[side][0] or f"{wanted.found.name} {wanted.key}"


def choose_modules(found: Compared, sides: Sides, plan: Plan) -> list[Wanted]:
    """Choose the modules of an implementation that takes long to compile, for both releases.

    Problems are drawn of these alone from then on. The modules of stored cases follow them.
    """
    if found.axes is None or not found.build_minutes:
        return []
    modules, others = _modules(found, found.axes, sides, plan)
    wanted = [*((module.key, module.first) for module in modules), *others.items()]
    problems = [problem for _, problem in wanted]
    libraries = {side: _libraries(found, sides, side, problems) for side in found.addresses}
    _restrict(found, sides, modules)
    found.modules = len(wanted)
    return [
        Wanted(found, key, problem, turn, {side: libraries[side][turn] for side in libraries})
        for turn, (key, problem) in enumerate(wanted)
    ]


def build_all(
    wanted: Sequence[Wanted],
    releases: Mapping[str, Release],
    journal: Journal,
    plan: Plan,
    ending: Ending,
    *,
    count: Count,
    built: Callable[[Compared, str], object],
) -> None:
    """Build modules for both releases, until the time for that is over.

    Each implementation gets one before any gets its second, and the quickest come first; a library
    that several implementations need is compiled once. One that
    cannot be built is left to the laws: their first call says what is wrong.

    Args:
        wanted: modules.
        releases: by side.
        journal: of the run.
        plan: of it.
        ending: of it.
        count: of compilations, of which a module has one for each side.
        built: is given the implementation and the key of each module that all sides have.
    """
    ordered = sorted(wanted, key=lambda each: (each.turn, each.found.build_minutes))
    jobs = [(each, side) for each in ordered for side in each.found.addresses]
    if not jobs:
        return
    compilers_each = compilers_of_a_build(COMPILERS_A_BUILD)
    at_a_time = min(builds_at_a_time(compilers_each, plan.device), len(jobs))
    environment = limited_to(compilers() // at_a_time)
    builders = {
        name: Side(
            name,
            journal,
            partial(release.workers, plan.device, size=at_a_time, environment=environment),
            plan.device,
        )
        for name, release in releases.items()
    }
    builds = _Builds(Queue(jobs), builders, count, built)
    with ExitStack() as stack:
        stack.callback(builds.close)
        stack.enter_context(ending.closing(builds.close))
        if ending.minutes is not None:  # a compiler may run on for long
            timer = threading.Timer(ending.left, builds.close)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        with ThreadPoolExecutor(at_a_time) as threads:
            for ended in [threads.submit(builds.in_turns) for _ in range(at_a_time)]:
                ended.result()


@dataclass
class _Builds:
    """What the threads that build have in common."""

    queue: Queue
    builders: Sides
    count: Count
    built: Callable[[Compared, str], object]
    _done: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def in_turns(self) -> None:
        """Build one after the other; the first error, such as the end, ends the other threads."""
        try:
            while True:
                with self.queue.take() as job:
                    if job is None:
                        return
                    self._build(*job)
        except BaseException:
            self.queue.drop()
            self.close()
            raise

    def _build(self, each: Wanted, side: str) -> None:
        request = each.found.addresses[side].request("build", problem=each.problem.to_json())
        self.count.begin()
        outcome = self.builders[side].ask(request, BUILD_DEADLINES, note="build")
        with self._lock:
            each.found.builds.setdefault(side, []).append(outcome.seconds)
            self._done[id(each)] += 1
            both = self._done[id(each)] == len(each.found.addresses)
        self.count.add()
        if both:
            self.built(each.found, each.key)

    def close(self) -> None:
        """End the compilers."""
        for side in self.builders.values():
            side.close()


def _modules(
    found: Compared, axes: Axes, sides: Sides, plan: Plan
) -> tuple[list[Module], dict[str, Problem]]:
    """Choose the modules that problems are drawn of; give a problem of each that cases need too.

    Both are answers of the journal. What module each case needs is noted in ``found.keys``.
    """
    side = CANDIDATE if CANDIDATE in found.addresses else BASELINE
    address, asker = found.addresses[side], Asker(sides[side])
    most = min(plan.modules, plan.profile.modules_of(found.build_minutes))
    stored = [case.problem for case, _ in cases_to_judge(found, plan)]

    def choice() -> list[dict[str, Any]]:
        selection = Selection(
            axes,
            module_keys(asker, address),
            most,
            stored=stored,
            libraries=module_libraries(asker, address),
        )
        while taken := selection.next(lambda module: module.exists):
            selection.take(taken)
        return [
            {
                "key": module.key,
                "values": {name: list(values) for name, values in module.values.items()},
                "first": module.first.to_json(),
            }
            for module in selection.chosen
        ]

    question = {
        "modules": address.request("modules"),
        "most": most,
        "stored": [each.id for each in stored],
    }
    modules = [
        Module(each["key"], tuples(each["values"]), problem_from_json(each["first"]))
        for each in sides[side].remember(question, choice)
    ]
    keys = ask_keys(found, sides, stored) if stored else []
    for problem, key in zip(stored, keys, strict=True):
        if key is not None:
            found.keys[problem.id] = key
    others = further(modules, lambda _: keys, stored)
    return modules, {found.keys[each.id]: each for each in others}


def ask_keys(found: Compared, sides: Sides, problems: Sequence[Problem]) -> list[str | None]:
    """Return the key of the module of each problem; None where it needs none that is chosen."""
    side = CANDIDATE if CANDIDATE in found.addresses else BASELINE
    return _keys(found, sides, side, problems)


def _keys(
    found: Compared, sides: Sides, side: str, problems: Sequence[Problem]
) -> list[str | None]:
    address = found.addresses[side]
    question = {"keys": address.request("keys"), "of": [each.id for each in problems]}
    ask = partial(module_keys(Asker(sides[side]), address), problems)
    return list(sides[side].remember(question, ask))


def _libraries(
    found: Compared, sides: Sides, side: str, problems: Sequence[Problem]
) -> list[tuple[str, bool]]:
    """Return what a side compiles for the module of each problem, and whether that exists."""
    address = found.addresses[side]
    question = {"libraries": address.request("libraries"), "of": [each.id for each in problems]}
    ask = partial(module_libraries(Asker(sides[side]), address), problems)
    return [(name, exists) for name, exists in sides[side].remember(question, ask)]


def _restrict(found: Compared, sides: Sides, modules: Sequence[Module]) -> None:
    """Let problems of these modules alone be drawn and called."""
    if found.axes is None or not modules:
        return
    found.axes = replace(found.axes, restrictions=tuple(each.values for each in modules))
    firsts: list[Problem] = [each.first for each in modules]
    for side, address in found.addresses.items():
        known = tuple(key for key in _keys(found, sides, side, firsts) if key is not None)
        found.addresses[side] = replace(address, modules=known)
