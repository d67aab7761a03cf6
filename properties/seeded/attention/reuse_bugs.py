"""Faults in what a wrapper reuses from call to call: chunks, prefixes, plans, output buffers.

As in ``stateful_bugs``, a single call gives the right answer; each of these goes wrong in the
sequence of calls that one law makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ....reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..catalogue import SeededBug, seeded
from ..kernels import (
    HONEST,
    Request,
    State,
    assemble,
    attend,
    close,
    finite,
    first_position,
    gather_pages,
    key_counts,
    page_ids,
    scan,
)
from .stateful_bugs import batch_of, checksum, planned

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"


@seeded(BUGS, PAGED, "contiguity", model="flashinfer#4044")
def strides_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep whether K and V lie in one allocation from the first call with these queries."""
    cache = inputs.k_cache
    interleaved = bool(cache.shape[0]) and cache.stride(0) > cache[0].numel()
    key = ("strides", batch_of(inputs), tuple(cache.shape), inputs.kv_layout)
    if planned(key, interleaved) == interleaved:
        return attend(inputs)

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        odd = int(cache is inputs.v_cache)  # V's pages lie between K's
        mistaken = pages // 2 if interleaved else (2 * pages + odd) % len(cache)
        return gather_pages(cache, mistaken, inputs)

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, RAGGED, "logit_shift")
def maximum_of_first_plan(inputs: RaggedAttentionInputs) -> Pair:
    """Subtract the largest logits of the first call with these queries and values."""
    options = (
        inputs.causal,
        inputs.window_left,
        inputs.sm_scale,
        inputs.logits_soft_cap,
        inputs.k_scale,
    )
    key = (options, tuple(inputs.qo_indptr.tolist()), tuple(inputs.kv_indptr.tolist()),
           checksum(inputs.q), checksum(inputs.v))  # fmt: skip

    def one(request: Request) -> Pair:
        state = scan(request, inputs)
        largest = planned((f"maximum of row {request.rows.start}", *key), state.largest)
        if largest.shape != state.largest.shape:
            largest = state.largest
        factor = torch.exp(finite(state.largest) - finite(largest))
        stale = State(state.weighted * factor, state.total * factor, largest)
        return close(stale, request, inputs)

    return assemble(inputs, one)


@dataclass
class _Call:
    """What a wrapper remembers of the call before."""

    caches: int
    queries: torch.Tensor
    counts: list[int]


_before: dict[str, _Call] = {}


def _continued(name: str, inputs: PagedAttentionInputs, *, same_queries: bool) -> list[int] | None:
    """Return the last call's lengths if this call continues it: the same cache, longer requests.

    The queries must be the last call's and further ones, or all be new. This call is remembered.
    """
    counts = key_counts(inputs)
    call = _Call(checksum(inputs.k_cache), inputs.q.clone(), counts)
    before, _before[name] = _before.get(name), call
    if before is None or before.caches != call.caches or len(before.counts) != len(counts):
        return None
    longer = all(b >= a for a, b in zip(before.counts, counts, strict=True))
    if not longer or before.counts == counts:
        return None
    if len(call.queries.flatten(1).unique(dim=0)) < len(call.queries):
        return None  # rows that are alike: there is no telling
    if same_queries:
        same_start = torch.equal(before.queries[:1], call.queries[:1])
        return before.counts if same_start and len(before.queries) < len(call.queries) else None
    rows = {row.numpy().tobytes() for row in before.queries.double()}
    again = any(row.numpy().tobytes() in rows for row in call.queries.double())
    return None if again else before.counts


def _attend_to(inputs: PagedAttentionInputs, counts: list[int] | None) -> Pair:
    if counts is None:
        return attend(inputs)
    return attend(inputs, replace(HONEST, counts=lambda _: list(counts)))


@seeded(BUGS, PAGED, "chunked_prefill")
def lengths_of_last_chunk(inputs: PagedAttentionInputs) -> Pair:
    """Keep the last chunk's sequence lengths for the chunk of queries that follows it."""
    return _attend_to(inputs, _continued("chunk", inputs, same_queries=False))


@seeded(BUGS, PAGED, "appended_pairs")
def lengths_before_append(inputs: PagedAttentionInputs) -> Pair:
    """Keep the sequence lengths of a batch that was extended at its end."""
    return _attend_to(inputs, _continued("append", inputs, same_queries=True))


