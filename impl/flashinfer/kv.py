"""How a quantised KV cache is passed to FlashInfer: the view of its bytes, and its block scales."""

from __future__ import annotations

from typing import Any

import torch

from ...reference.formats.kv_format import KVCacheFormat, checked_cache
from ..gating.rules import version_matches

RENAMED = ">=0.6.8.dev0"
"""``kv_block_scales`` became ``kv_cache_sf`` (flashinfer-ai/flashinfer#2954)."""
INTERLEAVING = ("trtllm-gen",)
"""Backends that read V's block scales in groups of four tokens; FA2 and XQA read them linear."""


def flashinfer_arguments(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_format: KVCacheFormat,
    *,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str,
    flashinfer: str,
) -> dict[str, Any]:
    """Return the keyword arguments with which a FlashInfer release reads a cache as what it is.

    Args:
        k_cache, v_cache: the caches in their stored form.
        kv_format: what they hold.
        kv_cache_sf: block scales, where the format has them, in ``kv_format.v_scale_layout``.
        backend: the backend that will read them.
        flashinfer: the release; it decides what the scales are called.

    Returns:
        ``paged_kv_cache``, the pair of caches, FP8 viewed as FP8; with block scales also
        ``kv_cache_sf``, or ``kv_block_scales`` before 0.6.8. Nothing is copied.

    Raises:
        ValueError: cache, format and scales disagree, or V's scales are not in the layout that the
            backend reads.
    """
    cache = checked_cache(k_cache, v_cache, kv_format.kv_layout, kv_format, kv_cache_sf)
    arguments: dict[str, Any] = {"paged_kv_cache": (cache.k, cache.v)}
    if not kv_format.entry.block:
        return arguments
    wanted = "interleaved" if backend in INTERLEAVING else "linear"
    if kv_format.v_scale_layout != wanted:
        message = (
            f"v_scale_layout is {kv_format.v_scale_layout!r}; {backend} reads V's block scales "
            f"{wanted} (interleave_v_scales and deinterleave_v_scales convert)"
        )
        raise ValueError(message)
    renamed = version_matches(flashinfer, RENAMED)
    arguments["kv_cache_sf" if renamed else "kv_block_scales"] = kv_cache_sf
    return arguments
