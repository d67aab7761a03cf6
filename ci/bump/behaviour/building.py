"""Compiling the modules that both releases are compared on, before the first problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from ..sides.journal import Journal
from ..sides.plan import Plan
from ..sides.releases import BASELINE, CANDIDATE, Release
from .asking import Asker, Side
from .comparison import Compared, Sides, entries_of, further_cases
from .surveying import tuples

Built = Callable[[int, int], None]


def build_all(
    compared: Sequence[Compared],
    sides: Sides,
    releases: Mapping[str, Release],
    journal: Journal,
    plan: Plan,
    built: Built = lambda _done, _of: None,
) -> None:
    """Choose modules of each implementation that takes long to compile, and build them.

    The same modules for both releases: problems are drawn of these alone. One that cannot be built
    is left to the laws: their first call says what is wrong.
    """
    chosen = [
        (each, *_modules(each, each.axes, sides, plan))
        for each in compared
        if each.axes is not None and each.build_minutes
    ]
    jobs = [
        (each, side, problem)
        for each, modules, others in sorted(chosen, key=lambda found: -found[0].build_minutes)
        for problem in [*(module.first for module in modules), *others]
        for side in each.addresses
    ]
    if not jobs:
        return
    wanted = compilers_of_a_build(COMPILERS_A_BUILD)
    at_a_time = min(builds_at_a_time(wanted, plan.device), len(jobs))
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
    done = itertools.count(1)

    def build(job: tuple[Compared, str, Problem]) -> None:
        each, side, problem = job
        request = each.addresses[side].request("build", problem=problem.to_json())
        outcome = builders[side].ask(request, BUILD_DEADLINES, note="build")
        each.builds.setdefault(side, []).append(outcome.seconds)
        built(next(done), len(jobs))

    try:
        with ThreadPoolExecutor(at_a_time) as threads:
            list(threads.map(build, jobs))
    finally:
        for side in builders.values():
            side.close()
    for each, modules, _ in chosen:
        _restrict(each, sides, modules)


def _modules(
    found: Compared, axes: Axes, sides: Sides, plan: Plan
) -> tuple[list[Module], list[Problem]]:
    """Choose the modules that problems are drawn of; give a problem of each that cases need too.

    Both are answers of the journal.
    """
    side = CANDIDATE if CANDIDATE in found.addresses else BASELINE
    address, asker = found.addresses[side], Asker(sides[side])
    most = min(plan.modules, plan.profile.modules_of(found.build_minutes))
    stored: list[Problem] = [
        *(entry.load_case()[1] for entry in entries_of(found, plan)),
        *(case.problem for case in further_cases(found, plan)),
    ]
    of = [each.id for each in stored]

    def choice() -> list[dict[str, Any]]:
        return [
            {
                "key": module.key,
                "values": {name: list(values) for name, values in module.values.items()},
                "first": module.first.to_json(),
            }
            for module in choose(axes, module_keys(asker, address), most, stored=stored)
        ]

    def keys(problems: Sequence[Problem]) -> list[str | None]:
        question = {"keys": address.request("keys"), "of": of}
        return list(sides[side].remember(question, partial(module_keys(asker, address), problems)))

    question = {"modules": address.request("modules"), "most": most, "stored": of}
    modules = [
        Module(each["key"], tuples(each["values"]), problem_from_json(each["first"]))
        for each in sides[side].remember(question, choice)
    ]
    return modules, further(modules, keys, stored)


def _restrict(found: Compared, sides: Sides, modules: Sequence[Module]) -> None:
    """Let problems of these modules alone be drawn and called."""
    if found.axes is None or not modules:
        return
    found.axes = replace(found.axes, restrictions=tuple(each.values for each in modules))
    firsts: list[Problem] = [each.first for each in modules]
    for side, address in found.addresses.items():
        question = {"keys": address.request("keys"), "of": [each.id for each in firsts]}
        asker = Asker(sides[side])
        keys = sides[side].remember(question, partial(module_keys(asker, address), firsts))
        known = tuple(key for key in keys if key is not None)
        found.addresses[side] = replace(address, modules=known)
