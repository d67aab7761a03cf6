"""The law of the host that runs ahead: plans are made while earlier runs wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...impl.protocol import GraphSession, Session
from ...reference import AttentionProblem
from ...reference.attention.bounds import Bounded
from ..verdicts.comparison import Result, against_oracle
from ..verdicts.contained import Stop
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .batches import LONGER, OTHER, PLANNED, Batch, batches_of, blind, on_host, tensors
from .general import expectation_of
from .law import ATTENTION, Law

BUSY_CYCLES = 20_000_000
"""Cycles for which the GPU is kept busy: about 10 ms, in which the host makes many plans."""
OVERWRITING = "overwriting what was planned from at once"


@dataclass(frozen=True)
class _Step:
    """A plan and a run after it, with all that would wait for the GPU done before."""

    name: str
    batch: Batch
    hosted: Any
    given: Sequence[torch.Tensor]
    inputs: Any
    expectation: Bounded


def host_runs_ahead(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Plan and run batch after batch while the GPU is busy: each run is that of its own plan."""
    if subject.implementation.session is None or subject.target.device != "cuda":
        return VACUOUS
    batches = batches_of(subject, problem)
    # The schedule of another batch differs; that of the same lengths on other pages would not.
    others = [name for name in (OTHER, LONGER) if name in batches]
    if not (batches and others):
        return VACUOUS
    names = (PLANNED, others[problem.seed % len(others)])
    session = subject.open_session()
    # What is built or allocated at first waits for the GPU.
    for name in names[::-1]:
        first = _step(subject, name, batches[name], 0)
        _run_all(subject, session, session.run, [first], overwrite=False)
    function, verb = session.run, "run"
    if isinstance(session, GraphSession) and batches[names[0]].fits(batches[names[1]]):
        subject.call(first.batch.problem, first.inputs, session.capture)
        function, verb = session.replay, "replay"
    for some, overwrite in ((names[:1], True), (names, False), (names, True)):
        steps = [_step(subject, name, batches[name], 1 + i) for i, name in enumerate(some)]
        verdict = _outcome(subject, session, function, steps, verb, overwrite=overwrite)
        if verdict.bad:
            return verdict
    return PASS


def _outcome(
    subject: Subject,
    session: Session,
    function: Callable[[Any], Any],
    steps: Sequence[_Step],
    verb: str,
    *,
    overwrite: bool,
) -> Verdict:
    told = "; ".join(f"{step.name}; {verb}" for step in steps)
    told = f"while the GPU is busy, {told}" + (f", {OVERWRITING}" if overwrite else "")
    try:
        with subject.ahead():
            _fall_behind()
            results = _run_all(subject, session, function, steps, overwrite=overwrite)
    except Stop as stop:
        return replace(stop.verdict, message=f"{told}: {stop.verdict.message}")
    for number, (step, result) in enumerate(zip(steps, results, strict=True), 1):
        exact = subject.exact(step.batch.room)
        verdict = against_oracle(result, step.expectation, exact=exact)
        if verdict.bad:
            return replace(verdict, message=f"{told}: {verb} {number}: {verdict.message}")
    return PASS


def _step(subject: Subject, name: str, batch: Batch, step: int) -> _Step:
    inputs = tensors(subject, batch, step)
    hosted, given = on_host(inputs)
    expectation = expectation_of(subject, batch.problem, inputs)
    return _Step(name, batch, hosted, given, blind(inputs, batch.problem), expectation)


def _run_all(
    subject: Subject,
    session: Session,
    function: Callable[[Any], Any],
    steps: Sequence[_Step],
    *,
    overwrite: bool,
) -> list[Result]:
    """Plan and run, or replay, each."""
    results = []
    for step in steps:
        problem = step.batch.problem
        subject.call(problem, step.hosted, session.plan)
        if overwrite:
            for tensor in step.given:
                tensor.fill_(1)
        results.append(subject.run_operation(problem, step.inputs, function=function))
    return results


def _fall_behind() -> None:
    """Keep the GPU busy, so that whatever is launched next waits."""
    torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001  there is no public way to keep it busy


LAWS = (
    Law(
        "host_runs_ahead",
        ATTENTION,
        host_runs_ahead,
        "a plan that is made while earlier runs wait for the GPU leaves them alone, and has copied "
        "what it was made from",
        weight=0.25,
        needs=("session",),
        overlap="a CPU never falls behind, and that is where the score runs",
    ),
)
