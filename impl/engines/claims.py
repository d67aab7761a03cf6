"""What kernels of several engines do not take, and shapes that their calls have in common."""

from __future__ import annotations

import torch

from ...reference import AttentionProblem
from ..targets.refusal import Refusal
from ..targets.target import Target

FP8_SM = 89
"""Least compute capability, times ten, with Triton's FP8 (``fp8e4nv``)."""


def wrong_here(target: Target, kv_cache: str) -> Refusal | None:
    """Refuse FP8 where a chip does not have it."""
    if target.sm is not None and target.sm < FP8_SM and kv_cache:
        return Refusal(f"FP8 needs sm_{FP8_SM} or newer", "device", f"sm_{FP8_SM} or newer")
    return None


def refused_attention(problem: AttentionProblem) -> str | None:
    """Refuse what engines' attention kernels have no words for; None if there is nothing."""
    if problem.head_dim_qk != problem.head_dim_vo:
        return "keys and values have one head dim"
    if problem.head_dim_qk < 16:  # noqa: PLR2004  the least that tl.dot multiplies
        return "tl.dot takes 16 channels or more"
    of_a_tensor = problem.kv_cache and not problem.cache_entry.scaled_by_token
    if not of_a_tensor and (problem.k_scale != 1 or problem.v_scale != 1):
        return "scales of a whole tensor belong to FP8 caches"
    return None


def by_slots(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Return a view of a cache as [pages, page_size, heads, head_dim]."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)
