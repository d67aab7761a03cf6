"""What kernels of several engines do not take, and shapes that their calls have in common."""

from __future__ import annotations

import torch

from ...reference import AttentionProblem, BatchedMoEProblem, MoEProblem
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target

LEAST_CHANNELS = 16
"""Channels of a product of tensor cores."""
FP8_SM = 89
"""Least compute capability, times ten, with Triton's FP8 (``fp8e4nv``)."""


def wrong_here(target: Target, kv_cache: str) -> Refusal | None:
    """Refuse FP8 where a chip does not have it."""
    if target.sm is not None and target.sm < FP8_SM and kv_cache:
        return Refusal(f"FP8 needs sm_{FP8_SM} or newer", "device", f"sm_{FP8_SM} or newer")
    return None


def refused_attention(problem: AttentionProblem) -> str | None:
    """Refuse what engines' attention kernels have no words for; None if there is nothing."""
    of_a_tensor = problem.kv_cache and not problem.cache_entry.scaled_by_token
    return first_reason(
        (problem.head_dim_qk != problem.head_dim_vo, "keys and values have one head dim"),
        (problem.head_dim_qk < LEAST_CHANNELS, f"tl.dot takes {LEAST_CHANNELS} channels or more"),
        (not of_a_tensor and (problem.k_scale != 1 or problem.v_scale != 1),
         "scales of a whole tensor belong to FP8 caches"),
    )  # fmt: skip


def refused_experts(problem: MoEProblem | BatchedMoEProblem, target: Target) -> str | None:
    """Refuse what a GPU multiplies less exactly than experts' bounds allow for."""
    if problem.dtype == "float32" and target.device != "cpu":
        return "a GPU multiplies float32 as TF32, which bounds of experts cannot say"
    return None


def by_slots(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Return a view of a cache as [pages, page_size, heads, head_dim]."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache of one byte an element as bytes, for which torch has every operation."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache
