"""How many small problems a second are judged for parity, and where their time goes.

The way is that of a check: Hypothesis draws, several problems an example, and an isolated worker
judges one after another while the next are drawn; where stages are timed, nothing is drawn
meanwhile. Each of several jobs is a process of its own with a worker, as under ``pytest -n``.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import torch

from ...impl import ImplementationNotFoundError
from ...impl.registry import resolve_name
from ...properties.findings.report import ImplementationReport
from ...properties.isolation.outcome import Outcome
from ...properties.isolation.workers import Worker
from ...properties.laws.general import expectation_of
from ...properties.search.deadlines import DeadlineModel
from ...properties.search.preparation import survey
from ...properties.space.axes import Axes
from ...properties.space.profiles import PROFILES
from ...properties.space.rounds import Enough, draw_round
from ...properties.verdicts.comparison import against_oracle
from ...properties.verdicts.specialising import Stages
from ...properties.worker import tasks
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address
from ...reference import AttentionProblem, Problem, problem_from_json
from .results import Requirement, Results, Table

ONE_WORKER, SEVERAL_WORKERS = 300.0, 1_300.0
"""Least problems a second on a GPU."""
REQUESTS, KEYS = 4, 300
DTYPES = ("bfloat16", "float16", "float32")
SETTING: dict[str, tuple[Any, ...]] = {
    "head_dims": ((128, 128),),
    "num_kv_heads": (2,),
    "group_size": (4,),
    "window_left": (-1,),
    "logits_soft_cap": (0.0,),
    "sinks": (False,),
    "custom_mask": (False,),
    "verify": (0,),
    "tree": (0,),
    "per_head_scales": (False,),
    "output_scale": (None,),
    "output_divisor": (1.0,),
    "caches": (("", ""),),
}
"""One module of a kernel that is compiled; what else an implementation supports is drawn."""
PHASES = ("decode", "prefill", "chunk")
MAX_WORK = REQUESTS * KEYS * 2 * (128 + 128) * (4 + 8)
"""Work of four decodes of the most keys: prefills are shorter."""
WARM_UP_SECONDS = 1.0
START_SECONDS = 900.0
"""What importing and compiling may take before all jobs begin."""
HANDLER = f"{__name__}:handle"
STAGES = ("draw", "transport", "materialise", "oracle and bound", "call", "compare", "other")


class UnmeasurableError(ValueError):
    """An implementation that cannot be judged in this setting; the message says why."""


@dataclass
class Tally:
    """What one job did, seconds by stage."""

    problems: int = 0
    failed: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def rate(self) -> float:
        """Problems a second."""
        return self.problems / self.seconds if self.seconds else 0.0


def handle(payload: Mapping[str, Any], monitor: Stages) -> dict[str, Any]:
    """Do a task of the worker's, parity in timed stages if it is ``staged``; and time it."""
    start = time.perf_counter()
    stages: dict[str, float] = {}
    if payload.get("staged"):
        result = _staged(payload, monitor, stages)
    else:
        result = tasks.handle(payload, monitor)
    return {**result, "inside": time.perf_counter() - start, "stages": stages}


def _staged(
    payload: Mapping[str, Any], monitor: Stages, stages: dict[str, float]
) -> dict[str, Any]:
    """Judge parity as the law does, and wait for the device after each stage."""
    subject = tasks.subject_of(payload, monitor)
    problem = problem_from_json(payload["problem"])
    if not isinstance(problem, AttentionProblem) or not subject.supports(problem):
        return {"status": "UNSUPPORTED"}

    def note(stage: str, since: float) -> float:
        if subject.target.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        stages[stage] = now - since
        return now

    now = time.perf_counter()
    inputs = subject.materialise(problem)
    now = note("materialise", now)
    expectation = expectation_of(subject, problem, inputs)
    now = note("oracle and bound", now)
    result = subject.run_operation(problem, inputs)
    now = note("call", now)
    verdict = against_oracle(result, expectation, exact=subject.exact(problem))
    note("compare", now)
    return verdict.to_json()


def measure(
    names: Sequence[str],
    device: str,
    *,
    jobs: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    """Judge each implementation for some seconds: by one worker, in stages, and by several.

    Args:
        names: names of the implementations.
        device: the device that judges, "cpu" or "cuda".
        jobs: number of processes in the second count; the first has one.
        seconds: length of each measurement in seconds.
        tell: receives a line as soon as something is known.

    Raises:
        UnmeasurableError: one cannot be judged in this setting.
    """
    rates: list[tuple[str | int | float, ...]] = []
    shares: list[tuple[str | int | float, ...]] = []
    requirements: list[Requirement] = []
    notes: list[str] = []
    for name in names:
        tell(f"{name}: starting a worker, which may compile")
        address = Address(_reference(name), None, device)
        with open_pool(device, standby=False, handler=HANDLER) as pool, pool.lease() as worker:
            axes = _axes(worker, address, name)
            _judge(worker, address, axes, WARM_UP_SECONDS, seed=1000)
            alone = _judge(worker, address, axes, seconds, seed=0)
            tell(f"{name}: {alone.rate:.0f} problems a second by one worker")
            staged = _judge(worker, address, axes, seconds, seed=0, staged=True)
        rates.append((name, 1, alone.problems, alone.rate))
        if alone.failed:
            notes.append(f"{name} failed {alone.failed} of {alone.problems} problems.")
        requirements += _required(f"{name}, one worker", alone.rate, ONE_WORKER, device)
        if jobs > 1:
            several = _jobs(address, axes, seconds, jobs)
            count, rate = sum(each.problems for each in several), sum(each.rate for each in several)
            tell(f"{name}: {rate:.0f} problems a second by {jobs} workers")
            rates.append((name, jobs, count, rate))
            requirements += _required(f"{name}, {jobs} workers", rate, SEVERAL_WORKERS, device)
        shares += [
            (
                name,
                stage,
                1e3 * staged.stages[stage] / max(staged.problems, 1),
                100 * staged.stages[stage] / staged.seconds,
            )
            for stage in STAGES
        ]
    setting = f"batch {REQUESTS}, KV up to {KEYS}, head dim 128, 8/2 heads, 16 bits, on {device}"
    tables = (
        Table(
            f"Problems judged for parity: {setting}",
            ("what", "workers", "problems", "a second"),
            tuple(rates),
        ),
        Table(
            "One worker, a problem, waiting for the device after each stage",
            ("what", "stage", "ms", "%"),
            tuple(shares),
        ),
    )
    return Results("throughput", tables, tuple(requirements), tuple(notes))


def _required(name: str, rate: float, low: float, device: str) -> list[Requirement]:
    wanted = f"problems a second, {name}"
    return [Requirement(wanted, rate, low=low)] if device == "cuda" else []


_barrier: Barrier | None = None


def _share(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  how a pool's processes are given what cannot be sent
    _barrier = barrier


def _jobs(address: Address, axes: Axes, seconds: float, jobs: int) -> list[Tally]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(jobs)
    with ProcessPoolExecutor(jobs, context, initializer=_share, initargs=(barrier,)) as processes:
        begun = [processes.submit(_job, address, axes, seconds, number) for number in range(jobs)]
        return [each.result() for each in begun]


def _job(address: Address, axes: Axes, seconds: float, seed: int) -> Tally:
    """Judge for some seconds with a worker of its own, once all other jobs are ready too."""
    with open_pool(address.device, standby=False, handler=HANDLER) as pool, pool.lease() as worker:
        _judge(worker, address, axes, WARM_UP_SECONDS, seed=seed + 1000)
        if _barrier is not None:
            _barrier.wait(START_SECONDS)
        return _judge(worker, address, axes, seconds, seed=seed)


def _reference(name: str) -> str:
    try:
        return resolve_name(name)
    except ImplementationNotFoundError as error:
        raise UnmeasurableError(str(error)) from error


def _axes(worker: Worker, address: Address, name: str) -> Axes:
    report = ImplementationReport(name, address.reference)
    axes = survey(worker, address, MAX_WORK, report)
    if axes is None:
        message = f"{name} cannot be judged: {report.error or report.refusal}"
        raise UnmeasurableError(message)
    if axes.operation not in ("paged_attention", "ragged_attention"):
        message = f"{name} implements {axes.operation}; problems of attention are judged here"
        raise UnmeasurableError(message)
    dtypes = [dtype for dtype in DTYPES if dtype in axes.allows("dtype")][:1]
    wanted = {**SETTING, "dtype": tuple(dtypes), "phase": PHASES}
    values = dict(axes.values)
    for axis, some in wanted.items():
        values[axis] = tuple(value for value in axes.allows(axis) if value in some)
        if not values[axis]:
            message = f"{name} does not support {axis} {some[0]}"
            raise UnmeasurableError(message)
    return replace(axes, values=values)


def _judge(
    worker: Worker, address: Address, axes: Axes, seconds: float, *, seed: int, staged: bool = False
) -> Tally:
    tally = Tally()
    waiting: deque[Problem] = deque()
    start = time.perf_counter()

    def look(drawn: Problem) -> None:
        asked = time.perf_counter()
        if asked - start > seconds:
            raise Enough
        problem = _of_four(drawn)
        request = {**address.case("parity", problem), "staged": staged}
        waiting.append(problem)
        worker.ask(request, DeadlineModel().of(problem))
        while worker.full or (staged and waiting):
            note(asked)

    def note(asked: float) -> None:
        outcome = worker.answer()
        trip = time.perf_counter() - asked
        result = _result(outcome, waiting.popleft())
        inside, stages = result["inside"], result["stages"]
        tally.problems += result["status"] != "UNSUPPORTED"
        tally.failed += result["status"] not in ("PASS", "UNSUPPORTED")
        for stage, spent in stages.items():
            tally.stages[stage] += spent
        tally.stages["other"] += inside - sum(stages.values())
        tally.stages["transport"] += trip - inside

    number = itertools.count(1_000_003 * seed + 1)
    while not draw_round(axes, PROFILES["gate"], next(number), look):
        pass
    while waiting:
        note(time.perf_counter())
    tally.seconds = time.perf_counter() - start
    tally.stages["draw"] = tally.seconds - sum(tally.stages.values())
    return tally


def _of_four(problem: Problem) -> AttentionProblem:
    """Return a problem of four requests with the lengths that were drawn, cut to the most keys."""
    assert isinstance(problem, AttentionProblem)  # noqa: S101  its axes are of attention
    drawn = list(zip(problem.query_lens, problem.seq_lens, strict=True)) or [(1, 1)]
    lengths = [drawn[i % len(drawn)] for i in range(REQUESTS)]
    return replace(
        problem,
        query_lens=tuple(min(t, s, KEYS) for t, s in lengths),
        seq_lens=tuple(min(s, KEYS) for _, s in lengths),
    )


def _result(outcome: Outcome, problem: Problem) -> dict[str, Any]:
    """Return the verdict as JSON; there is none of a process that hung or died."""
    if outcome.status == "done" and outcome.result is not None:
        return outcome.result
    message = f"problem {problem.id} gave {outcome.status} {outcome.kind}: {outcome.detail}"
    raise RuntimeError(message)
