"""Making the tensors of attention, merging, appending and metadata; the same bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch

from ..attention.metadata import BatchMetadata
from ..attention.options import OUTPUT_DTYPE
from ..formats.cache_elements import SCALE_LAYOUTS
from ..problems import AttentionProblem, MergeProblem, MetadataProblem
from .allocation import Allocator
from .inputs import (
    AppendInputs,
    AttentionOptions,
    MergeInputs,
    MetadataInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from .kv_storage import format_of, kv_views, quantised, queries
from .mask_patterns import bias_values, mask_values, span_values
from .placement import Placement, block_table, placement
from .regimes import alibi_slopes, attention_values, merge_values, sink_values
from .trees import mask_of_trees, tree_masks
from .values import bits, choose, stream

NAN_BYTE = 0xFF
"""Byte of which every number of a latent record is NaN."""
SPARE_CHANNELS = 16
"""Channels by which rows of values are wider than the values, where they are strided so: 16
bytes in each dtype, or a multiple."""

SPARE_HEADS, SPARE_TOKENS = 3, 5
"""Heads, or tokens, by which padded rows of lses are wider."""


def merge_inputs(problem: MergeProblem, home: Allocator) -> MergeInputs:
    """Make the tensors of a call of ``merge_states``."""
    outs, lses = merge_values(problem, home.device)
    dtype = getattr(torch, problem.dtype)
    return MergeInputs(
        outs=_place_outs(problem, outs.to(dtype), home),
        lses=_place_lses(problem, lses, home),
        apart=_place_apart(problem, outs.to(dtype), home),
        context_tokens=None if problem.context == "all" else problem.context_tokens,
        inf_marks_empty=problem.inf_marks_empty,
        output_scale=problem.output_scale,
        out_dtype=dtype if problem.output_scale is None else OUTPUT_DTYPE,
        storages=home.storages,
    )


def _place_outs(problem: MergeProblem, outs: torch.Tensor, home: Allocator) -> torch.Tensor:
    if problem.strides != "padded":
        return home.place("outs", outs)
    *rows, dim = outs.shape
    return home.empty("outs", (*rows, dim + SPARE_CHANNELS), outs.dtype)[..., :dim].copy_(outs)


def _place_lses(problem: MergeProblem, lses: torch.Tensor, home: Allocator) -> torch.Tensor:
    states, tokens, heads = lses.shape
    if problem.lse_layout == "heads_first":
        return home.empty("lses", (states, heads, tokens), lses.dtype).transpose(1, 2).copy_(lses)
    if problem.lse_layout == "padded_heads_first":
        room = home.empty("lses", (states, heads, tokens + SPARE_TOKENS), lses.dtype)
        return room[..., :tokens].transpose(1, 2).copy_(lses)
    if problem.lse_layout == "padded":
        room = home.empty("lses", (states, tokens, heads + SPARE_HEADS), lses.dtype)
        return room[..., :heads].copy_(lses)
    return home.place("lses", lses)


def _place_apart(
    problem: MergeProblem, outs: torch.Tensor, home: Allocator
) -> tuple[torch.Tensor, ...] | None:
    """Place states [tokens, heads, dim] by themselves; None where they may be views of one tensor.

    In tight memory each has an allocation of its own: an engine's prefix is no part of what its
    suffix lies in, so that a read behind it is one outside of both.
    """
    if problem.strides != "different" and not home.tight:
        return None
    _, tokens, heads, dim = outs.shape
    views = []
    for number, state in enumerate(outs):
        if problem.strides == "different":  # the second begins to have room to spare
            room = (tokens, heads + number % 2, dim + number % 3 * SPARE_CHANNELS)
        else:
            room = (tokens, heads, dim + SPARE_CHANNELS * (problem.strides == "padded"))
        whole = home.empty(f"states[{number}]", room, outs.dtype)
        views.append(whole[:, :heads, :dim].copy_(state))
    return tuple(views)


def _options(problem: AttentionProblem, home: Allocator) -> AttentionOptions:
    sinks = home.place("sinks", sink_values(problem, home.device)) if problem.sinks else None
    mask = None
    if problem.custom_mask:
        mask = home.place("custom_mask", mask_values(problem, home.device))
    if problem.tree:
        mask = home.place("custom_mask", mask_of_trees(tree_masks(problem), problem.seq_lens))
    slopes = (
        home.place("alibi_slopes", alibi_slopes(problem, home.device)) if problem.alibi else None
    )
    spans = home.place("spans", span_values(problem)) if problem.spans else None
    bias = None
    if problem.logits_bias:
        bias = home.place("logits_bias", bias_values(problem, home.device))
    kv_heads = problem.num_kv_heads
    return AttentionOptions(
        causal=_causal(problem, home),
        sm_scale=problem.scale,
        window_left=problem.window_left,
        window_right=problem.keys_to_the_right,
        alibi_slopes=slopes,
        output_scale=problem.output_scale,
        spans=spans,
        attention_chunk_size=problem.chunk,
        window_dilation=problem.window_dilation,
        sink_tokens=problem.sink_tokens,
        logits_bias=bias,
        alibi_function=problem.alibi_function,
        output_divisor=problem.output_divisor,
        spans_in_window=problem.spans_in_window,
        logits_soft_cap=problem.logits_soft_cap,
        sinks=sinks,
        custom_mask=mask,
        q_scale=_scale(problem, "q_scale", problem.num_qo_heads if problem.q_dtype else 0, home),
        k_scale=_scale(problem, "k_scale", kv_heads, home),
        v_scale=_scale(problem, "v_scale", kv_heads, home),
    )


def _out_dtype(problem: AttentionProblem) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.dtype)
    return dtype if problem.output_scale is None else OUTPUT_DTYPE


def _causal(problem: AttentionProblem, home: Allocator) -> bool | torch.Tensor:
    """Return whether the batch is causal, or place a flag of each request."""
    if not problem.causal_by_request:
        return problem.causal
    return home.place("causal", torch.tensor(problem.causal_flags, dtype=torch.bool))


def _tree_mask(problem: AttentionProblem, home: Allocator) -> torch.Tensor | None:
    """Place what each query token sees of its request's query tokens, where they are a tree."""
    if not problem.tree:
        return None
    masks = [torch.empty(0, dtype=torch.bool), *(mask.flatten() for mask in tree_masks(problem))]
    return home.place("tree_mask", torch.cat(masks))


