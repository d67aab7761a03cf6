"""Laws of experts about sums: over routing weights, shards, ranks, equal experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import MoEProblem
from ...reference.moe.weights import IN_BLOCKS
from ...reference.problems.moe import WITHOUT_SHARED
from ...reference.tensors.moe_inputs import MoEInputs
from ...reference.tensors.values import bits, choose, stream
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .expert_calls import (
    Answer,
    answer,
    inter_steps,
    of_experts,
    of_inter,
    same,
    shuffled,
    unshared,
)
from .law import MOE, Law


def _summed(whole: Answer, parts: list[Answer]) -> Verdict:
    """Check that parts add up to the whole; each is rounded by itself, so that no bit counts."""
    total = torch.stack([part.out.double() for part in parts]).sum(dim=0)
    bound = torch.stack([whole.bound, *(part.bound for part in parts)]).sum(dim=0)
    return same(total, whole.out, bound)


def routing_weight_linearity(subject: Subject, problem: MoEProblem) -> Verdict:
    """Split the routing weights into two parts: what these give adds up."""
    if problem.weights_on_input or not problem.num_tokens:
        return VACUOUS
    problem, inputs = unshared(problem, subject.materialise(problem))
    if not subject.supports(problem):
        return VACUOUS
    weights = inputs.topk_weights
    tokens = torch.arange(len(weights), device=weights.device)
    hashes = bits(stream(problem.seed, "linearity"), tokens, weights.shape[1])
    # All or nothing of some weights, in every other problem; parts are exact.
    quarters = hashes % 5 if choose(problem.seed, "linearity", 0, 2) else 1 + hashes % 3
    part = weights * (quarters.to(weights.dtype) / 4)
    answers = [
        answer(subject, problem, replace(inputs, topk_weights=each))
        for each in (weights, part, weights - part)
    ]
    return _summed(answers[0], answers[1:])


def expert_shards(subject: Subject, problem: MoEProblem) -> Verdict:
    """Split the experts over two ranks: their outputs add up to the whole."""
    here = problem.here
    if here < 2 or problem.identity_experts:  # noqa: PLR2004  nothing to share out, or no rank's
        return VACUOUS
    cut = here // 2 if here % 2 == 0 else 1 + choose(problem.seed, "shards", 0, here - 1)
    shards = []
    for start, stop in ((0, cut), (cut, here)):
        shard = replace(
            problem,
            local_experts=stop - start,
            expert_offset=problem.expert_offset + start,
            **(WITHOUT_SHARED if start else {}),
        )
        if not subject.supports(shard):
            return VACUOUS
        shards.append((shard, torch.arange(start, stop)))
    inputs = subject.materialise(problem)
    whole, parts = answer(subject, problem, inputs), []
    for shard, index in shards:
        alone = inputs if shard.shared_experts else unshared(shard, inputs)[1]
        given = replace(alone, expert_offset=shard.expert_offset, **of_experts(inputs, index))
        parts.append(answer(subject, shard, given))
    return _summed(whole, parts)


def inter_shards(subject: Subject, problem: MoEProblem) -> Verdict:
    """Split inter over two ranks: their outputs add up to the whole."""
    step = inter_steps(problem)
    cut = problem.inter // 2 // step * step
    if problem.output_norm or problem.one_product or problem.pad_to:
        return VACUOUS  # a norm is of the sum of ranks' outputs; of one product they are parts
    blocks_are_cut = problem.quantized in IN_BLOCKS and problem.inter % step
    if not cut or blocks_are_cut or problem.identity_experts:  # which have no inter
        return VACUOUS
    parts, inputs = [], subject.materialise(problem)
    for start, stop in ((0, cut), (cut, problem.inter)):
        part = replace(problem, inter=stop - start)
        given = of_inter(problem, inputs, start, stop)
        if start or problem.shared_experts:
            part, given = unshared(part, given)
        if not subject.supports(part):
            return VACUOUS
        parts.append((part, given))
    # Shared experts have an inter of their own: they are left out.
    whole, inputs = unshared(problem, inputs)
    if not subject.supports(whole):
        return VACUOUS
    answers = [answer(subject, part, given) for part, given in parts]
    return _summed(answer(subject, whole, inputs), answers)


def expert_twins(subject: Subject, problem: MoEProblem) -> Verdict:
    """Make one expert the copy of another: it does not matter which of them a token goes to."""
    if problem.here < 2 or problem.weights_on_input:  # noqa: PLR2004  one expert has no twin
        return VACUOUS
    order = shuffled(problem.seed, "twins", problem.here).tolist()
    index = torch.arange(problem.here)
    index[order[1]] = order[0]
    inputs = subject.materialise(problem)
    inputs = replace(inputs, **of_experts(inputs, index))
    first, second = (each + problem.expert_offset for each in order[:2])
    moved = _moved(inputs, second, first)
    if moved is None:
        return VACUOUS
    before, after = answer(subject, problem, inputs), answer(subject, problem, moved)
    return same(after.out, before.out, before.bound + after.bound)


def _moved(inputs: MoEInputs, expert: int, twin: int) -> MoEInputs | None:
    """Send the tokens of an expert to its twin; None if it has none.

    A token that has both gives the twin both weights, and the expert none.
    """
    ids, weights = inputs.topk_ids, inputs.topk_weights
    of_expert, of_twin = ids == expert, ids == twin
    if not bool(of_expert.any()):
        return None
    both = of_expert.any(dim=1) & of_twin.any(dim=1)
    ids = ids.masked_fill(of_expert & ~both.unsqueeze(1), twin)
    if bool(both.any()):
        # Weights that go over to the first slot of the twin.
        over = (weights * of_expert).sum(dim=1) * both
        first = of_twin & (of_twin.cumsum(dim=1) == 1)
        weights = torch.where(first, weights + over.unsqueeze(1), weights)
        weights = weights.masked_fill(of_expert & both.unsqueeze(1), 0.0)
    return replace(inputs, topk_ids=ids, topk_weights=weights)


LAWS = (
    Law(
        "routing_weight_linearity",
        MOE,
        routing_weight_linearity,
        "routing weights that are split into two parts give two outputs that add up",
        weight=0.5,
    ),
    Law(
        "expert_shards",
        MOE,
        expert_shards,
        "the outputs of ranks that have some of the experts each add up to the whole",
        weight=0.5,
        needs=("expert_parallel",),
    ),
    Law(
        "inter_shards",
        MOE,
        inter_shards,
        "the outputs of ranks that have a part of inter each add up to the whole",
        weight=0.5,
    ),
    Law(
        "expert_twins",
        MOE,
        expert_twins,
        "of two equal experts it does not matter which one a token goes to",
        weight=0.5,
    ),
)
