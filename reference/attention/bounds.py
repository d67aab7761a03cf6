"""Bounds on what an honest kernel may differ from the oracle; derived in ``error_terms``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.arithmetic import Arithmetic, checked_arithmetic
from ..formats.kv_format import KVCacheFormat, stored_head_dim
from ..validation import KVLayout
from .batches import Call, batches
from .definition import AttentionOutput
from .error_terms import Roundings, block_bounds
from .metadata import BatchMetadata
from .options import OUTPUT_DTYPE, Options, scaled_output
from .requests import paged_call, ragged_call
from .softmax import softmax_weights, value_heads, weighted_values


class Bounded(NamedTuple):
    """The oracle's answer and the bounds on the difference of an honest kernel."""

    expected: AttentionOutput
    bound: AttentionOutput


class Values(NamedTuple):
    """Properties of V that a bound needs.

    Attributes:
        head_dim: channels.
        dtype: the dtype to which ``Arithmetic(probabilities="inputs")`` rounds the probabilities.
    """

    head_dim: int
    dtype: torch.dtype


def value_dtype(q: torch.Tensor, v_cache: torch.Tensor) -> torch.dtype:
    """Return the dtype in which P multiplies V: q's, where a quantised cache is widened first.

    With FP8 queries that is FP8: FA3 and trtllm-gen round P to it for their second product.
    """
    return v_cache.dtype if v_cache.dtype.itemsize > 1 else q.dtype


def attention_error_bound(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: BatchMetadata,
    *,
    kv_layout: KVLayout = "NHD",
    causal: bool | torch.Tensor = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    compute_dtype: torch.dtype = torch.float64,
    kv_format: KVCacheFormat | None = None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    arithmetic: Arithmetic | None = None,
    out_dtype: torch.dtype | None = None,
    window_right: int = -1,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: float | None = None,
    spans: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
    window_dilation: int = 1,
    sink_tokens: int = 0,
    logits_bias: torch.Tensor | None = None,
    alibi_function: str = "linear",
    output_divisor: float = 1.0,
    spans_in_window: bool = False,
) -> AttentionOutput:
    """Bound, element by element, how far an honest kernel may be from ``paged_attention``.

    Args:
        q, k_cache, v_cache, metadata, kv_layout, causal, sm_scale, window_left, logits_soft_cap,
            sinks, custom_mask, q_scale, k_scale, v_scale, compute_dtype, kv_format, kv_cache_sf,
            window_right, alibi_slopes, output_scale, spans, attention_chunk_size, window_dilation,
            sink_tokens, logits_bias, alibi_function, output_divisor, spans_in_window: as in
            ``paged_attention``.
        arithmetic: what the kernel rounds where; float32 throughout if None.
        out_dtype: dtype of the kernel's output; if None, q's, or float8_e4m3fn where there is an
            ``output_scale``.

    Returns:
        AttentionOutput of bounds: ``out`` [tokens, qo_heads, head_dim_vo] and ``lse`` [tokens,
        qo_heads], in ``compute_dtype``. The derivation is the docstring of ``error_terms``.

    Raises:
        ValueError: as ``paged_attention``.
    """
    options = Options(
        causal=causal,
        sm_scale=sm_scale,
        window_left=window_left,
        window_right=window_right,
        alibi_slopes=alibi_slopes,
        output_scale=output_scale,
        spans=spans,
        attention_chunk_size=attention_chunk_size,
        window_dilation=window_dilation,
        sink_tokens=sink_tokens,
        logits_bias=logits_bias,
        alibi_function=alibi_function,
        output_divisor=output_divisor,
        spans_in_window=spans_in_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        compute_dtype=compute_dtype,
        kv_format=kv_format,
        kv_cache_sf=kv_cache_sf,
    )
    call = paged_call(q, k_cache, v_cache, metadata, kv_layout, options)
    values = Values(stored_head_dim(v_cache, kv_format), value_dtype(q, v_cache))
    bound = bounded(call, values, options, arithmetic, out_dtype).bound
    return AttentionOutput(bound.out.contiguous(), bound.lse.contiguous())


def ragged_attention_error_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    causal: bool | torch.Tensor = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    custom_mask: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    compute_dtype: torch.dtype = torch.float64,
    arithmetic: Arithmetic | None = None,
    out_dtype: torch.dtype | None = None,
    window_right: int = -1,
    alibi_slopes: torch.Tensor | None = None,
    output_scale: float | None = None,
    spans: torch.Tensor | None = None,
    attention_chunk_size: int = 0,
    window_dilation: int = 1,
    sink_tokens: int = 0,
    logits_bias: torch.Tensor | None = None,
    alibi_function: str = "linear",
    output_divisor: float = 1.0,
    spans_in_window: bool = False,
) -> AttentionOutput:
    """Bound how far an honest kernel may be from ``ragged_attention``; see attention_error_bound.

    Args:
        q, k, v, qo_indptr, kv_indptr, and the options: the same as in ``ragged_attention``.
        arithmetic: what the kernel rounds where; float32 throughout if None.
        out_dtype: dtype of the kernel's output; if None, q's, or float8_e4m3fn where there is an
            ``output_scale``.

    Returns:
        AttentionOutput of bounds in ``compute_dtype``.

    Raises:
        ValueError: as ``ragged_attention``.
    """
    options = Options(
        causal=causal,
        sm_scale=sm_scale,
        window_left=window_left,
        window_right=window_right,
        alibi_slopes=alibi_slopes,
        output_scale=output_scale,
        spans=spans,
        attention_chunk_size=attention_chunk_size,
        window_dilation=window_dilation,
        sink_tokens=sink_tokens,
        logits_bias=logits_bias,
        alibi_function=alibi_function,
        output_divisor=output_divisor,
        spans_in_window=spans_in_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        custom_mask=custom_mask,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        compute_dtype=compute_dtype,
    )
    call = ragged_call(q, k, v, qo_indptr, kv_indptr, options)
    values = Values(v.shape[-1], value_dtype(q, v))
    bound = bounded(call, values, options, arithmetic, out_dtype).bound
    return AttentionOutput(bound.out.contiguous(), bound.lse.contiguous())


def bounded(
    call: Call,
    values: Values,
    options: Options,
    arithmetic: Arithmetic | None,
    out_dtype: torch.dtype | None,
) -> Bounded:
    """Compute attention and its bounds in one pass over the requests."""
    q, sizes = call.q, (values.head_dim, 1, values.head_dim, 1)
    # Every token is some request's: nothing of it is left as it is.
    found = q.new_empty((*q.shape[:2], sum(sizes)), dtype=options.compute_dtype)
    scaled = options.output_scale is not None
    roundings = Roundings.of(
        checked_arithmetic(arithmetic),
        values.dtype,
        out_dtype or (OUTPUT_DTYPE if scaled else q.dtype),
        cache=None if call.kv_format is None else call.kv_format.entry,
    )
    with torch.no_grad():
        for batch in batches(call, options):
            for weights in softmax_weights(batch, options):
                v = value_heads(batch, weights.block, options)
                attended = weighted_values(weights, v)
                bounds = block_bounds(weights, v, attended, options, roundings)
                answer = scaled_output(attended, options)
                weights.block.put(torch.cat([answer, weights.lse, *bounds], dim=-1), found)
    out, lse, out_bound, lse_bound = found.split(sizes, dim=-1)
    return Bounded(
        AttentionOutput(out, lse.squeeze(-1)), AttentionOutput(out_bound, lse_bound.squeeze(-1))
    )
