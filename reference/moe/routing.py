"""Routing: which experts a token goes to, and with which weights.

    scores  = softmax, sigmoid, ... of the logits, or the logits themselves
    ids     = the top_k experts by score + bias, of the best groups where there are groups
    weights = what the method makes of the selected scores or logits, times scaling_factor

The bias selects and does not weigh. Among equal scores the lowest expert index comes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..validation import check_tensor, checked_number
from .routing_methods import (
    GROUP_SCORES,
    MASKED_GROUPS,
    RENORMALISE_FLOOR,
    RoutingMethod,
    router_scores,
    router_weights,
    routing_method,
)
from .routing_rules import (
    JITTER,
    RoutingRules,
    best_of_groups,
    check_together,
    checked_rules,
    sparsemixer_weights,
    with_shared,
)


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        topk_ids: int32 [tokens, top_k], best first; with shared experts [tokens, top_k + shared
            experts], theirs last.
        topk_weights: weights of the same shape.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Router:
    """The arguments of ``route``, checked; numbers are in the dtype of the computation.

    Attributes:
        how: the method.
        logits: [tokens, experts], those of shared experts last.
        scores: [tokens, experts], without bias.
        bias: [experts], or None.
        top_k, num_groups, topk_groups, scaling_factor: the same as in ``route``; without groups,
            one group.
        masked: the score of an expert in a group that was not chosen.
        rules: those of single families of models.
        group_score: the same as in ``route``.
    """

    how: RoutingMethod
    logits: torch.Tensor
    scores: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    num_groups: int
    topk_groups: int
    scaling_factor: float
    masked: float
    rules: RoutingRules
    group_score: str | None = None

    @property
    def experts(self) -> int:
        """Experts that are selected from: all but the shared ones."""
        return self.scores.shape[1] - self.rules.shared_experts

    @property
    def ranking(self) -> torch.Tensor:
        """The scores [tokens, experts] that experts are selected by: with the bias."""
        scores = self.scores[:, : self.experts]
        return scores if self.bias is None else scores + self.bias

    @property
    def best_of_group(self) -> int:
        """Of how many of its best experts a group's score is the sum."""
        two = self.how.two_best or self.bias is not None
        usual = "two_best" if two else "best"
        count = GROUP_SCORES[self.group_score or usual]
        return min(count, self.experts // self.num_groups)


@torch.no_grad()
def route(
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
) -> Routing:
    """Route tokens to experts.

    Args:
        logits: [tokens, experts], any floating dtype; each is taken as the number that it is. Minus
            infinity is allowed: a probability of 0.
        top_k: experts a token.
        method: a name of ``METHODS``, which are FlashInfer's: ``"default"`` (softmax, top-k),
            ``"renormalize"`` (top-k, softmax), ``"renormalize_naive"`` (softmax, top-k,
            renormalise), ``"deepseek_v3"`` (sigmoid, bias, groups by their two best, top-k,
            renormalise), ``"minimax2"`` (the same without groups), ``"llama4"`` and
            ``"topk_sigmoid"`` (top-k, sigmoid), ``"topk"`` (the logits are the weights),
            ``"sigmoid"``, ``"sigmoid_renorm"``, ``"deepseek_v4"`` (square root of softplus).
        bias: [experts], added to the scores (probabilities, sigmoids, or logits, whatever the
            method ranks by) for selection alone.
        num_groups, topk_groups: into how many groups of equal size the experts fall, and how many
            of them a token may use; both or neither. Only for methods that do not rank by the
            logits.
        scaling_factor: multiplies the weights at the end.
        masked_groups: ``"-inf"`` or ``"zero"``: what the score of an expert in a group that was not
            chosen becomes, see ``MASKED_GROUPS``.
        renormalise_floor: added to the sum that renormalised weights are divided by: 1e-20
            (DeepSeek-V3), 1e-6 (LFM2), 0 for none. Without one, a token whose scores are all 0 has
            weights of NaN.
        expert_scales: [experts], a factor on each expert's weight after the normalisation
            (Gemma 4).
        best_of_each_group: each group gives its top_k / num_groups best experts (InternS1-Pro);
            topk_groups is num_groups.
        shared_experts: number of experts that every token goes to, whose columns are the last of
            ``logits``. Their weights are normalised together with those of the selected ones and
            follow them, with their ids (Inkling). Only for methods that normalise.
        expert_table, input_ids: integers [vocabulary, top_k] and [tokens]: the experts of each
            token are the row of its id in the vocabulary (the first layers of DeepSeek-V4); the
            scores only weigh. Without bias and groups.
        jitter: the jitter of ``"sparsemixer"`` (PhiMoE): the best logit is taken, weighed by its
            share of the softmax over the experts whose distance to it is at most 2 jitter
            max(abs(logit), best); then the same among the others. Without bias.
        group_score: ``"best"`` or ``"two_best"``: a group's score is that of its best expert, or
            the sum of its two best, see ``GROUP_SCORES``. None: two for ``"deepseek_v3"`` and
            wherever there is a bias, be it of zeros, else one.
        compute_dtype: float64 (default) or float32.

    Returns:
        Routing, the weights in ``compute_dtype``.

    Raises:
        ValueError: an unknown method or convention, a top_k or groups that do not fit the experts,
            shapes that disagree, or logits that have no order (NaN, infinity, a token without a
            finite one); the position is named.
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
    ids = with_shared(selected(router), router.experts, shared_experts)
    return Routing(ids.to(torch.int32), weights_of(router, ids))


def selected(router: Router) -> torch.Tensor:
    """Return the experts [tokens, top_k] that tokens go to besides the shared ones."""
    if router.rules.chosen is not None:
        return router.rules.chosen
    if router.rules.best_of_each_group:
        return best_of_groups(router.ranking, router.num_groups, router.top_k)
    return best(masked(router, best(group_scores(router), router.topk_groups)), router.top_k)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices [tokens, count] of the largest scores; of equal ones, the lowest first."""
    ranked: torch.Tensor = scores.sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :count]


