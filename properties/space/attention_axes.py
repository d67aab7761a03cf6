"""The space of attention, merging and appending: values by axis, simplest first, and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...reference import AttentionProblem
from ...reference.attention.alibi import ALIBI_FUNCTIONS
from ...reference.formats.cache_elements import FP8, cache_element
from ...reference.problems import (
    ATTENTION_REGIMES,
    CONTEXTS,
    DTYPES,
    EMPTY_STATES,
    KV_VIEWS,
    LSE_LAYOUTS,
    MERGE_REGIMES,
    STATE_STRIDES,
)
from ...reference.problems.cache_names import (
    KV_CACHES,
    cache_fits,
    element_of,
    has_tensor_scales,
    multiples_of,
    query_dtypes,
)
from ...reference.problems.mask_fields import BIASES, MASK_PATTERNS, NO_MASK, SPANS
from .real_values import real_axis, rows_of

HEAD_DIMS: tuple[tuple[int, ...], ...] = (
    (16, 16),
    (32, 32),
    (24, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
    (24, 16, 0),
    (576, 512, 0),
    (576, 512, 128),
    (16, 16, 0),
    (512, 512, 0),
)
"""Channels of queries and keys, and of values. A third number says that values are the keys' first
channels (``values_in_keys``), all of them where both numbers are the same: for that many query
heads with the scale of DeepSeek's layers, or for any number of heads where it is 0."""
DEEPSEEK_SCALE = 192**-0.5
"""Softmax scale for 128 + 64 channels, as before the projections were absorbed; CUTLASS knows no
other."""
PAIR = 2
CACHES = tuple((name, q_dtype) for name in KV_CACHES for q_dtype in query_dtypes(name))
"""Formats of the cache, each with the dtypes of queries that may meet it."""
MANY_TO_ONE = (10, 12, 20, 24, 32, 48, 64, 71, 128)
"""Query heads of a key-value head in layers with one or few of them: multi-query attention (Falcon
has 71), and latent attention of 20 to 128 heads, whole or shared by ranks."""
FEW_HEADS = 8
"""Key-value heads that most layers have at most, whole or shared by ranks."""
MANY_HEADS = (10, 12, 13, 16, 20, 32, 40)
"""Key-value heads of layers in which each query head has its own (GPT-2, Whisper, Llama 2), and of
others that no rank shares."""
HYBRID_PAGES = (480, 528, 544, 672, 864)
"""Keys a page in caches that attention shares with layers of a recurrent state, whose state fills a
page: multiples of 16 that follow from the model (vLLM 37467 and 24280)."""
PHASES: dict[str, tuple[int, int]] = {
    "decode": (1, 3),
    "prefill": (3, 3),
    "chunk": (2, 5),
    "no_query": (0, 3),
    "no_keys": (1, 0),
    "surplus": (3, 2),
    "verify": (2, 5),
}
"""Kinds of request and an example (query_len, seq_len) of each. A ``verify`` has a few of the last
tokens of a long request, as speculative decoding and multi-token prediction give them."""
MOST_DRAFTS = 16
"""Most query tokens of a verify."""
RAGGED = -1

ATTENTION_AXES: dict[str, tuple[Any, ...]] = {
    "phase": tuple(PHASES),
    "verify": (0, 2, 3, 4, 5, 6, 7, 8, 9, 16, RAGGED),
    "dtype": DTYPES,
    "causal": (False, True),
    "head_dims": HEAD_DIMS,
    "num_kv_heads": (*range(1, FEW_HEADS + 1), *MANY_HEADS),
    "group_size": (1, 2, 3, 4, 5, 6, 7, 8, 16, *MANY_TO_ONE),
    "page_size": (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, *HYBRID_PAGES),
    "kv_layout": ("NHD", "HND"),
    "page_order": (0, 1),
    "shared_prefix_pages": (0, 1, 2),
    "window_left": (-1, 0, 1, 2, 7, 15, 16, 63, 127, 128),
    "logits_soft_cap": (0.0, 30.0, 5.0, 1.0),
    "sm_scale": (None, 1.0, 0.25, 0.05),
    "k_scale": (1.0, 0.5, 2.0, 1.25),
    "v_scale": (1.0, 0.5, 2.0, 1.25),
    "sinks": (False, True),
    "custom_mask": (False, True),
    "tree": (0, 1, 2, 3),
    "per_head_scales": (False, True),
    "caches": CACHES,
    "q_scale": (1.0, 0.5, 2.0, 16.0),
    "strided_q": (False, True),
    "strided_kv": (False, True),
    "different_kv_strides": (False, True),
    "window_right": (-1, 0, 1, 2, 7, 16, 63, 128),
    "alibi": (False, True),
    "causal_by_request": (False, True),
    "output_scale": (None, 1.0, 0.25, 2.0**-8),
    "mask_pattern": MASK_PATTERNS,
    "mask_by_head": (False, True),
    "spans": SPANS,
    "chunk": (0, 16, 2, 7, 64, 128),
    "window_dilation": (1, 2, 3, 4),
    "sink_tokens": (0, 1, 4, 16, 64),
    "logits_bias": BIASES,
    "alibi_function": tuple(ALIBI_FUNCTIONS),
    "kv_views": KV_VIEWS,
    "output_divisor": (1.0, 2.0, 4.0, 3.0),
    "two_sided_window": (False, True),
    "spans_in_window": (False, True),
    "regime": ATTENTION_REGIMES,
    "real": real_axis("paged_attention"),
}
"""Values by axis, the simplest first. ``real`` is no field of a problem: 0, or the number of a row
of the table of what models have, all of whose values a problem then has. Nor is ``verify``: 0 where
each request has a phase of its own; n where each is a verify of n query tokens; ``RAGGED`` where
each is one of 1 to ``MOST_DRAFTS``."""
MERGE_AXES: dict[str, tuple[Any, ...]] = {
    "num_states": (2, 1, 3, 4, 7),
    "dtype": DTYPES,
    "head_dim": (4, 16, 64, 80, 128, 256),
    "empty": EMPTY_STATES,
    "regime": MERGE_REGIMES,
    "strides": STATE_STRIDES,
    "context": CONTEXTS,
    "lse_layout": LSE_LAYOUTS,
    "inf_marks_empty": (False, True),
    "output_scale": (None, 1.0, 0.25, 2.0**-8),
}
WITHOUT_LATENT = tuple(dims for dims in HEAD_DIMS if len(dims) == PAIR)
RAGGED_AXES = {
    **ATTENTION_AXES,
    "head_dims": WITHOUT_LATENT,
    "real": real_axis("ragged_attention"),
    **{name: ATTENTION_AXES[name][:1] for name in ("page_size", "kv_layout", "page_order",
                                                   "shared_prefix_pages")},
    "caches": tuple(pair for pair in CACHES if pair[0] in ("", *FP8)),
}  # fmt: skip
APPEND_AXES = {
    # Appending reads no query and computes nothing: other axes would only repeat problems.
    **{name: values[:1] for name, values in ATTENTION_AXES.items()},
    **{name: ATTENTION_AXES[name] for name in ("dtype", "head_dims", "num_kv_heads", "page_size",
                                               "kv_layout", "page_order", "strided_q", "strided_kv",
                                               "different_kv_strides", "kv_views", "regime")},
    "phase": ("decode", "prefill", "chunk", "no_query"),
    "real": real_axis("append_paged_kv"),
    "caches": tuple((name, "") for name in KV_CACHES
                    if not name or cache_element(element_of(name)).appendable),
    "k_scale": (1.0, 0.5, 2.0),
    "v_scale": (1.0, 0.5, 2.0),
}  # fmt: skip


