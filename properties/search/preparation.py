"""Getting to know an implementation before it is judged: what it supports, what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ...impl import Target, registry
from ...impl.targets.refusal import Refusal, most_telling
from ...impl.targets.registrations import Registration
from ...reference import AttentionProblem, Problem
from ..findings.claimed_space import surveyed
from ..findings.report import ImplementationReport
from ..isolation.sanitizer import LESS_WORK
from ..isolation.workers import Deadlines, Outcome, Worker
from ..space.axes import Axes, all_axes, example, narrow
from ..space.given_lengths import given, without_lengths
from ..space.module_selection import Keys, Libraries, Module, Selection
from ..space.operations import OPERATIONS
from ..space.profiles import CHEAP_MINUTES, NO_COST, SLOW, Cost, Profile, Timing, cost_of, on_device
from ..space.restrictions import WHOLE_SPACE, Only, OnlyError
from ..verdicts.memory_need import NO_ROOM
from ..worker.requests import (
    Address,
    DeviceLostError,
    HarnessError,
    probe_device,
    refusals_of,
    verdict_of,
)
from .building import Builder, compilers_of_a_build
from .candidate import Candidate
from .deadlines import COMPILE_SECONDS
from .module_plan import ModulePlan
from .plan import Plan

Lease = Callable[[], AbstractContextManager[Worker]]
"""Returns a context in which a worker belongs to the caller."""
Once = Callable[[str, Callable[[], None]], None]
"""Does what has a name, or waits until another process has done it."""
LOAD_SECONDS = 120.0
"""Deadline of a process's first call of a module that was built before, which only loads it."""
SHOWN_WHOLE = 10
"""Minutes from which tenths are not shown."""
PATIENCE = 4.0
"""Factor of the least deadline of a slow implementation: in Triton's interpreter problems of one
size differ in cost, by their heads for one, and a busy machine does the rest."""
FAILURES = {"error", "stopped"}
"""Fields of the worker's answers that say what went wrong."""
MANY_QUESTIONS = 1_000
"""Problems that an implementation is asked about from which on a refusal of all says how many."""
IMPORT_SECONDS = 60.0
"""Deadline for importing an implementation's module."""
_STACK_TOP = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in')
"""A frame as faulthandler writes it: the first one is the innermost."""


def usable(lease: Lease, device: str) -> tuple[list[str], list[Registration]]:
    """Import what distributions register, in a worker.

    What the machine is to blame for is left to the run, which says it.

    Returns:
        Names of all implementations that can be used, and the registrations that cannot, each with
        the reason.
    """
    owners = dict.fromkeys(registry.BUILT_IN, "Kernelproof")
    broken, left_out = [], set()
    for each in registry.installed():
        reason = each.reason
        if not reason:
            with lease() as worker:
                reason = _unusable(worker, each, device, owners)
            left_out |= {each.name} if reason else set()
        if reason:
            broken.append(replace(each, reason=reason))
    return [name for name in registry.registered() if name not in left_out], broken


def _unusable(worker: Worker, each: Registration, device: str, owners: dict[str, str]) -> str:
    """Return why a registration cannot be used; empty where it can, which then has its name."""
    try:
        declared = _described(worker, Address(each.reference, None, device))
    except (DeviceLostError, HarnessError):
        return ""
    if "error" in declared:
        return str(declared["error"]).strip().rpartition("\n")[2]  # of a traceback, its error
    name = str(declared["name"])
    if name in owners:
        return f"it is named {name!r}, as an implementation of {owners[name]}"
    owners[name] = each.distribution
    return ""


