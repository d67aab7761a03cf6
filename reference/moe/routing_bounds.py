r"""Comparing routings where scores are equal or nearly so, and the bound on the weights.

Which of two experts with equal scores is chosen is nobody's promise, and a kernel that computes in
float32 cannot tell scores apart that differ by less than its roundings. A choice is right if no
expert that was left out has a score above one that was taken by more than both may be off, among
the experts of groups that were chosen rightly in the same sense. The weights are then those that
belong to the experts that were taken, not those of the oracle's own choice.

Errors of the scores, with u the unit roundoff of the kernel's arithmetic, x the logits, m the
largest of a token, d = LOGIT u (|x| + |m|) + EXP u the exponent's, and TINY what a flush to zero
loses:

    logit               0: read as it is
    softmax             p (expm1(d) + sum p expm1(d) + (n(E) + SUM) u) + TINY
    sigmoid             s ((1 - s) expm1(LOGIT u |x| + EXP u) + SUM u) + TINY; from tanh: 8 u more
    sqrt(softplus)      s (LOGIT u |x| + 2 EXP u) + min(s, sqrt(TINY)) + sqrt(SUBNORMAL)
    with a bias b       u (|score| + |b|) more, for the selection

Weights: renormalised scores s_i / S, S the sum of k of them: (error_i + w_i sum of errors) / S +
(n(k) + SUM) u w; S has the floor that is added to it. Softmax over the selected: as above, with k
in the place of E. Sparsemixer: the same over what is near the expert, with all that a kernel may
take for near, and without it. The scaling factor multiplies all, a scale of each expert too, with a
rounding of its own, and what the weights are stored in rounds once more. Where such a bound
exceeds the weights, they are held to what else the arithmetic promises, see ``routing_promises``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import torch

from ..attention.error_terms import EXP, LOGIT, SUM, growth
from ..attention.reordering import LARGEST_LOGIT_ERROR
from ..formats.arithmetic import (
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    checked_arithmetic,
    dtype_name,
    unit_roundoff,
)
from ..validation import check_index_tensor, check_tensor
from .routing import Router, Routing, checked_router, group_scores, masked, unscaled, weights_of
from .routing_methods import RENORMALISE_FLOOR
from .routing_promises import TINY, keeps_promises, zero_is_right
from .routing_rules import JITTER
from .routing_rules_bounds import best_of_each_were_taken, sparsemixer_error

MOST_CHOICES = 20_000
"""Most choices of groups that rounding may exchange: a token with more is not judged."""
SIGMOID_BY_TANH = 8.0
"""Absolute error, in units of u, of (1 + tanh(x / 2)) / 2."""


class RoutingComparison(NamedTuple):
    """What is right about a routing.

    Attributes:
        ids_right: bool [tokens]: distinct experts, and no better one was left out.
        weights_right: bool [tokens]: the weights that belong to these ids, within the bound.
        expected: [tokens, slots], those weights; 0 where an id is no expert.
        bound: [tokens, slots], how far an honest kernel's may be from them.
        weights_judged: bool [tokens]: the arithmetic promises weights other than 0 for these ids,
            or 0 is right. Of other tokens any weights within the bound are called right, weights
            that are all 0 among them.
    """

    ids_right: torch.Tensor
    weights_right: torch.Tensor
    expected: torch.Tensor
    bound: torch.Tensor
    weights_judged: torch.Tensor

    @property
    def right(self) -> bool:
        """Whether all tokens are right."""
        return bool((self.ids_right & self.weights_right).all())


@torch.no_grad()
def compare_routing(
    found: Routing,
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str = "renormalize",
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    scaling_factor: float = 1.0,
    masked_groups: str = "-inf",
    renormalise_floor: float = RENORMALISE_FLOOR,
    expert_scales: torch.Tensor | None = None,
    best_of_each_group: bool = False,
    shared_experts: int = 0,
    expert_table: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    jitter: float = JITTER,
    group_score: str | None = None,
    compute_dtype: torch.dtype = torch.float64,
    arithmetic: Arithmetic | None = None,
) -> RoutingComparison:
    """Judge a routing, in which ties and near ties may have gone either way.

    Args:
        found: topk_ids, integers [tokens, slots] in any order; topk_weights of any floating dtype,
            which is taken for what the kernel stores them in.
        logits, top_k, and the options: the same as in ``route``.
        arithmetic: what the kernel computes in (``accumulate``, ``sigmoid``); float32 if None.

    Raises:
        ValueError: as ``route``, a routing of another shape, or so many groups of a token that
            cannot be told apart that the choices cannot be tried.
    """
    router = checked_router(
        logits,
        top_k,
        method=method,
        bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scaling_factor=scaling_factor,
        masked_groups=masked_groups,
        renormalise_floor=renormalise_floor,
        expert_scales=expert_scales,
        best_of_each_group=best_of_each_group,
        shared_experts=shared_experts,
        expert_table=expert_table,
        input_ids=input_ids,
        jitter=jitter,
        group_score=group_score,
        compute_dtype=compute_dtype,
    )
    slots = top_k + shared_experts
    wanted = (len(logits), slots)
    if not isinstance(found, Routing):
        message = f"found must be a Routing(topk_ids, topk_weights), not {type(found).__name__}"
        raise ValueError(message)
    for name, tensor in found._asdict().items():
        if not isinstance(tensor, torch.Tensor):
            message = f"{name} must be a tensor [tokens, top_k], not {type(tensor).__name__}"
            raise ValueError(message)
        if tuple(tensor.shape) != wanted:
            message = (
                f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, slots] = {wanted}"
            )
            raise ValueError(message)
    check_index_tensor("topk_ids", found.topk_ids)
    check_tensor("topk_weights", found.topk_weights, "tokens top_k")
    arithmetic, ids = checked_arithmetic(arithmetic), found.topk_ids.to(torch.int64)
    valid = ((ids >= 0) & (ids < logits.shape[1])).all(dim=1)
    ids = ids.where(valid.unsqueeze(1), torch.arange(slots, device=ids.device))
    ordered = ids.sort(dim=1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all(dim=1)
    shared = torch.arange(router.experts, logits.shape[1], device=ids.device)
    distinct &= (ordered[:, top_k:] == shared).all(dim=1)
    errors = score_errors(router, arithmetic)
    routed = ordered[:, :top_k].clamp(max=router.experts - 1)
    ids_right = valid & distinct & _choice_is_right(router, errors, routed)
    given, stored = found.topk_weights.to(compute_dtype), found.topk_weights.dtype
    expected, bound = _weights(router, errors, ids, arithmetic, given, stored)
    parts = _weighed(router, errors, ids, arithmetic)
    inside = (given == expected) | ((given - expected).abs() <= bound)  # equal infinities too
    inside &= keeps_promises(router, ids, *parts, given, arithmetic, stored)
    anything = _may_be_nothing(router, errors, ids)
    inside |= anything.unsqueeze(1)
    nothing = torch.zeros_like(expected)
    told = keeps_promises(router, ids, *parts, nothing, arithmetic, stored)
    told &= expected.abs() <= bound
    judged = ~told.all(dim=1) | zero_is_right(router, *parts, expected, bound, stored)
    judged &= ~anything
    known = valid.unsqueeze(1)
    return RoutingComparison(
        ids_right,
        valid & inside.all(dim=1),
        expected.where(known, 0.0),
        bound.where(known, 0.0),
        judged,
    )


def _weighed(
    router: Router, errors: torch.Tensor, ids: torch.Tensor, arithmetic: Arithmetic
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the weights [tokens, top_k] of these experts are made of, and its errors."""
    if router.how.weight != "sigmoid":
        return router.scores.gather(1, ids), errors.gather(1, ids)
    logits = router.logits.gather(1, ids)
    error = _sigmoid_error(UNIT_ROUNDOFF[arithmetic.accumulate], logits, arithmetic)
    return torch.sigmoid(logits), error


