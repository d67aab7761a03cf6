"""The table of operations for the cells: simple calls of each, and what may be changed about them.

An operation that no support rule speaks of needs no entry: its implementations name no backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...reference import (
    METHODS,
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    NormQuantizeProblem,
    Problem,
    QuantizeProblem,
    RopeAppendProblem,
    RouteProblem,
)
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.weights import WEIGHT_FORMATS
from ...reference.operations import Table
from ...reference.problems.rope_append import ROPE_DTYPES
from ..space.attention_axes import CACHES, MERGE_AXES, WITHOUT_LATENT
from ..space.moe_axes import QUANTISATION

Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Query and sequence lengths of a batch."""
Change = tuple[str, str, Mapping[str, Any]]
"""What a change is about, its name, and the fields that it sets."""
Lengths = Mapping[str, tuple[Pair, ...]]
Simple = Mapping[str, Sequence[Problem]]
"""Simple calls by title, the most usual first."""

LENGTHS: Lengths = {
    "decode": (((1, 1, 1), (300, 64, 5)), ((1,), (300,))),
    "prefill": (((300, 17), (300, 97)), ((300,), (300,))),
    "mixed": (((1, 300), (97, 300)),),
}
"""Lengths of small calls, by phase: longer than a window, than a tile of 256, and not."""
ON_CPU: Lengths = {
    **LENGTHS,
    "prefill": (((140, 17), (140, 97)), ((140,), (140,))),
    "mixed": (((1, 140), (97, 140)),),
}
"""Shorter ones, where a call costs more."""
DTYPES = ("bfloat16", "float16", "float32")
GROUPED = "deepseek_v3"
GROUP_SIZES = (1, 3, 4, 5, 6, 7, 8, 12, 16, 32)
PAGE_SIZES = (1, 8, 32, 64, 128, 256)
BASES: Mapping[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "head_dims": ((128, 128), (64, 64), (16, 16)),
    "page_size": (16, 64, 1),
    "kv_layout": ("NHD", "HND"),
    "group_size": (2, 8, 1),
    "causal": (True, False),
}
"""Simple calls, the most usual first."""
LATENT: Mapping[str, tuple[Any, ...]] = {
    **BASES,
    "head_dims": ((576, 512),),
    "page_size": (64, 32),
    "group_size": (16, 128),
    "values_in_keys": (True,),
}
"""Values of multi-head latent attention."""
ALL_FP8: Mapping[str, tuple[Any, ...]] = {
    **BASES,
    "kv_cache": ("float8_e4m3fn",),
    "q_dtype": ("float8_e4m3fn",),
}
"""Values of what takes no others: queries, keys and values in FP8."""
WITHOUT_PAGES = {**BASES, "page_size": (16,), "kv_layout": ("NHD",)}

SMALLEST: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "decode": ((1,), (1,)),
    "prefill": ((3,), (3,)),
    "mixed": ((1, 3), (1, 3)),
}
"""Lengths of the call that builds a module: nothing hangs on so few."""


def _attention_calls(
    operation: str, spaces: Sequence[Mapping[str, tuple[Any, ...]]], lengths: Lengths
) -> Simple:
    return {
        phase: list(_simple_attention(operation, spaces, pairs)) for phase, pairs in lengths.items()
    }


def _simple_attention(
    operation: str, spaces: Sequence[Mapping[str, tuple[Any, ...]]], lengths: Sequence[Pair]
) -> Iterator[Problem]:
    for space, (query_lens, seq_lens) in itertools.product(spaces, lengths):
        for chosen in itertools.product(*space.values()):
            given = dict(zip(space, chosen, strict=True))
            given["head_dim_qk"], given["head_dim_vo"] = given.pop("head_dims")
            yield AttentionProblem(
                operation=operation,
                query_lens=query_lens,
                seq_lens=seq_lens,
                num_kv_heads=2 - ("values_in_keys" in space),
                **given,
            )


def _append_calls(lengths: Lengths) -> Simple:
    space = {**BASES, "causal": (False,)}
    return _attention_calls("append_paged_kv", [space], {"append": lengths["mixed"]})


def _merge_calls(_: Lengths) -> Simple:
    dims = (128, *MERGE_AXES["head_dim"])
    return {
        "merge": [
            MergeProblem(num_tokens=9, num_heads=4, head_dim=dim, dtype=dtype)
            for dtype, dim in itertools.product(DTYPES, dims)
        ]
    }


