"""How a worker is asked about an implementation, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Refusal
from ...reference import Problem, problem_from_json
from ..isolation.memory_use import MemoryUse
from ..isolation.outcome import KILLED_FOR_MEMORY, SENTENCES
from ..isolation.sanitizer import SLOWNESS, errors
from ..isolation.stages import STAGES
from ..isolation.workers import SECOND, Deadlines, Outcome, Worker
from ..verdicts.comparison import MOST_COLUMNS, MOST_ROWS
from ..verdicts.launches import MOST_CHARACTERS, MOST_KERNELS
from ..verdicts.verdict import Verdict
from . import memory_deaths
from .distrust import GARBLED

ON_ITS_GPU = ("soak", "host_runs_ahead", "metadata_no_host_sync")
"""Laws that watch streams of the GPU, and so are judged in the kernel's process there."""
WARM_UP_DEADLINES = Deadlines(run=20.0)


class DeviceLostError(RuntimeError):
    """The device did not come back after a hang or a crash."""


class HarnessError(RuntimeError):
    """The suite itself failed; the message says where."""


@dataclass(frozen=True)
class Address:
    """How the worker finds an implementation, and what it may do.

    Attributes:
        reference: MODULE:NAME.
        operation: the operation of a plain function.
        device: ``"cpu"`` or ``"cuda"``.
        modules: keys of the modules that are built: problems of others are refused; all are
            allowed if there is none.
        without_rules: ids of support rules that are not asked, or ``EVERY_RULE``.
        tool: the tool of compute-sanitizer that the worker runs under; none if empty.
        environment: further variables for workers that are started for it.
        soak: launches of one problem under the law of that name; the law's own number if 0.
        distrust: whether a process in which the implementation is not loaded judges.
    """

    reference: str
    operation: str | None
    device: str
    modules: tuple[str, ...] = ()
    without_rules: tuple[str, ...] = ()
    soak: int = 0
    tool: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    distrust: bool = False

    @property
    def slowness(self) -> float:
        """How many times longer calls may take than usual."""
        return SLOWNESS if self.tool else 1.0

    @property
    def first_deadlines(self) -> Deadlines:
        """Deadlines of calls before any was measured."""
        return replace(WARM_UP_DEADLINES, run=self.slowness * WARM_UP_DEADLINES.run)

    def request(self, task: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
        """Return what the worker needs for one of ``tasks.TASKS``."""
        return {
            "task": task,
            "implementation": self.reference,
            "operation": self.operation,
            "device": self.device,
            "modules": list(self.modules),
            "without_rules": list(self.without_rules),
            **({"soak": self.soak} if self.soak else {}),
            **({SECOND: ""} if self.distrust else {}),
            **({"tight": True} if self.tool else {}),
            **more,
        }

    def case(self, law: str, problem: Problem) -> dict[str, Any]:
        """Return what the worker needs to judge one case."""
        request = self.request("judge", law=law, problem=problem.to_json())
        apart = self.distrust and not (self.device == "cuda" and law in ON_ITS_GPU)
        return {**request, SECOND: "oversee"} if apart else request

    def attempt(self, law: str, problem: Problem, limits: Deadlines) -> dict[str, Any]:
        """Return what the worker needs to judge one case in a fork of its process."""
        seconds = {
            "compile": limits.compile,
            "run": limits.run,
            "specialise": limits.specialise,
            "supports": limits.supports,
        }
        return {**self.case(law, problem), "task": "try", "limits": seconds}


Size = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Step = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Number = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
MOST_DIGITS = 100_000
"""Most hexadecimal digits of the lines of a file that ran: two bits a line."""
Cells = Annotated[list[float], msgspec.Meta(min_length=1, max_length=MOST_COLUMNS)]


class _Element(TypedDict):
    where: str
    got: str
    expected: str
    bound: str


class _Listed(_Element):
    at: dict[str, Size]


class _Map(TypedDict):
    tensor: str
    shape: Annotated[list[Size], msgspec.Meta(min_length=1)]
    step: tuple[Step, Step]
    worst: Annotated[list[Cells], msgspec.Meta(min_length=1, max_length=MOST_ROWS)]


class _Kernels(TypedDict):
    ran: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", max_length=MOST_DIGITS)]
    launched: dict[Number, dict[str, list[str]]]
    compiled: dict[Number, Size]


Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{10}$")]
Names = Annotated[list[Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]],
                  msgspec.Meta(max_length=MOST_KERNELS)]  # fmt: skip


class _Call(TypedDict):
    id: Id
    step: str
    module: str
    features: list[str]
    size: Size
    kernels: Names


class _Launched(TypedDict, total=False):
    calls: list[_Call]
    called: list[Id]
    known: list[Id]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    why: str


