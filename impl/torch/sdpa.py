"""torch's scaled_dot_product_attention as an implementation, one request at a time.

Three axes have no fused kernel, so that torch computes in its math backend, and rows without keys
are zeroed here; ``sdpa_backends`` has each backend as it is. It has no soft cap, no sinks and no
LSE. Its mask is given as a tensor, so that windows and the alignment of queries to the end of the
keys are expressed exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..protocol import implementation
from ..targets.backends import TORCH
from ..targets.target import Target
from .records import RECORDS
from .rounding import rounds_twice

ARITHMETIC = Arithmetic(accumulate="float32", probabilities="inputs", dequantized="inputs")
"""The CPU and CUDA flash kernels round probabilities to the inputs' dtype before P V."""
FEATURES = (
    "custom_mask", "tree", "different_kv_strides", "window_right", "output_scale", "large_tensors",
    "output_divisor",
    "unread_hidden_keys", "kv_views", "strided_channels",
    "mask_by_head", "image_spans", "chunked_attention", "dilated_window", "sink_tokens",
    "logits_bias", "alibi", "alibi_sqrt", "two_sided_window", "spans_in_window",
)  # fmt: skip


def _supports(problem: AttentionProblem, _: Target) -> bool | str:
    narrow, divisor = problem.dtype != "float32", problem.output_divisor
    refusals = (
        (problem.logits_soft_cap, "scaled_dot_product_attention has no logits soft cap"),
        (problem.sinks, "scaled_dot_product_attention has no attention sinks"),
        (
            rounds_twice(problem.v_scale, problem.dtype),
            f"v_scale {problem.v_scale} on a {problem.dtype} output would round it twice",
        ),
        (
            rounds_twice(1 / divisor, problem.dtype),
            f"output_divisor {divisor} would round a {problem.dtype} output twice",
        ),
        (
            narrow and problem.output_scale is not None,
            f"an output in FP8 would be rounded to {problem.dtype} before",
        ),
    )
    return next((reason for refused, reason in refusals if refused), True)


sdpa = functools.partial(
    implementation,
    backend="torch-sdpa",
    provider=TORCH,
    supports=_supports,
    arithmetic=ARITHMETIC,
)


