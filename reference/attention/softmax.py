"""The masked softmax of a batch of requests: the definition that attention and its bound share.

Shapes: N requests of at most T query tokens and S keys, H query heads, K key-value heads, G = H / K
query heads a key-value head, D head_dim_qk, E head_dim_vo. Query head h reads key-value head
h // G, so heads are grouped as [N, K, T * G] rows against [N, K, S] keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .alibi import ALIBI_REACH
from .batches import Batch
from .blocks import Block, block_of, group
from .options import Options

MAX_LOGIT_BYTES = 8 * 2**20
"""Query rows are taken in blocks whose logits fit in this, so that memory stays linear in S."""


class Weights(NamedTuple):
    """The softmax of a block of query rows; R = rows * G."""

    block: Block
    q: torch.Tensor  # [N, K, R, D], q_scale applied
    k: torch.Tensor  # [N, K, S', D], k_scale applied; until the next block of rows
    logits: torch.Tensor  # [N, K, R, S'], -inf where masked
    largest: torch.Tensor  # [N, K, R, 1], the largest logit, sinks included; 0 where none is finite
    probabilities: torch.Tensor  # [N, K, R, S'], rows sum to 1 less the sink's share, or to 0
    lse: torch.Tensor  # [N, K, R, 1]
    sinks: torch.Tensor | None  # [K, R, 1]
    slopes: torch.Tensor | None  # [K, R, 1], of ALiBi
    reach: torch.Tensor  # [N, 1, 1], the most that a slope may multiply
    bias: torch.Tensor | None = None  # [N, K, R, S'], added to logits

    @property
    def farthest(self) -> torch.Tensor | float:
        """The most that ALiBi may add to a logit, [N, K, R, 1], from wherever it is counted."""
        if self.slopes is None:
            return 0.0
        return self.slopes.abs() * self.reach.unsqueeze(-1)

    @property
    def sizes(self) -> torch.Tensor:
        """|logits|, or how large they may have been without addends; infinite where masked."""
        sizes = self.logits.abs()
        if self.bias is not None:
            sizes.add_(self.bias.abs())
        return sizes if self.slopes is None else sizes.add_(self.farthest)


def softmax_weights(batch: Batch, options: Options) -> Iterator[Weights]:
    """Return the softmax of the requests' query rows, a block of rows at a time."""
    requests, num_queries, num_heads, _ = batch.q.shape
    row_bytes = requests * num_heads * batch.k.shape[1] * options.compute_dtype.itemsize
    size = max(1, MAX_LOGIT_BYTES // max(1, row_bytes))
    for start in range(0, num_queries, size):
        block = block_of(batch, options, slice(start, min(start + size, num_queries)))
        yield _block_weights(batch, options, block)


def _block_weights(batch: Batch, options: Options, block: Block) -> Weights:
    num_heads, num_kv_heads = batch.q.shape[2], batch.k.shape[2]
    q = group(_scaled_queries(batch.q[:, block.rows], options), num_kv_heads)
    k = _heads_first("k", batch.k[:, block.keys], options.k_scale, options)
    sm_scale = options.sm_scale
    if sm_scale is None:
        sm_scale = 1.0 / math.sqrt(batch.q.shape[-1])
    logits = (q * sm_scale) @ k.transpose(-1, -2)
    if options.logits_soft_cap:
        logits = options.logits_soft_cap * torch.tanh(logits / options.logits_soft_cap)
    by_token = logits.unflatten(2, (-1, num_heads // num_kv_heads))  # [N, K, rows, G, S']
    slopes, sinks = (
        None if each is None else _per_row(each, block, q, num_kv_heads)
        for each in (options.alibi_slopes, options.sinks)
    )
    if slopes is not None and block.distances is not None:
        by_token += slopes.unflatten(1, by_token.shape[2:4]) * block.distances[:, None, :, None]
    bias = None
    if block.bias is not None:
        of_heads = block.bias.unflatten(1, (num_kv_heads, -1)).transpose(2, 3)
        by_token += of_heads
        bias = of_heads.flatten(2, 3)
    if block.hidden is not None:
        by_token.masked_fill_(block.hidden.unsqueeze(3), -math.inf)
    reach = ALIBI_REACH[options.alibi_function](block.lengths).to(logits.dtype)
    empty = Weights(block, q, k, logits, logits, logits, logits, sinks, slopes, reach, bias)
    return _normalise(empty)


def _per_row(
    per_head: torch.Tensor, block: Block, q: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """Return [H] numbers of query heads as [K, R, 1]."""
    rows = (block.rows.stop - block.rows.start, len(per_head), 1)
    per_row = per_head.to(device=q.device, dtype=q.dtype).unsqueeze(-1).expand(rows)
    return group(per_row, num_kv_heads)


def _scaled_queries(q: torch.Tensor, options: Options) -> torch.Tensor:
    """Return [N, rows, H, D] in the compute dtype, q_scale applied."""
    wide, scale = q.to(options.compute_dtype), options.q_scale
    if isinstance(scale, torch.Tensor):
        return wide * scale.to(device=wide.device, dtype=wide.dtype).reshape(-1, 1)
    return wide if scale == 1 else wide * scale


def _normalise(weights: Weights) -> Weights:
    logits, sinks = weights.logits, weights.sinks
    if logits.shape[-1]:
        largest = logits.amax(dim=-1, keepdim=True)
    else:
        largest = logits.new_full((*logits.shape[:-1], 1), -math.inf)
    if sinks is not None:
        largest = torch.maximum(largest, sinks)
    largest = largest.masked_fill_(torch.isneginf(largest), 0.0)
    exponentials = (logits - largest).exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - largest)
    lse = largest + torch.log(total)
    probabilities = exponentials.div_(total.masked_fill_(total == 0, 1.0))
    return weights._replace(largest=largest, probabilities=probabilities, lse=lse)


def value_heads(batch: Batch, block: Block, options: Options) -> torch.Tensor:
    """Return V of a block as [N, K, S', E] in the compute dtype, v_scale applied, until the next.

    Entries that are no request's are zero: what lies there may be NaN, and NaN * 0 is NaN.
    """
    heads = _heads_first("v", batch.v[:, block.keys], options.v_scale, options)
    if block.padding is not None:
        heads.masked_fill_(block.padding[:, None, :, None], 0.0)
    return heads


def weighted_values(weights: Weights, v: torch.Tensor) -> torch.Tensor:
    """Return P V [N, K, R, E] of a block; what a row may not see adds nothing to it, NaN neither.

    Args:
        weights: the block's softmax.
        v: [N, K, S', E]. Where it may not be finite, NaN and infinities in it are zero afterwards,
            so that bounds of the other rows stay numbers.

    A key that a row sees counts however small its probability: NaN makes the row's channel NaN.
    """
    out = weights.probabilities @ v
    # 0 * NaN is NaN, so that finite sums need nothing more; a GPU is not waited for.
    if reads_are_free(out) and bool(out.sum().isfinite()):
        return out
    seen = (~torch.isneginf(weights.logits)).to(v.dtype)
    strange = torch.cat([torch.isnan(v), torch.isposinf(v), torch.isneginf(v)], dim=-1).to(v.dtype)
    nans, largest, smallest = ((seen @ strange) > 0).chunk(3, dim=-1)
    added = torch.zeros_like(out).masked_fill_(largest, math.inf)
    added.masked_fill_(smallest, -math.inf).masked_fill_(nans | (largest & smallest), math.nan)
    v.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return (weights.probabilities @ v).add_(added)


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Whether the host may read a number of it without waiting for a GPU."""
    return not tensor.is_cuda


def _heads_first(
    name: str, tensor: torch.Tensor, scale: float | torch.Tensor, options: Options
) -> torch.Tensor:
    heads = tensor.transpose(1, 2)
    dtype = options.compute_dtype
    converted = options.scratch.take(name, tuple(heads.shape), dtype, heads.device).copy_(heads)
    if isinstance(scale, torch.Tensor):
        return converted.mul_(scale.to(device=heads.device, dtype=dtype).reshape(-1, 1, 1))
    return converted if scale == 1.0 else converted.mul_(scale)
