"""What the isolated worker does for the engine: it describes, probes, times and judges.

The parent never imports an implementation: what an import or a ``supports`` does wrong stays here.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from types import FunctionType
from typing import Any, TypeVar

import torch

from ...impl import (
    Implementation,
    ImplementationNotFoundError,
    Target,
    UnsupportedError,
    find_implementation,
)
from ...impl.gpu.interpreted import at_each_program
from ...reference import Problem, problem_from_json
from ..isolation.machine import waited
from ..isolation.outcome import DEVICE_FAULT
from ..isolation.stages import LINK
from ..isolation.worker_main import Monitor
from ..isolation.workers import LAST_REPLY
from ..laws import find_law
from ..laws.law import Law
from ..verdicts.asked import CALLS, with_calls
from ..verdicts.contained import OUT_OF_MEMORY, Stop, contained, crash, out_of_memory
from ..verdicts.elements import with_places
from ..verdicts.launches import Launches, launches_of
from ..verdicts.memory_need import NO_ROOM, note_calls
from ..verdicts.specialising import Stages
from ..verdicts.subject import LAUNCHES, Subject
from ..verdicts.verdict import Verdict
from . import integrity
from .distrust import RemoteSubject, Server
from .kernel_lines import recording
from .link import Link
from .requests import ON_ITS_GPU
from .room import judged_with_room
from .surveys import keys_of, libraries_of, refusal_unless_raised, selectable, surveyed

ERRORS_LEFT = 3
COST_CALLS = 5
COST_SECONDS = 0.8
DEFINITION = re.compile(r"\s*(?:async\s+)?def\s")

Kind = TypeVar("Kind", bound=Subject)

_UNTOUCHED: dict[str, object] = {}
_latest = ""
"""The implementation whose code ran last in this process."""
_compiled: dict[str, set[Hashable]] = {}
_launches: dict[str, Launches | None] = {}


class SpoiledError(RuntimeError):
    """An implementation has left a process in which no other can be judged."""


def handle(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Run the payload's ``task``, one of ``TASKS``, and return its reply.

    An error of the GPU that comes up after a call has ended is that call's too.
    """
    _see_that_it_works(payload.get("implementation", ""))
    task: Callable[[Mapping[str, Any], Stages], dict[str, Any]] = TASKS[payload["task"]]
    on_gpu = payload["device"] == "cuda"
    late: Exception | None = None
    result: dict[str, Any] = {}
    try:
        result = task(payload, stages)
    except RuntimeError as error:
        if not on_gpu or task is not judge or _settled():
            raise
        late = error
    if on_gpu and not (late is None and _settled()):
        if task is judge and result.get("status") != "CRASH":
            result = _failed_later(late).to_json()
        result[LAST_REPLY] = True
    if not on_gpu and result.get("kind") in (NO_ROOM, OUT_OF_MEMORY):
        result[LAST_REPLY] = True  # what has filled this process may be an earlier problem's
    return result


def _see_that_it_works(implementation: str) -> None:
    """Refuse the code of another where that before it has replaced what the suite relies on.

    Raises:
        SpoiledError: the parent asks again, in a fresh process.
    """
    global _latest  # noqa: PLW0603  the process has one
    if not _UNTOUCHED:
        _UNTOUCHED.update(integrity.snapshot())
    if _latest and implementation not in ("", _latest):
        changed = integrity.replaced(_UNTOUCHED)
        if changed:
            raise SpoiledError(f"{_latest} has changed {changed}")  # noqa: TRY003, EM102
    _latest = implementation or _latest


def _failed_later(error: Exception | None) -> Verdict:
    """Return the verdict on a call after which the GPU does not work in this process any more."""
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as found:
        error = error or found
    what = str(error).partition("\n")[0] if error else f"CUDA refused {ERRORS_LEFT} calls in a row"
    message = f"the GPU failed after the call had ended: {what}"
    return Verdict("CRASH", type(error).__name__ if error else DEVICE_FAULT, message)


def _settled() -> bool:
    """Take up the error that a failed launch leaves for whoever asks CUDA next.

    Returns:
        Whether CUDA works again; after an illegal access it never does in this process.
    """
    for _ in range(ERRORS_LEFT):
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            if out_of_memory(error):  # a GPU that others have filled works
                return True
            continue
        return True
    return False