def score_errors(router: Router, arithmetic: Arithmetic) -> torch.Tensor:
    """Return the errors [tokens, experts] of the scores, without bias."""
    u, x, scores = UNIT_ROUNDOFF[arithmetic.accumulate], router.logits, router.scores
    size = x.abs().masked_fill(x.isneginf(), 0.0)
    if router.how.score == "softmax":
        relative = _exponential(u, x)
        common: torch.Tensor = (scores * relative).sum(dim=1, keepdim=True)
        return scores * (relative + common + (growth(x.shape[1]) + SUM) * u) + TINY
    if router.how.score == "sigmoid":
        return _sigmoid_error(u, x, arithmetic)
    if router.how.score == "sqrt_softplus":
        # Flushing loses no more than there is; of what is not flushed, last digits.
        flushed = scores.clamp(max=math.sqrt(TINY)) + math.sqrt(SMALLEST_SUBNORMAL["float32"])
        return scores * (LOGIT * u * size + 2 * EXP * u) + flushed
    return torch.zeros_like(x)


def _exponential(u: float, x: torch.Tensor) -> torch.Tensor:
    """Return the relative errors of exp(x - max): 0 where x is minus infinity."""
    size = x.abs().masked_fill(x.isneginf(), 0.0)
    largest = x.amax(dim=1, keepdim=True).abs()
    return torch.expm1((u * (LOGIT * (size + largest) + EXP)).clamp(max=LARGEST_LOGIT_ERROR))


