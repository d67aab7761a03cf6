"""What kernels of several engines do not take, and shapes that their calls have in common."""

from __future__ import annotations

import torch

from ...reference import AttentionProblem
from ..targets.refusal import Refusal
from ..targets.target import Target

E5M2_TO_HALF = ("float8_e5m2", "float16")
FP8_SM = 89
"""Least compute capability, times ten, with Triton's FP8 (``fp8e4nv``)."""


def wrong_here(target: Target, kv_cache: str) -> Refusal | None:
    """Refuse FP8 where a chip does not have it."""
    if target.sm is not None and target.sm < FP8_SM and kv_cache:
        return Refusal(f"FP8 needs sm_{FP8_SM} or newer", "device", f"sm_{FP8_SM} or newer")
    return None


def loses_subnormals(problem: AttentionProblem, target: Target) -> Refusal | None:
    """Refuse an e5m2 cache that a kernel widens to float16 at once, where no GPU does it."""
    if target.device == "cpu" and (problem.kv_element, problem.dtype) == E5M2_TO_HALF:
        reason = "Triton's interpreter makes 0 of e5m2's smallest numbers in float16"
        return Refusal(reason, "device", "a GPU")
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
