"""Arguments of an attention call, checked and cut into one dense problem a request."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .kv_format import CheckedCache, KVCacheFormat, Scales, checked_cache
from .metadata import BatchMetadata
from .scratch import Scratch
from .validation import (
    check_heads,
    check_indptr,
    check_kv_layout,
    check_same,
    check_tensor,
    host_integers,
)


@dataclass(frozen=True)
class Options:
    """The keyword arguments that paged and ragged attention share, see ``paged_attention``."""

    causal: bool = True
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    q_scale: float | torch.Tensor = 1.0
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    compute_dtype: torch.dtype = torch.float64
    kv_format: KVCacheFormat | None = None
    kv_cache_sf: Scales | None = None
    scratch: Scratch = field(default_factory=Scratch, compare=False, repr=False)


class Request(NamedTuple):
    """One request with dense tensors, ready for the definition, until the next is taken."""

    tokens: slice
    q: torch.Tensor  # [T, H, D], as given
    k: torch.Tensor  # [S, K, D], as given, or decoded
    v: torch.Tensor  # [S, K, E], as given, or decoded
    mask: torch.Tensor | None  # [T, S] bool, True keeps


class _Pages:
    """Gathers requests' keys and values out of their pages."""

    def __init__(
        self, cache: CheckedCache, metadata: BatchMetadata, kv_layout: str, scratch: Scratch
    ) -> None:
        self._cache, self._kv_layout, self._scratch = cache, kv_layout, scratch
        self._seq_lens = metadata.seq_lens.tolist()
        self._indptr = metadata.paged_kv_indptr.tolist()
        self._indices = metadata.paged_kv_indices.to(device=cache.k.device, dtype=torch.long)

    def values(
        self, name: str, stored: torch.Tensor, scales: torch.Tensor | None, request: int
    ) -> torch.Tensor:
        """Give [S, K, D] of a request: as stored, or decoded where there are block scales."""
        rows = self._gather(name, stored, request)
        if scales is None:
            return rows
        return self._cache.kv_format.decode(rows, self._gather(f"{name}_sf", scales, request))

    def _gather(self, name: str, stored: torch.Tensor, request: int) -> torch.Tensor:
        chosen = self._indices[self._indptr[request] : self._indptr[request + 1]]
        shape = (chosen.shape[0], *stored.shape[1:])
        pages = self._scratch.take(f"{name}_pages", shape, stored.dtype, stored.device)
        # index_select copies whole pages; plain indexing takes six times as long.
        torch.index_select(stored, 0, chosen, out=pages)
        if self._kv_layout == "HND":
            pages = pages.transpose(1, 2)
        return pages.flatten(0, 1)[: self._seq_lens[request]]


def paged_requests(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: BatchMetadata,
    kv_layout: str,
    options: Options,
) -> Iterator[Request]:
    """Check the arguments, then gather each request's keys and values out of its pages."""
    check_tensor("q", q, "tokens qo_heads head_dim_qk")
    check_kv_layout(kv_layout)
    axes = "pages page_size kv_heads" if kv_layout == "NHD" else "pages kv_heads page_size"
    check_tensor("k_cache", k_cache, f"{axes} head_dim_qk", codes=True)
    check_tensor("v_cache", v_cache, f"{axes} head_dim_vo", codes=True)
    for axis, name in enumerate(axes.split()):
        check_same("v_cache", name, v_cache.shape[axis], "k_cache", k_cache.shape[axis])
    cache = checked_cache(k_cache, v_cache, kv_layout, options.kv_format, options.kv_cache_sf)
    check_same("k_cache", "head_dim_qk", cache.head_dim_qk, "q", q.shape[-1])
    if not isinstance(metadata, BatchMetadata):
        message = f"metadata must be a BatchMetadata, not {type(metadata).__name__}"
        raise ValueError(message)
    page_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    found = k_cache.shape[page_axis]
    if found != metadata.page_size:
        message = (
            f"k_cache has pages of {found} keys in layout {kv_layout}, "
            f"but metadata.page_size is {metadata.page_size}"
        )
        raise ValueError(message)
    metadata.validate(num_tokens=q.shape[0], num_pages=k_cache.shape[0])
    seq_lens = metadata.seq_lens.tolist()
    qo_indptr = metadata.qo_indptr.tolist()
    lengths = [
        (end - start, seq_len)
        for start, end, seq_len in zip(qo_indptr, qo_indptr[1:], seq_lens, strict=False)
    ]
    check_options(q, k_cache.shape[head_axis], lengths, options)
    pages = _Pages(cache, metadata, kv_layout, options.scratch)

    def iterate() -> Iterator[Request]:
        masks = split_mask(options.custom_mask, lengths)
        for request, mask in enumerate(masks):
            tokens = slice(qo_indptr[request], qo_indptr[request + 1])
            if tokens.stop > tokens.start:
                k = pages.values("k", cache.k, cache.k_scales, request)
                v = pages.values("v", cache.v, cache.v_scales, request)
                yield Request(tokens, q[tokens], k, v, mask)

    return iterate()


