"""The law of sessions: plans that are kept, made anew, and used in turn with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem, BatchMetadata, build_metadata
from ...reference.inputs import PagedAttentionInputs
from ...reference.values import choose
from ..comparison import against_oracle
from ..subject import Stop, Subject
from ..verdict import PASS, VACUOUS, Verdict
from .general import judged, others
from .law import PAGED, Law

ACTIONS = (
    "plan the batch",
    "plan another batch",
    "plan the same lengths on other pages",
    "run",
    "run",
    "overwrite what was planned from",
    "use another session",
)
BATCHES = dict(zip(ACTIONS[:3], range(3), strict=True))
LENGTH = 6
"""Actions between the first plan and run and the last run."""


def life_cycle(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Plan, run, plan anew, overwrite host buffers, use two sessions: each run is a fresh call's.

    What is done follows from the problem's seed; the fewest actions that show a fault are told.
    """
    if subject.implementation.session is None:
        return VACUOUS
    # A mask is planned by some and given to each run by others: it is of no use here.
    problem = replace(problem, custom_mask=False)
    repaged = replace(problem, page_order=problem.page_order + 1)
    other = next(others(problem))
    assert isinstance(other, AttentionProblem)  # noqa: S101  of the same kind
    batches = (problem, other, repaged)
    if not problem.num_tokens or not all(subject.supports(batch) for batch in batches):
        return VACUOUS
    walk = _walk(problem.seed)
    verdict = _outcome(subject, batches, walk)
    if not verdict.bad:
        return verdict
    for position in reversed(range(len(walk))):
        shorter = [*walk[:position], *walk[position + 1 :]]
        found = _outcome(subject, batches, shorter)
        if (found.status, found.kind) == (verdict.status, verdict.kind):
            walk, verdict = shorter, found
    return replace(verdict, message=f"{'; '.join(walk)}: {verdict.message}")


def _walk(seed: int) -> list[str]:
    chosen = [ACTIONS[choose(seed, "life", step, len(ACTIONS))] for step in range(LENGTH)]
    return [ACTIONS[0], "run", *chosen, "run"]


def _outcome(subject: Subject, batches: Sequence[AttentionProblem], walk: Sequence[str]) -> Verdict:
    """Give the verdict on a walk; an exception is one, so that its actions are told too."""
    try:
        return _follow(subject, batches, walk)
    except Stop as stop:
        return stop.verdict


def _follow(subject: Subject, batches: Sequence[AttentionProblem], walk: Sequence[str]) -> Verdict:
    session = subject.implementation.session
    assert session is not None  # noqa: S101  the law has looked
    mine, theirs = session(), session()
    current: AttentionProblem | None = None
    given: list[torch.Tensor] = []
    for step, action in enumerate(walk):
        if action in BATCHES:
            current = batches[BATCHES[action]]
            given = _plan(subject, mine, current)
        elif action.startswith("overwrite"):
            for tensor in given:
                tensor.fill_(1)
        elif action.startswith("use"):
            _plan(subject, theirs, batches[1])
            verdict = _run(subject, theirs, replace(batches[1], seed=batches[1].seed + step))
            if verdict.bad:
                return verdict
        elif current is not None:
            verdict = _run(subject, mine, replace(current, seed=current.seed + step))
            if verdict.bad:
                return verdict
    return PASS


def _plan(subject: Subject, session: Any, problem: AttentionProblem) -> list[torch.Tensor]:  # noqa: ANN401
    """Plan a batch from host tensors, and give these."""
    inputs: PagedAttentionInputs = subject.materialise(problem)
    held = {name: tensor.cpu().clone() for name, tensor in inputs.metadata.tensors().items()}
    table = inputs.block_table.cpu().clone()
    metadata = BatchMetadata(**held, page_size=inputs.metadata.page_size)
    subject.call(problem, replace(inputs, metadata=metadata, block_table=table), session.plan)
    return [*held.values(), table]


def _run(subject: Subject, session: Any, problem: AttentionProblem) -> Verdict:  # noqa: ANN401
    """Run a session on fresh values of the batch that it has planned."""
    inputs: PagedAttentionInputs = subject.materialise(problem)
    expectation = judged(subject, inputs)
    # Metadata of another batch, of one key a request: what was planned counts.
    table = torch.zeros_like(inputs.block_table)
    one_key = [1] * len(problem.seq_lens)
    metadata = build_metadata(problem.query_lens, one_key, table, problem.page_size)
    blind = replace(inputs, metadata=metadata, block_table=table)
    result = subject.attend(problem, blind, function=session.run)
    return against_oracle(result, expectation, exact=subject.exact(problem))


LAWS = (
    Law(
        "life_cycle",
        PAGED,
        life_cycle,
        "a session's run is that of a fresh call, whatever was planned, run and overwritten before",
        weight=0.5,
        needs=("session",),
    ),
)
