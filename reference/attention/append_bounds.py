"""How far an honest kernel may be off where it writes a cache with scales of its own."""

from __future__ import annotations

import torch

from ..formats.arithmetic import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from ..formats.cache_elements import token_scales
from ..formats.kv_format import KVCacheFormat, Scales, check_kv_format
from ..formats.zero_points import steps_of
from .append import Caches, addresses, append_paged_scaled, checked_append, in_slots
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

    Where zero points lie beside the scales, several codes are right, with the scales that belong
    to them: bounded is what attention reads, (code - zero point) * scale. Half a step is lost; the
    range, the scale and the zero point may each be rounded to the scales' dtype, whose unit of
    roundoff is w: w (largest - least), w times the number and w times the least. A scale below the
    smallest normal number loses half of the smallest one, times the number over the scale.

    Args:
        k, v, paged_kv_cache, kv_cache_sf, metadata, kv_format: the same as in
            ``append_paged_scaled``.

    Returns:
        (expected, bound), each (k_cache, v_cache, k_scales, v_scales) in float64, of the caches'
        shapes. In new slots, codes are expected before they are rounded; all others have bound 0.
        With zero points, each is of what ``as_compared`` returns; the bound of new codes and scales
        is inf.

    Raises:
        ValueError: as ``append_paged_scaled``, a format without scales of tokens, or one whose
            codes are judged one by one (int4 with zero points in its scales, ``code_ends.py``).
    """
    check_kv_format(kv_format, needed=True)
    entry, layout = kv_format.entry, kv_format.kv_layout
    if not entry.scaled_by_token:
        message = f"kv_format is {kv_format.element}, which has no scales of tokens and heads"
        raise ValueError(message)
    if entry.ends is not None:
        message = f"kv_format is {kv_format.element}, whose codes have ends and no bounds"
        raise ValueError(message)
    if entry.zero_point:
        stored, made = append_paged_scaled(
            k, v, paged_kv_cache, kv_cache_sf, metadata, kv_format=kv_format
        )
        return _bounds_of_reading((k, v), (*stored, *made), metadata, kv_format)
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


def as_compared(caches: AppendedCaches, kv_format: KVCacheFormat | None) -> AppendedCaches:
    """Return (k_cache, v_cache, ...), followed by what is read from them, [..., channels] float64.

    Only codes with zero points are read: of others, each tensor is bounded by itself.
    """
    if kv_format is None or not kv_format.entry.zero_point:
        return caches
    k_cache, v_cache, k_scales, v_scales = caches
    return *caches, kv_format.decode(k_cache, k_scales), kv_format.decode(v_cache, v_scales)


def _bounds_of_reading(
    new: Caches, written: AppendedCaches, metadata: BatchMetadata, kv_format: KVCacheFormat
) -> tuple[AppendedCaches, AppendedCaches]:
    """Bound caches with zero points by what is read of new keys and values."""
    slots, layout = addresses(metadata), kv_format.kv_layout
    expected = [each.double().contiguous() for each in as_compared(written, kv_format)]
    bound = [torch.zeros_like(each) for each in expected]
    for each in bound[:4]:
        anything = each.new_full((*new[0].shape[:2], each.shape[-1]), torch.inf)
        in_slots(each, anything, slots, layout)
    for rows, of_scales, read, error in zip(new, written[2:], expected[4:], bound[4:], strict=True):
        wide = rows.double()
        in_slots(read, wide, slots, layout)
        most = _lost_with_zero_points(wide, of_scales.dtype, 8 // kv_format.packed)
        in_slots(error, most, slots, layout)
    return tuple(expected), tuple(bound)


def _lost_with_zero_points(rows: torch.Tensor, dtype: torch.dtype, bits: int) -> torch.Tensor:
    """Bound what reading rows [tokens, kv_heads, channels] in float64 back may have lost."""
    if not rows.numel():
        return rows
    name = str(dtype).removeprefix("torch.")
    w, u = UNIT_ROUNDOFF[name], UNIT_ROUNDOFF["float32"]
    steps, least = steps_of(rows, bits), rows.amin(dim=-1, keepdim=True)
    width = rows.amax(dim=-1, keepdim=True) - least
    rounded = w * (width + rows.abs() + least.abs()) + CODE * u * rows.abs().amax(-1, keepdim=True)
    # Products of two roundings are below a share of 3 w of each.
    return (1 + 3 * w) * (steps / 2 + rounded + rows.abs() / steps * SMALLEST_SUBNORMAL[name] / 2)