def _sigmoid_error(u: float, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    s, size = torch.sigmoid(x), x.abs().masked_fill(x.isneginf(), 0.0)
    relative = torch.expm1((u * (LOGIT * size + EXP)).clamp(max=LARGEST_LOGIT_ERROR))
    absolute = SIGMOID_BY_TANH * u if arithmetic.sigmoid == "tanh" else 0.0
    return s * ((1 - s) * relative + SUM * u) + TINY + absolute


def _choice_is_right(router: Router, errors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return, for each token [tokens], whether these experts may have been selected."""
    if router.rules.chosen is not None:
        right: torch.Tensor = (ids == router.rules.chosen.sort(dim=1).values).all(dim=1)
        return right
    errors = errors[:, : router.experts] + _bias_error(router)
    if router.rules.best_of_each_group:
        groups = router.num_groups, router.top_k // router.num_groups
        return best_of_each_were_taken(router.ranking, errors, ids, groups)
    if router.topk_groups == router.num_groups:
        return _best_were_taken(router.ranking, errors, ids)
    sure, maybe = _groups(router, errors)
    possible = sure | maybe
    settled = possible.sum(dim=1) == router.topk_groups
    right = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    chosen = possible[settled].nonzero()[:, 1].view(-1, router.topk_groups)
    allowed = masked(_of_tokens(router, settled), chosen)
    right[settled] = _best_were_taken(allowed, errors[settled], ids[settled])
    counts = torch.stack([sure.sum(dim=1), maybe.sum(dim=1)], dim=1)
    for alike in counts[~settled].unique(dim=0):
        rows = (~settled & (counts == alike).all(dim=1)).nonzero()[:, 0]
        right[rows] = _some_choice_is_right(router, errors, ids, (sure, maybe), rows)
    return right


def _some_choice_is_right(
    router: Router,
    errors: torch.Tensor,
    ids: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """Try the groups that are in doubt in every combination; of these tokens, all have as many.

    Args:
        router, errors, ids: the router, and the errors and ids of all tokens.
        groups: which [tokens, groups] are surely chosen, and which may be.
        rows: the tokens.

    Returns:
        bool [rows].
    """
    first, doubtful = (
        each[rows].nonzero()[:, 1].view(len(rows), int(each[rows[0]].sum())) for each in groups
    )
    right = torch.zeros(len(rows), dtype=torch.bool, device=ids.device)
    more = router.topk_groups - first.shape[1]
    if math.comb(doubtful.shape[1], more) > MOST_CHOICES:
        message = (
            f"logits: {doubtful.shape[1]} groups of token {int(rows[0])} cannot be told apart, of "
            f"which {more} are chosen: too many choices to try"
        )
        raise ValueError(message)
    for others in combinations(range(doubtful.shape[1]), more):
        left = (~right).nonzero()[:, 0]
        if not len(left):
            break
        chosen = torch.cat([first[left], doubtful[left][:, list(others)]], dim=1)
        tokens = rows[left]
        allowed = masked(_of_tokens(router, tokens), chosen)
        right[left] = _best_were_taken(allowed, errors[tokens], ids[tokens])
    return right


def _of_tokens(router: Router, index: torch.Tensor) -> Router:
    rules = router.rules.of_tokens(index)
    return replace(router, logits=router.logits[index], scores=router.scores[index], rules=rules)


def _groups(router: Router, errors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which groups [tokens, groups] are surely among the best, and which may be."""
    scores, many = group_scores(router), router.topk_groups
    of_group = errors.unflatten(1, (router.num_groups, -1)).amax(dim=-1) * router.best_of_group
    of_group = of_group + UNIT_ROUNDOFF["float32"] * scores.abs()
    low, high = scores - of_group, scores + of_group
    # Of each group: how many may be as good or better (itself included), and how many are better.
    as_good = (high.unsqueeze(1) >= low.unsqueeze(2)).sum(dim=2)
    better = (low.unsqueeze(1) > high.unsqueeze(2)).sum(dim=2)
    sure = as_good <= many
    return sure, ~sure & (better < many)


def _best_were_taken(scores: torch.Tensor, errors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return, for each token, whether no expert left out is surely better than one taken."""
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ids, value=True)
    least = (scores + errors).masked_fill(~taken, torch.inf).amin(dim=1)
    most = (scores - errors).masked_fill(taken, -torch.inf).amax(dim=1)
    return least >= most


def _bias_error(router: Router) -> torch.Tensor:
    if router.bias is None:
        return torch.zeros((), dtype=router.scores.dtype, device=router.scores.device)
    scores = router.scores[:, : router.experts]
    size = scores.abs().masked_fill(scores.isneginf(), 0.0)
    return UNIT_ROUNDOFF["float32"] * (size + router.bias.abs())


def _weights(
    router: Router,
    errors: torch.Tensor,
    ids: torch.Tensor,
    arithmetic: Arithmetic,
    given: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [tokens, slots] of these experts, and their bound.

    Weights of sparsemixer are those of an order. Equal logits may be taken in that of the slots, or
    in its reverse: the one that ``given`` [tokens, slots] agrees with is expected.
    """
    if router.how.weight != "sparsemixer":
        bound = _weight_bound(router, errors, ids, arithmetic, dtype)
        return weights_of(router, ids), bound
    found = []
    for slots in (ids, ids.flip(1)):
        order = router.logits.gather(1, slots).sort(dim=1, descending=True, stable=True).indices
        taken = slots.gather(1, order)
        pair = (weights_of(router, taken), _weight_bound(router, errors, taken, arithmetic, dtype))
        put = [torch.empty_like(each).scatter_(1, order, each) for each in pair]
        found.append(put if slots is ids else [each.flip(1) for each in put])
    (expected, bound), (other, other_bound) = found
    closer = ((given - other).abs() <= other_bound).all(dim=1, keepdim=True)
    return torch.where(closer, other, expected), torch.where(closer, other_bound, bound)


def _may_be_nothing(router: Router, errors: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens [tokens] whose scores may all be 0 in a kernel that adds nothing to them.

    It divides 0 by 0, and no weight of theirs is a wrong one.
    """
    if router.how.weight != "renormalize" or router.rules.renormalise_floor > TINY:
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    lost: torch.Tensor = (router.scores <= errors).gather(1, ids).all(dim=1)
    return lost


def _weight_bound(
    router: Router,
    errors: torch.Tensor,
    ids: torch.Tensor,
    arithmetic: Arithmetic,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the weights [tokens, slots] of these experts."""
    u, how, top_k = UNIT_ROUNDOFF[arithmetic.accumulate], router.how, ids.shape[1]
    weights = unscaled(router, ids).abs()
    logits, selected = router.logits.gather(1, ids), errors.gather(1, ids)
    sums = (growth(top_k) + SUM) * u
    if how.weight == "renormalize":
        total = router.scores.gather(1, ids).sum(dim=1, keepdim=True)
        total = total + router.rules.renormalise_floor
        error = (selected + weights * selected.sum(dim=1, keepdim=True)) / total + sums * weights
    elif how.weight == "softmax":
        relative = _exponential(u, logits)
        common = (weights * relative).sum(dim=1, keepdim=True)
        error = weights * (relative + common + sums) + TINY
    elif how.weight == "sigmoid":
        error = _sigmoid_error(u, logits, arithmetic)
    elif how.weight == "sparsemixer":
        error = sparsemixer_error(router.logits, ids, router.rules.jitter, u) + TINY
    else:
        error = selected
    factor: torch.Tensor | float = abs(router.scaling_factor)
    if router.rules.expert_scales is not None:
        factor = factor * router.rules.expert_scales[ids].abs()
        error = error + u * weights
    rounding, floor = unit_roundoff(dtype), SMALLEST_SUBNORMAL[dtype_name(dtype)] / 2
    error = factor * (error + u * weights)
    return (1 + rounding) * error + rounding * factor * weights + floor