def ragged_requests(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    options: Options,
) -> Iterator[Request]:
    """Check the arguments, then cut each request's rows out of q, k and v."""
    check_tensor("q", q, "tokens qo_heads head_dim_qk")
    check_tensor("k", k, "keys kv_heads head_dim_qk")
    check_tensor("v", v, "keys kv_heads head_dim_vo")
    check_same("v", "keys", v.shape[0], "k", k.shape[0])
    check_same("v", "kv_heads", v.shape[1], "k", k.shape[1])
    check_same("k", "head_dim_qk", k.shape[-1], "q", q.shape[-1])
    q_ends, kv_ends = host_integers("qo_indptr", qo_indptr), host_integers("kv_indptr", kv_indptr)
    check_indptr("qo_indptr", q_ends, q.shape[0], "query tokens")
    check_indptr("kv_indptr", kv_ends, k.shape[0], "keys")
    if len(q_ends) != len(kv_ends):
        message = f"qo_indptr has {len(q_ends)} entries, but kv_indptr has {len(kv_ends)}"
        raise ValueError(message)
    tokens = [slice(a, b) for a, b in itertools.pairwise(q_ends)]
    keys = [slice(a, b) for a, b in itertools.pairwise(kv_ends)]
    lengths = [(t.stop - t.start, s.stop - s.start) for t, s in zip(tokens, keys, strict=True)]
    check_options(q, k.shape[1], lengths, options)

    def iterate() -> Iterator[Request]:
        masks = split_mask(options.custom_mask, lengths)
        for t, s, mask in zip(tokens, keys, masks, strict=True):
            if t.stop > t.start:
                yield Request(t, q[t], k[s], v[s], mask)

    return iterate()


def check_options(
    q: torch.Tensor, num_kv_heads: int, lengths: list[tuple[int, int]], options: Options
) -> None:
    """Check the options against the tensors; ``lengths`` are (T, S) a request."""
    check_heads(q.shape[1], num_kv_heads)
    if not isinstance(options.window_left, int) or options.window_left < -1:
        message = f"window_left is {options.window_left!r}; it must be -1 (none) or at least 0"
        raise ValueError(message)
    cap = options.logits_soft_cap
    if not (_is_finite(cap) and cap >= 0):
        message = f"logits_soft_cap is {cap!r}; it must be 0 (off) or positive"
        raise ValueError(message)
    if options.sm_scale is not None and not _is_finite(options.sm_scale):
        message = f"sm_scale is {options.sm_scale!r}; it must be a finite number or None"
        raise ValueError(message)
    if options.sinks is not None:
        _check_shape("sinks", options.sinks, (q.shape[1],), "floating [qo_heads]")
    check_scale("q_scale", options.q_scale, "qo_heads", q.shape[1])
    for name in ("k_scale", "v_scale"):
        check_scale(name, getattr(options, name), "kv_heads", num_kv_heads)
    if options.custom_mask is not None:
        size = sum(t * s for t, s in lengths)
        _check_shape(
            "custom_mask", options.custom_mask, (size,), "bool [sum of query_len * seq_len]"
        )
    if options.compute_dtype not in (torch.float64, torch.float32):
        message = f"compute_dtype is {options.compute_dtype}; it must be float64 or float32"
        raise ValueError(message)


def check_scale(name: str, scale: object, axis: str, heads: int) -> None:
    """Check a scale: a finite number, or a tensor with one of each head."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            _check_shape(name, scale, (heads,), f"a float or floating [{axis}]")
    elif not _is_finite(scale):
        message = f"{name} is {scale!r}; it must be a finite number or a tensor [{axis}]"
        raise ValueError(message)


def _is_finite(number: object) -> bool:
    return (
        isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    )


def _check_shape(name: str, tensor: object, shape: tuple[int, ...], wanted: str) -> None:
    """Check an option that is a tensor: its shape, and bool or floating as ``wanted`` says."""
    if not isinstance(tensor, torch.Tensor):
        message = f"{name} must be {wanted} = {list(shape)}, not {type(tensor).__name__}"
        raise ValueError(message)
    right_dtype = tensor.dtype == torch.bool if "bool" in wanted else tensor.dtype.is_floating_point
    if tuple(tensor.shape) != shape or not right_dtype:
        message = (
            f"{name} must be {wanted} = {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )
        raise ValueError(message)


def split_mask(
    custom_mask: torch.Tensor | None, lengths: list[tuple[int, int]]
) -> Iterator[torch.Tensor | None]:
    """Cut the flat custom mask into one [T, S] mask a request."""
    start = 0
    for t, s in lengths:
        yield None if custom_mask is None else custom_mask[start : start + t * s].view(t, s)
        start += t * s
