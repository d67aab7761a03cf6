"""The masked softmax of one request: the definition that attention and its bound share.

Shapes: T query tokens and S keys of one request, H query heads, K key-value heads, G = H / K
query heads a key-value head, D head_dim_qk, E head_dim_vo. Query head h reads key-value head
h // G, so heads are grouped as [K, T * G] rows against [K, S] keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .requests import Options, Request

MAX_LOGIT_BYTES = 8 * 2**20
"""Query rows are taken in blocks whose logits fit in this, so that memory stays linear in S."""


class Weights(NamedTuple):
    """The softmax of a block of query rows; R = rows * G."""

    rows: slice  # query rows of the request
    keys: slice  # keys of the request that any of these rows may see
    q: torch.Tensor  # [K, R, D], q_scale applied
    k: torch.Tensor  # [K, S', D], k_scale applied; until the next block of rows
    logits: torch.Tensor  # [K, R, S'], -inf where masked
    largest: torch.Tensor  # [K, R, 1], the largest logit, sinks included; 0 where none is finite
    probabilities: torch.Tensor  # [K, R, S'], rows sum to 1 less the sink's share, or to 0
    lse: torch.Tensor  # [K, R, 1]
    sinks: torch.Tensor | None  # [K, R, 1]


def softmax_weights(request: Request, options: Options) -> Iterator[Weights]:
    """Give the softmax of a request's query rows, a block of rows at a time."""
    num_queries, num_keys = request.q.shape[0], request.k.shape[0]
    row_bytes = max(1, request.q.shape[1] * num_keys * options.compute_dtype.itemsize)
    block = max(1, MAX_LOGIT_BYTES // row_bytes)
    for start in range(0, num_queries, block):
        yield _block_weights(request, options, slice(start, min(start + block, num_queries)))


def _block_weights(request: Request, options: Options, rows: slice) -> Weights:
    keys = _key_range(request, options, rows)
    num_kv_heads = request.k.shape[1]
    q = group(_scaled_queries(request.q[rows], options), num_kv_heads)
    k = _heads_first("k", request.k[keys], options.k_scale, options)
    sm_scale = options.sm_scale
    if sm_scale is None:
        sm_scale = 1.0 / math.sqrt(request.q.shape[-1])
    logits = (q * sm_scale) @ k.transpose(-1, -2)
    if options.logits_soft_cap:
        logits = options.logits_soft_cap * torch.tanh(logits / options.logits_soft_cap)
    mask = visible(request, options, rows, keys)
    if mask is not None:
        groups = request.q.shape[1] // num_kv_heads
        logits = logits.masked_fill(~mask.repeat_interleave(groups, dim=0), -math.inf)
    sinks = None
    if options.sinks is not None:
        per_row = options.sinks.to(device=q.device, dtype=q.dtype).expand(
            rows.stop - rows.start, -1
        )
        sinks = group(per_row.unsqueeze(-1), num_kv_heads)
    return _normalise(Weights(rows, keys, q, k, logits, logits, logits, logits, sinks))


def _scaled_queries(q: torch.Tensor, options: Options) -> torch.Tensor:
    """Give [rows, H, D] in the compute dtype, q_scale applied."""
    wide, scale = q.to(options.compute_dtype), options.q_scale
    if isinstance(scale, torch.Tensor):
        return wide * scale.to(device=wide.device, dtype=wide.dtype).reshape(-1, 1)
    return wide if scale == 1 else wide * scale


def _normalise(weights: Weights) -> Weights:
    logits, sinks = weights.logits, weights.sinks
    every = logits if sinks is None else torch.cat([logits, sinks], dim=-1)
    if every.shape[-1] == 0:
        largest = logits.new_zeros((*logits.shape[:-1], 1))
    else:
        largest = every.amax(dim=-1, keepdim=True)
        largest = torch.where(torch.isneginf(largest), 0.0, largest)
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    lse = largest + torch.log(total)
    probabilities = exponentials / torch.where(total == 0, 1.0, total)
    return weights._replace(largest=largest, probabilities=probabilities, lse=lse)


def _key_range(request: Request, options: Options, rows: slice) -> slice:
    """Give the keys that any of the rows may see; the others are never read, whatever they hold."""
    num_queries, num_keys = request.q.shape[0], request.k.shape[0]
    offset = num_keys - num_queries
    start, stop = 0, num_keys
    if options.causal:
        stop = min(max(rows.stop + offset, 0), num_keys)
    if options.window_left >= 0:
        start = min(max(rows.start + offset - options.window_left, 0), stop)
    return slice(start, stop)


def visible(request: Request, options: Options, rows: slice, keys: slice) -> torch.Tensor | None:
    """Give the [rows, keys] mask of what each query row sees; None where it sees all of them."""
    device = request.q.device
    offset = request.k.shape[0] - request.q.shape[0]
    first, last = rows.start + offset, rows.stop - 1 + offset
    if (
        request.mask is None
        and not (options.causal and first < keys.stop - 1)
        and not (options.window_left >= 0 and last - options.window_left > keys.start)
    ):
        return None
    position = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) + offset
    key = torch.arange(keys.start, keys.stop, device=device).unsqueeze(0)
    keep = torch.ones((position.shape[0], key.shape[1]), dtype=torch.bool, device=device)
    if options.causal:
        keep &= key <= position
    if options.window_left >= 0:
        keep &= key >= position - options.window_left
    if request.mask is not None:
        keep &= request.mask[rows, keys].to(device)
    return keep


def value_heads(request: Request, keys: slice, options: Options) -> torch.Tensor:
    """Give V of these keys as [K, S', E] in the compute dtype, v_scale applied, until the next."""
    return _heads_first("v", request.v[keys], options.v_scale, options)


def _heads_first(
    name: str, tensor: torch.Tensor, scale: float | torch.Tensor, options: Options
) -> torch.Tensor:
    heads = tensor.transpose(0, 1)
    dtype = options.compute_dtype
    converted = options.scratch.take(name, tuple(heads.shape), dtype, heads.device).copy_(heads)
    if isinstance(scale, torch.Tensor):
        return converted.mul_(scale.to(device=heads.device, dtype=dtype).reshape(-1, 1, 1))
    return converted if scale == 1.0 else converted.mul_(scale)


def group(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Reorder [T, H, X] to [K, T * G, X]: the rows that share a key-value head together."""
    tokens, heads, width = rows.shape
    grouped = rows.reshape(tokens, num_kv_heads, heads // num_kv_heads, width)
    return grouped.transpose(0, 1).reshape(num_kv_heads, -1, width)


def ungroup(grouped: torch.Tensor, rows: slice) -> torch.Tensor:
    """Reorder [K, T * G, X] back to [T, H, X]."""
    num_kv_heads, _, width = grouped.shape
    tokens = rows.stop - rows.start
    split = grouped.reshape(num_kv_heads, tokens, -1, width)
    return split.transpose(0, 1).reshape(tokens, -1, width)