def _metadata_calls(_: Lengths) -> Simple:
    return {"metadata": [MetadataProblem(steps=(((1, 17), (97, 300)),), page_size=16)]}


def _matrix_calls(_: Lengths) -> Simple:
    return {
        "quantising": [
            QuantizeProblem(9, 256, dtype, block_rows=1, block_channels=128) for dtype in DTYPES
        ]
    }


def _norm_calls(_: Lengths) -> Simple:
    return {"normalising": [NormQuantizeProblem(9, 256, dtype) for dtype in DTYPES]}


def _rope_calls(_: Lengths) -> Simple:
    return {"appending": [RopeAppendProblem((2, 1), (5, 9), dtype=each) for each in ROPE_DTYPES]}


def _dtypes(names: Sequence[str] = DTYPES) -> list[Change]:
    return [("dtype", each, {"dtype": each}) for each in names]


def _merge_changes(_: Problem) -> list[Change]:
    dims = MERGE_AXES["head_dim"]
    return [*_dtypes(), *(("dims", f"head dim {d}", {"head_dim": d}) for d in dims)]


def _dims(*, strided: bool) -> list[Change]:
    """Change dtypes and head dims; caches of two widths can have one stride in one allocation."""
    found = _dtypes()
    for qk, vo in (*WITHOUT_LATENT, (192, 192), (128, 64)):
        dims: dict[str, Any] = {"head_dim_qk": qk, "head_dim_vo": vo}
        dims |= {"strided_kv": True} if strided and qk != vo else {}
        found.append(("dims", f"head dims {qk}x{vo}", dims))
    return found


def _pages(base: AttentionProblem) -> list[Change]:
    v_scale = 0.5 if base.values_in_keys else 2.0
    return [
        *(("page", f"page size {size}", {"page_size": size}) for size in PAGE_SIZES),
        *(("layout", each, {"kv_layout": each}) for each in ("NHD", "HND")),
        *(("cache", *_cache(*pair, v_scale)) for pair in CACHES if pair[0]),
    ]


def _cache(kv_cache: str, q_dtype: str, v_scale: float) -> tuple[str, dict[str, Any]]:
    """Return the title and the fields of a quantised cache; a scale that is lost shows."""
    fields = {"kv_cache": kv_cache, "q_dtype": q_dtype, "k_scale": 0.5, "v_scale": v_scale}
    title = f"KV {kv_cache}"
    return (f"Q {q_dtype}, {title}" if q_dtype else title), fields


OPTIONS: tuple[Change, ...] = (
    *(("group", f"group size {size}", {"group_size": size}) for size in GROUP_SIZES),
    ("window", "window", {"window_left": 127}),
    # A cap of 30, as models have it, is within the bound of FP8 where logits are small.
    ("cap", "soft cap", {"logits_soft_cap": 1.0}),
    ("sinks", "sinks", {"sinks": True}),
    ("mask", "no mask", {"causal": False}),
    ("mask", "custom mask", {"causal": False, "custom_mask": True}),
)
"""Options of attention that rules may speak of."""


def _requests(base: AttentionProblem) -> list[Change]:
    """Change how many tokens requests have, and what the last one lacks."""
    count, query_lens, seq_lens = base.num_requests, base.query_lens[:-1], base.seq_lens[:-1]
    found: list[Change] = [
        ("keys", "a request without keys", {"seq_lens": (*seq_lens, 0)}),
        ("tokens", "a request without a query", {"query_lens": (*query_lens, 0)}),
    ]
    if base.most_queries > 1:
        return found
    trees = {"query_lens": (4,) * count, "tree": 1}
    drafts = (
        *((f"{t} query tokens", (t,) * count) for t in (4, 5)),
        ("4, 1 and 2 query tokens", (4, 1, 2)[:count]),
    )
    return [
        *found,
        *(("tokens", title, {"query_lens": lengths}) for title, lengths in drafts),
        ("tokens", "draft trees", trees),
        ("tokens", "draft trees of 4, 1 and 2", {**trees, "query_lens": (4, 1, 2)[:count]}),
    ]


def _paged_changes(base: AttentionProblem) -> list[Change]:
    return [*_dims(strided=True), *_pages(base), *OPTIONS, *_requests(base)]


def _ragged_changes(base: AttentionProblem) -> list[Change]:
    return [*_dims(strided=False), *OPTIONS, *_requests(base)]


def _append_changes(base: AttentionProblem) -> list[Change]:
    return [*_dims(strided=False), *_pages(base)]


