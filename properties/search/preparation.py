"""Getting to know an implementation before it is judged: what it supports, what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...impl import Target, registry
from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Refusal
from ...impl.targets.registrations import Registration
from ...reference import AttentionProblem, Problem
from ..findings.claimed_space import surveyed
from ..findings.report import ImplementationReport
from ..isolation.sanitizer import LESS_WORK
from ..isolation.workers import Deadlines, Outcome, Worker
from ..space.axes import Axes, all_axes, example, narrow
from ..space.given_lengths import given, without_lengths
from ..space.module_selection import Found, Keys, Libraries, Module, Selection
from ..space.operations import OPERATIONS
from ..space.pairs import Taken
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
from .plan import Plan, light_of
from .scheduler import Lease

Once = Callable[[str, Callable[[], None]], None]
"""Does what has a name, or waits until another process has done it."""
LOAD_SECONDS = 120.0
"""Deadline in seconds of a process's first call of a module that was built before."""
SHOWN_WHOLE = 10
"""Minutes from which on they are shown without tenths."""
PATIENCE = 4.0
"""Multiplier on the shortest deadline of slow implementations: interpreted problems of equal size
differ in cost."""
FAILURES = {"error", "stopped"}
"""Fields of the worker's answers that say what went wrong."""
MANY_QUESTIONS = 1_000
"""Number of probed problems from which on a refusal of all of them states the number."""
SURVEY_SECONDS = 900.0
"""Deadline in seconds of a survey beside its calls of ``supports``, each of which has its own."""
IMPORT_SECONDS = 60.0
"""Deadline in seconds for importing an implementation's module."""
_STACK_TOP = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in')
"""A frame as faulthandler writes it: the first one is the innermost."""


