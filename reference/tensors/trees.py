"""Draft trees: which of a request's last tokens each of them sees, in speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..problems import AttentionProblem
from .values import choose

SHAPES = ("mixed", "chain", "mixed", "siblings", "mixed")
"""Kinds of tree, as often as they stand here: ``siblings`` is one token and its children."""


def tree_parents(problem: AttentionProblem, request: int) -> list[int]:
    """Return the parent of each query token of a request, by its row; -1 for one without.

    Parents come before their children. Of a mixed tree half of the tokens continue a chain, a
    quarter are siblings of the token before, the others are children of any earlier token.
    """
    parents: list[int] = []
    tag = f"tree {problem.ids[request]}"
    shape = SHAPES[choose(problem.tree, tag, 0, len(SHAPES))]
    for row in range(problem.query_lens[request]):
        kind = choose(problem.tree, tag, 2 * row + 1, 4)
        if row == 0 or shape == "chain" or (shape == "mixed" and kind < 2):  # noqa: PLR2004
            parents.append(row - 1)
        elif shape == "siblings":
            parents.append(0)
        else:
            parents.append(parents[-1] if kind == 2 else choose(problem.tree, tag, 2 * row, row))  # noqa: PLR2004
    return parents


def ancestry(parents: Sequence[int]) -> torch.Tensor:
    """Return the bool [t, t] mask of which tokens each token sees: its ancestors and itself."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def tree_masks(problem: AttentionProblem) -> list[torch.Tensor]:
    """Return each request's bool [t, t] mask of what its query tokens see of each other."""
    return [ancestry(tree_parents(problem, request)) for request in range(problem.num_requests)]


def mask_of_trees(masks: Sequence[torch.Tensor], seq_lens: Sequence[int]) -> torch.Tensor:
    """Return the flat ``custom_mask`` of trees at the end of these numbers of keys.

    Args:
        masks: bool [t, t] of each request.
        seq_lens: keys of each request, t or more.
    """
    device = masks[0].device if masks else None
    found = [torch.empty(0, dtype=torch.bool, device=device)]
    for mask, keys in zip(masks, seq_lens, strict=True):
        seen = mask.new_ones((len(mask), keys - len(mask)))
        found.append(torch.cat([seen, mask], dim=1).flatten())
    return torch.cat(found)