def _smallest_batch(problem: AttentionProblem, phase: str) -> Problem:
    query_lens, seq_lens = SMALLEST[phase]
    if phase == "decode":  # how many tokens a request has may be part of the module
        query_lens = seq_lens = (max(problem.most_queries, 1),)
    return replace(problem, query_lens=query_lens, seq_lens=seq_lens)


def _as_it_is(problem: Problem, _: str) -> Problem:
    return problem


def _routing_calls(_: object) -> dict[str, list[Problem]]:
    """Return simple calls of routing by title, the most usual first."""
    return {
        "routing": [
            RouteProblem(num_tokens=9, num_experts=16, top_k=top_k, method=method, dtype=dtype)
            for method, top_k, dtype in itertools.product(
                METHODS, (4, 1), ("float32", "bfloat16", "float16")
            )
        ]
    }


def _expert_calls(_: object) -> dict[str, list[Problem]]:
    """Return simple calls of experts by title, the most usual first."""
    sizes: dict[str, Any] = {
        "num_tokens": 9,
        "hidden": 256,
        "inter": 128,
        "num_experts": 4,
        "top_k": 2,
    }
    return {
        "experts": [
            MoEProblem(**sizes, activation=activation, dtype=dtype, **fields)
            for activation in ACTIVATIONS
            for fields in map(_fields, QUANTISATION)
            for dtype in DTYPES
        ]
    }


def _routing_changes(_: object) -> list[Change]:
    """Return what rules of routing speak of: dtypes and methods."""
    groups = {"num_groups": 4, "topk_groups": 2, "bias": True, "method": GROUPED}
    return [
        *_dtypes(),
        *(("method", each, {"method": each}) for each in METHODS),
        *(("method", f"{each}, one expert", {"method": each, "top_k": 1}) for each in METHODS),
        ("method", f"{GROUPED}, groups and bias", groups),
    ]


def _expert_changes(_: object) -> list[Change]:
    """Return what rules of experts speak of: dtypes, activations and quantisation."""
    return [
        *_dtypes(),
        *(("activation", each, {"activation": each}) for each in ACTIVATIONS),
        ("activation", "swiglu with numbers", {"swiglu_parameters": "one"}),
        *(("weights", _title(pair), _fields(pair)) for pair in QUANTISATION),
    ]


def _title(pair: tuple[str, bool]) -> str:
    quantized, hidden = pair
    if not quantized:
        return "16-bit weights"
    return f"weights {quantized}" + (", hidden states too" if hidden else "")


def _fields(pair: tuple[str, bool]) -> dict[str, Any]:
    """Return the fields of a format; the grid is what a kernel's own quantising does not change."""
    quantized, hidden = pair
    grid = bool(quantized) and not WEIGHT_FORMATS[quantized].weights.entry.block
    return {
        "quantized": quantized,
        "quantized_hidden": hidden,
        "regime": "exact_grid" if grid else "iid",
    }


@dataclass(frozen=True)
class Calls:
    """What cells are made of for one operation.

    Attributes:
        simple: simple calls, given lengths by phase.
        changes: everything that may be changed about such a call, as far as rules may speak of it.
        smallest: the smallest call of the same module and phase.
    """

    simple: Callable[[Lengths], Simple]
    changes: Callable[[Any], list[Change]]
    smallest: Callable[[Any, str], Problem] = _as_it_is


OPERATIONS = Table("kernelproof.properties.gating.operations.OPERATIONS", {
    "paged_attention": Calls(partial(_attention_calls, "paged_attention", (BASES, LATENT, ALL_FP8)),
                             _paged_changes, _smallest_batch),
    "ragged_attention": Calls(partial(_attention_calls, "ragged_attention", (WITHOUT_PAGES,)),
                              _ragged_changes, _smallest_batch),
    "merge_state": Calls(_merge_calls, _merge_changes),
    "append_paged_kv": Calls(_append_calls, _append_changes, _smallest_batch),
    "build_metadata": Calls(_metadata_calls, lambda _: []),
    "route": Calls(_routing_calls, _routing_changes),
    "moe": Calls(_expert_calls, _expert_changes),
    "quantize": Calls(_matrix_calls, lambda _: _dtypes()),
    "norm_and_quantize": Calls(_norm_calls, lambda _: _dtypes()),
    "rope_and_append": Calls(_rope_calls, lambda _: _dtypes(ROPE_DTYPES)),
})  # fmt: skip
