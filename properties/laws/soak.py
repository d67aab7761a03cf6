"""The law of the long run: the same call, launched again and again, gives the same bits each time.

Races, and counters that nobody resets, show up in one of many launches and in no single one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...impl.protocol import ScratchSession, Session
from ...reference import AttentionOutput, AttentionProblem
from ..verdicts.comparison import Result, against_oracle, agree, bitwise, fail, same_bits
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, Verdict
from .batches import on_host
from .general import Computing, kept, run_on
from .law import ATTENTION, BATCHED, MERGE, MOE, Law

STREAMS = 4
MOST_UNWATCHED, SECONDS_UNWATCHED, BYTES_UNWATCHED = 64, 0.5, 256 << 20
"""Launches between two looks at the results, what they may take, and what their results may."""
SECONDS_A_LAUNCH = 0.01
"""A slow implementation is launched less often: until so long for each launch asked for is over."""
LEAST_LAUNCHES = 4
"""However slow it is."""


@dataclass
class _Lane:
    """Where launches are queued: a stream, and what is called there with what."""

    inputs: Any
    function: Any = None
    stream: torch.cuda.Stream | None = None
    waits: bool = True
    """Whether a launch waits for the one before: on one workspace they may not overtake another."""


@dataclass
class _Comparison:
    """Compares each result with the first one: their bits, or within the bounds."""

    first: Result
    bound: AttentionOutput | None
    exact: bool
    launches: int = 0
    different: int = 0
    where: str = field(default="")

    def take(self, results: Sequence[Result]) -> None:
        """Count the results of the next launches."""
        for result in results:
            self.launches += 1
            said = self._difference(result)
            if said:
                self.different += 1
                self.where = self.where or f"launch {self.launches}: {said}"

    def _difference(self, result: Result) -> str:
        if self.bound is not None:
            bounds = (self.bound, self.bound)
            return agree(self.first, result, bounds, exact=self.exact).message
        for name, before, now in zip(("out", "lse"), self.first, result, strict=True):
            if before is None or now is None:
                continue
            if before.shape != now.shape or before.dtype != now.dtype:
                return f"{name} is {now.dtype} {list(now.shape)}"
            if not same_bits(before, now):
                return bitwise(name, now, before).message or f"{name} has other bits"
        return ""

    def verdict(self) -> Verdict:
        """Return how many launches differed, and where the first of them did."""
        if not self.different:
            return PASS
        counts = f"{self.different} of {self.launches} launches differ from the first"
        return fail("nondeterministic", f"{counts}; {self.where}")


def soak(subject: Subject, problem: Computing) -> Verdict:
    """Launch the same problem ``subject.launches`` times, on several streams of a GPU.

    It waits for them rarely. The first result is compared with the oracle, the others with the
    first: bit by bit, or within twice the bound where an implementation is ``nondeterministic``.
    """
    inputs = subject.materialise(problem)
    first, expectation = run_on(subject, problem, inputs)
    verdict = against_oracle(first, expectation, exact=subject.exact(problem))
    if verdict.bad:
        return verdict
    with _lanes(subject, problem, inputs) as lanes:
        if lanes[0].function is not None:  # a plan of its own, and maybe another order of sums
            first = _launch(subject, problem, lanes[0])
            verdict = against_oracle(first, expectation, exact=subject.exact(problem))
            if verdict.bad:
                return verdict
        noisy = "nondeterministic" in subject.implementation.features
        bound = expectation.bound if noisy else None
        comparison = _Comparison(first, bound, subject.exact(problem))
        _repeat(subject, problem, lanes, comparison)
    return replace(comparison.verdict(), ratio=verdict.ratio)


def _repeat(
    subject: Subject, problem: Computing, lanes: Sequence[_Lane], comparison: _Comparison
) -> None:
    start = time.perf_counter()
    comparison.take([_launch(subject, problem, lanes[0])])
    unwatched = _unwatched(time.perf_counter() - start, comparison.first)
    until = start + SECONDS_A_LAUNCH * subject.launches
    while comparison.launches < subject.launches:
        if comparison.launches >= LEAST_LAUNCHES and time.perf_counter() > until:
            break
        count = min(unwatched, subject.launches - comparison.launches)
        ready: torch.cuda.Event | None = None
        results = []
        for number in range(count):
            lane = lanes[number % len(lanes)]
            if lane.stream is not None and ready is not None and lane.waits:
                lane.stream.wait_event(ready)
            results.append(_launch(subject, problem, lane, wait=False))
            ready = lane.stream.record_event() if lane.stream is not None else None
        subject.wait([lane.stream for lane in lanes])
        comparison.take(results)


def _launch(subject: Subject, problem: Computing, lane: _Lane, *, wait: bool = True) -> Result:
    """Launch once in a lane; the result is a copy, made there too."""
    with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
        result = kept(
            subject.run_operation(problem, lane.inputs, function=lane.function, wait=wait)
        )
    if wait:  # for the copy, too: it is read on another stream
        subject.wait([lane.stream])
    return result


def _unwatched(seconds: float, result: Result) -> int:
    """Return the launches between two looks, from what one takes and gives."""
    size = sum(each.nbytes for each in result if each is not None)
    most = min(SECONDS_UNWATCHED / max(seconds, 1e-6), BYTES_UNWATCHED / max(size, 1))
    return max(1, min(MOST_UNWATCHED, int(most)))


@contextmanager
def _lanes(subject: Subject, problem: Computing, inputs: Any) -> Iterator[list[_Lane]]:  # noqa: ANN401
    """Return the lanes of a device: one on a CPU, a stream each on a GPU, empty when this ends.

    An implementation that has sessions is run in one a stream for every other problem: plans of
    their own may overtake another, unless their sessions say that they share scratch memory.
    """
    if subject.target.device != "cuda":
        yield [_Lane(inputs)]
        return
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    writes = subject.implementation.writes_out
    lanes = [
        _Lane(subject.materialise(problem) if writes else inputs, stream=each) for each in streams
    ]
    for stream in streams:  # until their inputs are made
        stream.wait_stream(torch.cuda.current_stream())
    if (
        subject.implementation.session is not None
        and isinstance(problem, AttentionProblem)
        and _in_sessions(problem)
    ):
        sessions = [subject.open_session() for _ in lanes]
        for lane, planned in zip(lanes, sessions, strict=True):
            with torch.cuda.stream(lane.stream):
                subject.call(problem, on_host(lane.inputs)[0], planned.plan)
            lane.function = planned.run
        alone = not share_scratch(sessions)
        for lane in lanes:
            lane.waits = not alone
    try:
        yield lanes
    finally:
        # What still runs reads memory that is given back here.
        with suppress(RuntimeError):
            subject.wait(streams)


def _in_sessions(problem: AttentionProblem) -> bool:
    # A mask is planned by some and given to each run by others.
    masked = problem.custom_mask or problem.tree or problem.spans or problem.logits_bias
    return problem.seed % 2 == 0 and problem.num_tokens > 0 and not masked


def share_scratch(sessions: Sequence[Session]) -> bool:
    """Whether sessions say that some of their scratch memory is the same."""
    held = [
        tensor.untyped_storage().data_ptr()
        for each in sessions
        if isinstance(each, ScratchSession)
        for tensor in each.scratch()
    ]
    return len(set(held)) < len(held)


LAWS = (
    Law(
        "soak",
        ATTENTION + MERGE + MOE + BATCHED,
        soak,
        "launched again and again, on several streams of a GPU, a call gives the same bits",
        weight=0.2,
        floor=1,  # one problem is launched hundreds of times
    ),
)