def survey(
    worker: Worker,
    address: Address,
    max_work: int,
    report: ImplementationReport,
    only: Only = WHOLE_SPACE,
) -> Axes | None:
    """Import an implementation and learn what it supports.

    Args:
        worker: that asks.
        address: of the implementation.
        max_work: see ``Axes``.
        report: to be filled.
        only: the part of the space that is asked for.

    Returns:
        None where it cannot be judged; the report says why.
    """
    declared = _described(worker, address)
    if "error" in declared:
        report.error = str(declared["error"])
        return None
    report.declared = declared
    report.name, report.operation = str(declared["name"]), str(declared["operation"])
    refusal: Refusal | None = None
    ended, questions = False, 0

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        nonlocal refusal, ended, questions
        if ended:
            return [None] * len(problems)
        asked = [problem.to_json() for problem in problems]
        questions += len(asked)
        reply = _ask(worker, address, "probe", problems=asked)
        if "stopped" in reply:  # a law finds that ``supports`` ends its process
            ended = True
            return [None] * len(problems)
        refusals = refusals_of(reply)
        refusal = most_telling([refusal, *refusals])
        return refusals

    try:
        axes = narrow(report.operation, probe, max_work, axes=only.axes(report.operation))
    except OnlyError as error:
        report.refusal = Refusal(str(error), "only")
        return None
    except HarnessError as error:
        report.error = str(error)
        return None
    if axes is None:
        report.refusal = refusal and _counted(refusal, questions)
        return None
    report.refused = dict(axes.refused)
    report.claimed_space = surveyed(all_axes(axes.operation), axes.values, axes.refused)
    return axes


def _counted(refusal: Refusal, questions: int) -> Refusal:
    """Return a refusal that says how many problems were asked about, where these were many."""
    if refusal.code != "supports" or questions < MANY_QUESTIONS:
        return refusal
    reason = f"{refusal} (none of {questions:,} problems that it was asked about is supported)"
    return Refusal(reason, refusal.code, refusal.about)


def _here(name: str, do: Callable[[], None]) -> None:
    del name
    do()


