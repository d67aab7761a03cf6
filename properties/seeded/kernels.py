"""An honest float32 attention kernel in stages, any one of which a seeded bug may replace.

It shares no code with the oracle, and computes another way: FlashAttention's loop over tiles of
keys with a running maximum (arXiv:2205.14135, algorithm 1), in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from ...reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from .masking import HONEST_MASKS, Masks

LARGEST_FP8 = 448.0
"""Largest number of float8_e4m3fn."""
TILE = 64
"""Keys taken at a time."""


class Request(NamedTuple):
    """One request of a batch: t query rows [T, H, D], S keys [S, K, D] and values [S, K, E]."""

    rows: slice
    num_keys: int
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None  # [t, S] bool, or [K, t, S]; True keeps
    causal: bool
    spans: torch.Tensor | None = None  # [n, 2]
    bias: torch.Tensor | None = None  # [H, t, S]

    @property
    def num_queries(self) -> int:
        """Query rows."""
        start, stop = int(self.rows.start), int(self.rows.stop)
        return stop - start


class State(NamedTuple):
    """The softmax over the keys seen so far, relative to their largest logit; all float32."""

    weighted: torch.Tensor  # [H, t, E], sum of exp(logit - largest) V
    total: torch.Tensor  # [H, t, 1], sum of exp(logit - largest)
    largest: torch.Tensor  # [H, t, 1], -inf where nothing was seen


def page_ids(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
    """Return each request's physical pages."""
    indptr = inputs.metadata.paged_kv_indptr.tolist()
    indices = inputs.metadata.paged_kv_indices.long()
    return [indices[a:b] for a, b in pairwise(indptr)]


def key_counts(inputs: PagedAttentionInputs) -> list[int]:
    """Count each request's keys."""
    counts: list[int] = inputs.metadata.seq_lens.tolist()
    return counts


def gather_pages(
    cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
) -> torch.Tensor:
    """Read pages out of a cache: [slots, K, channels], in the order of the keys."""
    chosen = cache[pages]
    if inputs.kv_layout == "HND":
        chosen = chosen.transpose(1, 2)
    return chosen.flatten(0, 1)


