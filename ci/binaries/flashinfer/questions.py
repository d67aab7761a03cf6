"""The kinds of call that a release is asked about, and the calls that each kind is asked by.

A kind of call is a ``Feature``, as the support rules know it. Which kernel is selected depends on
more: on the batch, the lengths and the number of KV heads, so that each kind is several calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ....impl.gating import Feature

BACKEND = "trtllm-gen"
OPERATIONS = ("paged_attention", "ragged_attention", "mla")
HALF, BRAIN, EIGHT, FOUR = "float16", "bfloat16", "float8_e4m3fn", "nvfp4"
SAME = ((BRAIN, BRAIN), (HALF, HALF), (EIGHT, EIGHT))
PAIRS = (*SAME, (EIGHT, FOUR), (BRAIN, EIGHT), (HALF, EIGHT), (BRAIN, FOUR))
"""Dtypes of queries and cache that are asked about together."""
HEAD_DIMS = (64, 80, 128, 256, 512)
RAGGED_HEAD_DIMS = ((192, 128), (128, 128), (64, 64), (256, 256))
LATENT_HEAD_DIMS = ((576, 512), (320, 256))
LATENT_HEADS = (1, 2, 4, 8, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128)
"""Numbers of heads of latent attention, for which the kernels' tiles decide."""


@dataclass(frozen=True)
class Call:
    """One call of a kind.

    Attributes:
        batch: number of requests.
        query_len: query tokens of each request.
        kv_len: keys of the longest request, an argument of the call.
        kv_heads: number of KV heads.
    """

    batch: int
    query_len: int
    kv_len: int
    kv_heads: int

    def __str__(self) -> str:
        """Return it in words."""
        words = f"batch {self.batch}, {self.query_len} query tokens, {self.kv_len} keys"
        return f"{words}, {self.kv_heads} KV heads"


def can_be_asked(feature: Feature) -> bool:
    """Whether the API of trtllm-gen attention has arguments for a kind of call."""
    return (
        feature.operation in OPERATIONS
        and feature.backend == BACKEND
        and {feature.q_dtype, feature.kv_dtype} <= {HALF, BRAIN, EIGHT, FOUR}
        and feature.q_dtype != FOUR
        and feature.phase != "mixed"
        and not (feature.soft_cap or feature.ragged_queries or feature.kv_storage)
        and (feature.mask == "causal" or (feature.mask == "none" and not feature.window))
        and feature.padding == "none"
    )


def calls_of(feature: Feature) -> tuple[Call, ...]:
    """Return the calls that a kind is asked by."""
    tokens = feature.query_len
    if feature.operation == "mla":
        # From 33 heads on, whether there is a kernel depends on the batch and on the length.
        sizes = product((1, 8, 64, 256), (16, 1024, 32768))
        return tuple(Call(batch, tokens, keys, 1) for batch, keys in sizes)
    few = 8 if feature.group_size <= 8 else 2  # noqa: PLR2004  as many query heads as models have
    if feature.operation == "ragged_attention":
        return tuple(Call(4, new, keys, few) for new, keys in ((128, 128), (512, 1024)))
    if feature.phase == "prefill":
        lengths = ((128, 128), (16, 16), (512, 4096))
        return tuple(Call(4, new, keys, few) for new, keys in lengths)
    shapes = ((8, 1024, few), (1, 16, few), (256, 1024, few), (1, 32768, few), (64, 4096, 1))
    return tuple(Call(batch, tokens, keys, heads) for batch, keys, heads in shapes)


def kinds() -> Iterator[Feature]:
    """Yield all kinds of call that a release is asked about."""
    groups, tokens = (1, 2, 4, 5, 8, 12, 16, 32, 64), (1, 2, 4, 8, 16)
    yield from _paged("decode", (16, 64, 128), groups, tokens, windows=(False, True))
    yield from _paged("decode", (1, 8, 32, 256), (1, 5, 8), (1, 4), windows=(False,))
    yield from _paged("decode", (64,), (20, 24, 40), (1, 4), windows=(False,))
    yield from _paged("prefill", (1, 16, 64, 128), (1, 5, 8), (1,), windows=(False, True))
    # With a window and without the causal mask, kernels that mask nothing are selected: a launch
    # then says nothing of the window.
    for (query, value), (q, kv), group, (window, mask) in product(
        RAGGED_HEAD_DIMS, SAME, (1, 4), ((False, "causal"), (True, "causal"), (False, "none"))
    ):
        yield _feature(
            "ragged_attention",
            phase="prefill",
            head_dim_qk=query,
            head_dim_vo=value,
            q_dtype=q,
            kv_dtype=kv,
            group_size=group,
            window=window,
            mask=mask,
        )
    for (query, value), page, (q, kv), heads, count in product(
        LATENT_HEAD_DIMS, (1, 16, 32, 64, 128), (*SAME, (BRAIN, EIGHT)), LATENT_HEADS, (1, 2, 4, 8)
    ):
        yield _feature(
            "mla",
            head_dim_qk=query,
            head_dim_vo=value,
            q_dtype=q,
            kv_dtype=kv,
            page_size=page,
            group_size=heads,
            query_len=count,
        )


def _paged(
    phase: str,
    pages: tuple[int, ...],
    groups: tuple[int, ...],
    tokens: tuple[int, ...],
    *,
    windows: tuple[bool, ...],
) -> Iterator[Feature]:
    for dim, page, (q, kv), group, count, window in product(
        HEAD_DIMS, pages, PAIRS, groups, tokens, windows
    ):
        yield _feature(
            "paged_attention",
            phase=phase,
            head_dim_qk=dim,
            q_dtype=q,
            kv_dtype=kv,
            page_size=page,
            group_size=group,
            query_len=count,
            window=window,
        )


def _feature(operation: str, **fields: Any) -> Feature:  # noqa: ANN401  fields by name
    return Feature(operation, BACKEND, kv_layout="HND", **fields)