def usable(lease: Lease, device: str) -> tuple[list[str], list[Registration]]:
    """Import what distributions register, in a worker.

    Errors of the machine are not reported here; the run reports them.

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
        worker: the worker that asks.
        address: the address of the implementation.
        max_work: see ``Axes``.
        report: the report to be filled.
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
    try:
        asked = only.axes(report.operation)
        axes = _supported_axes(worker, address, max_work, asked, report)
    except OnlyError as error:
        report.refusal = Refusal(str(error), "only")
        return None
    except HarnessError as error:
        report.error = str(error)
        return None
    if axes is None:
        return None
    report.refused = dict(axes.refused)
    report.claimed_space = surveyed(all_axes(axes.operation), axes.values, axes.refused)
    return axes


def _supported_axes(
    worker: Worker,
    address: Address,
    max_work: int,
    asked: Mapping[str, tuple[Any, ...]],
    report: ImplementationReport,
) -> Axes | None:
    """Have a worker find what is supported of some axes; None where that is nothing.

    The report then says why.

    Raises:
        HarnessError: the worker's answer is none.
    """
    reply = _ask(worker, address, "survey", load=SURVEY_SECONDS, max_work=max_work, axes=asked)
    if "stopped" in reply:
        # ``supports`` has ended its process: everything counts as claimed, and a law finds it.
        return narrow(report.operation, _claim_all, max_work, axes=asked)
    try:
        if reply["axes"] is None:
            (refusal,) = refusals_of({"refusals": [reply["refusal"]]})
            report.refusal = refusal and _counted(refusal, int(reply["questions"]))
            return None
        found = Axes.from_json(reply["axes"])
        if missing := asked.keys() - found.values.keys():
            message = f"nothing of {', '.join(sorted(missing))}"
            raise ValueError(message)  # noqa: TRY301  as of what is read
        return _of_asked(found, Axes(report.operation, asked, max_work))
    except (KeyError, TypeError, ValueError) as error:
        message = f"survey: its process gave no answer: {message_of(error)}"
        raise HarnessError(message) from error


def _of_asked(found: Axes, asked: Axes) -> Axes:
    """Return what a process says of its axes; ValueError where it was not asked about them.

    It runs the code under test, which may claim less, and nothing else.
    """
    simplest = {name: (value,) for name, value in found.simplest.items()}
    for name, values in (*found.values.items(), *simplest.items()):
        if any(value not in asked.values[name] for value in values):
            message = f"{name} has values that were not asked about"
            raise ValueError(message)
    return replace(
        asked,
        values=found.values,
        refused=found.refused,
        simplest=found.simplest,
        max_requests=min(int(found.max_requests), 1),
    )


def _claim_all(problems: Sequence[Problem]) -> list[Refusal | None]:
    return [None] * len(problems)


def _asked_to_support(
    worker: Worker, address: Address, problems: Sequence[Problem]
) -> dict[str, Any]:
    return _ask(worker, address, "probe", problems=[problem.to_json() for problem in problems])


def _taken(worker: Worker, candidate: Candidate, problems: Sequence[Problem]) -> list[bool]:
    """Return whether each problem is supported, and may show what the ledger does not know."""
    reply = _asked_to_support(worker, candidate.address, problems)
    if "refusals" not in reply:  # a law finds that ``supports`` ends its process
        return [False] * len(problems)
    return [
        refusal is None and not candidate.is_known(problem)
        for refusal, problem in zip(refusals_of(reply), problems, strict=True)
    ]


def _covering(
    find: Callable[[Axes, Taken], Sequence[Problem]], candidate: Candidate, worker: Worker
) -> Sequence[Problem]:
    """Return the problems that cover features, or pairs of which thousands are asked about."""
    return find(candidate.axes, partial(_taken, worker, candidate))


def _counted(refusal: Refusal, questions: int) -> Refusal:
    """Return a refusal that says how many problems were asked about, where these were many."""
    if refusal.code != "supports" or questions < MANY_QUESTIONS:
        return refusal
    reason = f"{refusal} (none of {questions:,} problems that it was asked about is supported)"
    return Refusal(reason, refusal.code, refusal.about)


def _here(name: str, do: Callable[[], None]) -> None:
    del name
    do()


@dataclass(frozen=True)
class Setting:
    """What the preparations of all implementations of a run have in common.

    Attributes:
        plan: plan of the run.
        target: machine that workers run on.
        builder: builds modules, where they take long.
        together: chooses modules with those of other implementations.
        once: does the building, or waits for the process that does.
        stored: returns the problems of an implementation's stored cases, whose modules are built.
        named: returns the name in the report: its own, or one that differs from another's.
        built: receives a name, how many of its modules are built, and how many there are.
        surveys: lets a few surveys at a time wait in line for a worker; behind all of them, what
            is known already would wait for the last.
    """

    plan: Plan
    target: Target
    builder: Builder
    together: ModulePlan = field(default_factory=lambda: ModulePlan(1))
    once: Once = _here
    stored: Callable[[ImplementationReport], Sequence[Problem]] = lambda _: ()
    named: Callable[[ImplementationReport], str] = lambda report: report.name
    built: Callable[[str, int, int], None] = lambda *_: None
    surveys: AbstractContextManager[Any] = field(default_factory=nullcontext)


def prepare(
    setting: Setting,
    report: ImplementationReport,
    lease: Lease,
    begun: Callable[[Candidate], None] | None = None,
) -> Candidate | None:
    """Import an implementation, learn what it supports and what it costs; build its modules.

    Args:
        setting: what it has in common with others.
        report: report of the implementation, which is filled.
        lease: leases a worker that asks; none is held while modules are built.
        begun: receives the implementation with its first module, while the others are built; None
            where nobody searches it then.

    Returns:
        None where it cannot be judged; the report says why.

    Raises:
        CancelledError: the builder was closed, or another machine builds the modules.
    """
    with setting.surveys:
        found = _surveyed(setting, report, lease)
    if found is None:
        return None
    if found.selection is None:
        setting.together.leave(report)
        return found.timed(())
    # With others, the choice waits until all are known: what exists can be judged before.
    several = begun is not None and len(setting.plan.implementations) > 1
    # The modules that exist on disk keep the processors busy until the slowest survey is over.
    ready = found.selection.ready() if several else []
    found.selection.take(ready)
    early = found.begin(ready, begun)
    modules = found.choose(found.selection)
    if modules is None:
        return None
    if modules:
        # What exists is loaded by whoever judges with it: nobody waits for another process.
        unbuilt = [each for each in [*modules, *found.selection.others()] if not each.exists]
        setting.builder.claim(unbuilt)
        if early is None and begun is not None:
            first = _first_to_judge(modules, found.selection)
            found.build([each for each in unbuilt if each in first])
            unbuilt = [each for each in unbuilt if each not in first]
            early = found.begin(first, begun)
        # The keys too: another search, say with another profile, needs other modules.
        key = f"{report.reference} {[module.key for module in modules]}"
        setting.once(key, lambda: found.build(unbuilt))
        report.modules = len(modules)
    if early is None:
        return found.timed(modules)
    early.deadlines.compile_seconds = _compile_seconds(modules)
    # Costs were measured with the first module; they are not measured again for the others, so that
    # both searches draw alike.
    address, axes = _restricted(found.address, early.axes, modules)
    return replace(early, address=address, axes=axes)


def _surveyed(setting: Setting, report: ImplementationReport, lease: Lease) -> _Surveyed | None:
    """Learn what an implementation supports, and its modules; None where it cannot be judged."""
    plan = setting.plan
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
    with lease() as worker:
        axes = survey(worker, address, profile.max_work, report, plan.only)
        selection = None
        if axes is not None:
            try:
                selection = _selection(worker, address, axes, plan, report, setting.stored(report))
            except HarnessError as error:  # its compile_key or library raised
                report.error = str(error)
                axes = None
        report.name = setting.named(report)
    if axes is None:
        return None
    return _Surveyed(setting, report, lease, address, axes, profile, selection)


@dataclass(frozen=True)
class _Surveyed:
    """An implementation of which it is known what it supports, but not what it costs.

    Attributes:
        setting, report, lease: the same as in ``prepare``.
        address: how workers call it.
        axes: what it supports.
        profile: profile of the run, as far as this device goes.
        selection: modules to choose from; None where none is built ahead.
    """

    setting: Setting
    report: ImplementationReport
    lease: Lease
    address: Address
    axes: Axes
    profile: Profile
    selection: Selection | None

    def begin(
        self, modules: Sequence[Module], begun: Callable[[Candidate], None] | None
    ) -> Candidate | None:
        """Hand over what can be searched with these modules, before the others are there."""
        if begun is None or not modules:
            return None
        self.report.modules = len(modules)
        early = self.timed(modules)
        begun(early)
        return early

    def choose(self, selection: Selection) -> Sequence[Module] | None:
        """Choose modules with those of other implementations; None where no time is left for one.

        The report then says so.
        """
        report, together = self.report, self.setting.together
        each = compilers_of_a_build(report.declared["build_compilers"])
        chosen = together.choose(report, selection, report.declared["build_minutes"], each)
        if chosen.modules or not chosen.missing:
            return chosen.modules
        report.refusal = Refusal(
            f"building one of its modules takes about {_minutes_text(chosen.missing)} of a "
            f"core; all builds of this run have {_minutes_text(together.minutes)}, of which "
            f"others left {_minutes_text(chosen.left)}, and one build has "
            f"{_minutes_text(each * together.longest)}",
            "time",
        )
        return None

    def build(self, modules: Sequence[Module]) -> None:
        """Build modules, as many at a time as the machine has cores and memory for."""
        built = partial(self.setting.built, self.report.name)
        self.setting.builder.build(self.address, modules, self.report, built)

    def timed(self, modules: Sequence[Module]) -> Candidate:
        """Measure what it costs, restricted to modules; unrestricted if there are none."""
        plan, report = self.setting.plan, self.report
        candidate = Candidate(
            report.name,
            *_restricted(self.address, self.axes, modules),
            frozenset(report.declared["declares"]),
            plan.ledger,
            self.setting.target,
            declared_name=str(report.declared["name"]),
        )
        with self.lease() as worker:
            _time(worker, candidate, report, self.profile, plan.costs.get(report.name))
            space = OPERATIONS[candidate.axes.operation]
            if light := light_of(plan, candidate.axes.operation):
                candidate.axes = light.limit(candidate.axes)
            candidate.find_kinds = partial(_covering, space.kinds, candidate)
            if plan.profile.thorough:
                candidate.find_pairs = partial(_covering, space.pairs, candidate)
        candidate.deadlines.compile_seconds = _compile_seconds(modules)
        return candidate


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
    reply = _ask(
        worker,
        address,
        "select",
        load=SURVEY_SECONDS,
        axes=axes.to_json(),
        stored=[problem.to_json() for problem in stored],
        companions=minutes < CHEAP_MINUTES,
    )
    if "error" in reply:
        raise HarnessError(str(reply["error"]))
    try:
        found = Found.from_json(reply)
        for module in (each for each in (*found.modules, *found.plain) if each):
            _of_asked(replace(axes, values=module.values, simplest={}), axes)
    except (KeyError, TypeError, ValueError) as error:
        message = f"select: its process gave no answer: {message_of(error)}"
        raise HarnessError(message) from error
    most = plan.profile.modules_of(minutes, together=plan.seconds < math.inf)
    return Selection(found, axes.simplest, most)


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

    A module found on disk may still trigger the compilation of a variant, so its first call gets
    the compile deadline.
    """
    built = modules and not any(each.exists for each in modules)
    return LOAD_SECONDS if built else COMPILE_SECONDS


