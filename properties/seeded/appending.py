"""Honest appending to a paged cache, in steps any of which a seeded bug may replace."""

from __future__ import annotations

import torch

from ...reference.tensors.inputs import AppendInputs

Pair = tuple[torch.Tensor, torch.Tensor]
Caches = tuple[torch.Tensor, ...]
LEAST_SCALE = 1e-6


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
    k, v = ((rows.float().abs().amax(-1, keepdim=True) / largest).clamp_min(LEAST_SCALE)
            for rows in (inputs.k, inputs.v))  # fmt: skip
    return k, v


def codes_of(inputs: AppendInputs, scales: Pair) -> Pair:
    """Return the codes of new keys and values by their scales."""
    largest = _largest(inputs)
    k, v = (rows.float() / scale for rows, scale in zip((inputs.k, inputs.v), scales, strict=True))
    if inputs.k_cache.dtype == torch.int8:
        k, v = k.round(), v.round()
    dtype = inputs.k_cache.dtype
    return k.clamp(-largest, largest).to(dtype), v.clamp(-largest, largest).to(dtype)


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
