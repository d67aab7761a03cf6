"""Which keys the honest kernel shows to a row, and what it adds to logits, in stages of their own.

Positions of queries are [t, 1], those of keys [1, S]; all are of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def same_chunk(position: torch.Tensor, key: torch.Tensor, size: int) -> torch.Tensor:
    """Return which keys are in the query's chunk."""
    return torch.floor(position / size) == torch.floor(key / size)


def on_grid(position: torch.Tensor, key: torch.Tensor, dilation: int) -> torch.Tensor:
    """Return which keys are at a distance that is a multiple."""
    return (position - key) % dilation == 0


def among_first(key: torch.Tensor, count: int) -> torch.Tensor:
    """Return which keys are of the first ones."""
    return key < count


def in_span(position: torch.Tensor, key: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Return which keys are in a span [n, 2] that the query is in, too."""
    found = torch.zeros(len(position), key.shape[1], dtype=torch.bool, device=key.device)
    for start, stop in spans.tolist():
        inside = (position >= start) & (position < stop)
        found |= inside & (key >= start) & (key < stop)
    return found


def mask_heads(mask: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return the masks [H, t, S] of query heads, out of those [K, t, S] of key-value heads."""
    return mask[heads]


def add_bias(
    logits: torch.Tensor, bias: torch.Tensor | None, cap: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Bend logits [H, t, S] towards their soft cap, then add a bias of the same shape."""
    return cap(logits) if bias is None else cap(logits) + bias.float()


def root(slopes: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ALiBi [H, t, S] of the root of the distance to earlier keys; slopes [H]."""
    return -slopes.view(-1, 1, 1) * (position - key).clamp(min=0).float().sqrt()


@dataclass(frozen=True)
class Masks:
    """Stages of what is seen and added; the defaults are right."""

    chunk: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = same_chunk
    dilated: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = on_grid
    firsts: Callable[[torch.Tensor, int], torch.Tensor] = among_first
    spans: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = in_span
    heads: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mask_heads
    bias: Callable[
        [torch.Tensor, torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor
    ] = add_bias
    root: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = root


HONEST_MASKS = Masks()
