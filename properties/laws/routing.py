"""Laws of routing. Scores that a kernel cannot tell apart may be ranked either way."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...reference import METHODS, RouteProblem
from ...reference.tensors.moe_inputs import RouteInputs
from ...reference.tensors.values import choose
from ..verdicts.comparison import Result, fail
from ..verdicts.contained import Stop
from ..verdicts.routes import agree_routes, compare, guarded, judge_route, misshapen
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .expert_calls import shuffled
from .general import kept
from .law import ROUTE, Law, Values

SOFTMAX = ("default", "renormalize", "renormalize_naive")
SHIFTS = (-64.0, 64.0, -96.0)
"""Added to logits that are multiples of 1/2 below 16: sums that bfloat16 holds exactly."""
GRID, MOST = 0.5, 15.5
RAISED = 8.0
"""Amount by which the last expert of a token is raised: no rounding is as large."""
BIAS_SHIFT = -4.0
BIAS_GRID = {"float32": 64, "bfloat16": 16}
"""Parts of 1 that a bias is rounded to, so that the shift adds exactly: it stays below 8."""
WEIGHTS_SLACK = 2.0**-6
"""Tolerance of the sum of renormalised weights that may be stored in bfloat16."""
LEAST_LOGIT = {"exponential": -30.0, "tanh": -11.0}
"""Least logits whose sigmoid is far above the 1e-20 that is added to sums, and above what its
arithmetic loses: 0.5 tanh(x / 2) + 0.5 is a multiple of 2**-25 there, so that below -18 it is 0."""


LARGEST_FLOOR, NO_FLOOR = 2.0**-10, 2.0**-126
"""Above the first no sum of scores is far above the floor; below the second it may be flushed."""


def parity(subject: Subject, problem: RouteProblem) -> Verdict:
    """Check that no better expert was left out, and the weights of those that were taken."""
    inputs = subject.materialise(problem)
    before = guarded(inputs)
    return judge_route(subject.implementation, before, subject.run_operation(problem, inputs))


def invariants(subject: Subject, problem: RouteProblem) -> Verdict:
    """Check what needs no oracle: distinct ids, their groups, sums of weights."""
    inputs = subject.materialise(problem)
    weights, ids = _routed(subject, problem, inputs)
    if not problem.num_tokens:
        return PASS
    wide = ids.long()
    ordered = wide.sort(dim=1).values
    columns = problem.num_experts + problem.shared_experts
    outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= columns)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    group = wide // (problem.num_experts // problem.num_groups)
    used = torch.zeros((len(wide), problem.num_groups), device=wide.device)
    used.scatter_(1, group.clamp(0, problem.num_groups - 1), 1.0)
    scattered = used.sum(dim=1) > problem.topk_groups
    if problem.masked_groups == "zero":
        scattered[:] = False  # a negative score is below that of an expert of a masked group
    known = wide.clamp(0, columns - 1)
    least = _least_logit(problem, subject.implementation.arithmetic.sigmoid)
    something = (inputs.logits.double().gather(1, known) > least).any(dim=1)
    how = METHODS[problem.method]
    # Without a floor a sum of scores that are all 0 in float32 makes NaN.
    no_floor = how.weight == "renormalize" and problem.renormalise_floor < NO_FLOOR
    lost = ~something & no_floor
    for wrong, said in (
        (outside, "has ids that are no expert's"),
        (twice, "has an expert twice"),
        (scattered, f"has experts of more than {problem.topk_groups} groups"),
        (~weights.isfinite().all(dim=1) & ~lost, "has weights that are not finite"),
    ):
        if bool(wrong.any()):
            token = int(wrong.nonzero()[0])
            return fail("shape", f"token {token} {said}: {ids[token].tolist()}")
    return _sums(problem, weights, something)


def guarded_sums(subject: Subject, problem: RouteProblem) -> Verdict:
    """Check that weights of a sum of nothing are numbers, as the implementation promises."""
    weights, _ = _routed(subject, problem, subject.materialise(problem))
    finite = weights.isfinite().all(dim=1)
    if bool(finite.all()):
        return PASS
    token = int((~finite).nonzero()[0])
    return fail("nan", f"the weights of token {token} are {weights[token].tolist()}")


def _of_nothing(values: Values) -> Values:
    """Leave the regime whose scores vanish."""
    return tuple(each for each in values if each == "all_negative")


def _without_floor(values: Values) -> Values:
    return tuple(each for each in values if each == 0)


def _least_logit(problem: RouteProblem, sigmoid: str) -> float:
    """Return the least logit whose score is far above the floor of the sum, and above errors."""
    floor = problem.renormalise_floor
    if floor > LARGEST_FLOOR:
        return math.inf
    return max(LEAST_LOGIT[sigmoid], math.log(floor / LARGEST_FLOOR) if floor else -math.inf)


def _sums(problem: RouteProblem, weights: torch.Tensor, something: torch.Tensor) -> Verdict:
    """Check that renormalised weights add up to the scaling factor.

    Scores that are not a softmax must be ``something`` [tokens]: of next to nothing, weights are
    next to nothing too.
    """
    how = METHODS[problem.method]
    if how.weight not in ("renormalize", "softmax") or how.score == "softmax":
        return PASS
    if problem.expert_scales:
        return PASS
    total = weights.double().sum(dim=1) / problem.scaling_factor
    something = something | (how.weight == "softmax")
    wrong = ((total - 1).abs() > WEIGHTS_SLACK) & something
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        said = f"the weights of token {token} add up to {float(total[token]):.6g}"
        return fail("numeric", f"{said} times the scaling factor")
    return PASS


def token_order(subject: Subject, problem: RouteProblem) -> Verdict:
    """Reorder the tokens: their rows must come in that order."""
    order = shuffled(problem.seed, "token order", problem.num_tokens)
    if torch.equal(order, torch.arange(problem.num_tokens)):
        return VACUOUS
    inputs = subject.materialise(problem)
    weights, ids = _routed(subject, problem, inputs)
    order = order.to(ids.device)
    other = inputs.of_tokens(order)
    second = _routed(subject, problem, other)
    return agree_routes(subject.implementation, other, (weights[order], ids[order]), second)


def expert_order(subject: Subject, problem: RouteProblem) -> Verdict:
    """Put the groups, and the experts within each, into other places: ids go with them."""
    size = problem.num_experts // problem.num_groups
    groups = shuffled(problem.seed, "group order", problem.num_groups)
    within = shuffled(problem.seed, "expert order", size)
    order = (groups.unsqueeze(1) * size + within).flatten()
    if torch.equal(order, torch.arange(problem.num_experts)):
        return VACUOUS
    inputs = subject.materialise(problem)
    weights, ids = _routed(subject, problem, inputs)
    order = order.to(ids.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(problem.num_experts, device=order.device)
    bias, scales, table = inputs.bias, inputs.expert_scales, inputs.expert_table
    columns = inputs.logits.shape[1]
    shared = torch.arange(problem.num_experts, columns, device=order.device)
    other = replace(
        inputs,
        logits=inputs.logits[:, torch.cat([order, shared])].contiguous(),
        bias=None if bias is None else bias[order],
        expert_scales=None if scales is None else scales[order],
        expert_table=None if table is None else places[table.long()].to(table.dtype),
    )
    second = _routed(subject, problem, other)
    moved = torch.cat([places, shared])[ids.long().clamp(0, columns - 1)].to(ids.dtype)
    return agree_routes(subject.implementation, other, (weights, moved), second)


def logit_shift(subject: Subject, problem: RouteProblem) -> Verdict:
    """Add a constant to all logits of a method that takes their softmax: nothing changes."""
    if problem.method not in SOFTMAX or not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    logits = ((inputs.logits.float() / GRID).round() * GRID).clamp(-MOST, MOST)
    shift = SHIFTS[choose(problem.seed, "shift", 0, len(SHIFTS))]
    base = replace(inputs, logits=logits.to(inputs.logits.dtype))
    shifted = replace(inputs, logits=(logits + shift).to(inputs.logits.dtype))
    first = _routed(subject, problem, base)
    return agree_routes(
        subject.implementation, base, first, _routed(subject, problem, shifted), other=shifted
    )


def monotone(subject: Subject, problem: RouteProblem) -> Verdict:
    """Raise the logit of an expert that a token goes to: it still goes there."""
    inputs = subject.materialise(problem)
    _, ids = _routed(subject, problem, inputs)
    columns = inputs.logits.shape[1]
    if not problem.num_tokens or not bool(((ids >= 0) & (ids < columns)).all()):
        return VACUOUS
    last = ids[:, problem.top_k - 1 : problem.top_k].long()
    raised = inputs.logits.scatter_add(1, last, torch.full_like(last, 1).to(inputs.logits) * RAISED)
    other = replace(inputs, logits=raised)
    again = _routed(subject, problem, other)
    _, second = again
    gone = ~(second.long() == last).any(dim=1)
    # Where both scores saturate, or a bias outweighs them, raising moves nothing.
    if bool(gone.any()):
        compared = compare(subject.implementation, other, again)
        if isinstance(compared, Verdict):
            return compared
        gone &= ~compared.ids_right
    if bool(gone.any()):
        token = int(gone.nonzero()[0])
        said = f"token {token} leaves expert {int(last[token])} when its logit is raised"
        return fail("numeric", f"{said}: {ids[token].tolist()}, then {second[token].tolist()}")
    return PASS


def bias_shift(subject: Subject, problem: RouteProblem) -> Verdict:
    """Add a constant to the bias: it selects and does not weigh, so that nothing changes.

    No bias is one of zeros: where there is none, such a one must change nothing either.
    """
    if not problem.bias:
        return _zeros_for_no_bias(subject, problem)
    grouped_by_zero = problem.num_groups > 1 and problem.masked_groups == "zero"
    if not (problem.bias and problem.num_tokens) or grouped_by_zero:
        return VACUOUS
    inputs = subject.materialise(problem)
    assert inputs.bias is not None  # noqa: S101  the problem has one
    parts = BIAS_GRID[problem.bias_dtype]
    base = replace(inputs, bias=(inputs.bias * parts).round() / parts)
    shifted = replace(inputs, bias=base.bias + BIAS_SHIFT)
    first = _routed(subject, problem, base)
    return agree_routes(
        subject.implementation, base, first, _routed(subject, problem, shifted), other=shifted
    )


def _zeros_for_no_bias(subject: Subject, problem: RouteProblem) -> Verdict:
    """Check that a bias of zeros changes nothing where there is none."""
    if problem.method == "sparsemixer" or problem.hash_vocabulary:
        return VACUOUS  # which have none
    zeros = replace(problem, bias=True, bias_values="zeros")
    if problem.grouped and not (problem.group_score or METHODS[problem.method].two_best):
        return VACUOUS  # a bias says that groups are ranked by their two best
    if not (problem.num_tokens and subject.supports(zeros)):
        return VACUOUS
    inputs = subject.materialise(problem)
    biased = replace(inputs, bias=torch.zeros(problem.num_experts, device=inputs.logits.device))
    first = _routed(subject, problem, inputs)
    return agree_routes(
        subject.implementation, inputs, first, _routed(subject, zeros, biased), other=biased
    )


def scaling(subject: Subject, problem: RouteProblem) -> Verdict:
    """Double the scaling factor: the weights double, and nothing else changes."""
    doubled = replace(problem, scaling_factor=2 * problem.scaling_factor)
    if not (problem.num_tokens and subject.supports(doubled)):
        return VACUOUS
    inputs = subject.materialise(problem)
    weights, ids = _routed(subject, problem, inputs)
    other = replace(inputs, scaling_factor=doubled.scaling_factor)
    second = _routed(subject, doubled, other)
    return agree_routes(subject.implementation, other, (2 * weights, ids), second)


def _routed(
    subject: Subject, problem: RouteProblem, inputs: RouteInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of (topk_weights, topk_ids).

    Raises:
        Stop: it raised, or the shapes or dtypes are not those of a routing.
    """
    result: Result = kept(subject.run_operation(problem, guarded(inputs)))
    wrong = misshapen(inputs, result)
    if wrong is not None:
        raise Stop(wrong)
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    return weights, ids