@sdpa(
    "paged_attention",
    name="torch-sdpa-paged",
    features=(*FEATURES, "mla", "per_token_head_kv", "int4_kv", "fp8_ds_mla", "nvfp4_ds_mla"),
)
def paged(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Gather each request's pages and attend; codes are widened to float32, and so are queries."""
    metadata = inputs.metadata
    pages = metadata.paged_kv_indptr.tolist()
    seq_lens = metadata.seq_lens.tolist()
    indices = metadata.paged_kv_indices.long()

    def gather(cache: torch.Tensor, request: int) -> torch.Tensor:
        chosen = cache[indices[pages[request] : pages[request + 1]]]
        if inputs.kv_layout == "HND":
            chosen = chosen.transpose(1, 2)
        return chosen.flatten(0, 1)[: seq_lens[request]]

    def rows(which: int) -> list[torch.Tensor]:
        cache = (inputs.k_cache, inputs.v_cache)[which]
        found = [gather(cache, request) for request in range(len(seq_lens))]
        if inputs.kv_cache_sf is None:
            return found
        scales = [gather(inputs.kv_cache_sf[which], request) for request in range(len(seq_lens))]
        pairs = zip(found, scales, strict=True)
        values = _int4_values if inputs.k_cache.dtype == torch.uint8 else _scaled
        return [values(codes, scale) for codes, scale in pairs]

    if inputs.kv_format is not None and inputs.kv_format.element in RECORDS:
        read = RECORDS[inputs.kv_format.element]
        keys = [
            read(gather(inputs.k_cache, request)).to(inputs.q.dtype)
            for request in range(len(seq_lens))
        ]
        values = [each[..., : inputs.head_dim_vo] for each in keys]
    else:
        keys, values = rows(0), rows(1)
    return _attend(inputs, metadata.qo_indptr.tolist(), keys, values)


@sdpa("ragged_attention", name="torch-sdpa-ragged", features=(*FEATURES, "fp8_kv", "fp8_q"))
def ragged(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Attend each request's rows; FP8 is widened first, with queries in FP8 to float32."""
    if inputs.q.dtype.itemsize == 1:
        inputs = dataclasses.replace(inputs, q=inputs.q.float() * float(inputs.q_scale))
    if inputs.k.dtype.itemsize == 1:
        k, v = inputs.k.to(inputs.q.dtype), inputs.v.to(inputs.q.dtype)
        inputs = dataclasses.replace(inputs, k=k, v=v)
    bounds = inputs.kv_indptr.tolist()
    keys = [inputs.k[a:b] for a, b in itertools.pairwise(bounds)]
    values = [inputs.v[a:b] for a, b in itertools.pairwise(bounds)]
    return _attend(inputs, inputs.qo_indptr.tolist(), keys, values)


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.float() * scales


def _int4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [S, K, channels] of int4 codes, two a byte, and scales that end in a zero point."""
    bits = scales.contiguous().view(torch.int32)
    zero_points = torch.bitwise_and(bits, 15)
    values = codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=torch.float32)
    values[..., 0::2] = codes.remainder(16)
    values[..., 1::2] = codes.div(16, rounding_mode="floor")
    return (values - zero_points) * (bits ^ zero_points).view(torch.float32)


def _attend(
    inputs: AttentionInputs,
    qo_indptr: list[int],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> tuple[torch.Tensor, None]:
    out = inputs.q.new_zeros((*inputs.q.shape[:2], inputs.head_dim_vo))
    mask_start = 0
    for request, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = slice(qo_indptr[request], qo_indptr[request + 1])
        queries, length = rows.stop - rows.start, k.shape[0]
        custom, bias = (
            None
            if each is None
            else each[..., mask_start : mask_start + queries * length].unflatten(
                -1, (queries, length)
            )
            for each in (inputs.custom_mask, inputs.logits_bias)
        )
        mask_start += queries * length
        if not queries or not length:
            continue
        mask = mask_of(inputs, queries, length, request)
        if custom is not None:
            group = inputs.q.shape[1] // k.shape[1]
            by_head = custom.dim() > mask.dim()
            mask = mask & (custom.repeat_interleave(group, dim=0) if by_head else custom)
        added = _addend(inputs, queries, length, bias)
        # A bias is added in the operands' dtype, and rounding to 16 bits would move its logits.
        dtype = k.dtype if added is None else torch.float32
        # What no row sees may be NaN, and torch multiplies it by 0.
        unseen = ~mask.flatten(0, -2).any(dim=0)[:, None, None]
        attended = scaled_dot_product_attention(
            inputs.q[rows].to(dtype).transpose(0, 1),
            k.masked_fill(unseen, 0.0).to(dtype).transpose(0, 1),
            v.masked_fill(unseen, 0.0).to(dtype).transpose(0, 1),
            attn_mask=mask if added is None else added.masked_fill(~mask, -math.inf),
            scale=inputs.sm_scale * float(inputs.k_scale),
            enable_gqa=True,
        )
        sees_a_key = mask.any(dim=-1).expand(inputs.q.shape[1], -1).unsqueeze(-1)
        out[rows] = torch.where(sees_a_key, attended, 0.0).transpose(0, 1) * float(inputs.v_scale)
    if inputs.output_divisor != 1:
        out = out / inputs.output_divisor
    if inputs.output_scale is not None:
        largest = torch.finfo(inputs.out_dtype).max
        out = (out / inputs.output_scale).clamp(-largest, largest)
    return out.to(inputs.out_dtype), None


def _places(
    inputs: AttentionInputs, queries: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of queries [T, 1] and keys [1, S]."""
    position = torch.arange(queries, device=inputs.q.device).unsqueeze(1) + length - queries
    return position, torch.arange(length, device=inputs.q.device).unsqueeze(0)


def mask_of(inputs: AttentionInputs, queries: int, length: int, request: int) -> torch.Tensor:
    """Return which keys each query sees, [T, S], a custom mask aside."""
    position, key = _places(inputs, queries, length)
    keep = torch.ones((queries, length), dtype=torch.bool, device=inputs.q.device)
    if inputs.window_left >= 0:
        keep &= key >= position - inputs.window_left
    if inputs.attention_chunk_size:
        size = inputs.attention_chunk_size
        keep &= key // size == torch.div(position, size, rounding_mode="floor")
    if inputs.window_dilation > 1:
        keep &= torch.remainder(position - key, inputs.window_dilation) == 0
    keep[:, : inputs.sink_tokens] = True
    if inputs.causal:
        keep &= key <= position
    if inputs.window_right >= 0:
        keep &= key <= position + inputs.window_right
    if inputs.spans is not None:
        for start, stop in inputs.spans[request].tolist():
            first = max(start - length + queries, 0)
            rows = slice(first, max(stop - length + queries, first))
            if inputs.spans_in_window and inputs.window_left >= 0:
                near = key[:, start:stop] >= position[rows] - inputs.window_left
                keep[rows, start:stop] |= near
            else:
                keep[rows, start:stop] = True
    return keep


def _addend(
    inputs: AttentionInputs, queries: int, length: int, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what is added to logits, float32 [H, T, S]; None where nothing is."""
    if inputs.alibi_slopes is None:
        return None if bias is None else bias.float()
    position, key = _places(inputs, queries, length)
    distance = (key - position).float()
    if inputs.alibi_function == "sqrt":
        distance = -torch.clamp(-distance, min=0).sqrt()
    alibi = inputs.alibi_slopes.float().view(-1, 1, 1) * distance
    return alibi if bias is None else alibi + bias
