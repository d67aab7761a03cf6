"""Paged and ragged attention, as the textbook defines them, in float64 by default.

out = softmax(cap(scale * q k^T) + bias + mask) v          (Vaswani et al., arXiv:1706.03762)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.kv_format import KVCacheFormat, stored_head_dim
from ..validation import KVLayout
from .batches import Call, batches
from .metadata import BatchMetadata
from .options import Options, scaled_output
from .requests import paged_call, ragged_call
from .softmax import softmax_weights, value_heads, weighted_values


class AttentionOutput(NamedTuple):
    """Attention and its normaliser.

    Attributes:
        out: [tokens, qo_heads, head_dim_vo].
        lse: [tokens, qo_heads], natural logarithm of the sum of exponentials of the logits, sinks
            included. A row that sees no key has out 0 and lse -inf (or the sink's logit).
    """

    out: torch.Tensor
    lse: torch.Tensor


def paged_attention(
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
    """Attend a mixed batch of prefills and decodes to a paged KV cache.

    Args:
        q: [tokens, qo_heads, head_dim_qk], any floating dtype, FP8 too, strided or not.
        k_cache: NHD [pages, page_size, kv_heads, head_dim_qk] or HND [pages, kv_heads, page_size,
            head_dim_qk] (FlashInfer's layouts).
        v_cache: the same with head_dim_vo.
        metadata: which tokens and pages belong to which request.
        kv_layout: ``"NHD"`` or ``"HND"``.
        causal: query row i of T sees keys up to position ``i + S - T``: queries are aligned to the
            end of the keys. A bool tensor [R] says it of each request.
        sm_scale: factor of q k^T; ``1 / sqrt(head_dim_qk)`` if None.
        window_left: keys to the left of the query's own position that are kept; -1: all.
        logits_soft_cap: c > 0 replaces a scaled logit s by ``c * tanh(s / c)``; 0: off.
        sinks: [qo_heads], one more logit a head in the denominator (arXiv:2309.17453; gpt-oss),
            neither scaled nor capped.
        custom_mask: bool, [sum of T_i * S_i]: the requests' [T, S] masks, flattened row by row and
            concatenated (FlashInfer's order); True keeps. It removes keys besides those that
            ``causal`` and ``window_left`` remove (FlashInfer would ignore ``causal``). With a first
            axis, [kv_heads, sum of T_i * S_i], each key-value head has a mask of its own (sparse
            attention by blocks that a head chooses, as of MiniMax).
        q_scale: float or [qo_heads], factor of q: FP8 queries come with one.
        k_scale: float or [kv_heads], factor of k.
        v_scale: float or [kv_heads], factor of v.
        compute_dtype: float64 (default) or float32.
        kv_format: what the cache holds; may be left out where its dtype says so (float8 too), and
            must be given where it is ``uint8``. The codes are consumed as they are, so that the
            error of quantising is no part of the result.
        kv_cache_sf: scales of K and V that lie beside the cache, NHD or HND as it does. Of an
            nvfp4 cache, block scales, float8_e4m3fn [pages, page_size, kv_heads, head_dim / 16]
            (FlashInfer's argument of that name). Of int8_per_token_head and fp8_per_token_head,
            one of each token and head, float32 [pages, page_size, kv_heads, 1] (vLLM's
            ``k_scale_cache`` and ``v_scale_cache``); of int4_per_token_head, these with zero points
            in their lowest bits; of int8_zero_point and int4_zero_point, scales and zero points
            [pages, page_size, kv_heads, 2] in the model's dtype (lmdeploy's ``k_scales_zeros`` and
            ``v_scales_zeros``). ``k_scale`` and ``v_scale`` multiply besides.
        window_right: keys to the right of the query's own position that are kept; -1: all. With
            ``causal`` there are none.
        alibi_slopes: [qo_heads], ALiBi (arXiv:2108.12409): the logit of a key grows by the head's
            slope times its position less the query's, after scale and soft cap.
        output_scale: scale of outputs in FP8 (float8_e4m3fn), a positive number: ``out`` is divided
            by it and saturates at 448. It is not rounded here. None: the output has no scale.
        spans: int32 [R, n, 2], ranges [start, stop) of positions of each request; empty where
            ``start >= stop``. A query whose position lies in one sees all keys of the same one,
            whatever ``causal``, windows, chunks and dilation say (tokens of an image in Gemma 3 and
            PaliGemma, prefix LM; vLLM's ``mm_prefix_range``, of which the stop is the last
            position). ``custom_mask`` removes of these too.
        attention_chunk_size: c > 0: a query sees keys of the same chunk of c positions only
            (Llama 4's local attention); 0: off.
        window_dilation: d > 1: a query sees keys at distances that are multiples of d only
            (Longformer's dilated windows, arXiv:2004.05150); 1: off.
        sink_tokens: the first keys of a request, this many, are seen behind a window, in other
            chunks and at other distances, too (StreamingLLM, arXiv:2309.17453); ``causal`` and
            ``window_right`` hide them as others.
        logits_bias: floating, [qo_heads, sum of T_i * S_i], in ``custom_mask``'s order: added to
            scaled and capped logits (T5's relative bias, arXiv:1910.10683).
        alibi_function: what ``alibi_slopes`` multiply, of a key's position less the query's:
            ``"linear"``: itself; ``"sqrt"``: less the root of how far the key is before the query,
            0 behind it (vLLM's ``use_alibi_sqrt``).
        output_divisor: a positive number by which ``out`` is divided, whatever its dtype: kernels
            whose second product has the factor ``v_scale / o_scale`` (trtllm-gen's bmm2_scale) give
            16-bit outputs so.
        spans_in_window: whether ``window_left`` hides keys of the query's own span, too (Gemma 4;
            vLLM's ``mm_prefix_clamp_sliding_window``).

    Returns:
        AttentionOutput in ``compute_dtype``, on q's device, without gradients. No input is changed.
        A row is a function of the keys and values that it sees: a NaN in another is not in it.

    Raises:
        ValueError: shapes that disagree, metadata that contradict themselves, the token count or
            the cache, an unknown layout; the argument and position are named.
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
    return attend(call, stored_head_dim(v_cache, kv_format), options)


def ragged_attention(
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
    """Attend requests to keys and values that lie one request after another, without pages.

    Args:
        q: [tokens, qo_heads, head_dim_qk].
        k: [keys, kv_heads, head_dim_qk], any floating dtype; FP8 codes come with ``k_scale``.
        v: [keys, kv_heads, head_dim_vo], alike with ``v_scale``; FP8 where k is.
        qo_indptr: [R + 1], request i owns query tokens ``qo_indptr[i]:qo_indptr[i + 1]``.
        kv_indptr: [R + 1], the same for keys.
        causal, sm_scale, window_left, logits_soft_cap, sinks, custom_mask, q_scale, k_scale,
            v_scale, compute_dtype, window_right, alibi_slopes, output_scale, spans,
            attention_chunk_size, window_dilation, sink_tokens, logits_bias, alibi_function,
            output_divisor, spans_in_window: as in ``paged_attention``.

    Returns:
        AttentionOutput in ``compute_dtype``, on q's device. No input is changed.

    Raises:
        ValueError: shapes that disagree, an indptr that decreases or does not end at the number of
            tokens or keys; the argument and position are named.
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
    return attend(call, v.shape[-1], options)


def attend(call: Call, head_dim_vo: int, options: Options) -> AttentionOutput:
    """Compute attention of a checked call, whose values have ``head_dim_vo`` channels."""
    tokens, heads, _ = call.q.shape
    # Every token is some request's: nothing of these is left as it is.
    out = call.q.new_empty((tokens, heads, head_dim_vo), dtype=options.compute_dtype)
    lse = call.q.new_empty((tokens, heads, 1), dtype=options.compute_dtype)
    with torch.no_grad():
        for batch in batches(call, options):
            for weights in softmax_weights(batch, options):
                v = value_heads(batch, weights.block, options)
                weights.block.put(scaled_output(weighted_values(weights, v), options), out)
                weights.block.put(weights.lse, lse)
    return AttentionOutput(out, lse.squeeze(-1))