LAWS = (
    Law(
        "routing_parity",
        ROUTE,
        parity,
        "each token goes to distinct experts, no better one is left out, and the weights are those "
        "that belong to them",
        weight=3.0,
        overlap="routing_expert_order sees a choice that depends on the experts' numbers; this law "
        "says what is the right one",
    ),
    Law(
        "routing_invariants",
        ROUTE,
        invariants,
        "ids are distinct experts of so many groups, and renormalised weights add up",
        overlap="routing_parity sees that too; this law asks no oracle and names the broken rule",
    ),
    Law(
        "guarded_sums",
        ROUTE,
        guarded_sums,
        "where all scores vanish and there is no floor, weights are finite",
        weight=0.25,
        needs=("guarded_sums",),
        looks_at=({"regime": _of_nothing, "renormalise_floor": _without_floor},),
    ),
    Law(
        "routing_token_order",
        ROUTE,
        token_order,
        "tokens in another order give their rows in that order",
    ),
    Law(
        "routing_expert_order",
        ROUTE,
        expert_order,
        "experts and groups in other places are selected as before, by their new ids",
    ),
    Law(
        "routing_logit_shift",
        ROUTE,
        logit_shift,
        "a constant added to all logits changes nothing where their softmax is taken",
    ),
    Law(
        "routing_monotone",
        ROUTE,
        monotone,
        "an expert whose logit is raised stays selected",
        overlap="routing_parity sees that too where it happens to draw such logits: a choice that "
        "it accepts is accepted here",
    ),
    Law(
        "routing_bias_shift",
        ROUTE,
        bias_shift,
        "a constant added to the bias of all experts, or a bias of zeros for none, changes nothing",
    ),
    Law(
        "routing_scaling",
        ROUTE,
        scaling,
        "twice the scaling factor gives twice the weights",
    ),
)