@functools.cache
def _implementation(name: str, operation: str | None) -> Implementation:
    return find_implementation(name, operation)


@functools.cache
def _target(device: str) -> Target:
    return Target.here(device)


def subject_of(payload: Mapping[str, Any], stages: Stages) -> Subject:
    """Return the implementation that a payload names, to be run on its device."""
    return subject_of_kind(Subject, payload, stages)


def subject_of_kind(kind: type[Kind], payload: Mapping[str, Any], stages: Stages) -> Kind:
    """Return a subject of this kind."""
    target = _target(payload["device"])  # before the code under test can patch what it needs
    at_each_program(stages.advance if isinstance(stages, Monitor) else None)
    note_calls(stages.note_memory if isinstance(stages, Monitor) else None)
    with stages.stage("load"):
        return kind(
            _implementation(payload["implementation"], payload.get("operation")),
            target,
            stages,
            _compiled.setdefault(payload["implementation"], set()),
            modules=payload.get("modules", ()),
            without_rules=payload.get("without_rules", ()),
            launches=int(payload.get("soak", LAUNCHES)),
            tight=bool(payload.get("tight")),
            explains=bool(payload.get("explains", True)),
        )


def describe(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Import an implementation and say what it declares, or why it cannot be imported."""
    try:
        subject = subject_of(payload, stages)
    except ImplementationNotFoundError as error:
        return {"error": error.why}
    implementation = subject.implementation
    return {
        # A lone surrogate can be neither hashed for a seed nor written.
        "name": implementation.name.encode(errors="backslashreplace").decode(),
        "operation": implementation.operation,
        "features": sorted(implementation.features),
        "declares": sorted(subject.declares),
        "claims": list(implementation.claims),
        "arithmetic": asdict(implementation.arithmetic),
        "backend": implementation.backend_on(subject.target),
        "ruled_as": dict(implementation.ruled_as),
        "unset_flags": dict(implementation.unset_flags),
        "decodes": implementation.decodes,
        "provider": implementation.provider,
        "provider_version": implementation.provider_version,
        "compiles": implementation.compile_key is not None,
        "build_ahead": implementation.builds_ahead(payload["device"]),
        "build_minutes": implementation.build_minutes,
        "build_compilers": implementation.build_compilers,
        "tile": implementation.tile,
        "split": implementation.split,
        "place": source_place(implementation.function),
    }


def source_place(function: object) -> tuple[str, int] | None:
    """Return the file of a function and the line of its ``def``; None where it has no source."""
    if not isinstance(function, FunctionType):
        return None
    try:
        code = inspect.unwrap(function).__code__
        lines, first = inspect.getsourcelines(code)
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None
    # The source begins with the decorators.
    above = next((number for number, line in enumerate(lines) if DEFINITION.match(line)), 0)
    return code.co_filename, first + above


def probe(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Ask for the refusal of each of ``problems``; None for those supported."""
    subject = subject_of(payload, stages)
    problems = map(problem_from_json, payload["problems"])
    rules = payload.get("without_rules", ())
    refusals = [refusal_unless_raised(subject, problem, rules, stages) for problem in problems]
    return {"refusals": [refusal and refusal.to_json() for refusal in refusals]}


def survey(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Learn what an implementation supports, see ``surveys.surveyed``."""
    return surveyed(subject_of(payload, stages), payload, stages)


def select(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the modules to choose from, see ``surveys.selectable``."""
    return selectable(subject_of(payload, stages), payload)


def modules(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the key of the module of each of ``problems``; None for those that are refused."""
    subject = subject_of(payload, stages)
    found = [problem_from_json(problem) for problem in payload["problems"]]
    try:
        return {"keys": keys_of(subject, found)}
    except Stop as stop:
        return {"error": stop.verdict.message}


def libraries(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return what is compiled for the module of each of ``problems``, and whether it exists."""
    found = [problem_from_json(problem) for problem in payload["problems"]]
    return {"libraries": libraries_of(subject_of(payload, stages), found)}


def build(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Call every kernel of the module of a ``problem``, so that all of them are compiled.

    Returns:
        ``kernels``, how many calls there were, and ``stopped``, the first verdict on one that
        failed.
    """
    subject = subject_of(payload, stages)
    problem = problem_from_json(payload["problem"])
    try:
        with contained("kernels raised "):
            kernels = list(subject.implementation.problems_of_module(problem))
    except Stop as stop:
        return {"kernels": 0, "stopped": stop.verdict.to_json()}
    stopped = [verdict for each in kernels if (verdict := _called(subject, each)) is not None]
    if payload["device"] == "cuda" and subject.device_works():
        gc.collect()
        torch.cuda.empty_cache()  # this process waits for its next module, and others judge
    return {"kernels": len(kernels), **({"stopped": stopped[0].to_json()} if stopped else {})}


def _called(subject: Subject, problem: Problem) -> Verdict | None:
    """Call an implementation; give the verdict where the call, or making its inputs, fails."""
    try:
        subject.try_call(problem)
    except Stop as stop:
        return stop.verdict
    except (RuntimeError, MemoryError) as error:  # an earlier call may have broken the GPU
        return Verdict("CRASH", type(error).__name__, str(error).partition("\n")[0])
    return None


class _WaitingCall:
    """A call that counts the seconds in which its thread waits for a processor.

    Not those of making its tensors: they are no part of the seconds of the call, and taken off
    these, they made a slow kernel on a busy machine look like a fast one.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.waited = 0.0

    def __call__(self, inputs: Any) -> Any:  # noqa: ANN401  any operation's
        before = waited()
        try:
            return self._function(inputs)
        finally:
            self.waited += waited() - before


def cost(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Time an implementation's call on a problem: the fastest of several after a first.

    Returns:
        ``seconds``, by the clock on the wall, and ``undisturbed``, those without what the process
        waited for a processor: a machine with other work gives the same.
    """
    subject = subject_of(payload, stages)
    problem = problem_from_json(payload["problem"])
    timings: list[tuple[float, float]] = []
    started = perf_counter()
    calls = int(payload.get("calls", COST_CALLS))
    while len(timings) < calls and perf_counter() - started < COST_SECONDS:
        before = subject.seconds
        call = _WaitingCall(subject.implementation)
        try:
            with attributed():
                subject.try_call(problem, call)
        except Stop as stop:
            return {"seconds": 0.0, "stopped": stop.verdict.to_json()}
        seconds = subject.seconds - before
        timings.append((seconds, max(0.0, seconds - call.waited)))
    seconds, undisturbed = (min(each) for each in zip(*(timings[1:] or timings), strict=True))
    return {"seconds": seconds, "undisturbed": undisturbed}


def judge(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the verdict of ``law`` on an implementation and a ``problem``.

    With ``keep``, a folder, the tensors of the call that is wrong are kept there, see ``Keeper``.

    Returns:
        The verdict as JSON. Where another process judges, nothing, unless the call failed here.
    """
    if LINK in payload:
        return _served(payload, stages)
    subject = _keeper(payload, stages) if payload.get("keep") else subject_of(payload, stages)
    subject.kernel_names = names = _names_of(subject, payload)
    with recording() as ran:
        result = _judged(subject, payload)
    told = {"kernels": ran.files, "launched": names.to_json() if names else {}}
    return {**result, **{name: value for name, value in told.items() if value}}


def _names_of(subject: Subject, payload: Mapping[str, Any]) -> Launches | None:
    """Return what names the kernels of a case; None under a tool, and laws that watch streams."""
    if payload.get("tight") or payload.get("law") in ON_ITS_GPU:
        return None
    names = _launches.setdefault(
        payload["implementation"], launches_of(subject.implementation, subject.target)
    )
    if names is not None:
        names.begin(payload.get("named", ()))
    return names


def _judged(subject: Subject, payload: Mapping[str, Any]) -> dict[str, Any]:
    law = find_law(payload["law"])
    problem = problem_from_json(payload["problem"])
    CALLS.begin()
    try:
        refusal = subject.refusal(problem)
        if refusal is not None:
            return Verdict("UNSUPPORTED", refusal.code, refusal).to_json()
        verdict = judged_with_room(lambda: _checked(law, subject, problem), payload["device"])
        verdict = subject.as_launched(verdict)
    except Stop as stop:
        verdict = stop.verdict
    about = problem_from_json(verdict.about) if verdict.about else problem
    verdict = with_calls(with_places(verdict, about), problem)
    return replace(
        verdict, seconds=subject.seconds, calls=subject.calls, interpreted=subject.interpreted
    ).to_json()


def _checked(law: Law, subject: Subject, problem: Problem) -> Verdict:
    try:
        with attributed():
            return law.check(subject, problem)
    except Stop as stop:
        return stop.verdict


def _keeper(payload: Mapping[str, Any], stages: Stages) -> Subject:
    from .keeping import Keeper

    subject = subject_of_kind(Keeper, payload, stages)
    subject.folder = Path(payload["keep"])
    return subject


@contextmanager
def attributed() -> Iterator[None]:
    """Have an error of the suite count as the implementation's where that has caused it.

    Raises:
        Stop: what the suite relies on was replaced, or a thread has raised in the main one.
    """
    try:
        yield
    except Stop:
        raise
    except BaseException as error:
        if changed := integrity.replaced(_UNTOUCHED):
            where = f"the process does not work since {changed} changed: "
        elif isinstance(error, Exception):
            raise
        else:  # the parent's signals are ignored here
            where = "raised outside of its call: "
        raise Stop(crash(error, where)) from error


def _served(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Do calls for the process that judges."""
    link = Link(payload[LINK])
    try:
        with attributed():
            Server(subject_of(payload, stages), link, stages, attributed).serve()
    except Stop as stop:
        return stop.verdict.to_json()
    finally:
        link.end()
    return {}


def overseen(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Judge as ``judge`` does, where another process does the calls: none of its code is here."""
    launches = int(payload.get("soak", LAUNCHES))
    try:
        target = _target(payload["device"])
        tight = bool(payload.get("tight"))
        link = Link(payload[LINK])
        subject = RemoteSubject(link, target, stages, launches=launches, tight=tight)
    except Stop as stop:
        return stop.verdict.to_json()
    return _judged(subject, payload)


def tried(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Judge in a fork of this process, for a hang or a death is expected; see ``in_fork``."""
    from .forked import in_fork

    subject_of(payload, stages)  # imported here, it is there in the next fork
    return in_fork(judge, payload, stages)


def measured(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return which usual comparisons accept an answer; nothing where the problem is refused."""
    from .tolerance_baselines import measure

    subject = subject_of(payload, stages)
    problem = problem_from_json(payload["problem"])
    return dict(measure(subject, problem)) if subject.supports(problem) else {}


def answered(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Judge a problem and keep or compare the result's bits; see ``recording.answer``."""
    from .recording import Recorder, answer

    subject = subject_of_kind(Recorder, payload, stages)
    subject.kernel_names = _names_of(subject, payload)
    return answer(subject, payload)


def timed(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Time calls on one problem; see ``recording.timed``."""
    from .recording import timed as measured_times

    return measured_times(subject_of(payload, stages), payload)


def weighed(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Measure what a call needs of memory; see ``recording.weighed``."""
    from .recording import weighed as measured_bytes

    return measured_bytes(subject_of(payload, stages), payload)


def target(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Describe the device, or say why there is none."""
    del stages
    try:
        found = _target(payload["device"])
        for provider in payload.get("providers", ()):
            found.version_of(provider)
        return found.to_json()
    except UnsupportedError as error:
        return {"error": str(error)}


def device(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Use the device once, to see that it is still there."""
    with stages.stage("run"):
        ones = torch.ones(64, device=payload["device"])
        return {"sum": float(ones.sum())}


TASKS = {
    "describe": describe,
    "probe": probe,
    "survey": survey,
    "select": select,
    "modules": modules,
    "libraries": libraries,
    "build": build,
    "cost": cost,
    "judge": judge,
    "oversee": overseen,
    "try": tried,
    "measure": measured,
    "answer": answered,
    "time": timed,
    "weigh": weighed,
    "target": target,
    "device": device,
}
