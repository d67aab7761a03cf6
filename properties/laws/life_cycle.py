"""The law of sessions: plans that are kept, made anew, recorded, and used in turn with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...impl.protocol import ExactSession, GraphSession, ScratchSession, Session
from ...reference import AttentionProblem
from ...reference.tensors.values import choose
from ..verdicts.comparison import against_oracle
from ..verdicts.contained import Stop, contained
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .batches import OTHER, PLANNED, PLANS, Batch, batches_of, blind, described, on_host, tensors
from .batches import rewrite as rewrite_in_place
from .general import expectation_of
from .law import ATTENTION, Law

RUN, CAPTURE, REPLAY = "run", "capture", "replay"
REWRITE = "write new keys in place and run again"
APPEND = "append a key to each request, plan and run again"
PUBLISH = "publish exact lengths below the planned ones and run again"
OVERWRITE_PLAN = "overwrite what was planned from"
OVERWRITE_SCRATCH = "overwrite the scratch memory"
OTHER_SESSION = "plan and run another session"
OTHER_SESSION_AGAIN = "run the other session again"
ACTIONS = (*PLANS, RUN, RUN, RUN, REWRITE, APPEND, OVERWRITE_PLAN, OVERWRITE_SCRATCH, OTHER_SESSION,
           OTHER_SESSION_AGAIN)  # fmt: skip
GRAPH_ACTIONS, EXACT_ACTIONS = (CAPTURE, *[REPLAY] * 6), (PUBLISH, PUBLISH)
"""Actions that only a ``GraphSession`` or an ``ExactSession`` has."""


def life_cycle(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Plan, run, plan anew, append, record and replay: each run gives what a fresh call gives.

    The actions follow from the problem's seed; the message names the fewest that show the fault.
    """
    if subject.implementation.session is None:
        return VACUOUS
    batches = batches_of(subject, problem)
    if not batches:
        return VACUOUS
    walk = _walk(problem.seed, subject.open_session())
    verdict = _outcome(subject, batches, walk)
    if not verdict.bad:
        return verdict
    walk, verdict = _fewest(subject, batches, walk, verdict)
    return replace(verdict, message=f"{'; '.join(walk)}: {verdict.message}")


def _walk(seed: int, session: Session) -> list[str]:
    """Shuffle the actions only by the seed, so that a problem that shrinks keeps their order."""
    graphs = isinstance(session, GraphSession)
    actions = (*ACTIONS, *GRAPH_ACTIONS * graphs)
    actions += EXACT_ACTIONS * isinstance(session, ExactSession)
    order = sorted(range(len(actions)), key=lambda each: choose(seed, "life", each, 2**32))
    shuffled = [actions[each] for each in order]
    if graphs and choose(seed, "graphs", 0, 4):
        return [PLANNED, CAPTURE, *shuffled, REPLAY]
    return [PLANNED, RUN, *shuffled, RUN]


def _fewest(
    subject: Subject, batches: Mapping[str, Batch], walk: list[str], verdict: Verdict
) -> tuple[list[str], Verdict]:
    """Leave out actions, the last ones first, until none can be left out."""
    before = None
    while walk != before:
        before = walk
        for position in reversed(range(len(walk))):
            if not subject.device_works():  # after an illegal access nothing can be tried here
                return walk, verdict
            shorter = [*walk[:position], *walk[position + 1 :]]
            found = _outcome(subject, batches, shorter)
            if (found.status, found.kind) == (verdict.status, verdict.kind):
                walk, verdict = shorter, found
    return walk, verdict


