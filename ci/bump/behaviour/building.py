"""Compiling the modules that both releases are compared on, while problems are judged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from ....properties.search.preparation import module_keys
from ....properties.space.axes import Axes
from ....properties.space.module_selection import Module, choose, further
from ....reference import Problem, problem_from_json
from ..sides.ending import EndedError, Ending
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
    """

    found: Compared
    key: str
    problem: Problem
    turn: int


def choose_modules(found: Compared, sides: Sides, plan: Plan) -> list[Wanted]:
    """Choose the modules of an implementation that takes long to compile, for both releases.

    Problems are drawn of these alone from then on. The modules of stored cases follow them.
    """
    if found.axes is None or not found.build_minutes:
        return []
    modules, others = _modules(found, found.axes, sides, plan)
    wanted = [*((module.key, module.first) for module in modules), *others.items()]
    _restrict(found, sides, modules)
    found.modules = len(wanted)
    return [Wanted(found, key, problem, turn) for turn, (key, problem) in enumerate(wanted)]


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

    Each implementation gets one before any gets its second, and the quickest come first. One that
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
    lock, done = threading.Lock(), Counter[int]()

    def close() -> None:
        for side in builders.values():
            side.close()

    def build(job: tuple[Wanted, str]) -> None:
        each, side = job
        request = each.found.addresses[side].request("build", problem=each.problem.to_json())
        count.begin()
        outcome = builders[side].ask(request, BUILD_DEADLINES, note="build")
        with lock:
            each.found.builds.setdefault(side, []).append(outcome.seconds)
            done[id(each)] += 1
            both = done[id(each)] == len(each.found.addresses)
        count.add()
        if both:
            built(each.found, each.key)

    with ExitStack() as stack:
        stack.callback(close)
        stack.enter_context(ending.closing(close))
        if ending.minutes is not None:  # a compiler may run on for long
            timer = threading.Timer(ending.left, close)
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        threads = stack.enter_context(ThreadPoolExecutor(at_a_time))
        try:
            list(threads.map(build, jobs))
        except EndedError:
            return
        except BaseException:
            close()
            raise


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
        return [
            {
                "key": module.key,
                "values": {name: list(values) for name, values in module.values.items()},
                "first": module.first.to_json(),
            }
            for module in choose(axes, module_keys(asker, address), most, stored=stored)
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


def _restrict(found: Compared, sides: Sides, modules: Sequence[Module]) -> None:
    """Let problems of these modules alone be drawn and called."""
    if found.axes is None or not modules:
        return
    found.axes = replace(found.axes, restrictions=tuple(each.values for each in modules))
    firsts: list[Problem] = [each.first for each in modules]
    for side, address in found.addresses.items():
        known = tuple(key for key in _keys(found, sides, side, firsts) if key is not None)
        found.addresses[side] = replace(address, modules=known)
