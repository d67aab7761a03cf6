"""Choosing and compiling the modules that both releases are compared with."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
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
    note_cost,
)
from ....properties.search.costs import keep_builds, read_builds
from ....properties.search.module_plan import BUILD_SHARE, LONGEST_SHARE, Chosen, ModulePlan
from ....properties.search.preparation import module_keys, module_libraries
from ....properties.search.priority_executor import for_each
from ....properties.space.axis_values import tuples
from ....properties.space.module_selection import Selection, find_modules
from ....properties.space.profiles import CHEAP_MINUTES
from ....reference import Problem, problem_from_json
from ..sides.plan import JUDGED
from ..sides.releases import SIDES, Release
from .asking import Asker, Bench
from .preparing import cases_to_judge, to_judge
from .records import DEAR, TIME, Planned, Surveyed


@dataclass(frozen=True)
class Wanted:
    """A module that an implementation needs.

    Attributes:
        found: the implementation.
        key: the module's key.
        problem: the problem whose call compiles it.
        turn: how many modules of the implementation come before it.
        libraries: names, by side, of what is compiled for it, which all implementations have in
            common, and whether that exists.
    """

    found: Planned
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
    surveyed: Sequence[Surveyed], bench: Bench
) -> tuple[list[Planned], list[Wanted]]:
    """Choose the modules of all implementations together, within the time that compilers have.

    Problems are drawn of these modules only. The modules of stored cases follow them. An
    implementation for which there is no time is left out. What is chosen is one answer of the
    journal: a run that goes on, with modules built and less time, builds the same ones.

    Args:
        surveyed: implementations whose modules are built ahead.
        bench: the bench of the comparison; its minutes limit the modules.

    Raises:
        EndedError: the comparison has ended before they were chosen.
    """
    if not surveyed:
        return [], []
    stored = [[case.problem for case, _ in cases_to_judge(each, bench.plan)] for each in surveyed]
    question = {
        "modules": {
            found.name: {
                "of": {side: each.request("modules") for side, each in found.addresses.items()},
                "stored": [each.id for each in of_it],
            }
            for found, of_it in zip(surveyed, stored, strict=True)
        }
    }
    answer = bench.journal.ask(question, lambda: _chosen(surveyed, stored, bench))
    found = [
        _planned(each, answer[each.name], of_it, bench)
        for each, of_it in zip(surveyed, stored, strict=True)
    ]
    return [each for each, _ in found], [each for _, wanted in found for each in wanted]


def _chosen(
    surveyed: Sequence[Surveyed], stored: Sequence[Sequence[Problem]], bench: Bench
) -> dict[str, Any]:
    """Choose modules, and return those of each implementation as JSON."""
    ending, learned = bench.ending, read_builds(bench.plan.cases)
    # Each module is compiled with both releases.
    minutes = BUILD_SHARE * compilers() * ending.seconds / 60 / len(SIDES)
    longest = LONGEST_SHARE * ending.seconds / 60

    def choose(found: Surveyed, selection: Selection) -> Chosen:
        report = ImplementationReport(found.name, found.reference)
        return together.choose(report, selection, found.build_minutes, found.build_compilers)

    with ThreadPoolExecutor(len(surveyed)) as threads:
        selections = list(threads.map(partial(_selection, bench), surveyed, stored))
        # Its patience begins here, when all are surveyed.
        together = ModulePlan(len(surveyed), minutes=minutes, longest=longest, learned=learned)
        chosen = list(threads.map(choose, surveyed, selections))
    return {
        found.name: {
            "modules": [
                {"key": module.key, "values": module.values, "first": module.first.to_json()}
                for module in each.modules
            ],
            "others": [other.first.to_json() for other in selection.others()],
            "left_out": _left_out(each, min(minutes, found.build_compilers * longest)),
        }
        for found, selection, each in zip(surveyed, selections, chosen, strict=True)
    }


def _left_out(chosen: Chosen, minutes: float) -> str:
    """Return the code of why there is no time for a module; empty where there is one."""
    if chosen.modules or not chosen.missing:
        return ""
    return DEAR if chosen.missing > minutes else TIME


def _selection(bench: Bench, found: Surveyed, stored: Sequence[Problem]) -> Selection:
    askers = {side: Asker(bench.sides[side]) for side in found.addresses}
    side = found.runs[-1]

    def libraries(problems: Sequence[Problem]) -> list[tuple[str, bool]]:
        """Return what one release compiles, and whether it exists for all of them."""
        answers = {
            each: module_libraries(askers[each], address)(problems)
            for each, address in found.addresses.items()
        }
        return [
            (name, all(of_side[place][1] for of_side in answers.values()))
            for place, (name, _) in enumerate(answers[side])
        ]

    assert found.axes is not None  # noqa: S101  else it has no modules
    modules = find_modules(
        found.axes,
        module_keys(askers[side], found.addresses[side]),
        stored=stored,
        companions=found.build_minutes < CHEAP_MINUTES,
        libraries=libraries,
    )
    together = bench.ending.seconds < math.inf
    most = bench.plan.profile.modules_of(found.build_minutes, together=together)
    return Selection(modules, found.axes.simplest, most)


def _planned(
    found: Surveyed, chosen: Mapping[str, Any], stored: Sequence[Problem], bench: Bench
) -> tuple[Planned, list[Wanted]]:
    """Return what is to be judged of an implementation, of the chosen modules, and these."""
    if chosen["left_out"]:
        return to_judge(found, bench.plan, left_out=chosen["left_out"]), []
    firsts = [problem_from_json(each["first"]) for each in chosen["modules"]]
    keys = ask_keys(found, bench, stored) if stored else []
    of_stored = {
        problem.id: key for problem, key in zip(stored, keys, strict=True) if key is not None
    }
    others = {of_stored[each.id]: each for each in map(problem_from_json, chosen["others"])}
    wanted = [
        *zip((each["key"] for each in chosen["modules"]), firsts, strict=True),
        *others.items(),
    ]
    problems = [problem for _, problem in wanted]
    libraries = {side: _libraries(found, bench, side, problems) for side in found.addresses}
    restricted: dict[str, Any] = {}
    if firsts and found.axes is not None:
        values = tuple(tuples(each["values"]) for each in chosen["modules"])
        restricted = {
            "axes": replace(found.axes, restrictions=values),
            "addresses": {
                side: replace(address, modules=_known(_keys(found, bench, side, firsts)))
                for side, address in found.addresses.items()
            },
        }
    planned = to_judge(found, bench.plan, modules=len(wanted), keys=of_stored, **restricted)
    return planned, [
        Wanted(planned, key, problem, turn, {side: libraries[side][turn] for side in libraries})
        for turn, (key, problem) in enumerate(wanted)
    ]


def _known(keys: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(key for key in keys if key is not None)


def ask_keys(found: Surveyed, bench: Bench, problems: Sequence[Problem]) -> list[str | None]:
    """Return the key of the module of each problem; None where it needs none that is chosen."""
    return _keys(found, bench, found.runs[-1], problems)


def _keys(
    found: Surveyed, bench: Bench, side: str, problems: Sequence[Problem]
) -> list[str | None]:
    address = found.addresses[side]
    question = {"keys": address.request("keys"), "of": [each.id for each in problems]}
    ask = partial(module_keys(Asker(bench.sides[side]), address), problems)
    return list(bench.sides[side].remember(question, ask))


def _libraries(
    found: Surveyed, bench: Bench, side: str, problems: Sequence[Problem]
) -> list[tuple[str, bool]]:
    """Return what a side compiles for the module of each problem, and whether that exists."""
    address = found.addresses[side]
    question = {"libraries": address.request("libraries"), "of": [each.id for each in problems]}
    ask = partial(module_libraries(Asker(bench.sides[side]), address), problems)
    return [(name, exists) for name, exists in bench.sides[side].remember(question, ask)]


class Builders:
    """Workers of both releases that learn what there is to build, and then build it.

    They are no judging workers: while a module is compiled, problems are judged, and while
    implementations are surveyed too.

    Args:
        releases: the releases by side.
        bench: the bench with these workers.

    Attributes:
        at_a_time: modules that are built at a time.
        compilers_each: compilers that one of them may start.
        bench: the bench with these workers.
        seconds: the seconds of each module that was built, by implementation and side.
    """

    def __init__(self, releases: Mapping[str, Release], bench: Bench) -> None:
        device = bench.plan.device
        self.at_a_time = builds_at_a_time(compilers_of_a_build(COMPILERS_A_BUILD), device)
        self.compilers_each = compilers() // self.at_a_time
        environment = limited_to(self.compilers_each)
        self.bench = bench.staffed(releases, size=self.at_a_time, environment=environment)
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self._minutes: dict[str, float] = {}
        self._done: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """End the workers, and what they compile, with the block or with the time for it."""
        # Not with the time of the comparison: a compiler may run on for long.
        with closing(self.bench), self.bench.ending.closing(self.bench.close, JUDGED):
            yield

    def build(self, wanted: Sequence[Wanted], built: Callable[[Wanted], object]) -> None:
        """Build modules for both releases, each library once, until the time for that is over.

        One that cannot be built is left to the laws: their first call says what is wrong.

        Args:
            wanted: modules.
            built: called with each module that all sides have.

        Raises:
            EndedError: the comparison has ended, or its time for building.
        """
        left = []
        for each in ordered_builds(wanted):
            if each.exists:
                self._end(each, 0.0, built)
            else:
                left.append(each)
        self.bench.progress.compiled.expect(len(left))
        build = partial(self._build, built=built)
        try:
            for_each(left, self.at_a_time, build, failed=self.bench.close)
        finally:
            keep_builds(self.bench.plan.cases, self._minutes)

    def _build(self, build: Build, built: Callable[[Wanted], object]) -> None:
        first, count = build.wanted[0], self.bench.progress.compiled
        address = first.found.addresses[build.side]
        request = address.request("build", problem=first.problem.to_json())
        count.begin()
        outcome = self.bench.sides[build.side].ask(request, BUILD_DEADLINES, note="build")
        count.add()
        note_cost(self._minutes, first.libraries[build.side][0], outcome, self.compilers_each)
        self._end(build, outcome.seconds, built)

    def _end(self, build: Build, seconds: float, built: Callable[[Wanted], object]) -> None:
        """Count what is compiled: modules that all sides have are built."""
        for each in build.wanted:
            with self._lock:
                of_it = self.seconds.setdefault(each.found.name, {}).setdefault(build.side, [])
                of_it.append(seconds if each is build.wanted[0] else 0.0)
                self._done[id(each)] += 1
                everywhere = self._done[id(each)] == len(each.found.addresses)
            if everywhere:
                built(each)
