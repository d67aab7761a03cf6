"""torch's flex_attention as an implementation, one request at a time under a block mask.

Uncompiled, torch computes the whole matrix of logits, in float32, and rounds probabilities to the
queries' dtype: that is how its users try a ``score_mod`` out. Compiled for a GPU it is a kernel of
another kind, and not judged.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..protocol import implementation
from ..targets.backends import TORCH
from ..targets.optional import require
from ..targets.refusal import Refusal
from ..targets.target import Target
from .rounding import rounds_twice

MODULE = "torch.nn.attention.flex_attention"
UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""torch's switch for a score_mod that runs as it is written."""
FLOAT32_LOGITS = "2.13"
"""First release of torch whose uncompiled logits were measured to be in float32."""
Pair = tuple[torch.Tensor, torch.Tensor]


def _supports(problem: AttentionProblem, target: Target) -> bool | str:
    if target.device != "cpu":
        return Refusal("flex_attention is judged uncompiled, on a CPU", "device", "a CPU")
    if not all(hasattr(require(MODULE, "torch"), name) for name in (UNCOMPILED, "AuxRequest")):
        return "this release of torch compiles flex_attention always, or gives no LSE"
    old = torch.__version__ < FLOAT32_LOGITS
    refusals = (
        (problem.sinks, "flex_attention has no attention sinks"),
        (
            rounds_twice(problem.v_scale, problem.dtype),
            f"v_scale {problem.v_scale} on a {problem.dtype} output would round it twice",
        ),
        (
            old and problem.dtype != "float32",
            "flex_attention is known to keep logits in float32 from torch 2.13 on",
        ),
    )
    return next((reason for refused, reason in refusals if refused), True)


flex = functools.partial(
    implementation,
    provider=TORCH,
    supports=_supports,
    arithmetic=Arithmetic(probabilities="inputs"),
)
FEATURES = (
    "custom_mask", "different_kv_strides", "window_right", "alibi", "mask_by_head", "image_spans",
    "chunked_attention", "dilated_window", "sink_tokens", "logits_bias", "alibi_sqrt", "kv_views",
    "strided_channels", "two_sided_window", "spans_in_window",
)  # fmt: skip