def group_scores(router: Router) -> torch.Tensor:
    """Return the scores [tokens, groups] of the groups."""
    members = router.ranking.unflatten(1, (router.num_groups, -1))
    two: torch.Tensor = members.topk(router.best_of_group, dim=-1).values
    return two.sum(dim=-1)


def masked(router: Router, groups: torch.Tensor) -> torch.Tensor:
    """Return the ranking [tokens, experts] with scores left only to the groups [tokens, n]."""
    chosen = torch.zeros(
        (len(groups), router.num_groups), dtype=torch.bool, device=groups.device
    ).scatter_(1, groups, value=True)
    size = router.experts // router.num_groups
    return router.ranking.masked_fill(~chosen.repeat_interleave(size, dim=1), router.masked)


def weights_of(router: Router, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights [tokens, slots] that belong to these experts (int64 [tokens, slots])."""
    weights = unscaled(router, ids) * router.scaling_factor
    scales = router.rules.expert_scales
    return weights if scales is None else weights * scales[ids]


def unscaled(router: Router, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights of ``weights_of`` without the factors on them."""
    if router.how.weight == "sparsemixer":
        return sparsemixer_weights(router.logits, ids, router.rules.jitter)
    floor = router.rules.renormalise_floor
    return router_weights(router.how, router.logits, router.scores, ids, floor)


def checked_router(
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str,
    bias: torch.Tensor | None,
    num_groups: int | None,
    topk_groups: int | None,
    scaling_factor: float,
    masked_groups: str,
    compute_dtype: torch.dtype,
    group_score: str | None = None,
    **rules: Any,  # noqa: ANN401  those of ``RoutingRules``, which ``checked_rules`` checks
) -> Router:
    """Check the arguments of ``route``, which says what they are."""
    how = routing_method(method)
    check_tensor("logits", logits, "tokens experts")
    if compute_dtype not in (torch.float64, torch.float32):
        message = f"compute_dtype is {compute_dtype}; it must be float64 or float32"
        raise ValueError(message)
    made = checked_rules(how, logits.to(compute_dtype), top_k=top_k, **rules)
    experts = logits.shape[1] - made.shared_experts
    groups, of_groups = _checked_groups(how, method, experts, num_groups, topk_groups)
    if masked_groups not in tuple(MASKED_GROUPS):
        message = f"masked_groups is {masked_groups!r}; it must be one of {tuple(MASKED_GROUPS)}"
        raise ValueError(message)
    if group_score is not None and group_score not in tuple(GROUP_SCORES):
        message = f"group_score is {group_score!r}; it must be None or one of {tuple(GROUP_SCORES)}"
        raise ValueError(message)
    _check_count("top_k", top_k, experts, "experts")
    if top_k > of_groups * (experts // groups):
        message = (
            f"top_k is {top_k}, but {of_groups} groups of {experts // groups} experts are used"
        )
        raise ValueError(message)
    factor = checked_number("scaling_factor", scaling_factor)
    if isinstance(scaling_factor, bool) or not math.isfinite(factor):
        message = f"scaling_factor is {scaling_factor!r}; it must be a finite number"
        raise ValueError(message)
    if bias is not None:
        check_tensor("bias", bias, "experts")
        if len(bias) != experts or not bool(bias.isfinite().all()):
            message = f"bias must be {experts} finite numbers, one for each expert of logits"
            raise ValueError(message)
    check_together(made, how, top_k, groups=(groups, of_groups), biased=bias is not None)
    wide = logits.to(compute_dtype)
    _check_order(wide)
    return Router(
        how,
        wide,
        router_scores(how, wide),
        None if bias is None else bias.to(compute_dtype),
        top_k,
        groups,
        of_groups,
        factor,
        MASKED_GROUPS[masked_groups],
        made,
        group_score,
    )


def _check_count(name: str, count: int, most: int, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        message = f"{name} is {count!r}; it must be from 1 to {most}, the number of {what}"
        raise ValueError(message)


def _checked_groups(
    how: RoutingMethod, method: str, experts: int, num_groups: int | None, topk_groups: int | None
) -> tuple[int, int]:
    if num_groups is None and topk_groups is None:
        return 1, 1
    if num_groups is None or topk_groups is None:
        message = f"num_groups is {num_groups} and topk_groups {topk_groups}: give both, or neither"
        raise ValueError(message)
    _check_count("num_groups", num_groups, experts, "experts")
    if experts % num_groups:
        message = (
            f"num_groups is {num_groups}, which does not divide the {experts} experts of logits"
        )
        raise ValueError(message)
    _check_count("topk_groups", topk_groups, num_groups, "groups")
    if how.score == "logit" and num_groups > 1:
        message = f"num_groups is {num_groups}, but method {method!r} ranks by logits: no groups"
        raise ValueError(message)
    return num_groups, topk_groups


def _check_order(logits: torch.Tensor) -> None:
    """Check that every token has an order of experts."""
    unordered = logits.isnan() | logits.isposinf()
    if bool(unordered.any()):
        token, expert = unordered.nonzero()[0].tolist()
        message = f"logits[{token}, {expert}] is {logits[token, expert].item()}: it has no rank"
        raise ValueError(message)
    nowhere = logits.isneginf().all(dim=1)
    if bool(nowhere.any()):
        message = f"logits[{int(nowhere.nonzero()[0])}] are all minus infinity"
        raise ValueError(message)