def shared_heads(num_qo_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Return the key-value head of each query head."""
    return torch.arange(num_qo_heads) // (num_qo_heads // num_kv_heads)


def first_position(request: Request, inputs: AttentionInputs) -> int:
    """Return the position of the first query row: queries end where the keys end."""
    del inputs
    return request.num_keys - request.num_queries


def dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return q k^T of q [H, t, D] and k [H, S, D]."""
    return q @ k.transpose(-1, -2)


def cap(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Bend logits towards the soft cap, if there is one."""
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def in_window(position: torch.Tensor, key: torch.Tensor, window_left: int) -> torch.Tensor:
    """Return which keys the window keeps; positions [t, 1], keys [1, S], window_left >= 0."""
    return key >= position - window_left


def in_right_window(position: torch.Tensor, key: torch.Tensor, window_right: int) -> torch.Tensor:
    """Return which keys the window keeps on its right; window_right >= 0."""
    return key <= position + window_right


def alibi(slopes: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return ALiBi [H, t, S] of slopes [H]; positions [t, 1], keys [1, S]."""
    return slopes.view(-1, 1, 1) * (key - position)


def keep_probabilities(probabilities: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Leave the probabilities as they are before they multiply V of this dtype."""
    del dtype
    return probabilities


def weigh(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return P V of P [H, t, S] and V [H, S, E]."""
    return probabilities @ v


def rescale(state: State, factor: torch.Tensor) -> State:
    """Make sums relative to a new largest logit."""
    return State(state.weighted * factor, state.total * factor, state.largest)


def natural_lse(total: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of the sum of exponentials."""
    return largest + torch.log(total)


def sinks_of(inputs: AttentionInputs, request: Request) -> torch.Tensor | None:
    """Return the sinks [H] that join a request's rows, if there are any."""
    del request
    return inputs.sinks


def to_codes(out: torch.Tensor, scale: float) -> torch.Tensor:
    """Divide an output in FP8 by its scale, and saturate."""
    return (out / scale).clamp(-LARGEST_FP8, LARGEST_FP8)


@dataclass(frozen=True)
class Stages:
    """The kernel's stages; the defaults are right."""

    tile: int = TILE
    start: float = -math.inf  # the running maximum of q k^T before the first tile
    masked: float = -math.inf  # the logit of a masked key
    reads_tail: bool = False  # multiply the slots behind the last key by zero, not skip them
    # The same of keys that no row of the request sees: none, those of a page that some key is seen
    # of, or all.
    reads_hidden: Literal["", "seen_pages", "all"] = ""
    pages: Callable[[PagedAttentionInputs], list[torch.Tensor]] = page_ids
    counts: Callable[[PagedAttentionInputs], list[int]] = key_counts
    gather: Callable[[torch.Tensor, torch.Tensor, PagedAttentionInputs], torch.Tensor] = (
        gather_pages
    )
    heads: Callable[[int, int], torch.Tensor] = shared_heads
    position: Callable[[Request, AttentionInputs], int] = first_position
    dot: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = dot
    cap: Callable[[torch.Tensor, float], torch.Tensor] = cap
    caps_masked: bool = False  # the soft cap comes after the mask
    window: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = in_window
    right: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = in_right_window
    bias: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = alibi
    masks: Masks = HONEST_MASKS
    probabilities: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = keep_probabilities
    summed: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = keep_probabilities
    weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weigh
    rescale: Callable[[State, torch.Tensor], State] = rescale
    sinks: Callable[[AttentionInputs, Request], torch.Tensor | None] = sinks_of
    lse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = natural_lse
    divide: Callable[[torch.Tensor, float], torch.Tensor] = torch.div
    to_codes: Callable[[torch.Tensor, float], torch.Tensor] = to_codes


HONEST = Stages()


def attend(inputs: AttentionInputs, stages: Stages = HONEST) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend request by request; out [tokens, H, E] in out_dtype and lse [tokens, H] float32."""
    return assemble(
        inputs,
        lambda request: close(scan(request, inputs, stages), request, inputs, stages),
        stages,
    )


def assemble(
    inputs: AttentionInputs,
    one: Callable[[Request], tuple[torch.Tensor, torch.Tensor]],
    stages: Stages = HONEST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``one`` on each request, which gives [H, t, E] and [H, t, 1], and put rows together."""
    tokens, heads, _ = inputs.q.shape
    out = inputs.q.new_zeros((tokens, heads, inputs.values.shape[-1]), dtype=inputs.out_dtype)
    lse = inputs.q.new_full((tokens, heads), -math.inf, dtype=torch.float32)
    for request in requests(inputs, stages):
        if request.num_queries:
            attended, sums = one(request)
            out[request.rows] = attended.transpose(0, 1).to(out.dtype)
            lse[request.rows] = sums.squeeze(-1).transpose(0, 1)
    return out, lse


def requests(inputs: AttentionInputs, stages: Stages) -> Iterator[Request]:
    """Cut a batch into requests with dense keys and values."""
    if isinstance(inputs, PagedAttentionInputs):
        indptr, keys = inputs.metadata.qo_indptr.tolist(), _paged_keys(inputs, stages)
    else:
        indptr, keys = inputs.qo_indptr.tolist(), _ragged_keys(inputs)
    mask_start = 0
    for index, (num_keys, k, v) in enumerate(keys):
        rows = slice(indptr[index], indptr[index + 1])
        shape = (rows.stop - rows.start, num_keys)
        flat = slice(mask_start, mask_start + shape[0] * shape[1])
        mask, bias = (
            None if each is None else each[..., flat].unflatten(-1, shape)
            for each in (inputs.custom_mask, inputs.logits_bias)
        )
        mask_start = flat.stop
        causal = inputs.causal
        causal = bool(causal[index]) if isinstance(causal, torch.Tensor) else causal
        spans = None if inputs.spans is None else inputs.spans[index]
        yield Request(rows, num_keys, k, v, mask, causal, spans, bias)


def _paged_keys(
    inputs: PagedAttentionInputs, stages: Stages
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for pages, num_keys in zip(stages.pages(inputs), stages.counts(inputs), strict=True):
        k = stages.gather(inputs.k_cache, pages, inputs)
        v = stages.gather(inputs.v_cache, pages, inputs)
        read = k.shape[0] if stages.reads_tail else num_keys
        yield num_keys, k[:read], v[:read]


def _ragged_keys(
    inputs: RaggedAttentionInputs,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    indptr = inputs.kv_indptr.tolist()
    for a, b in pairwise(indptr):
        yield b - a, inputs.k[a:b], inputs.v[a:b]


def scan(
    request: Request,
    inputs: AttentionInputs,
    stages: Stages = HONEST,
    keys: slice | None = None,
) -> State:
    """Run over the keys of a request, or over some of them, a tile at a time."""
    num_heads = inputs.q.shape[1]
    heads = stages.heads(num_heads, request.k.shape[1]).to(inputs.q.device)
    q = inputs.q[request.rows].float().transpose(0, 1)
    factor = inputs.sm_scale * per_head(inputs.k_scale, heads)
    shape = (num_heads, request.num_queries)
    state = State(
        q.new_zeros((*shape, request.v.shape[-1])),
        q.new_zeros((*shape, 1)),
        stages.start * factor.expand(*shape, 1),
    )
    first = stages.position(request, inputs)
    position = torch.arange(first, first + request.num_queries, device=q.device).unsqueeze(1)
    keys = keys or slice(0, request.k.shape[0])
    for begin in range(keys.start, keys.stop, stages.tile):
        tile = slice(begin, min(begin + stages.tile, keys.stop))
        k = request.k[tile].float()[:, heads].transpose(0, 1)
        v = request.v[tile].float()[:, heads].transpose(0, 1)
        logits = stages.dot(q, k) * factor
        hidden = ~visible(request, inputs, stages, position, tile, heads)
        v = v.masked_fill(_skipped(hidden, request, inputs, stages, tile).view(1, -1, 1), 0.0)
        if stages.caps_masked:
            logits = stages.cap(logits.masked_fill(hidden, stages.masked), inputs.logits_soft_cap)
        else:
            bias = None if request.bias is None else request.bias[:, :, tile]
            logits = stages.masks.bias(
                logits, bias, lambda bent: stages.cap(bent, inputs.logits_soft_cap)
            )
            if inputs.alibi_slopes is not None:
                key = torch.arange(tile.start, tile.stop, device=q.device).unsqueeze(0)
                root = inputs.alibi_function == "sqrt"
                added = stages.masks.root if root else stages.bias
                logits = logits + added(inputs.alibi_slopes, position, key)
            logits = logits.masked_fill(hidden, stages.masked)
        largest = torch.maximum(state.largest, logits.amax(dim=-1, keepdim=True))
        base = finite(largest)
        probabilities = torch.exp(logits - base)
        state = stages.rescale(state, torch.exp(state.largest - base))
        state = State(
            state.weighted + stages.weigh(stages.probabilities(probabilities, request.v.dtype), v),
            state.total + stages.summed(probabilities, request.v.dtype).sum(dim=-1, keepdim=True),
            largest,
        )
    return state


def visible(
    request: Request,
    inputs: AttentionInputs,
    stages: Stages,
    position: torch.Tensor,
    tile: slice,
    heads: torch.Tensor,
) -> torch.Tensor:
    """Return which keys of a tile each query row sees, [t, S], or [H, t, S] with masks of heads."""
    masks = stages.masks
    key = torch.arange(tile.start, tile.stop, device=position.device).unsqueeze(0)
    valid = (key < request.num_keys).expand(position.shape[0], -1)
    keep = valid
    if inputs.window_left >= 0:
        keep = keep & stages.window(position, key, inputs.window_left)
    if inputs.attention_chunk_size:
        keep = keep & masks.chunk(position, key, inputs.attention_chunk_size)
    if inputs.window_dilation > 1:
        keep = keep & masks.dilated(position, key, inputs.window_dilation)
    if inputs.sink_tokens:
        keep = valid & (keep | masks.firsts(key, inputs.sink_tokens))
    if request.causal:
        keep = keep & (key <= position)
    if inputs.window_right >= 0:
        keep = keep & stages.right(position, key, inputs.window_right)
    if request.spans is not None:
        own = masks.spans(position, key, request.spans)
        if inputs.spans_in_window and inputs.window_left >= 0:
            own = own & stages.window(position, key, inputs.window_left)
        keep = valid & (keep | own)
    if request.mask is not None:
        mask = request.mask[..., tile]
        keep = keep & (mask if mask.dim() == position.dim() else masks.heads(mask, heads))
    return keep


def _skipped(
    hidden: torch.Tensor, request: Request, inputs: AttentionInputs, stages: Stages, tile: slice
) -> torch.Tensor:
    """Return which keys of a tile are left out, [S]: their values add nothing, NaN neither."""
    key = torch.arange(tile.start, tile.stop, device=hidden.device)
    skipped = hidden.flatten(0, -2).all(dim=0) & (key < request.num_keys)
    if stages.reads_hidden == "seen_pages":
        size = inputs.metadata.page_size if isinstance(inputs, PagedAttentionInputs) else 1
        first = request.num_keys - request.num_queries - inputs.window_left
        return skipped & (key < first // size * size) & (inputs.window_left >= 0)
    return skipped & (stages.reads_hidden == "")


def close(
    state: State, request: Request, inputs: AttentionInputs, stages: Stages = HONEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the sinks join, then give out [H, t, E] and lse [H, t, 1]."""
    sinks = stages.sinks(inputs, request)
    if sinks is not None:
        logits = sinks.view(-1, 1, 1)
        largest = torch.maximum(state.largest, logits)
        state = rescale(state, torch.exp(state.largest - largest))
        state = State(state.weighted, state.total + torch.exp(logits - largest), largest)
    heads = stages.heads(inputs.q.shape[1], request.v.shape[1]).to(inputs.q.device)
    out = state.weighted / torch.where(state.total == 0, 1.0, state.total)
    out = out * per_head(inputs.v_scale, heads)
    out = stages.divide(out, inputs.output_divisor)
    if inputs.output_scale is not None:
        out = stages.to_codes(out, inputs.output_scale)
    return out, stages.lse(state.total, finite(state.largest))


def finite(largest: torch.Tensor) -> torch.Tensor:
    """Put 0 in place of the largest logit of no keys, so that differences are never NaN."""
    return torch.where(torch.isneginf(largest), 0.0, largest)


def per_head(scale: float | torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return a scale of all or of each key-value head as [H or 1, 1, 1]."""
    if isinstance(scale, torch.Tensor):
        return scale[heads].view(-1, 1, 1)
    return torch.full((1, 1, 1), scale, device=heads.device)