# Uncompiled flex attention multiplies the values of hidden keys by 0: with a page of NaN behind its
# window, a decode of two keys is NaN (torch 2.13.0 on a CPU).
@flex(
    "paged_attention",
    name="torch-flex-attention-paged",
    features=(*FEATURES, "mla"),
    hidden_keys="finite",
)
def paged(inputs: PagedAttentionInputs) -> Pair:
    """Gather each request's keys out of its pages and attend."""
    metadata, size = inputs.metadata, inputs.metadata.page_size
    ends, lengths = metadata.paged_kv_indptr.tolist(), metadata.seq_lens.tolist()
    keys = []
    for first, length in zip(ends, lengths, strict=False):
        key = torch.arange(length)
        page = metadata.paged_kv_indices[first + key // size].long()
        keys.append((page, key % size))
    k, v = inputs.k_cache, inputs.v_cache
    if inputs.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return _attend(inputs, [k[slots] for slots in keys], [v[slots] for slots in keys])


@flex("ragged_attention", name="torch-flex-attention", features=FEATURES)
def ragged(inputs: RaggedAttentionInputs) -> Pair:
    """Attend each request's rows."""
    lengths = inputs.kv_indptr.diff().tolist()
    return _attend(inputs, inputs.k.split(lengths), inputs.v.split(lengths))


def _attend(
    inputs: AttentionInputs, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> Pair:
    """Attend to keys [S, K, D] and values [S, K, E] of each request."""
    tokens, heads, _ = inputs.q.shape
    out = inputs.q.new_zeros((tokens, heads, inputs.head_dim_vo))
    lse = torch.full((tokens, heads), -torch.inf, device=inputs.q.device)
    lengths = inputs.qo_indptr.diff().tolist()
    starts = itertools.accumulate(
        (t * len(k) for t, k in zip(lengths, keys, strict=True)), initial=0
    )
    for request, (q, k, v, start, *written) in enumerate(
        zip(
            inputs.q.split(lengths),
            keys,
            values,
            starts,
            out.split(lengths),
            lse.split(lengths),
            strict=False,
        )
    ):
        if len(q) and len(k):
            attended, sums = _attend_one(inputs, q, k, v, (request, start))
            written[0].copy_(attended)
            written[1].copy_(sums)
    return out * float(inputs.v_scale), lse


def _attend_one(
    inputs: AttentionInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    which: tuple[int, int],
) -> Pair:
    """Attend to one request: its number, and where its custom mask begins.

    Returns:
        Out [T, H, E] and lse [T, H].
    """
    request, start = which
    first, group = len(k) - len(q), q.shape[1] // k.shape[1]

    def keeps(_: Any, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        kept = _keeps(inputs, request, row + first, key)
        if inputs.custom_mask is not None:
            place = start + row * len(k) + key
            mask = inputs.custom_mask
            kept = kept & (mask[place] if mask.dim() == 1 else mask[head // group, place])
        return kept

    def score(
        logit: torch.Tensor,
        _: Any,  # noqa: ANN401  the batch
        head: torch.Tensor,
        row: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        if inputs.logits_soft_cap:
            logit = inputs.logits_soft_cap * torch.tanh(logit / inputs.logits_soft_cap)
        if inputs.logits_bias is not None:
            logit = logit + inputs.logits_bias[head, start + row * len(k) + key]
        if inputs.alibi_slopes is not None:
            distance = key - row - first
            if inputs.alibi_function == "sqrt":
                distance = -torch.sqrt(torch.relu((-distance).to(logit.dtype)))
            logit = logit + inputs.alibi_slopes[head] * distance
        return logit

    by_head = inputs.custom_mask is not None and inputs.custom_mask.dim() > 1
    heads = q.shape[1] if by_head else None
    with _uncompiled() as flex_attention:
        out, aux = flex_attention.flex_attention(
            *(each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)),
            score_mod=score,
            block_mask=flex_attention.create_block_mask(
                keeps, None, heads, len(q), len(k), device=q.device
            ),
            scale=inputs.sm_scale * float(inputs.k_scale),
            enable_gqa=True,
            return_aux=flex_attention.AuxRequest(lse=True),
        )
    return out[0].transpose(0, 1), aux.lse[0].T


def _keeps(
    inputs: AttentionInputs, request: int, position: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Return whether the query at a position sees a key, a custom mask aside."""
    distance = key - position
    kept = distance == distance  # noqa: PLR0124  all, in the shape of the others
    if inputs.window_left >= 0:
        kept = kept & (distance >= -inputs.window_left)
    if inputs.attention_chunk_size:
        size = inputs.attention_chunk_size
        kept = kept & (position >= 0) & (key // size == position // size)
    if inputs.window_dilation > 1:
        kept = kept & (distance.abs() % inputs.window_dilation == 0)
    kept = kept | (key < inputs.sink_tokens)
    if inputs.causal:
        kept = kept & (distance <= 0)
    if inputs.window_right >= 0:
        kept = kept & (distance <= inputs.window_right)
    if inputs.spans is not None:
        for start, stop in inputs.spans[request].unbind():
            both = (position >= start) & (key >= start) & (position < stop) & (key < stop)
            if inputs.spans_in_window and inputs.window_left >= 0:
                both = both & (distance >= -inputs.window_left)
            kept = kept | both
    return kept


@contextmanager
def _uncompiled() -> Iterator[Any]:
    """Yield torch's module; until the block ends, its functions compile nothing."""
    module = require(MODULE, "torch")
    before = getattr(module, UNCOMPILED)
    setattr(module, UNCOMPILED, True)
    try:
        yield module
    finally:
        setattr(module, UNCOMPILED, before)