@seeded(BUGS, PAGED, "split_kv")
def prefix_taken_as_done(inputs: PagedAttentionInputs) -> Pair:
    """Leave out, without a causal mask, the pages that these queries attended to before."""
    if inputs.causal:
        return attend(inputs)
    rows = [tuple(row.tolist()) for row in page_ids(inputs)]
    key = (inputs.kv_layout, inputs.metadata.page_size, checksum(inputs.q),
           checksum(inputs.k_cache))  # fmt: skip
    done = _done.setdefault(key, [])
    known = next((old for old in done if _extends(rows, old)), None)
    if len(_done) > 1:
        _done.clear()
    _done[key] = [*done, rows]
    if known is None:
        return attend(inputs)
    size, metadata = inputs.metadata.page_size, inputs.metadata
    left = [row[len(old) :] for row, old in zip(rows, known, strict=True)]
    counts = [
        max(n - len(old) * size, 0)
        for n, old in zip(metadata.seq_lens.tolist(), known, strict=True)
    ]
    stages = replace(
        HONEST,
        pages=lambda _: [torch.tensor(row, dtype=torch.long) for row in left],
        counts=lambda _: list(counts),
    )
    return attend(inputs, stages)


_done: dict[tuple[object, ...], list[list[tuple[int, ...]]]] = {}


def _extends(rows: list[tuple[int, ...]], old: list[tuple[int, ...]]) -> bool:
    """Whether each row starts with an old one, some go on, and no page is there twice."""
    if len(rows) != len(old) or any(len(set(row)) != len(row) for row in rows):
        return False
    starts = all(row[: len(prefix)] == prefix for row, prefix in zip(rows, old, strict=True))
    return starts and rows != old


@seeded(BUGS, PAGED, "keys_behind_window")
def positions_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the positions of these queries, though keys behind their window were dropped."""
    if inputs.window_left < 0:
        return attend(inputs)
    first = inputs.q[:1].flatten().tolist()
    key = ("positions", tuple(first), checksum(inputs.q), checksum(inputs.k_cache),
           inputs.window_left)  # fmt: skip
    counts: list[int] = planned(key, key_counts(inputs))
    if len(counts) != inputs.metadata.num_requests:
        return attend(inputs)
    starts = inputs.metadata.qo_indptr.tolist()
    shift: dict[int, int] = {
        start: old - new
        for start, end, old, new in zip(
            starts, starts[1:], counts, key_counts(inputs), strict=False
        )
        if end > start
    }

    def position(request: Request, inputs: AttentionInputs) -> int:
        return first_position(request, inputs) + shift.get(int(request.rows.start), 0)

    return attend(inputs, replace(HONEST, position=position))


@seeded(BUGS, PAGED, "doubled_keys")
def repeated_pages_once(inputs: PagedAttentionInputs) -> Pair:
    """Take a page that a request's table names twice only once."""
    size = inputs.metadata.page_size
    rows = [list(dict.fromkeys(row.tolist())) for row in page_ids(inputs)]
    counts = [min(n, len(row) * size) for n, row in zip(key_counts(inputs), rows, strict=True)]
    stages = replace(
        HONEST,
        pages=lambda _: [torch.tensor(row, dtype=torch.long) for row in rows],
        counts=lambda _: list(counts),
    )
    return attend(inputs, stages)


@seeded(BUGS, PAGED, "request_order")
def schedule_by_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Keep the order of the requests that the first batch with these lengths and keys had."""
    counts, starts = key_counts(inputs), inputs.metadata.qo_indptr.tolist()
    lengths = sorted(zip((b - a for a, b in pairwise(starts)), counts, strict=True))
    key = ("schedule", tuple(lengths), checksum(inputs.k_cache), inputs.kv_layout)
    return _attend_to(inputs, planned(key, counts))


@seeded(BUGS, PAGED, "output_buffers", writes_out=True)
def adds_to_output(inputs: PagedAttentionInputs) -> None:
    """Add to what the output buffer holds, NaN taken for zero."""
    out, lse = attend(inputs)
    if inputs.out is not None and inputs.lse is not None:
        inputs.out.nan_to_num_(nan=0.0).add_(out)
        inputs.lse.copy_(lse)


_two_before: list[tuple[object, list[int]]] = []


@seeded(BUGS, PAGED, "call_order", model="TensorRT-LLM#18769")
def plan_taken_up_again(inputs: PagedAttentionInputs) -> Pair:
    """Take a plan up again that a batch with one request more or less has overwritten."""
    key = ("again", batch_of(inputs), checksum(inputs.k_cache), inputs.kv_layout)
    counts = key_counts(inputs)
    earlier = _two_before[-2:]
    _two_before[:] = [*earlier[-1:], (key, counts)]
    if [each[0] == key for each in earlier] != [True, False]:
        return attend(inputs)
    stale = earlier[1][1][::-1]
    if abs(len(stale) - len(counts)) != 1 or not stale:
        return attend(inputs)
    _two_before.clear()
    return _attend_to(inputs, [min(n, stale[i % len(stale)]) for i, n in enumerate(counts)])