def prepare(
    lease: Lease,
    plan: Plan,
    report: ImplementationReport,
    builder: Builder,
    target: Target,
    *,
    built: Callable[[int, int], None] | None = None,
    begun: Callable[[Candidate], None] | None = None,
    once: Once = _here,
    together: ModulePlan | None = None,
    stored: Callable[[ImplementationReport], Sequence[Problem]] = lambda _: (),
    named: Callable[[ImplementationReport], str] = lambda report: report.name,
) -> Candidate | None:
    """Import an implementation, learn what it supports and what it costs; build its modules.

    Args:
        lease: of a worker that asks; none is held while modules are built.
        plan: of the run.
        report: to be filled.
        builder: of modules, where they take long.
        target: the machine that workers run on.
        built: is called with the modules that are built, and how many there are.
        begun: is called with the implementation and its first module, while others are built.
        once: does the building, or waits for the process that does.
        together: chooses modules with those of other implementations.
        stored: returns the problems of its stored cases, whose modules are built too.
        named: returns the name in the report: its own, or one that tells it from another's.

    Raises:
        CancelledError: the builder was closed, or another machine builds the modules.
    """
    address = Address(
        report.reference,
        plan.operation,
        plan.device,
        without_rules=tuple(plan.without_rules),
        soak=plan.profile.soak,
        tool=plan.sanitizer,
        environment=plan.environment,
        distrust=plan.distrust,
    )
    profile = on_device(plan.profile, plan.device)
    if plan.sanitizer and plan.device == "cuda":
        profile = replace(profile, max_work=profile.max_work // LESS_WORK)
    together = together or ModulePlan(1)
    with lease() as worker:
        found = _surveyed(worker, address, profile.max_work, plan, report, stored)
        report.name = named(report)
        if found is None:
            return None
    surveyed, selection = found

    def candidate_of(modules: Sequence[Module]) -> Candidate:
        restricted = _restricted(address, surveyed, modules)
        candidate = Candidate(
            report.name,
            *restricted,
            frozenset(report.declared["declares"]),
            plan.ledger,
            target,
            declared_name=str(report.declared["name"]),
        )
        with lease() as worker:
            _time(worker, candidate, report, profile, plan.costs.get(report.name))
        candidate.deadlines.compile_seconds = _compile_seconds(modules)
        return candidate

    modules: list[Module] = []
    early: Candidate | None = None
    ready: list[Module] = []
    if selection is None:
        together.leave(report)
    else:
        several = len(plan.implementations) > 1
        if begun is not None and several and (ready := selection.ready()):
            # The first problems need not wait until all other implementations are known.
            selection.take(ready)
            report.modules = len(ready)
            early = candidate_of(ready)
            begun(early)
        each = compilers_of_a_build(report.declared["build_compilers"])
        chosen = together.choose(report, selection, report.declared["build_minutes"], each)
        modules = chosen.modules
        if chosen.missing and not modules:
            report.refusal = Refusal(
                f"building one of its modules takes about {_minutes_text(chosen.missing)} of a "
                f"core; all builds of this run have {_minutes_text(together.minutes)}, of which "
                f"others left {_minutes_text(chosen.left)}, and one build has "
                f"{_minutes_text(each * together.longest)}",
                "time",
            )
            return None
    if modules and selection is not None:
        # The keys too: another search, say with another profile, needs other modules.
        key = f"{report.reference} {[module.key for module in modules]}"
        # What exists is loaded by whoever judges with it: nobody waits for another process.
        every = [each for each in [*modules, *selection.others()] if not each.exists]
        builder.claim(every)
        first = None if ready or begun is None else _first_to_judge(modules, selection)
        if begun is not None and first is not None:
            builder.build(address, [each for each in every if each is first], report, built)
            report.modules = 1
            early = candidate_of([first])
            begun(early)
            every = [each for each in every if each is not first]
        once(key, lambda: builder.build(address, every, report, built))
        report.modules = len(modules)
    if early is None:
        return candidate_of(modules)
    early.deadlines.compile_seconds = _compile_seconds(modules)
    address, axes = _restricted(address, early.axes, modules)
    return replace(early, address=address, axes=axes)


def _surveyed(
    worker: Worker,
    address: Address,
    max_work: int,
    plan: Plan,
    report: ImplementationReport,
    stored: Callable[[ImplementationReport], Sequence[Problem]],
) -> tuple[Axes, Selection | None] | None:
    """Return what an implementation supports, and its modules; None where it cannot be judged."""
    axes = survey(worker, address, max_work, report, plan.only)
    if axes is None:
        return None
    try:
        return axes, _selection(worker, address, axes, plan, report, stored(report))
    except HarnessError as error:  # its compile_key or library raised
        report.error = str(error)
        return None


def _selection(
    worker: Worker,
    address: Address,
    axes: Axes,
    plan: Plan,
    report: ImplementationReport,
    stored: Sequence[Problem],
) -> Selection | None:
    """Return the modules to choose from; None where none is built ahead."""
    if not report.declared["build_ahead"]:
        return None
    minutes = report.declared["build_minutes"]
    return Selection(
        axes,
        module_keys(worker, address),
        plan.profile.modules_of(minutes, together=plan.seconds < math.inf),
        stored=stored,
        companions=minutes < CHEAP_MINUTES,
        libraries=module_libraries(worker, address),
    )


def _restricted(address: Address, axes: Axes, modules: Sequence[Module]) -> tuple[Address, Axes]:
    """Return an address and axes of these modules only; of all problems if there are none."""
    if not modules:
        return address, axes
    # Laws change problems, and may come to another module: those alone are called.
    return (
        replace(address, modules=tuple(module.key for module in modules)),
        replace(axes, restrictions=tuple(module.values for module in modules)),
    )


def _compile_seconds(modules: Sequence[Module]) -> float:
    """Return the deadline of a process's first call of one of these modules.

    What exists was found by its name: a call may want a variant of it, which is compiled then.
    """
    built = modules and not any(each.exists for each in modules)
    return LOAD_SECONDS if built else COMPILE_SECONDS


def _minutes_text(minutes: float) -> str:
    return f"{minutes:,.0f} minutes" if minutes >= SHOWN_WHOLE else f"{minutes:.1f} minutes"


def _first_to_judge(modules: Sequence[Module], selection: Selection) -> Module | None:
    """Return the module to judge while the others are built; None where that saves no time.

    It is that of the simplest problem, whose calls are timed.
    """
    first = next((each for each in modules if each.key == selection.simplest), None)
    return first if any(each is not first and not each.exists for each in modules) else None


def _time(
    worker: Worker,
    candidate: Candidate,
    report: ImplementationReport,
    profile: Profile,
    cost: Cost | None,
) -> None:
    """Measure what an implementation costs, and so how large its problems may be.

    Where the cost class is given, calls are timed for their deadlines only.
    """
    address = candidate.address
    timing = example(candidate.axes.operation, without_lengths(candidate.axes.simplest))
    timing = OPERATIONS[timing.operation].timed(timing)
    timed = _ask(worker, address, "cost", problem=timing.to_json())
    if timed.get("stopped", {}).get("status") == "HANG":
        # On a busy machine a first call takes long: taken for a hang, a slow kernel counts as fast.
        timed = _ask(worker, address, "cost", problem=timing.to_json())
    report.call_seconds = float(timed.get("seconds", 0.0))
    heads = timing.num_requests * timing.num_qo_heads if isinstance(timing, AttentionProblem) else 0
    small = Timing(float(timed.get("undisturbed", 0.0)), timing.work, heads)
    cost = cost or cost_of(small, _time_larger(worker, address, timing, small), profile)
    candidate.cost, report.cost = cost, cost.name
    candidate.axes = replace(candidate.axes, max_work=cost.max_work, max_heads=cost.max_heads)
    slow = cost.name == SLOW
    long, declared = OPERATIONS[timing.operation].long, report.declared
    if not given(candidate.axes.values):  # else there are no others
        candidate.long = long(candidate.axes, declared["tile"], declared["split"], slow=slow)
    if slow:
        candidate.deadlines.patience = PATIENCE
    candidate.deadlines.slowness = address.slowness
    candidate.deadlines.record(timing, report.call_seconds)
    candidate.warm_up = None if "stopped" in timed else timing


def module_keys(worker: Worker, address: Address) -> Keys:
    """Return a function that asks for the key of the module of each of some problems."""

    def keys(problems: Sequence[Problem]) -> list[str | None]:
        asked = [problem.to_json() for problem in problems]
        reply = _ask(worker, address, "modules", problems=asked)
        if "error" in reply:
            raise HarnessError(str(reply["error"]))
        return list(reply["keys"])

    return keys


def module_libraries(worker: Worker, address: Address) -> Libraries:
    """Return a function that asks what is compiled for the module of each of some problems."""

    def libraries(problems: Sequence[Problem]) -> list[tuple[str, bool]]:
        asked = [problem.to_json() for problem in problems]
        reply = _ask(worker, address, "libraries", problems=asked)
        if "error" in reply:
            raise HarnessError(str(reply["error"]))
        return [(name, exists) for name, exists in reply["libraries"]]

    return libraries


def _time_larger(worker: Worker, address: Address, problem: Problem, small: Timing) -> Timing:
    """Time a call of several times the work, where a call is not for nothing."""
    larger = OPERATIONS[problem.operation].larger(problem)
    if small.seconds < NO_COST or not larger:
        return Timing(2 * small.seconds, 2 * small.work)
    timed = _ask(worker, address, "cost", problem=larger.to_json())
    seconds = float(timed.get("undisturbed", 0.0))
    if not seconds:  # it was refused, or failed: as if all of the time went into the work
        return Timing(2 * small.seconds, 2 * small.work)
    return Timing(seconds, larger.work)


def _described(worker: Worker, address: Address) -> dict[str, Any]:
    """Have an implementation imported and described; ``error`` says why it cannot be."""
    _ask(worker, address, "target")  # the process's own start is no part of the import
    outcome = _run(worker, address.request("describe"), Deadlines(load=IMPORT_SECONDS))
    if outcome.status == "done":
        return outcome.result or {}
    where = _STACK_TOP.search(outcome.stack)
    at = f" ({where['file']}:{where['line']})" if where else ""
    if outcome.kind == "overrun":
        return {"error": f"importing it took longer than {outcome.limit:g} s{at}"}
    verdict = verdict_of(outcome)
    if verdict.kind == NO_ROOM:
        return {"error": f"it was not imported: {verdict.message}"}
    return {"error": f"importing it ended the process: {verdict.kind}{at}"}


def _run(worker: Worker, request: Mapping[str, object], deadlines: Deadlines) -> Outcome:
    """Ask; what goes wrong where others' code ran before is asked again in a fresh process."""
    outcome = worker.run(request, deadlines)
    if outcome.shared and (outcome.died or not FAILURES.isdisjoint(outcome.result or ())):
        if not outcome.died:
            worker.renew()
        worker.run({**request, "task": "target"})  # its own start is no part of what is asked
        outcome = worker.run(request, deadlines)
    return outcome


def _ask(worker: Worker, address: Address, task: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    outcome = _run(worker, address.request(task, **more), address.first_deadlines)
    if outcome.status == "done":
        return outcome.result or {}
    if outcome.died:
        probe_device(worker, address.device)
    verdict = verdict_of(outcome)
    return {"stopped": verdict.to_json(), "error": f"{task}: {verdict.message}"}
