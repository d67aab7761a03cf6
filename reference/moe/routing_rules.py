"""Rules of single families of models, which routing has besides its method.

Sources: Gemma 4 (``per_expert_scale``), InternS1-Pro (``router_n_groups``), Inkling (joint
normalisation), DeepSeek-V4 (``tid2eid``) and PhiMoE (``sparsemixer``) as their modelling code has
them, and LFM2 for another floor of the normalisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..validation import check_tensor, checked_integer, checked_number
from .routing_methods import RENORMALISE_FLOOR, RoutingMethod

JITTER = 0.01
"""Half the relative distance from the best logit within which sparsemixer sees experts: PhiMoE's
``router_jitter_noise``."""
JOINT = ("renormalize", "softmax")
"""Weights of methods that can be normalised together with those of shared experts."""


@dataclass(frozen=True)
class RoutingRules:
    """Rules of a call of ``route``, which says more of the fields that it shares.

    Attributes:
        renormalise_floor, best_of_each_group, shared_experts, jitter: the same as in ``route``.
        expert_scales: [experts], in the dtype of the computation, or None.
        chosen: int64 [tokens, top_k], the experts that the table has for the tokens, or None.
    """

    renormalise_floor: float = RENORMALISE_FLOOR
    expert_scales: torch.Tensor | None = None
    best_of_each_group: bool = False
    shared_experts: int = 0
    chosen: torch.Tensor | None = None
    jitter: float = JITTER

    def of_tokens(self, index: torch.Tensor) -> RoutingRules:
        """Return the rules of some of the tokens."""
        return self if self.chosen is None else replace(self, chosen=self.chosen[index])


def checked_rules(
    how: RoutingMethod,
    logits: torch.Tensor,
    *,
    top_k: int,
    renormalise_floor: float,
    expert_scales: torch.Tensor | None,
    best_of_each_group: bool,
    shared_experts: int,
    expert_table: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    jitter: float,
) -> RoutingRules:
    """Check the rules among the arguments of ``route``, which says what they are."""
    floor = checked_number("renormalise_floor", renormalise_floor)
    if isinstance(renormalise_floor, bool) or not 0 <= floor < math.inf:
        message = f"renormalise_floor is {renormalise_floor!r}; it must be a number from 0 upwards"
        raise ValueError(message)
    near = checked_number("jitter", jitter)
    if isinstance(jitter, bool) or not 0 <= near < math.inf:
        message = f"jitter is {jitter!r}; it must be a number from 0 upwards"
        raise ValueError(message)
    shared = checked_integer("shared_experts", shared_experts)
    experts = logits.shape[1] - shared
    if isinstance(shared_experts, bool) or shared < 0 or experts < 1:
        message = (
            f"shared_experts is {shared_experts!r}; it must be from 0 to {logits.shape[1] - 1}: "
            "logits have a column of each, and of one routed expert at least"
        )
        raise ValueError(message)
    shared_experts = shared
    if shared_experts and how.weight not in JOINT:
        message = f"shared_experts is {shared_experts}, but the method normalises no weights"
        raise ValueError(message)
    if expert_scales is not None:
        if shared_experts:
            message = "expert_scales and shared_experts are given: there is one of both at most"
            raise ValueError(message)
        check_tensor("expert_scales", expert_scales, "experts")
        if len(expert_scales) != experts or not bool(expert_scales.isfinite().all()):
            message = f"expert_scales must be {experts} finite numbers, one for each expert"
            raise ValueError(message)
        expert_scales = expert_scales.to(logits.dtype)
    chosen = _chosen(expert_table, input_ids, (len(logits), top_k, experts))
    if chosen is not None and (shared_experts or how.weight == "sparsemixer"):
        message = "expert_table is given, but neither shared experts nor sparsemixer have one"
        raise ValueError(message)
    return RoutingRules(floor, expert_scales, best_of_each_group, shared_experts, chosen, near)


def check_together(
    rules: RoutingRules, how: RoutingMethod, top_k: int, *, groups: tuple[int, int], biased: bool
) -> None:
    """Check that the rules go with the number of groups, how many are used, and the bias."""
    many, used = groups
    if rules.best_of_each_group and (used != many or top_k % many):
        message = (
            f"best_of_each_group: topk_groups is {used} and top_k {top_k}; they must be "
            f"num_groups = {many} and a multiple of it"
        )
        raise ValueError(message)
    if many > 1 and rules.shared_experts:
        message = f"num_groups is {many}, but shared_experts is {rules.shared_experts}: no groups"
        raise ValueError(message)
    if rules.chosen is not None and (biased or many > 1):
        message = "expert_table is given, which selects: it goes without bias and groups"
        raise ValueError(message)
    if biased and how.weight == "sparsemixer":
        message = "bias is given, but sparsemixer has none"
        raise ValueError(message)


def _chosen(
    table: torch.Tensor | None, input_ids: torch.Tensor | None, sizes: tuple[int, int, int]
) -> torch.Tensor | None:
    """Look up the experts of each token, and check them."""
    if table is None and input_ids is None:
        return None
    if table is None or input_ids is None:
        message = "expert_table and input_ids: give both, or neither"
        raise ValueError(message)
    tokens, top_k, experts = sizes
    if table.dim() != 2 or table.shape[1] != top_k or table.dtype.is_floating_point:  # noqa: PLR2004
        message = f"expert_table must be integers [vocabulary, top_k], not {tuple(table.shape)}"
        raise ValueError(message)
    if tuple(input_ids.shape) != (tokens,) or input_ids.dtype.is_floating_point:
        message = f"input_ids must be integers [tokens], not {tuple(input_ids.shape)}"
        raise ValueError(message)
    ids = input_ids.long()
    if bool(((ids < 0) | (ids >= len(table))).any()):
        message = f"input_ids must be from 0 to {len(table) - 1}, the rows of expert_table"
        raise ValueError(message)
    chosen: torch.Tensor = table[ids].long()
    ordered = chosen.sort(dim=1).values
    if bool(((chosen < 0) | (chosen >= experts)).any()):
        message = f"expert_table must hold experts from 0 to {experts - 1}"
        raise ValueError(message)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        message = "expert_table must hold distinct experts in each row"
        raise ValueError(message)
    return chosen


def best_of_groups(ranking: torch.Tensor, groups: int, top_k: int) -> torch.Tensor:
    """Return the top_k / groups best experts of each group, [tokens, top_k], group by group."""
    members = ranking.unflatten(1, (groups, -1))
    ranked: torch.Tensor = members.sort(dim=2, descending=True, stable=True).indices
    first = torch.arange(groups, device=ranking.device) * members.shape[2]
    found: torch.Tensor = ranked[:, :, : top_k // groups] + first.view(1, -1, 1)
    return found.flatten(1)


def with_shared(ids: torch.Tensor, experts: int, shared: int) -> torch.Tensor:
    """Return ids [tokens, slots] with those of the shared experts, which follow the routed ones."""
    if not shared:
        return ids
    more = torch.arange(experts, experts + shared, device=ids.device)
    return torch.cat([ids, more.expand(len(ids), -1)], dim=1)


def sparsemixer_weights(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """Return the weights [tokens, top_k] of experts that are taken one after another.

    In each pass an expert's weight is its share of the softmax over what is left and near it: the
    distance to its logit m is at most 2 jitter max(|logit|, m).

    Args:
        logits: [tokens, experts].
        ids: int64 [tokens, top_k], in the order in which they are taken: best first.
        jitter: see ``JITTER``.
    """
    return torch.stack([near.share() for near in passes(logits, ids, jitter)], dim=1)


@dataclass(frozen=True)
class Pass:
    """One expert of each token, and the logits among which it was taken.

    Attributes:
        best: [tokens, 1], the logit of the expert.
        left: [tokens, experts], minus infinity where an earlier pass has taken the expert.
        size: [tokens, experts], what distances are divided by.
        jitter: see ``JITTER``.
    """

    best: torch.Tensor
    left: torch.Tensor
    size: torch.Tensor
    jitter: float

    def near(self, slack: float = 0.0) -> torch.Tensor:
        """Return the logits that are near the best, minus infinity elsewhere.

        Args:
            slack: how much farther is near still, as a share of what is compared.
        """
        distance, most = self.best - self.left, 2 * self.jitter * self.size
        excess = (slack * (distance + most)).nan_to_num(nan=0.0)
        near = (distance - most <= excess) | (distance == 0)
        return self.left.masked_fill(~near, -torch.inf)

    def share(self, slack: float = 0.0) -> torch.Tensor:
        """Return the weights [tokens] among what is near."""
        return torch.exp(self.best[:, 0] - torch.logsumexp(self.near(slack), dim=1))


def passes(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> list[Pass]:
    """Return the passes of sparsemixer that take these experts in this order."""
    found, left = [], logits
    for taken in ids.split(1, dim=1):
        best = logits.gather(1, taken)
        found.append(Pass(best, left, torch.maximum(logits.abs(), best), jitter))
        left = left.scatter(1, taken, -torch.inf)
    return found
