"""Honest appending to a paged cache, in steps any of which a seeded bug may replace."""

from __future__ import annotations

import torch

from ...reference.tensors.inputs import AppendInputs

Pair = tuple[torch.Tensor, torch.Tensor]
Caches = tuple[torch.Tensor, ...]
LEAST_SCALE = 1e-6
NARROWEST, EIGHT_BITS = 2048, 255
ZERO_POINTS = ("int8_zero_point", "int4_zero_point")


def writable_caches(inputs: AppendInputs) -> Pair:
    """Return the caches to write into: the given ones, or copies."""
    if inputs.in_place:
        return inputs.k_cache, inputs.v_cache
    return inputs.k_cache.clone(), inputs.v_cache.clone()


def by_slot(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a view of a cache as [pages, page_size, kv_heads, channels]."""
    return cache if layout == "NHD" else cache.transpose(1, 2)


def addresses(inputs: AppendInputs) -> Pair:
    """Return the physical page and the slot of every new token."""
    metadata, size = inputs.metadata, inputs.metadata.page_size
    new = metadata.qo_indptr.diff().long()
    request = torch.repeat_interleave(torch.arange(len(new)), new)
    row = torch.arange(len(request)) - metadata.qo_indptr.long()[request]
    position = metadata.seq_lens.long()[request] - new[request] + row
    page = metadata.paged_kv_indptr.long()[request] + position // size
    return metadata.paged_kv_indices.long()[page], position % size


def rounded(inputs: AppendInputs) -> Pair:
    """Return the new keys and values in the caches' dtype: FP8 is scaled first, and saturates."""
    if inputs.kv_format is None:
        return inputs.k, inputs.v
    dtype: torch.dtype = getattr(torch, inputs.kv_format.element)
    largest = torch.finfo(dtype).max
    k, v = scaled(inputs)
    return k.clamp(-largest, largest).to(dtype), v.clamp(-largest, largest).to(dtype)


def scaled(inputs: AppendInputs) -> Pair:
    """Return the new keys and values as the caches' scales see them, float32."""
    return inputs.k.float() / inputs.k_scale, inputs.v.float() / inputs.v_scale


def write(inputs: AppendInputs, pages: torch.Tensor, slots: torch.Tensor, rows: Pair) -> Pair:
    """Write rows [tokens, kv_heads, channels] into slots of the caches."""
    caches = writable_caches(inputs)
    for cache, new in zip(caches, rows, strict=True):
        by_slot(cache, inputs.kv_layout).view(new.dtype)[pages, slots] = new
    return caches


def scales_of(inputs: AppendInputs) -> Pair:
    """Return the scale of each new token and head, [tokens, kv_heads, 1] float32."""
    largest = _largest(inputs)
    k, v = (
        (rows.float().abs().amax(-1, keepdim=True) / largest).clamp_min(LEAST_SCALE)
        for rows in (inputs.k, inputs.v)
    )
    return k, v


def codes_of(inputs: AppendInputs, scales: Pair) -> Pair:
    """Return the codes of new keys and values by their scales."""
    largest = _largest(inputs)
    k, v = (rows.float() / scale for rows, scale in zip((inputs.k, inputs.v), scales, strict=True))
    if inputs.k_cache.dtype == torch.int8:
        k, v = k.round(), v.round()
    dtype = inputs.k_cache.dtype
    return k.clamp(-largest, largest).to(dtype), v.clamp(-largest, largest).to(dtype)


def pairs_of(inputs: AppendInputs) -> Pair:
    """Return scale and zero point of each new token and head, [tokens, kv_heads, 2] float32."""
    k, v = (_pairs(rows.float(), _levels(inputs)) for rows in (inputs.k, inputs.v))
    return k, v


def _pairs(rows: torch.Tensor, levels: int) -> torch.Tensor:
    least, largest = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    # Of equal numbers a scale is any that leaves the zero point finite.
    narrowest = rows.abs().amax(-1, keepdim=True) / NARROWEST
    scales = torch.maximum((largest - least) / levels, narrowest).clamp_min(LEAST_SCALE)
    return torch.cat([scales, -least / scales], dim=-1)


def codes_with_zero_points(inputs: AppendInputs, pairs: Pair) -> Pair:
    """Return the codes of new keys and values: int4 has the halves of a row in one byte."""
    levels = _levels(inputs)
    k, v = (
        (rows.float() / pair[..., :1] + pair[..., 1:] + 0.5).floor().clamp(0, levels)
        for rows, pair in zip((inputs.k, inputs.v), pairs, strict=True)
    )
    return _in_bytes(k, levels), _in_bytes(v, levels)


def write_pairs(inputs: AppendInputs, codes: Pair, pairs: Pair) -> Caches:
    """Write codes, and scales and zero points in their tensors' dtype."""
    assert inputs.kv_cache_sf is not None  # noqa: S101  such a cache has them
    k, v = (pair.to(given.dtype) for pair, given in zip(pairs, inputs.kv_cache_sf, strict=True))
    return write_scaled(inputs, codes, (k, v))


def has_zero_points(inputs: AppendInputs) -> bool:
    """Whether codes have a zero point beside their scale."""
    return inputs.kv_format is not None and inputs.kv_format.element in ZERO_POINTS


def _in_bytes(codes: torch.Tensor, levels: int) -> torch.Tensor:
    whole = codes.to(torch.uint8)
    if levels == EIGHT_BITS:
        return whole
    low, high = whole.chunk(2, dim=-1)
    return low + 16 * high


def _levels(inputs: AppendInputs) -> int:
    int4 = inputs.k_cache.shape[-1] < inputs.k.shape[-1]
    return 15 if int4 else EIGHT_BITS


def write_scaled(inputs: AppendInputs, codes: Pair, scales: Pair) -> Caches:
    """Write codes [tokens, kv_heads, channels] and scales [tokens, kv_heads, 1] of new tokens."""
    caches = tuple(each if inputs.in_place else each.clone() for each in inputs.written)
    pages, slots = addresses(inputs)
    for cache, new in zip(caches, (*codes, *scales), strict=True):
        rows = by_slot(cache, inputs.kv_layout).view(_as_bytes(new).dtype)
        rows[pages, slots] = _as_bytes(new)
    return caches


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View codes as bytes: torch writes no FP8 by index."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _largest(inputs: AppendInputs) -> float:
    dtype = inputs.k_cache.dtype
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(limits.max)
