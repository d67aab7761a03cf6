"""What rope_and_append is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention.rope import RopeAppended, rope_and_append
from ..problems.quantize import QuantizeProblem
from ..problems.rope_append import RopeAppendProblem
from ..validation import KVLayout
from .allocation import Allocator
from .quantize import matrix_of
from .values import bits, choose, stream

SPARE_PAGES = 2
"""Pages that no request has."""
LARGEST_TANGENT = 2.0
"""Largest magnitude of the tangent of half an angle, by which turns are made."""
SKIPPED = 3
"""One token in SKIPPED has no slot, by hash."""


@dataclass(frozen=True, eq=False)
class RopeAppendInputs:
    """Arguments of ``rope_and_append``, which writes into the caches.

    Attributes:
        q: [tokens, qo_heads, channels]; rows of tokens may lie apart.
        k: [tokens, kv_heads, channels].
        v: the same; None where keys hold the values.
        cos_sin: float32 [rows, rope_dim], cosines of pairs and their sines by position.
        positions: [tokens] int64 or int32, rows of ``cos_sin``.
        slots: [tokens] of the same dtype, page * page_size + offset; -1: not written, and nothing
            is promised of the token's queries.
        requests: [tokens] int32, the request of each token; -1 where its slot is.
        places: [tokens] int32, its position in its request, which ``positions`` may exceed.
        page_indptr: [R + 1] int32, where each request's pages begin in ``page_indices``.
        page_indices: [pages of all] int32.
        k_cache: [pages, page_size, kv_heads, channels], or with HND [pages, kv_heads, page_size,
            channels], written in place; pages may lie apart.
        v_cache: the same; None where keys hold the values.
        before: copies of the caches as they are given, for whoever compares; kernels have no use
            for them.
        rope_dim: channels that are turned: the first ones, or the last where ``latent``.
        interleaved: whether pairs are neighbours; else ``rope_dim / 2`` apart.
        kv_layout: ``"NHD"`` or ``"HND"``.
        q_dtype: dtype of the queries that are returned.
        q_scale, k_scale, v_scale: what is divided by before the rounding to FP8.
        in_place: True.
        storages: flat buffers by field name, of which the tensors are views.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    places: torch.Tensor
    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    before: tuple[torch.Tensor, ...]
    rope_dim: int
    interleaved: bool
    kv_layout: KVLayout
    q_dtype: torch.dtype
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    in_place: bool = True
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def latent(self) -> bool:
        """Whether keys hold the values, and the rotary channels are the last ones."""
        return self.v is None

    @property
    def rotary(self) -> slice:
        """The channels that are turned."""
        return slice(self.plain.stop, None) if self.latent else slice(self.rope_dim)

    @property
    def plain(self) -> slice:
        """The other channels."""
        size = self.q.shape[2] - self.rope_dim
        return slice(0, size) if self.latent else slice(self.rope_dim, self.q.shape[2])

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """The caches that there are."""
        return (self.k_cache,) if self.v_cache is None else (self.k_cache, self.v_cache)

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self.k_cache.shape[1 if self.kv_layout == "NHD" else 2]


def rope_append_inputs(problem: RopeAppendProblem, home: Allocator) -> RopeAppendInputs:
    """Make the tensors of a call of ``rope_and_append``."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    cache_dtype: torch.dtype = getattr(torch, problem.codes or problem.dtype)
    heads, kv_heads = problem.num_qo_heads, problem.num_kv_heads
    given: dict[str, Any] = {"v": None, "v_cache": None}
    rows = {"q": (heads, problem.q_scale), "k": (kv_heads, problem.k_scale)}
    if not problem.latent:
        rows["v"] = kv_heads, problem.v_scale
    for name, (count, scale) in rows.items():
        values = _rows(problem, name, count, scale, home.device)
        width = values.shape[1]
        room = home.empty(name, (len(values), width + problem.spare_channels), dtype)
        given[name] = room[:, :width].unflatten(1, (count, problem.head_dim))
        given[name].copy_(values.view(given[name].shape))
    integers, pages = _places(problem)
    given |= {name: home.place(name, each) for name, each in integers.items()}
    shape = [pages, problem.page_size, kv_heads, problem.head_dim]
    if problem.kv_layout == "HND":
        shape[1:3] = shape[2:0:-1]
    if problem.strided_kv:
        both = home.empty("k_cache", (shape[0], 2, *shape[1:]), cache_dtype)
        given["k_cache"], given["v_cache"] = both.unbind(1)
    for name in ("k_cache", "v_cache")[: 2 - problem.latent]:
        if not problem.strided_kv:
            given[name] = home.empty(name, tuple(shape), cache_dtype)
        bytes_of = given[name].view(torch.uint8)
        width = bytes_of.shape[3]
        numbers = torch.arange(bytes_of.numel() // width, device=home.device)
        held = bits(stream(problem.seed, name), numbers, width)
        bytes_of.copy_((held & 0xFF).to(torch.uint8).view(bytes_of.shape))
    return RopeAppendInputs(
        **given,
        before=tuple(given[n].clone() for n in ("k_cache", "v_cache") if given[n] is not None),
        cos_sin=home.place("cos_sin", _turns(problem)),
        rope_dim=problem.rope_dim,
        interleaved=problem.interleaved,
        kv_layout="NHD" if problem.kv_layout == "NHD" else "HND",
        q_dtype=cache_dtype if problem.quantised_q else dtype,
        q_scale=problem.q_scale,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        storages=home.storages,
    )


def roped(inputs: RopeAppendInputs) -> RopeAppended:
    """Turn, quantise and append the record's rows, by definition."""
    caches = inputs.before[0], None if inputs.latent else inputs.before[1]
    return rope_and_append(
        inputs.q, inputs.k, inputs.v, inputs.cos_sin, inputs.positions, inputs.slots, caches,
        interleaved=inputs.interleaved, kv_layout=inputs.kv_layout, q_dtype=inputs.q_dtype,
        q_scale=inputs.q_scale, k_scale=inputs.k_scale, v_scale=inputs.v_scale,
    )  # fmt: skip


