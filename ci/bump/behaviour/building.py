"""Choosing and compiling the modules that both releases are compared with."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ....impl.protocol import COMPILERS_A_BUILD
from ....properties.findings.report import ImplementationReport
from ....properties.search.building import (
    BUILD_DEADLINES,
    builds_at_a_time,
    compilers,
    compilers_of_a_build,
    limited_to,
    was_built,
)
from ....properties.search.costs import keep_builds, read_builds
from ....properties.search.module_plan import BUILD_SHARE, LONGEST_SHARE, Chosen, ModulePlan
from ....properties.search.preparation import module_keys, module_libraries
from ....properties.space.module_selection import Module, Selection
from ....properties.space.profiles import CHEAP_MINUTES
from ....reference import Problem, problem_from_json
from ..sides.ending import Ending
from ..sides.journal import Journal
from ..sides.plan import Plan
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release
from .asking import Asker, Side
from .comparison import Compared, Sides, cases_to_judge
from .surveying import tuples
from .unjudged import DEAR, TIME
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


@dataclass(frozen=True)
class Build:
    """What is compiled once for a side.

    Attributes:
        side: its name.
        wanted: modules that need it; a call of the first one compiles it.
        exists: whether it was compiled before.
    """

    side: str
    wanted: tuple[Wanted, ...]
    exists: bool


def ordered_builds(wanted: Sequence[Wanted]) -> list[Build]:
    """Order what is compiled: one of each implementation before any second, the quick ones first.

    A library that several implementations need is compiled once.
    """
    ordered = sorted(wanted, key=lambda each: (each.turn, each.found.build_minutes))
    libraries: dict[tuple[str, str], list[Wanted]] = {}
    for each in ordered:
        for side in each.found.addresses:
            library = each.libraries[side][0] or f"{each.found.name} {each.key}"
            libraries.setdefault((side, library), []).append(each)
    return [
        Build(side, tuple(members), members[0].libraries[side][1])
        for (side, _), members in libraries.items()
    ]


def choose_modules(
    compared: Sequence[Compared], sides: Sides, journal: Journal, plan: Plan, ending: Ending
) -> list[Wanted]:
    """Choose the modules of all implementations together, within the time that compilers have.

    Problems are drawn of these modules only from then on. The modules of stored cases follow them.
    An implementation for which there is no time is left out. What is chosen is one answer of the
    journal: a run that goes on, with modules built and less time, builds the same ones.

    Args:
        compared: implementations, all that were surveyed.
        sides: workers that are asked.
        journal: of the run.
        plan: of it.
        ending: of it, whose minutes limit the modules.

    Raises:
        EndedError: the comparison has ended before they were chosen.
    """
    building = {
        each.name: each for each in compared if each.axes is not None and each.build_minutes
    }
    if not building:
        return []
    stored = {
        name: [case.problem for case, _ in cases_to_judge(found, plan)]
        for name, found in building.items()
    }
    question = {
        "modules": {
            name: {
                "of": {side: each.request("modules") for side, each in found.addresses.items()},
                "stored": [each.id for each in stored[name]],
            }
            for name, found in building.items()
        }
    }
    answer = journal.ask(question, lambda: _chosen(building, stored, sides, plan, ending))
    return [
        wanted
        for name, found in building.items()
        for wanted in _wanted(found, answer[name], stored[name], sides)
    ]


def _chosen(
    building: Mapping[str, Compared],
    stored: Mapping[str, Sequence[Problem]],
    sides: Sides,
    plan: Plan,
    ending: Ending,
) -> dict[str, Any]:
    """Choose modules, and return those of each implementation as JSON."""

    def selection(found: Compared) -> Selection:
        return _selection(found, stored[found.name], sides, plan, ending)

    with ThreadPoolExecutor(len(building)) as threads:
        selections = list(threads.map(selection, building.values()))
        # Each module is compiled with both releases.
        minutes = _compiling_minutes(ending) / len(SIDES)
        learned = read_builds(plan.cases)
        longest = math.inf if ending.minutes is None else LONGEST_SHARE * ending.minutes
        together = ModulePlan(len(building), minutes=minutes, longest=longest, learned=learned)

        def choose(found: Compared, selection: Selection) -> Chosen:
            report = ImplementationReport(found.name, found.reference)
            return together.choose(report, selection, found.build_minutes, found.build_compilers)

        chosen = list(threads.map(choose, building.values(), selections))
    return {
        name: {
            "modules": [
                {
                    "key": module.key,
                    "values": {axis: list(values) for axis, values in module.values.items()},
                    "first": module.first.to_json(),
                }
                for module in each.modules
            ],
            "others": [other.first.to_json() for other in selection.others()],
            "left_out": _left_out(each, min(minutes, building[name].build_compilers * longest)),
        }
        for name, selection, each in zip(building, selections, chosen, strict=True)
    }


def _compiling_minutes(ending: Ending) -> float:
    """Return the minutes of one core that compilers have; infinite without a limit of time."""
    return math.inf if ending.minutes is None else BUILD_SHARE * compilers() * ending.minutes


def _left_out(chosen: Chosen, minutes: float) -> str:
    """Return the code of why there is no time for a module; empty where there is one."""
    if chosen.modules or not chosen.missing:
        return ""
    return DEAR if chosen.missing > minutes else TIME


def _selection(
    found: Compared, stored: Sequence[Problem], sides: Sides, plan: Plan, ending: Ending
) -> Selection:
    side = CANDIDATE if CANDIDATE in found.addresses else BASELINE
    minutes = found.build_minutes

    def libraries(problems: Sequence[Problem]) -> list[tuple[str, bool]]:
        """Return what one release compiles, and whether it exists for all of them."""
        answers = [
            module_libraries(Asker(sides[each]), address)(problems)
            for each, address in found.addresses.items()
        ]
        names = answers[found.runs.index(side)]
        return [
            (name, all(exists for _, exists in of_all))
            for (name, _), of_all in zip(names, zip(*answers, strict=True), strict=True)
        ]

    assert found.axes is not None  # noqa: S101  else it has no modules
    return Selection(
        found.axes,
        module_keys(Asker(sides[side]), found.addresses[side]),
        plan.profile.modules_of(minutes, together=ending.minutes is not None),
        stored=stored,
        companions=minutes < CHEAP_MINUTES,
        libraries=libraries,
    )


def _wanted(
    found: Compared, chosen: Mapping[str, Any], stored: Sequence[Problem], sides: Sides
) -> list[Wanted]:
    """Return the chosen modules of an implementation, and let it draw problems of these only."""
    found.left_out = chosen["left_out"]
    if found.left_out:
        return []
    modules = [
        Module(each["key"], tuples(each["values"]), problem_from_json(each["first"]))
        for each in chosen["modules"]
    ]
    keys = ask_keys(found, sides, stored) if stored else []
    found.keys = {
        problem.id: key for problem, key in zip(stored, keys, strict=True) if key is not None
    }
    others = {found.keys[each.id]: each for each in map(problem_from_json, chosen["others"])}
    wanted = [*((module.key, module.first) for module in modules), *others.items()]
    problems = [problem for _, problem in wanted]
    libraries = {side: _libraries(found, sides, side, problems) for side in found.addresses}
    _restrict(found, sides, modules)
    found.modules = len(wanted)
    return [
        Wanted(found, key, problem, turn, {side: libraries[side][turn] for side in libraries})
        for turn, (key, problem) in enumerate(wanted)
    ]


class Builders:
    """Workers of both releases that learn what there is to build, and then build it.

    They are no judging workers: while a module is compiled, problems are judged, and while
    implementations are surveyed too.

    Args:
        releases: by side.
        journal: of the run.
        plan: of it.
        ending: of it.

    Attributes:
        at_a_time: modules that are built at a time.
        compilers_each: compilers that one of them may start.
        sides: the workers.
    """

    def __init__(
        self, releases: Mapping[str, Release], journal: Journal, plan: Plan, ending: Ending
    ) -> None:
        self.at_a_time = builds_at_a_time(compilers_of_a_build(COMPILERS_A_BUILD), plan.device)
        self._plan, self._ending = plan, ending
        self.compilers_each = compilers() // self.at_a_time
        environment = limited_to(self.compilers_each)
        self.sides = {
            name: Side(
                name,
                journal,
                partial(release.workers, plan.device, size=self.at_a_time, environment=environment),
                plan.device,
            )
            for name, release in releases.items()
        }

    @contextmanager
    def opened(self) -> Iterator[None]:
        """End the workers, and what they compile, with the block or with the comparison."""
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.enter_context(self._ending.closing(self.close))
            if self._ending.minutes is not None:  # a compiler may run on for long
                timer = threading.Timer(self._ending.left, self.close)
                timer.daemon = True
                timer.start()
                stack.callback(timer.cancel)
            yield

    def close(self) -> None:
        """End the workers."""
        for side in self.sides.values():
            side.close()

    def build(
        self, wanted: Sequence[Wanted], count: Count, built: Callable[[Compared, str], object]
    ) -> None:
        """Build modules for both releases, each library once, until the time for that is over.

        One that cannot be built is left to the laws: their first call says what is wrong.

        Args:
            wanted: modules.
            count: of compilations, of which a module has one for each side.
            built: called with the implementation and the key of each module that all sides have.

        Raises:
            EndedError: the comparison has ended, or its time for building.
        """
        builds = _Builds(self, count, built)
        left = []
        for each in ordered_builds(wanted):
            if each.exists:
                builds.end(each, 0.0)
            else:
                left.append(each)
        count.expect(len(left))
        builds.left.extend(left)
        size = min(self.at_a_time, len(left))
        if not size:
            return
        try:
            with ThreadPoolExecutor(size) as threads:
                for ended in [threads.submit(builds.in_turns) for _ in range(size)]:
                    ended.result()
        finally:
            keep_builds(self._plan.cases, builds.minutes)


@dataclass
class _Builds:
    """What the threads that build have in common."""

    builders: Builders
    count: Count
    built: Callable[[Compared, str], object]
    left: deque[Build] = field(default_factory=deque)
    minutes: dict[str, float] = field(default_factory=dict)
    _done: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def in_turns(self) -> None:
        """Build one after the other; the first error, such as the end, ends the other threads."""
        try:
            while self.left:
                with suppress(IndexError):  # another thread was faster
                    self._build(self.left.popleft())
        except BaseException:
            self.left.clear()
            self.builders.close()
            raise

    def _build(self, build: Build) -> None:
        first = build.wanted[0]
        request = first.found.addresses[build.side].request(
            "build", problem=first.problem.to_json()
        )
        self.count.begin()
        outcome = self.builders.sides[build.side].ask(request, BUILD_DEADLINES, note="build")
        self.count.add()
        library = first.libraries[build.side][0]
        if library and was_built(outcome):
            self.minutes[library] = self.builders.compilers_each * outcome.seconds / 60
        self.end(build, outcome.seconds)

    def end(self, build: Build, seconds: float) -> None:
        """Count what is compiled: modules that all sides have are built."""
        for each in build.wanted:
            with self._lock:
                of_side = each.found.builds.setdefault(build.side, [])
                of_side.append(seconds if each is build.wanted[0] else 0.0)
                self._done[id(each)] += 1
                both = self._done[id(each)] == len(each.found.addresses)
            if both:
                self.built(each.found, each.key)


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
    """Draw and call problems of these modules only."""
    if found.axes is None or not modules:
        return
    found.axes = replace(found.axes, restrictions=tuple(each.values for each in modules))
    firsts: list[Problem] = [each.first for each in modules]
    for side, address in found.addresses.items():
        known = tuple(key for key in _keys(found, sides, side, firsts) if key is not None)
        found.addresses[side] = replace(address, modules=known)
