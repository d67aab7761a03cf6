"""What a problem calls its KV cache, and what such a cache asks of the call's other fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formats.kv_format import FP8, NVFP4
from ..formats.quantization import NVFP4_BLOCK

INTERLEAVED = f"{NVFP4} interleaved"
KV_CACHES = (
    "",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fn as uint8",
    "float8_e5m2 as uint8",
    NVFP4,
    INTERLEAVED,
)
"""Formats of a KV cache: the problem's dtype, or quantised; ``kv_format`` of the inputs says it.
``interleaved`` is the layout of V's block scales that trtllm-gen kernels read."""
Q_DTYPES = ("", *FP8)
"""Dtypes of queries: the problem's, or FP8."""
SCALE_GROUP = 4
"""Tokens, and block scales a token, whose scales are interleaved with one another."""


def element_of(kv_cache: str) -> str:
    """Give the element format of a cache; empty where it is the problem's dtype."""
    return kv_cache.partition(" ")[0]


def storage_of(kv_cache: str) -> str:
    """Give ``"uint8"`` where the cache is a tensor of bytes that hold something else."""
    return kv_cache.partition(" as ")[2]


def multiples_of(kv_cache: str) -> dict[str, int]:
    """Give, by field, of what a problem's head dims and page size must be multiples."""
    if element_of(kv_cache) != NVFP4:
        return {}
    dims = {"head_dim_qk": NVFP4_BLOCK, "head_dim_vo": NVFP4_BLOCK}
    if kv_cache != INTERLEAVED:
        return dims
    return {**dims, "head_dim_vo": SCALE_GROUP * NVFP4_BLOCK, "page_size": SCALE_GROUP}


def cache_fits(kv_cache: str, fields: Mapping[str, Any]) -> bool:
    """Tell whether a problem with these fields may have such a cache."""
    if fields.get("values_in_keys") and element_of(kv_cache) == NVFP4:
        return False
    return not any(fields[name] % number for name, number in multiples_of(kv_cache).items())


def query_dtypes(kv_cache: str) -> tuple[str, ...]:
    """Give the dtypes that queries may have: FP8 ones meet a cache of the same dtype, or nvfp4.

    FA3 takes queries, keys and values of one FP8 dtype; trtllm-gen multiplies FP8 queries with
    nvfp4 keys (FlashInfer 0.7.2).
    """
    element = element_of(kv_cache)
    if element == NVFP4:
        return Q_DTYPES
    return ("", element) if element else ("",)