def attention_example(operation: str, chosen: Mapping[str, Any]) -> AttentionProblem:
    """Return the simplest problem of an operation of attention with these values."""
    fields = dict(chosen)
    phase, verify = fields.pop("phase"), fields.pop("verify", 0)
    real = fields.pop("real", 0)
    lengths = _lengths_of(phase, verify)
    if fields.get("tree"):
        fields |= {**NO_MASK, "spans": "", "spans_in_window": False}
        lengths = [(min(pair), max(pair)) for pair in lengths]
    fields |= with_what_it_needs(fields)
    fields |= head_fields(fields.pop("head_dims"))
    fields |= rows_of(operation)[real - 1].problem_fields(operation) if real else {}
    kv_cache, q_dtype = fields.pop("caches")
    if operation == "append_paged_kv" and (fields["k_scale"], fields["v_scale"]) != (1.0, 1.0):
        kv_cache = kv_cache or FP8[0]
        if not has_tensor_scales(kv_cache):  # of tokens, which leave no room for those of a tensor
            fields |= {"k_scale": 1.0, "v_scale": 1.0}
    if fields["q_scale"] != 1 and not q_dtype:
        kv_cache = q_dtype = FP8[0]
    fields |= {"kv_cache": kv_cache, "q_dtype": q_dtype}
    if not cache_fits(kv_cache, fields):
        multiples = multiples_of(kv_cache)
        fields |= {"head_dim_qk": 64, "head_dim_vo": 64, "values_in_keys": False}
        fields["page_size"] = multiples.get("page_size", fields["page_size"])
        if cache_element(element_of(kv_cache)).record:
            fields |= head_fields((multiples["head_dim_qk"], multiples["head_dim_vo"], 0))
    if fields.get("values_in_keys"):
        fields["kv_views"] = ""
        fields |= {"v_scale": fields["k_scale"]} if operation == "append_paged_kv" else {}
    if fields["regime"] == "exact_grid":
        fields |= {"logits_soft_cap": 0.0, "v_scale": 1.0, "alibi": False,
                   "logits_bias": "", "alibi_function": "linear"}  # fmt: skip
    return AttentionProblem(
        operation=operation,
        query_lens=tuple(t for t, _ in lengths),
        seq_lens=tuple(s for _, s in lengths),
        **fields,
    )


def with_what_it_needs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a mask's pattern, ALiBi's function and spans ask for besides."""
    found: dict[str, Any] = {}
    if fields.get("mask_pattern") or fields.get("mask_by_head"):
        found["custom_mask"] = True
    if fields.get("alibi_function", "linear") != "linear":
        found["alibi"] = True
    if fields.get("spans_in_window") and not fields.get("spans"):
        found["spans"] = SPANS[-1]
    return found


def _lengths_of(phase: str, verify: int) -> list[tuple[int, int]]:
    """Return (query_len, seq_len) of the requests of an example."""
    t, s = PHASES[phase]
    if verify:
        return (
            [(2, 5), (1, 3), (3, 7)]
            if verify == RAGGED
            else [(verify, verify + more) for more in (3, 5)]
        )
    # A batch without a token is another matter: a request without a query has company. So has a
    # verify, of another number of tokens: kernels that take equally many only have ``verify``.
    company = {"no_query": [(1, s)], "verify": [(t + 1, s + 2)]}
    return [(t, s), *company.get(phase, [])]


def head_fields(dims: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a problem that one of ``HEAD_DIMS`` stands for."""
    found: dict[str, Any] = {"head_dim_qk": dims[0], "head_dim_vo": dims[1]}
    if len(dims) > PAIR:
        found |= {"values_in_keys": True, "num_kv_heads": 1}
        found |= {"group_size": dims[2], "sm_scale": DEEPSEEK_SCALE} if dims[2] else {}
    return found
