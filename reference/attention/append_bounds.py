"""How far an honest kernel may be off where it writes a cache with scales of its own."""

from __future__ import annotations

import torch

from ..formats.arithmetic import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from ..formats.cache_elements import token_scales
from ..formats.kv_format import KVCacheFormat, Scales
from .append import Caches, addresses, checked_append, in_slots
from .metadata import BatchMetadata

AppendedCaches = tuple[torch.Tensor, ...]
SCALE, CODE = 8, 16
"""Most errors of a scale of a token, and of a number before it is rounded to its code, in units of
float32's roundoff; about half of each is needed."""


@torch.no_grad()
def append_error_bound(
    k: torch.Tensor,
    v: torch.Tensor,
    paged_kv_cache: Caches,
    kv_cache_sf: Scales,
    metadata: BatchMetadata,
    *,
    kv_format: KVCacheFormat,
) -> tuple[AppendedCaches, AppendedCaches]:
    """Bound what an honest kernel may write into a cache with a scale for each token and head.

    The kernel computes in float32. Its scale s' is off by ``SCALE`` units of roundoff u: the
    quotient amax / largest code takes 2 ulp on a GPU, which are 4 u, and the reciprocal of a
    constant in its place fewer. What is rounded to a code is x / s', off by ``CODE`` u: the
    scale's error, that of 1 / s', and a product. Rounding to int8 then costs 1/2, whichever way
    ties go; to FP8, half an ulp.

    Args:
        k, v, paged_kv_cache, kv_cache_sf, metadata, kv_format: as in ``append_paged_scaled``.

    Returns:
        (expected, bound), each (k_cache, v_cache, k_scales, v_scales) in float64, of the caches'
        shapes. In new slots, codes are expected before they are rounded; all others have bound 0.

    Raises:
        ValueError: as ``append_paged_scaled``, or a format without scales of tokens.
    """
    entry, layout = kv_format.entry, kv_format.kv_layout
    if not entry.scaled_by_token:
        message = f"kv_format is {kv_format.element}, which has no scales of tokens and heads"
        raise ValueError(message)
    checked_append(k, v, paged_kv_cache, kv_cache_sf, metadata, kv_format)
    scales = [token_scales(rows.double(), entry.dtype) for rows in (k, v)]
    codes = [rows.double() / scale for rows, scale in zip((k, v), scales, strict=True)]
    u = UNIT_ROUNDOFF["float32"]
    if entry.dtype == torch.int8:
        off = [0.5 + CODE * u * each.abs() for each in codes]
    else:
        name = str(entry.dtype).removeprefix("torch.")
        rounding, least = UNIT_ROUNDOFF[name], SMALLEST_SUBNORMAL[name] / 2
        off = [(rounding + CODE * u) * each.abs() + least for each in codes]
    slots = addresses(metadata)
    expected, bound = [], []
    for cache, rows, error in zip(
        (*paged_kv_cache, *kv_cache_sf),
        (*codes, *scales),
        (*off, *(SCALE * u * each for each in scales)),
        strict=True,
    ):
        whole = cache.double().contiguous()
        expected.append(in_slots(whole, rows, slots, layout))
        bound.append(in_slots(torch.zeros_like(whole), error, slots, layout))
    return tuple(expected), tuple(bound)