def _rows(
    problem: RopeAppendProblem, name: str, heads: int, scale: float, device: torch.device
) -> torch.Tensor:
    """Make rows [tokens, heads * channels] as those of a matrix that a scale quantises."""
    matrix = QuantizeProblem(
        problem.num_tokens,
        heads * problem.head_dim,
        problem.dtype,
        problem.codes or "float8_e4m3fn",
        block_rows=0,
        scale=scale,
        regime=problem.regime,
        seed=stream(problem.seed, name) & 0xFFFFFFFF,
    )
    return matrix_of(matrix, device)


def _places(problem: RopeAppendProblem) -> tuple[dict[str, torch.Tensor], int]:
    """Return the integers of a batch by name, and the number of pages."""
    counts = [-(-keys // problem.page_size) for keys in problem.seq_lens]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    pages = sum(counts) + SPARE_PAGES
    order = bits(stream(problem.seed, "pages"), torch.arange(pages), 1).flatten()
    ids = order.argsort(stable=True)[: pages - SPARE_PAGES]
    lengths = list(zip(problem.query_lens, problem.seq_lens, strict=True))
    places = torch.tensor([p for new, keys in lengths for p in range(keys - new, keys)])
    requests = torch.tensor([r for r, (new, _) in enumerate(lengths) for _ in range(new)])
    places, requests = places.long(), requests.long()
    slots = ids[indptr[requests] + places // problem.page_size] * problem.page_size
    slots += places % problem.page_size
    if problem.skipped:
        tokens = torch.arange(len(slots))
        hashes = bits(stream(problem.seed, "skipped"), tokens, 1).flatten()
        is_skipped = hashes % SKIPPED == 0
        slots, requests = (each.masked_fill(is_skipped, -1) for each in (slots, requests))
    as_given: torch.dtype = getattr(torch, problem.index_dtype)
    found = {"positions": (places + problem.shift).to(as_given), "slots": slots.to(as_given)}
    narrow = {"requests": requests, "places": places, "page_indptr": indptr, "page_indices": ids}
    return {**found, **{name: each.to(torch.int32) for name, each in narrow.items()}}, pages


def _turns(problem: RopeAppendProblem) -> torch.Tensor:
    """Return cosines and sines by position, the first of which turns nothing.

    They are (1 - t^2) / (1 + t^2) and 2 t / (1 + t^2) of a tangent t that is a hash: the same bits
    on every machine, which cosines are not.
    """
    rows = torch.arange(max(problem.seq_lens, default=0) + problem.shift + 1)
    pairs = problem.rope_dim // 2
    hashes = bits(stream(problem.seed, "turns"), rows, pairs)
    if problem.regime == "ties":
        quarters = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
        cos, sin = quarters[hashes % 4], quarters[(hashes + 3) % 4]
    else:
        t = ((hashes & 0xFFFF).double() - 2**15) * (LARGEST_TANGENT / 2**15)
        cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    cos[0], sin[0] = 1.0, 0.0
    return torch.cat([cos, sin], dim=1).float()


def with_other_turns(inputs: RopeAppendInputs, seed: int) -> torch.Tensor:
    """Return positions of a call's tokens that differ from its own where there are others."""
    rows = len(inputs.cos_sin)
    by = 1 + choose(seed, "other turns", 0, max(rows - 1, 1))
    return (inputs.positions + by) % rows
