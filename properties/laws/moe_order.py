"""Laws of experts about order: of tokens, of batches, of slots, of experts and of their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...reference import BatchedMoEProblem, MoEProblem, RouteProblem
from ...reference.problems.batched_moe import MOST_ROWS
from ...reference.tensors.batched_moe import BatchedMoEInputs
from ...reference.tensors.moe_inputs import map_matrix
from ...reference.tensors.values import choose
from ..verdicts.comparison import same_bits
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .expert_calls import answer, of_experts, of_tokens, result, same, shuffled, take
from .general import kept, run, run_on
from .law import BATCHED, MOE, ROUTE, Law
from .moe_inert import spoil_experts

MORE_ROWS = (1, 3, 8, 64)
"""Rows of room that each expert has more."""
OF_BATCHED = ("hidden", "w13", "w2", "w13_bias", "w2_bias", "alpha", "beta", "limit", "counts")
"""Fields with an entry for each expert, if they are tensors or matrices."""


def token_order(subject: Subject, problem: MoEProblem) -> Verdict:
    """Reorder the tokens: their rows must come in that order."""
    order = shuffled(problem.seed, "token order", problem.num_tokens)
    if torch.equal(order, torch.arange(problem.num_tokens)):
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    second = result(subject, problem, of_tokens(inputs, order))
    order = order.to(first.device)
    return same(second, first[order], 2 * bound[order], exact=subject.exact(problem))


def token_batches(subject: Subject, problem: MoEProblem) -> Verdict:
    """Split the tokens into two batches: each row stays what it was."""
    count = problem.num_tokens
    if count < 2:  # noqa: PLR2004  nothing to split
        return VACUOUS
    cut = 1 + choose(problem.seed, "token batches", 0, count - 1)
    parts = [torch.arange(cut), torch.arange(cut, count)]
    problems = [replace(problem, num_tokens=len(part), token_ids=()) for part in parts]
    if not all(map(subject.supports, problems)):
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    pairs = zip(problems, parts, strict=True)
    rows = [result(subject, each, of_tokens(inputs, part)) for each, part in pairs]
    return same(torch.cat(rows), first, 2 * bound, exact=subject.exact(problem))


def slot_order(subject: Subject, problem: MoEProblem) -> Verdict:
    """Return each token's experts in another order: nothing changes."""
    if problem.top_k == 1 or not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    order = shuffled(problem.seed, "slot order", problem.top_k).to(inputs.topk_ids.device)
    if torch.equal(order.cpu(), torch.arange(problem.top_k)):
        order = order.flip(0)
    other = replace(
        inputs,
        topk_ids=inputs.topk_ids[:, order].contiguous(),
        topk_weights=inputs.topk_weights[:, order].contiguous(),
    )
    second = result(subject, problem, other)
    return same(second, first, 2 * bound, exact=subject.exact(problem))


def expert_order(subject: Subject, problem: MoEProblem) -> Verdict:
    """Put the experts into other places, and their ids with them: nothing changes."""
    order = shuffled(problem.seed, "expert order", problem.here)
    if torch.equal(order, torch.arange(problem.here)):
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    places = torch.empty_like(order)
    places[order] = torch.arange(problem.here)
    # Ids of other ranks, and of nobody, stay.
    named = torch.arange(-1, problem.num_experts + problem.identity_experts)
    start = 1 + problem.expert_offset
    named[start : start + problem.here] = places + problem.expert_offset
    ids = named.to(inputs.topk_ids.device)[inputs.topk_ids.long() + 1].to(inputs.topk_ids.dtype)
    other = replace(inputs, topk_ids=ids, **of_experts(inputs, order))
    second = result(subject, problem, other)
    return same(second, first, 2 * bound, exact=subject.exact(problem))


def no_tokens(subject: Subject, problem: MoEProblem | RouteProblem) -> Verdict:
    """Call without a token between two equal calls: no rows come, and nothing is left of it."""
    nobody = replace(problem, num_tokens=0, token_ids=())
    if not subject.supports(nobody):
        return VACUOUS
    before = kept(subject.run_operation(problem, subject.materialise(problem)))
    run(subject, nobody)  # which compares the shapes with the oracle's
    after = subject.run_operation(problem, subject.materialise(problem))
    if "nondeterministic" in subject.implementation.features:
        return PASS
    for first, second in zip(before, after, strict=True):
        if first is not None and second is not None and not same_bits(first, second):
            return Verdict("FAIL", "nondeterministic", "a call without tokens changed the next one")
    return PASS