def padded_graph(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Capture a batch and replay it with fewer requests, which engines do all the time.

    A session without graphs is planned and run for them.
    """
    if subject.implementation.session is None:
        return VACUOUS
    batches = batches_of(subject, problem)
    if OTHER not in batches:
        return VACUOUS
    large, small = PLANNED, OTHER
    if len(batches[OTHER].problem.query_lens) > len(batches[PLANNED].problem.query_lens):
        large, small = OTHER, PLANNED
    if not batches[large].fits(batches[small]):
        return VACUOUS
    graphs = isinstance(subject.open_session(), GraphSession)
    runs = REPLAY if graphs else RUN
    verdict = _outcome(
        subject, batches, [large, *[CAPTURE] * graphs, runs, small, runs, large, runs, small, runs]
    )
    if not verdict.bad:
        return verdict
    return replace(verdict, message=f"with all requests and with fewer in turn: {verdict.message}")


def _outcome(subject: Subject, batches: Mapping[str, Batch], walk: Sequence[str]) -> Verdict:
    """Return the verdict on a walk; an exception becomes one, so that it names its actions."""
    try:
        engine = _Engine(subject, batches)
        for step, action in enumerate(walk):
            verdict = engine.actions[action](step)
            if verdict is not None and verdict.bad:
                return verdict
    except Stop as stop:
        return stop.verdict
    return PASS


@dataclass(frozen=True)
class _Run:
    """A run or replay, the step whose values it was given, and the tensors that hold them."""

    function: Callable[[Any], Any]
    step: int
    inputs: Any


class _Engine:
    """Two sessions side by side, what each is planned for, and what was captured.

    An action that is impossible where it stands, such as a run without a plan, does nothing.
    """

    def __init__(self, subject: Subject, batches: Mapping[str, Batch]) -> None:
        self._subject, self._batches = subject, batches
        self._mine, self._theirs = subject.open_session(), subject.open_session()
        self._planned: Batch | None = None
        self._their_plan: Batch | None = None
        self._captured: Batch | None = None
        self._last: _Run | None = None
        """The last run, or replay, since the plan."""
        self._given: list[torch.Tensor] = []
        self.actions: dict[str, Callable[[int], Verdict | None]] = {
            **{name: partial(self._plan, batches.get(name)) for name in PLANS},
            RUN: self._run,
            REWRITE: self._rewrite,
            APPEND: self._append,
            PUBLISH: self._publish,
            OVERWRITE_PLAN: self._overwrite_plan,
            OVERWRITE_SCRATCH: self._overwrite_scratch,
            OTHER_SESSION: self._run_another,
            OTHER_SESSION_AGAIN: self._run_another_again,
            CAPTURE: self._capture,
            REPLAY: self._replay,
        }

    def _plan(self, batch: Batch | None, _: int) -> None:
        if batch is not None:
            self._given = plan(self._subject, self._mine, batch, tensors(self._subject, batch, 0))
            self._planned, self._last = batch, None

    def _run(self, step: int) -> Verdict | None:
        return self._fresh(self._mine.run, step)

    def _fresh(self, function: Callable[[Any], Any], step: int) -> Verdict | None:
        """Run on new tensors."""
        if self._planned is None:
            return None
        self._last = _Run(function, step, tensors(self._subject, self._planned, step))
        return self._attend(function, self._planned, self._last.inputs)

    def _rewrite(self, step: int) -> Verdict | None:
        if self._planned is None or self._last is None:
            return None
        self._last = replace(self._last, step=step)
        rewrite_in_place(self._last.inputs, tensors(self._subject, self._planned, step))
        return self._attend(self._last.function, self._planned, self._last.inputs)

    def _append(self, _: int) -> Verdict | None:
        if self._planned is None or self._last is None or self._planned.full:
            return None
        grown = self._planned.grown()
        rewrite_in_place(self._last.inputs, tensors(self._subject, grown, self._last.step))
        inputs = described(self._last.inputs, grown.problem)
        self._given = plan(self._subject, self._mine, grown, inputs)
        self._planned, self._last = grown, replace(self._last, inputs=inputs)
        return self._attend(self._last.function, grown, inputs)

    def _publish(self, step: int) -> Verdict | None:
        planned = self._planned
        # Keys of ragged requests lie one behind another, and rows of a mask are of one length.
        if planned is None or not planned.pages or planned.problem.custom_mask:
            return None
        exact = planned.shortened(step)
        if not (isinstance(self._mine, ExactSession) and self._subject.supports(exact.problem)):
            return None
        device = self._subject.target.device
        lengths = torch.tensor(exact.problem.seq_lens, dtype=torch.int32, device=device)
        with contained("publish raised "):
            self._mine.publish(lengths)
        self._planned = exact
        return None if self._last is None else self._fresh(self._last.function, step)

    def _overwrite_plan(self, _: int) -> None:
        for tensor in self._given:
            tensor.fill_(1)

    def _overwrite_scratch(self, _: int) -> None:
        if not isinstance(self._mine, ScratchSession):
            return
        with contained("its scratch raised "):
            for tensor in self._mine.scratch():
                tensor.view(torch.uint8).fill_(255)  # NaN of every floating type, -1 of integers

    def _run_another(self, step: int) -> Verdict | None:
        self._their_plan = self._batches.get(OTHER, self._batches[PLANNED])
        plan(
            self._subject,
            self._theirs,
            self._their_plan,
            tensors(self._subject, self._their_plan, 0),
        )
        return self._run_another_again(step)

    def _run_another_again(self, step: int) -> Verdict | None:
        if self._their_plan is None:
            return None
        inputs = tensors(self._subject, self._their_plan, step)
        return self._attend(self._theirs.run, self._their_plan, inputs)

    def _capture(self, step: int) -> None:
        if self._planned is not None and isinstance(self._mine, GraphSession):
            problem = self._planned.problem
            inputs = blind(tensors(self._subject, self._planned, step), problem)
            self._subject.call(problem, inputs, self._mine.capture)
            self._captured = self._planned

    def _replay(self, step: int) -> Verdict | None:
        if self._planned is None or self._captured is None:
            return None
        if not (isinstance(self._mine, GraphSession) and self._captured.fits(self._planned)):
            return None
        return self._fresh(self._mine.replay, step)

    def _attend(self, function: Callable[[Any], Any], batch: Batch, inputs: Any) -> Verdict:  # noqa: ANN401
        subject = self._subject
        expectation = expectation_of(subject, batch.problem, inputs)
        result = subject.run_operation(
            batch.problem, blind(inputs, batch.problem), function=function
        )
        # Values and pages are those of the room: what holds of all its keys holds of fewer.
        return against_oracle(result, expectation, exact=subject.exact(batch.room))


def plan(subject: Subject, session: Session, batch: Batch, inputs: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Plan a batch from host tensors, and give these."""
    hosted, given = on_host(inputs)
    subject.call(batch.problem, hosted, session.plan)
    return given


LAWS = (
    Law(
        "life_cycle",
        ATTENTION,
        life_cycle,
        "a session's run, or replay of a recorded run, is that of a fresh call, whatever was "
        "planned, run, appended and overwritten before",
        weight=0.5,
        needs=("session",),
    ),
    Law(
        "padded_graph",
        ATTENTION,
        padded_graph,
        "a captured batch replayed with fewer requests, and with all again, is that of fresh calls",
        weight=0.3,
        needs=("session",),
        overlap="life_cycle kills its bug when its walk happens to replay with fewer requests",
    ),
)