def _scale(
    problem: AttentionProblem, name: str, heads: int, home: Allocator
) -> float | torch.Tensor:
    """Return a scale of the problem: one number, or one a head."""
    scale: float = getattr(problem, name)
    if not (problem.per_head_scales and heads):
        return scale
    # Powers of two, so that the exact grid stays exact.
    return home.place(name, scale * 2.0 ** (torch.arange(heads, device=home.device) % 3 - 1.0))


def _place_q(problem: AttentionProblem, q: torch.Tensor, home: Allocator) -> torch.Tensor:
    if not problem.strided_q:
        return home.place("q", q)
    tokens, heads, dim = q.shape
    # Packed QKV as serving stacks project it: q's rows with room for k and v behind each.
    packed = home.empty("q", (tokens, heads + 2 * problem.num_kv_heads, dim), q.dtype)
    view = packed[:, :heads]
    view.copy_(q)
    return view


def _place_new(
    problem: AttentionProblem, k: torch.Tensor, v: torch.Tensor, home: Allocator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place new keys [tokens, K, D] and values [tokens, K, E], in rows of QKV if strided.

    One of the two may lie by itself in memory, as keys do that were rotated out of place.
    """
    which = choose(problem.seed, "packed rows", 0, 3) if problem.strided_q else None
    found = []
    for number, (name, rows) in enumerate((("new_k", k), ("new_v", v))):
        if which in (None, number):
            found.append(home.place(name, rows))
            continue
        tokens, heads, dim = rows.shape
        packed = home.empty(name, (tokens, 3 * heads, dim), rows.dtype)
        found.append(packed[:, heads : 2 * heads].copy_(rows))
    return found[0], found[1]


def _place_kv(
    problem: AttentionProblem, k: torch.Tensor, v: torch.Tensor, home: Allocator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place keys [keys, K, D] and values [keys, K, E]."""
    homes = _empty_kv(problem, tuple(k.shape), tuple(v.shape), k.dtype, home)
    return homes[0].copy_(k), homes[1].copy_(v)


def _empty_kv(
    problem: AttentionProblem,
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    home: Allocator,
    of: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for [a, b, c, D] and [a, b, c, E] (or without b), shared if strided."""
    if problem.kv_views and not of:
        return kv_views(problem, k_shape, v_shape, dtype, home)
    if problem.different_kv_strides:
        k_room = (k_shape[0], 3 if problem.strided_kv else 1, *k_shape[1:])
        v_room = (v_shape[0], 2, *v_shape[1:-1], v_shape[-1] + SPARE_CHANNELS)
        k, v = home.empty(f"k{of}", k_room, dtype), home.empty(f"v{of}", v_room, dtype)
        return k[:, 0], v[:, 0, ..., : v_shape[-1]]
    if not problem.strided_kv:
        return home.empty(f"k{of}", k_shape, dtype), home.empty(f"v{of}", v_shape, dtype)
    width = max(k_shape[-1], v_shape[-1])
    both = home.empty(f"k{of}", (k_shape[0], 2, *k_shape[1:-1], width), dtype)
    return both[:, 0, ..., : k_shape[-1]], both[:, 1, ..., : v_shape[-1]]


def _empty_latent(
    problem: AttentionProblem, shape: tuple[int, ...], dtype: torch.dtype, home: Allocator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for [a, b, c, D]; values are its first channels. If strided, pages lie apart."""
    if problem.strided_kv:
        room = home.empty("k", (shape[0], 2, *shape[1:]), dtype)[:, 0]
    else:
        room = home.empty("k", shape, dtype)
    if problem.cache_entry.record:
        # Bytes of ones are NaN as e4m3, as float32 and as bfloat16.
        unused = NAN_BYTE if math.isnan(home.unused) else int(home.fill(dtype))
        return room.fill_(unused), room
    return room, room[..., : problem.head_dim_vo]


def ragged_inputs(problem: AttentionProblem, home: Allocator) -> RaggedAttentionInputs:
    """Make the tensors of a call of ``ragged_attention``."""
    values = attention_values(problem, home.device)
    codes = [quantised(problem, rows).codes for rows in (values.k, values.v)]
    k, v = _place_kv(problem, codes[0], codes[1], home)
    placed = home.place_integers(
        {"qo_indptr": _indptr(problem.query_lens), "kv_indptr": _indptr(problem.seq_lens)}
    )
    return RaggedAttentionInputs(
        q=_place_q(problem, queries(problem, values.q), home),
        k=k,
        v=v,
        qo_indptr=placed["qo_indptr"],
        kv_indptr=placed["kv_indptr"],
        **_options(problem, home).keywords(),
        out_dtype=_out_dtype(problem),
        tree_mask=_tree_mask(problem, home),
        storages=home.storages,
    )


def paged_inputs(problem: AttentionProblem, home: Allocator) -> PagedAttentionInputs:
    """Make the tensors of a call of ``paged_attention``."""
    values = attention_values(problem, home.device)
    placed = placement(problem)
    k = quantised(problem, values.k)
    v = k if problem.cache_entry.record else quantised(problem, values.v)
    k_cache, v_cache = _paged_caches(problem, k.codes, v.codes, placed, home)
    scales = None
    if k.scales is not None and v.scales is not None:
        scales = _paged_caches(problem, k.scales, v.scales, placed, home, "_sf")
    kv_format = format_of(problem)
    if kv_format is not None:
        k_cache, v_cache = k_cache.view(kv_format.dtype), v_cache.view(kv_format.dtype)
        if scales is not None:
            layout = SCALE_LAYOUTS[kv_format.v_scale_layout]
            scales[1].copy_(layout.store(scales[1], problem.kv_layout))
    table, _ = block_table(problem)
    integers = home.place_integers({"block_table": table, **placed.metadata.tensors()})
    table = integers.pop("block_table")
    return PagedAttentionInputs(
        q=_place_q(problem, queries(problem, values.q), home),
        k_cache=k_cache,
        v_cache=v_cache,
        metadata=BatchMetadata(**integers, page_size=problem.page_size),
        block_table=table,
        kv_layout=problem.kv_layout,
        **_options(problem, home).keywords(),
        out_dtype=_out_dtype(problem),
        kv_format=kv_format,
        kv_cache_sf=scales,
        tree_mask=_tree_mask(problem, home),
        storages=home.storages,
    )


def append_inputs(problem: AttentionProblem, home: Allocator) -> AppendInputs:
    """Make the tensors of a call of ``append_paged_kv``."""
    values = attention_values(problem, home.device)
    new = torch.zeros(sum(problem.seq_lens), dtype=torch.bool, device=home.device)
    for start, t, s in zip(
        accumulate(problem.seq_lens, initial=0), problem.query_lens, problem.seq_lens, strict=False
    ):
        new[start + s - t : start + s] = True
    placed = placement(problem)
    k, v = quantised(problem, values.k), quantised(problem, values.v)

    def old(rows: torch.Tensor) -> torch.Tensor:
        return torch.where(new[:, None, None], torch.full_like(rows, home.fill(rows.dtype)), rows)

    k_cache, v_cache = _paged_caches(problem, old(k.codes), old(v.codes), placed, home)
    scales = None
    if k.scales is not None and v.scales is not None:
        scales = _paged_caches(problem, old(k.scales), old(v.scales), placed, home, "_sf")
    kv_format = format_of(problem)
    if kv_format is not None:
        k_cache, v_cache = k_cache.view(kv_format.dtype), v_cache.view(kv_format.dtype)
    integers = home.place_integers(placed.metadata.tensors())
    new_k, new_v = _place_new(
        problem, values.k[new] * problem.k_scale, values.v[new] * problem.v_scale, home
    )
    if problem.values_in_keys:
        new_v = new_k[..., : problem.head_dim_vo]
    return AppendInputs(
        k=new_k,
        v=new_v,
        k_cache=k_cache,
        v_cache=v_cache,
        metadata=BatchMetadata(**integers, page_size=problem.page_size),
        kv_layout=problem.kv_layout,
        in_place=bool(choose(problem.seed, "in_place", 0, 2)),
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
        kv_format=kv_format,
        kv_cache_sf=scales,
        storages=home.storages,
    )


def _paged_caches(
    problem: AttentionProblem,
    k: torch.Tensor,
    v: torch.Tensor,
    placed: Placement,
    home: Allocator,
    of: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows into their slots of two caches; whatever is in no slot is not to be read."""
    pages, offsets = placed.slots.to(home.device, non_blocking=True).unbind()

    def shape(rows: torch.Tensor) -> tuple[int, ...]:
        heads, channels = rows.shape[1:]
        if problem.kv_layout == "NHD":
            return (placed.num_pages, problem.page_size, heads, channels)
        return (placed.num_pages, heads, problem.page_size, channels)

    if problem.values_in_keys:
        caches = _empty_latent(problem, shape(k), k.dtype, home)
    else:
        caches = _empty_kv(problem, shape(k), shape(v), k.dtype, home, of)
    for cache, rows in zip(caches, (k,) if problem.values_in_keys else (k, v), strict=False):
        by_slot = cache if problem.kv_layout == "NHD" else cache.transpose(1, 2)
        by_slot[pages, offsets] = rows
    return caches


def metadata_inputs(problem: MetadataProblem, home: Allocator, *, step: int = 0) -> MetadataInputs:
    """Make the tensors of one call of ``build_metadata``, that of a step."""
    query_lens, seq_lens = problem.steps[step]
    columns = max((-(-s // problem.page_size) for s in seq_lens), default=0)
    columns += problem.spare_columns
    rows = torch.arange(len(seq_lens)) + 1000 * step
    table = bits(stream(problem.seed, "block_table"), rows, columns) % 10_000
    garbage = bits(stream(problem.seed, "garbage"), rows, columns).to(torch.int32)
    used = torch.tensor([-(-s // problem.page_size) for s in seq_lens], dtype=torch.long)
    is_used = torch.arange(columns).unsqueeze(0) < used.unsqueeze(1)
    make: Callable[[tuple[int, ...]], torch.Tensor] = lambda lengths: torch.tensor(  # noqa: E731
        lengths, dtype=torch.int32
    )
    return MetadataInputs(
        **home.place_integers(
            {
                "query_lens": make(query_lens),
                "seq_lens": make(seq_lens),
                "block_table": torch.where(is_used, table.to(torch.int32), garbage),
            }
        ),
        page_size=problem.page_size,
        decode_threshold=problem.decode_threshold,
        storages=home.storages,
    )


def _indptr(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