@dataclass(frozen=True)
class _Said(Verdict):
    """A verdict with the types that reports rely on."""

    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    calls: Annotated[int, msgspec.Meta(ge=0)] = 0
    waited: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    element: _Element | None = None  # type: ignore[assignment]  # to mypy no Mapping[str, str]
    error_map: _Map | None = None
    worst: Sequence[_Listed] = ()
    kernels: dict[str, _Kernels] = field(default_factory=dict)
    launched: _Launched = field(default_factory=_Launched)


@dataclass(frozen=True)
class _Ended:
    """What a fork may have come to, see ``in_fork``."""

    status: Literal["hang", "crash"]
    kind: str
    stage: str = "load"
    limit: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    starved: bool = False
    memory: MemoryUse | None = None

    def outcome(self) -> Outcome:
        """Return it; ValueError where it contradicts itself, or names no stage or size."""
        contradicts = self.starved and self.kind != KILLED_FOR_MEMORY
        possible = self.memory is None or self.memory.is_possible
        if contradicts or not possible or self.stage not in STAGES:
            message = f"a fork that ended with {self.kind} in {self.stage}"
            raise ValueError(message)
        return Outcome(**vars(self))


def read_answer(result: Mapping[str, Any]) -> Verdict | Outcome:
    """Return the verdict of a worker, or the outcome of its fork, see ``Address.attempt``.

    Raises:
        TypeError, ValueError: it is neither.
    """
    if "ended" in result:
        return msgspec.convert(result["ended"], _Ended).outcome()
    if msgspec.convert(result, _Said).about is not None:
        problem_from_json(result["about"])
    return Verdict.from_json(result)


def refusals_of(reply: Mapping[str, Any]) -> list[Refusal | None]:
    """Read an answer of ``tasks.probe``."""
    return [each and Refusal(**each) for each in reply["refusals"]]


def _with_print(of_fork: Outcome, outcome: Outcome) -> Outcome:
    """Return what became of a fork of a worker, with what it printed there."""
    return replace(of_fork, stderr=of_fork.stderr or outcome.stderr)


def verdict_of(outcome: Outcome, tool: str = "") -> Verdict:
    """Turn what became of a request into a verdict.

    Args:
        outcome: the outcome of the request.
        tool: the tool of compute-sanitizer that the worker runs under: an error that it reports is
            a CRASH of that kind.

    Raises:
        HarnessError: the suite itself failed.
    """
    verdict = _verdict_of(outcome, tool)
    return replace(verdict, printed=outcome.stderr) if verdict.bad else verdict


def _verdict_of(outcome: Outcome, tool: str) -> Verdict:
    reported = errors(outcome.log) if tool else []
    if reported and outcome.status != "error":
        first, _, rest = reported[0].partition("\n")
        more = f" (and {len(reported) - 1} more)" if len(reported) > 1 else ""
        at = rest.strip().partition("\n")[0]
        message = f"compute-sanitizer --tool {tool}: {first} {at}".rstrip() + more
        return Verdict("CRASH", tool, message, trace=reported[0])
    if outcome.status == "done":
        try:
            said = read_answer(outcome.result or {})
        except (TypeError, ValueError) as error:  # the process may have written it itself
            return Verdict("CRASH", GARBLED, f"its process gave no verdict: {message_of(error)}")
        if isinstance(said, Verdict):
            return said
        return _verdict_of(_with_print(said, outcome), tool)
    return memory_deaths.verdict_on(outcome) or _of_death(outcome)


def _of_death(outcome: Outcome) -> Verdict:
    if outcome.status == "hang":
        limit = f"{outcome.limit:.3g} s, " if outcome.limit else ""
        message = f"did not end within its deadline ({limit}in stage {outcome.stage})"
        return Verdict("HANG", outcome.stage, message, trace=outcome.stack)
    if outcome.status == "crash":
        how = SENTENCES.get(outcome.kind, outcome.kind)
        message = f"the process died: {how} in stage {outcome.stage}"
        return Verdict("CRASH", outcome.kind, message, trace=outcome.stack)
    message = f"{outcome.kind} in stage {outcome.stage}: {outcome.detail}\n{outcome.stderr}".strip()
    raise HarnessError(message)


def probe_device(worker: Worker, device: str) -> None:
    """Check in a fresh process that the device still works.

    Raises:
        DeviceLostError: the device does not respond.
    """
    if device == "cpu":
        return
    outcome = worker.run({"task": "device", "device": device}, Deadlines(run=60.0))
    if outcome.status != "done":
        message = f"{device} did not come back: {outcome.status} {outcome.kind} {outcome.detail}"
        raise DeviceLostError(message)
