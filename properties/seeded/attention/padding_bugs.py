"""Faults of padding and slack: spoilt rows that spread, padded requests, bounds above the truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from ....reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ....reference.tensors.inputs import RaggedAttentionInputs as Ragged
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, Request, State, assemble, attend, close, finite, key_counts, scan
from .graph_bugs import KeepsBatch
from .session_bugs import PAGED, RAGGED, Pair, once, with_lengths

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
PART, PARTS = 4, 4
"""Keys of a part of a request, or parts of a request."""
BOUNDS, LARGE = ("host_bounds",), ("large_tensors",)


def in_int32(numbers: torch.Tensor) -> torch.Tensor:
    """Return integers as int32 arithmetic leaves them."""
    return (numbers + 2**31) % 2**32 - 2**31


@seeded(BUGS, PAGED, "row_containment", model="vllm#39244")
def query_scale_of_the_batch(inputs: PagedAttentionInputs) -> Pair:
    """Divide queries by the largest of the batch before the products, and multiply behind them."""
    largest = inputs.q.float().abs().max() if inputs.q.numel() else torch.ones(())
    scale = torch.exp2(torch.log2(largest.clamp(min=1.0)).ceil())
    stages = replace(HONEST, dot=lambda q, k: (q @ k.transpose(-1, -2)) * scale)
    return attend(replace(inputs, q=inputs.q.float() / scale), stages)


@seeded(BUGS, RAGGED, "row_containment", model="aiter#4530")
def rows_placed_by_product(inputs: Ragged) -> Pair:
    """Bring the rows of a tile to their places by a product with ones and zeros."""
    out, lse = attend(inputs)
    return (torch.eye(len(out)) @ out.float().flatten(1)).view(out.shape).to(out.dtype), lse


@seeded(BUGS, PAGED, "row_containment", model="sglang#38851")
def scratch_tail_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Weigh parts that a request does not have by 0, with what the last request left there."""
    most = max([1, *(-(-count // PART) for count in key_counts(inputs))])
    scratch = torch.zeros((most, inputs.q.shape[1], len(inputs.q), inputs.values.shape[-1]))

    def one(request: Request) -> Pair:
        states, room = in_parts(request, inputs, PART), scratch[:, :, : request.num_queries]
        for place, state in zip(room, states, strict=False):
            place.copy_(state.weighted)
        return close(merged(states, room), request, inputs)

    return assemble(inputs, one)


def in_parts(request: Request, inputs: AttentionInputs, length: int) -> list[State]:
    """Attend to parts of a request's keys of this length, one at least."""
    ends = range(length, max(request.num_keys, 1) + length, length)
    return [
        scan(request, inputs, keys=slice(end - length, min(end, request.num_keys))) for end in ends
    ]


def merged(states: list[State], outs: torch.Tensor) -> State:
    """Merge states whose sums stand in ``outs`` [parts, H, t, E]; further parts weigh nothing."""
    largest = torch.stack([state.largest for state in states]).amax(dim=0)
    factors = torch.stack([torch.exp(state.largest - finite(largest)) for state in states])
    total = sum(f * state.total for f, state in zip(factors, states, strict=True))
    nothing = factors.new_zeros((len(outs) - len(states), *factors.shape[1:]))
    return State((torch.cat([factors, nothing]) * outs).sum(dim=0), total + 0.0, largest)


@seeded(BUGS, PAGED, "padded_batch", model="vllm#51593")
def padded_length_as_uint32(inputs: PagedAttentionInputs) -> Pair:
    """Schedule the longest first by keys less queries in uint32, as much as a launch may have."""
    counts, queries = torch.tensor(key_counts(inputs)), inputs.metadata.qo_indptr.diff().long()
    work = torch.where(queries > 0, counts - queries + 1, 0) % 2**32
    order = work.argsort(descending=True, stable=True)
    scheduled = torch.zeros_like(work, dtype=torch.bool)
    scheduled[order] = work[order].cumsum(0) < 2**31
    out, lse = attend(inputs)
    rows = scheduled.repeat_interleave(queries)
    return out * rows[:, None, None], lse


@seeded(BUGS, PAGED, "padded_batch")
def lengths_by_pages(inputs: PagedAttentionInputs) -> Pair:
    """Keep lengths by the requests' rows of the block table, as if no two had the same."""
    counts, size = key_counts(inputs), inputs.metadata.page_size
    width = -(-max(counts, default=0) // size)
    rows = [tuple(row[:width]) for row in inputs.block_table.tolist()]
    lengths = dict(zip(rows, counts, strict=True))
    known = torch.tensor([lengths[row] for row in rows], dtype=torch.int32)
    return attend(replace(inputs, metadata=with_lengths(inputs, known)))


@seeded(BUGS, PAGED, "padded_batch")
def padding_clears_its_page(inputs: PagedAttentionInputs) -> Pair:
    """Clear the first page of a request without keys, as of one that has just begun."""
    pair, pages = attend(inputs), inputs.block_table[:, :1].flatten()
    empty = (inputs.metadata.seq_lens == 0) & (pages >= 0) & (pages < len(inputs.k_cache))
    for cache in (inputs.k_cache, inputs.v_cache):
        cache[pages[empty[: len(pages)]].long()] = 0
    return pair


@seeded(BUGS, PAGED, "slack_bounds", features=BOUNDS)
def keys_of_the_host(inputs: PagedAttentionInputs) -> Pair:
    """Take the host's bound for the number of keys where all requests have as many."""

    def counts(inputs: PagedAttentionInputs) -> list[int]:
        own = key_counts(inputs)
        return [inputs.max_kv_len] * len(own) if len(set(own)) == 1 else own

    return attend(inputs, replace(HONEST, counts=counts))


@seeded(BUGS, RAGGED, "slack_bounds", features=BOUNDS)
def rows_laid_out_twice(inputs: Ragged) -> Pair:
    """Write a request's rows where the host's bound puts them, and read by the true lengths."""
    counts = inputs.qo_indptr.diff()
    longest = max(counts.tolist(), default=0)
    request, row = (torch.arange(longest) < counts.unsqueeze(1)).nonzero().T
    written, read = (request * most + row for most in (inputs.max_q_len, longest))

    def moved(rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((len(counts) * inputs.max_q_len, *rows.shape[1:])).index_copy(
            0, written, rows
        )[read]

    out, lse = attend(inputs)
    return moved(out), moved(lse)


@seeded(BUGS, PAGED, "slack_bounds", model="flashinfer#4647", features=BOUNDS)
def parts_counted_twice(inputs: PagedAttentionInputs) -> Pair:
    """Cut keys into parts by the host's bound, and merge as many as the true lengths would give."""
    return _in_parts_of(inputs, max(key_counts(inputs), default=0))


def _in_parts_of(inputs: PagedAttentionInputs, assumed: int) -> Pair:
    """Attend in parts by the host's bound, and merge as if the longest request were ``assumed``."""
    length, other = (max(1, -(-keys // PARTS)) for keys in (inputs.max_kv_len, assumed))

    def one(request: Request) -> Pair:
        states = in_parts(request, inputs, length)
        # Memory that no part was written to holds anything.
        unwritten = State(*(torch.ones_like(each) for each in states[0]))
        states += [unwritten] * (-(-request.num_keys // other) - len(states))
        outs = torch.stack([state.weighted for state in states])
        return close(merged(states, outs), request, inputs)

    return assemble(inputs, one)


@seeded(CONTROLS, PAGED, control="honest", features=(*BOUNDS, *LARGE))
def parts_of_the_bound(inputs: PagedAttentionInputs) -> Pair:
    """Cut keys into parts by the host's bound, and merge those."""
    return _in_parts_of(inputs, inputs.max_kv_len)


@seeded(CONTROLS, RAGGED, control="honest", features=(*BOUNDS, *LARGE))
def rows_of_the_batch(inputs: Ragged) -> Pair:
    """Visit as many rows of each request as the host's bound says, and mask those that are not."""
    begins, counts = inputs.qo_indptr[:-1], inputs.qo_indptr.diff()
    row = torch.arange(inputs.max_q_len)
    places = (begins.unsqueeze(1) + row)[row < counts.unsqueeze(1)]
    out, lse = attend(replace(inputs, q=inputs.q[places.long()]))
    return out, lse


INVARIANT = ("batch_invariant",)


def _in_fixed_parts(inputs: PagedAttentionInputs, length: int) -> Pair:
    """Attend to parts of as many keys, and merge them."""

    def one(request: Request) -> Pair:
        states = in_parts(request, inputs, length)
        outs = torch.stack([state.weighted for state in states])
        return close(merged(states, outs), request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, PAGED, "same_bits_in_any_batch", features=INVARIANT)
def parts_by_batch(inputs: PagedAttentionInputs) -> Pair:
    """Promise the same bits in any batch, and cut keys into as many parts as there is room for."""
    return _in_fixed_parts(inputs, PART * max(inputs.metadata.num_requests, 1))


@seeded(CONTROLS, PAGED, control="honest", features=INVARIANT)
def parts_of_one_length(inputs: PagedAttentionInputs) -> Pair:
    """Promise the same bits in any batch, and cut keys into parts of one length."""
    return _in_fixed_parts(inputs, PART)


@seeded(BUGS, PAGED, "far_pages", features=LARGE)
def page_offset_in_int32(inputs: PagedAttentionInputs) -> Pair:
    """Multiply a page's id by the stride of pages in int32."""

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        stride = cache.stride(0)
        # What lies before the cache is somebody else's; here it is read from the end.
        return HONEST.gather(cache, in_int32(pages * stride) // stride % len(cache), inputs)

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, RAGGED, "far_tokens", features=LARGE)
def row_offset_in_int32(inputs: Ragged) -> Pair:
    """Multiply a row's number by the stride of queries in int32."""
    rows, stride = torch.arange(len(inputs.q)), inputs.q.stride(0)
    places = in_int32(rows * stride) // stride % max(len(rows), 1)
    return attend(replace(inputs, q=inputs.q[places]))


class RunsAsManyRequests(KeepsBatch):
    """Replays the recorded number of requests; entries behind the batch's are the recorded ones."""

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend, and then to what stands behind the batch that is planned."""
        out, lse = super().replay(inputs)
        now, then = self.both()
        assert self.recorded is not None  # noqa: S101  capture comes first
        stale = then.qo_indptr.tolist()[now.num_requests :]
        old = attend(replace(self.recorded, metadata=then))
        for begin, end in pairwise(stale):
            for mine, theirs in zip((out, lse), old, strict=True):
                place = min(begin, len(mine) - 1)  # a row that is not there is the last one
                rows = min(end - begin, len(mine) - place)
                mine[place : place + rows] = theirs[begin : begin + rows]
        return out, lse


@seeded(BUGS, PAGED, "padded_graph", model="flashinfer#4002", session=RunsAsManyRequests)
def graph_runs_stale_entries(inputs: PagedAttentionInputs) -> Pair:
    """Replay a smaller batch with as many programs, which read entries of the larger one."""
    return once(RunsAsManyRequests, inputs)