def rows_behind_counts(subject: Subject, problem: BatchedMoEProblem) -> Verdict:
    """Put NaN behind the counts, into experts without a row, and around all tensors."""
    (first, _), bounded = run(subject, problem)
    poisoned = subject.materialise(problem, unused=torch.nan)
    spoil_experts(poisoned, (torch.tensor(problem.counts) == 0).nonzero().flatten())
    second = subject.run_operation(problem, poisoned)[0]
    return same(second, first, 2 * bounded.bound.out, exact=subject.exact(problem))


def room_for_rows(subject: Subject, problem: BatchedMoEProblem) -> Verdict:
    """Check that rows in use stay the same where every expert has room for more."""
    more = MORE_ROWS[choose(problem.seed, "room for rows", 0, len(MORE_ROWS))]
    other = replace(problem, most_rows=min(problem.most_rows + more, MOST_ROWS))
    if other == problem or not subject.supports(other):
        return VACUOUS
    (first, _), bounded = run(subject, problem)
    second = subject.run_operation(other, subject.materialise(other))[0]
    second = second[:, : problem.most_rows]
    return same(second, first, 2 * bounded.bound.out, exact=subject.exact(problem))


def batched_expert_order(subject: Subject, problem: BatchedMoEProblem) -> Verdict:
    """Put the experts into another order, and their rows and counts with them."""
    order = shuffled(problem.seed, "expert order", problem.num_experts)
    if torch.equal(order, torch.arange(problem.num_experts)):
        return VACUOUS
    inputs = subject.materialise(problem)
    (first, _), bounded = run_on(subject, problem, inputs)
    counts = tuple(problem.counts[expert] for expert in order.tolist())
    second = subject.run_operation(replace(problem, counts=counts), _ordered(inputs, order))[0]
    order = order.to(first.device)
    bound = 2 * bounded.bound.out[order]
    return same(second, first[order], bound, exact=subject.exact(problem))


def _ordered(inputs: BatchedMoEInputs, order: torch.Tensor) -> BatchedMoEInputs:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return take(tensor, order)

    changed: dict[str, Any] = {}
    for name in OF_BATCHED:
        value = getattr(inputs, name)
        if value is not None and not isinstance(value, float):
            changed[name] = map_matrix(value, change)
    return replace(inputs, **changed)


LAWS = (
    Law(
        "token_order",
        MOE,
        token_order,
        "tokens in another order give their rows in that order",
        weight=0.5,
    ),
    Law(
        "token_batches",
        MOE,
        token_batches,
        "a batch of tokens that is split in two gives the same rows",
        weight=0.5,
    ),
    Law(
        "slot_order",
        MOE,
        slot_order,
        "the order in which a token's experts are named does not matter",
        weight=0.5,
    ),
    Law(
        "expert_order",
        MOE,
        expert_order,
        "experts in other places, with their ids, give the same answer",
        weight=0.5,
    ),
    Law(
        "no_tokens",
        MOE + ROUTE,
        no_tokens,
        "a call without tokens gives no rows and leaves nothing behind",
        weight=0.5,
        overlap="parity kills its bug when the draw before happened to have no tokens",
    ),
    Law(
        "rows_behind_counts",
        BATCHED,
        rows_behind_counts,
        "NaN in rows behind an expert's count, in experts without a row and around tensors changes "
        "nothing",
        overlap="row_containment, which poisons a row of the batch, kills its bugs too",
    ),
    Law(
        "room_for_rows",
        BATCHED,
        room_for_rows,
        "rows in use stay the same where every expert has room for more",
        weight=0.5,
    ),
    Law(
        "batched_expert_order",
        BATCHED,
        batched_expert_order,
        "experts in another order give their rows in that order",
        weight=0.5,
        overlap="parity kills its bug where weights of neighbouring calls differ",
    ),
)