def _minutes_text(minutes: float) -> str:
    return f"{minutes:,.0f} minutes" if minutes >= SHOWN_WHOLE else f"{minutes:.1f} minutes"


def _first_to_judge(modules: Sequence[Module], selection: Selection) -> Sequence[Module]:
    """Return the module to judge while the others are built; none where that saves no time.

    It is that of the simplest problem, whose calls are timed.
    """
    first = [each for each in modules if each.key == selection.simplest][:1]
    return first if any(each not in first and not each.exists for each in modules) else ()


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
        # Retry once: a slow first call mistaken for a hang would give the kernel the cost class of
        # a fast one.
        timed = _ask(worker, address, "cost", problem=timing.to_json())
    report.call_seconds = float(timed.get("seconds", 0.0))
    heads = timing.num_requests * timing.num_qo_heads if isinstance(timing, AttentionProblem) else 0
    # The cost class follows from seconds in which the thread had a processor: by the clock, a busy
    # machine would draw other problems of the same seed.
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
    return lambda problems: list(_of_each(worker, address, "modules", problems)["keys"])


def module_libraries(worker: Worker, address: Address) -> Libraries:
    """Return a function that asks what is compiled for the module of each of some problems."""
    return lambda problems: [
        (name, exists)
        for name, exists in _of_each(worker, address, "libraries", problems)["libraries"]
    ]


def _of_each(
    worker: Worker, address: Address, task: str, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Ask something about each of some problems.

    Raises:
        HarnessError: there is no answer.
    """
    reply = _ask(worker, address, task, problems=[problem.to_json() for problem in problems])
    if "error" in reply:
        raise HarnessError(str(reply["error"]))
    return reply


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


def _ask(
    worker: Worker,
    address: Address,
    task: str,
    *,
    load: float = Deadlines.load,
    **more: Any,  # noqa: ANN401  JSON
) -> dict[str, Any]:
    deadlines = replace(address.first_deadlines, load=load)
    outcome = _run(worker, address.request(task, **more), deadlines)
    if outcome.status == "done":
        return outcome.result or {}
    if outcome.died:
        probe_device(worker, address.device)
    verdict = verdict_of(outcome)
    return {"stopped": verdict.to_json(), "error": f"{task}: {verdict.message}"}
