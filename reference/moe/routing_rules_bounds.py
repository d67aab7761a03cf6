"""What may differ of an honest kernel under the rules of single families of models."""

from __future__ import annotations

import torch

from ..attention.error_terms import EXP, LOGIT, SUM, growth
from ..attention.reordering import LARGEST_LOGIT_ERROR
from .routing_rules import Pass, passes

NEAR = 4.0
"""Roundings of what sparsemixer compares, in units of u: a difference, a quotient, the jitter."""


def best_of_each_were_taken(
    ranking: torch.Tensor, errors: torch.Tensor, ids: torch.Tensor, groups: tuple[int, int]
) -> torch.Tensor:
    """Return, for each token, whether each group gave equally many experts, and its best ones.

    Args:
        ranking, errors: [tokens, experts], the scores that experts are selected by.
        ids: int64 [tokens, top_k], the experts that were taken.
        groups: how many there are, and how many experts each gives.
    """
    many, each = groups
    taken = torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ids, value=True)
    of_group = taken.unflatten(1, (many, -1))
    low, high = ((ranking + sign * errors).unflatten(1, (many, -1)) for sign in (-1, 1))
    least = high.masked_fill(~of_group, torch.inf).amin(dim=2)
    most = low.masked_fill(of_group, -torch.inf).amax(dim=2)
    right: torch.Tensor = ((of_group.sum(dim=2) == each) & (least >= most)).all(dim=1)
    return right


def sparsemixer_jump(
    logits: torch.Tensor, ids: torch.Tensor, jitter: float, u: float
) -> torch.Tensor:
    """Return how far sparsemixer's weights [tokens, top_k] go where experts are near, or just not.

    It is 0 where the distance of no expert is so close to the one that is near that roundings of
    ``NEAR`` u decide. It does not shrink with the roundings of what is computed behind it.
    """
    return torch.stack([_jump(near, u)[0] for near in passes(logits, ids, jitter)], dim=1)


def _jump(near: Pass, u: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how far the weights go, and the most that they may be."""
    weight, least, most = near.share(), near.share(NEAR * u), near.share(-NEAR * u)
    return torch.maximum(most - weight, weight - least), most


def sparsemixer_error(
    logits: torch.Tensor, ids: torch.Tensor, jitter: float, u: float
) -> torch.Tensor:
    """Bound the errors [tokens, top_k] of sparsemixer's weights, of experts as they are taken.

    An expert whose distance a kernel cannot tell from the one that is near may be left out, or not:
    the weight lies between its share with all such experts and without them.
    """
    found = []
    for near in passes(logits, ids, jitter):
        jump, most = _jump(near, u)
        size = near.left.abs().masked_fill(near.left.isneginf(), 0.0) + near.best.abs()
        relative = torch.expm1((u * (LOGIT * size + EXP)).clamp(max=LARGEST_LOGIT_ERROR))
        powers = torch.exp(near.near(NEAR * u) - near.best)
        share = powers / powers.sum(dim=1, keepdim=True)
        common = (share * relative).sum(dim=1) + (growth(logits.shape[1]) + SUM) * u
        found.append(jump + most * common)
    return torch.stack(found, dim=1)
