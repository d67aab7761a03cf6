"""What a problem calls its KV cache, and what such a cache asks of the call's other fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats.cache_elements import (
    CACHE_ELEMENTS,
    FP8,
    QUANTISED_KV,
    SCALE_LAYOUTS,
    cache_element,
)

KV_CACHES = (
    "",
    *sorted(
        (each.name + variant for each in CACHE_ELEMENTS.values() for variant in each.variants),
        # The plain variants of a feature's elements first.
        key=lambda name: (
            QUANTISED_KV.index(cache_element(name.partition(" ")[0]).feature),
            " " in name,
        ),
    ),
)
"""Formats of a KV cache: the problem's dtype, or quantised; ``kv_format`` of the inputs says it.
A last word such as ``interleaved`` is the layout of V's block scales."""
Q_DTYPES = ("", *FP8)
"""Dtypes of queries: the problem's, or FP8."""


def element_of(kv_cache: str) -> str:
    """Return the element of a cache; empty where it is the problem's dtype."""
    return kv_cache.partition(" ")[0]


def storage_of(kv_cache: str) -> str:
    """Return ``"uint8"`` where the cache is a tensor of bytes that hold something else."""
    return kv_cache.partition(" as ")[2]


def layout_of(kv_cache: str) -> str:
    """Return the layout of V's block scales, where there are any."""
    word = kv_cache.partition(" ")[2]
    return word if word in SCALE_LAYOUTS else "linear"


def has_block_scales(kv_cache: str) -> bool:
    """Whether blocks of channels, or tokens and heads, have scales of their own in such a cache."""
    return bool(kv_cache) and cache_element(element_of(kv_cache)).scaled


def has_tensor_scales(kv_cache: str) -> bool:
    """Whether new keys and values of such a cache are divided by scales that a call gives."""
    if not kv_cache:
        return False
    entry = cache_element(element_of(kv_cache))
    of_rows = entry.record is not None or entry.scaled_by_token
    return bool(entry.feature) and not of_rows


def multiples_of(kv_cache: str) -> dict[str, int]:
    """Return, by field, of what a problem's head dims and page size must be multiples."""
    if kv_cache and (record := cache_element(element_of(kv_cache)).record):
        return {"head_dim_qk": record.head_dim_qk, "head_dim_vo": record.head_dim_vo}
    multiple = cache_element(element_of(kv_cache)).multiple if kv_cache else 1
    if multiple == 1:
        return {}
    group = SCALE_LAYOUTS[layout_of(kv_cache)].group
    dims = {"head_dim_qk": multiple, "head_dim_vo": group * multiple}
    return {**dims, "page_size": group} if group > 1 else dims


def cache_fits(kv_cache: str, fields: Mapping[str, Any]) -> bool:
    """Whether a problem with these fields may have such a cache."""
    multiples = multiples_of(kv_cache)
    if kv_cache and cache_element(element_of(kv_cache)).record:
        # Any of them where nothing is said of the channels.
        dims = {name: fields[name] for name in multiples}
        return not any(dims.values()) or (dims == multiples and bool(fields.get("values_in_keys")))
    if fields.get("values_in_keys") and has_block_scales(kv_cache):
        return False
    return not any(fields[name] % number for name, number in multiples.items())


def query_dtypes(kv_cache: str) -> tuple[str, ...]:
    """Return the dtypes that queries may have; those other than the problem's are FP8."""
    return cache_element(element_of(kv_cache)).query_dtypes if kv_cache else ("",)
