"""A planner of few lines, in the layout of FlashInfer's plans: for machines without nvcc."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kernelproof.ci.plans.answers import UNWRITTEN, Answer
from kernelproof.ci.plans.problems import DECODE, FA2, FA3, INT_BYTES, MLA, PlanProblem
from kernelproof.ci.plans.reading import LAYOUTS, MLA_TILE

TILE = 64
"""Packed rows of a block of FA2."""
ROOM, MOST_PARTIALS = 40_000, 1 << 16
"""Works and partial results of MLA for which there is room, whatever the batch."""


class Memory:
    """A workspace of integers: what is reserved lies behind what was before."""

    def __init__(self) -> None:
        self.data = bytearray([UNWRITTEN]) * INT_BYTES
        self.end = 0

    def reserve(self, size: int) -> int:
        start = -(-self.end // 16) * 16
        self.end = start + size
        return start

    def ints(self, values: Sequence[int], room: int = 0) -> int:
        start = self.reserve(4 * max(room, len(values)))
        struct.pack_into(f"{len(values)}i", self.data, start, *values)
        return start

    def flags(self, count: int, true: int) -> int:
        start = self.reserve(count)
        self.data[start : start + count] = bytes(i < true for i in range(count))
        return start


def parts_of(lengths: Sequence[int], size: int) -> list[int]:
    """Return how many parts each has, at least one."""
    return [max(1, -(-length // size)) for length in lengths]


class StandIn:
    """Plans as FlashInfer does, by simpler rules.

    Args:
        as_released: have two flaws of releases: a decode counts no part of a request without
            pages, and too few keys are split of a window without a causal mask.
    """

    def __init__(self, *, as_released: bool = False) -> None:
        self.as_released = as_released

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        memory = Memory()
        if after is not None:
            self._plan(after, memory)
            memory.end = 0
        info = self._plan(problem, memory)
        named = tuple(int(info.get(name, 0)) for name in LAYOUTS[problem.kind])
        return Answer(named, bytes(memory.data))

    def _plan(self, problem: PlanProblem, memory: Memory) -> dict[str, int]:
        if problem.kind == FA2:
            return fa2(problem, memory, as_released=self.as_released)
        if problem.kind == DECODE:
            return decode(problem, memory, as_released=self.as_released)
        return {FA3: fa3, MLA: mla}[problem.kind](problem, memory)


def decode(problem: PlanProblem, memory: Memory, *, as_released: bool) -> dict[str, int]:
    batch, slots = len(problem.kv_lens), problem.multiprocessors * problem.blocks
    slots //= problem.num_kv_heads
    size, split = max(1, *problem.pages), batch < slots
    if split:
        size = max(128 // problem.page_size, 1)
        counted = [each for each in problem.pages if each or not as_released]
        while sum(parts_of(counted, size)) > slots:
            size += 1
    parts = parts_of(problem.pages, size)
    split = split and (problem.graph or sum(parts) > batch)
    blocks = slots if split and problem.graph else sum(parts)
    requests = [request for request, count in enumerate(parts) for _ in range(count)]
    tiles = [part for count in parts for part in range(count)]
    info = {
        "padded_batch_size": blocks,
        "graph": problem.graph,
        "split_kv": split,
        "request_indices": memory.ints(requests[:blocks], blocks),
        "kv_tile_indices": memory.ints(tiles[:blocks], blocks),
        "o_indptr": memory.ints([sum(parts[:i]) for i in range(batch + 1)], blocks + 1),
        "kv_chunk_size": memory.ints([size * problem.page_size]),
        "block_valid_mask": memory.flags(blocks, len(requests)),
    }
    return info | {"s": blocks * problem.num_qo_heads * problem.head_dim * 4}


def fa2(problem: PlanProblem, memory: Memory, *, as_released: bool) -> dict[str, int]:
    batch, group = len(problem.kv_lens), problem.group_size
    tiles = [-(-count * group // TILE) for count in problem.query_lens]
    window = -(-(problem.window_left + TILE) // problem.page_size)
    pages = [min(each, window) if problem.window_left >= 0 else each for each in problem.pages]
    most = -(-problem.graph_rows * group // TILE) + batch - 1
    slots = 2 * problem.multiprocessors // problem.num_kv_heads
    size = max(128 // problem.page_size, 1)
    wide = problem.window_left >= 0 and not (problem.causal or as_released)
    while size < max(pages) and (
        sum(a * b for a, b in zip(tiles, parts_of(pages, size), strict=True)) > slots
    ):
        size += 1
    parts = parts_of(pages, size)
    split = problem.split and not wide and (problem.graph or max(parts) > 1)
    parts = parts if split else [1] * batch
    works = [
        (request, tile, part)
        for request, count in enumerate(tiles)
        for tile in range(count)
        for part in range(parts[request])
    ]
    blocks = max(slots, most) if problem.graph else len(works)
    rows = [parts[request] for request in range(batch) for _ in range(problem.query_lens[request])]
    partials = [a * b for a, b in zip(problem.query_lens, parts, strict=True)]
    info = {
        "padded_batch_size": blocks,
        "total_num_rows": problem.graph_rows,
        "cta_tile_q": TILE,
        "graph": problem.graph,
        "split_kv": split,
        "request_indices": memory.ints([each[0] for each in works], blocks),
        "qo_tile_indices": memory.ints([each[1] for each in works], blocks),
        "kv_tile_indices": memory.ints([each[2] for each in works], blocks),
        "o_indptr": memory.ints([sum(partials[:i]) for i in range(batch + 1)]),
        "kv_chunk_size": memory.ints([size * problem.page_size]),
    }
    if problem.graph:
        info["total_num_rows_at"] = memory.ints([problem.query_starts[-1]])
    if split:
        ends = [sum(rows[:i]) for i in range(len(rows) + 1)]
        info["merge_indptr"] = memory.ints(ends, problem.graph_rows + 1)
        info["s"] = 4 * blocks * TILE * problem.num_qo_heads * problem.head_dim
    if problem.graph:
        info["block_valid_mask"] = memory.flags(blocks, len(works))
    return info


def fa3(problem: PlanProblem, memory: Memory) -> dict[str, int]:
    tile_rows = 192 if problem.head_dim == 64 else 128
    works = [
        (request, head, tile)
        for head in range(problem.num_qo_heads)
        for request, queries in enumerate(problem.query_lens)
        for tile in range(-(-queries // tile_rows))
    ]
    most = -(-problem.graph_rows // tile_rows) + len(problem.kv_lens) - 1
    room = most * problem.num_qo_heads if problem.graph else len(works)
    share = -(-len(works) // problem.multiprocessors)
    ends = [min(i * share, len(works)) for i in range(problem.multiprocessors + 1)]
    requests = [each[0] for each in works]
    return {
        "head_indices": memory.ints([each[1] for each in works], room),
        "qo_tile_indices": memory.ints([each[2] for each in works], room),
        "batch_indices": memory.ints(requests, room),
        "qo_indptr": memory.ints([problem.query_starts[each] for each in requests], room),
        "kv_indptr": memory.ints([problem.page_starts[each] for each in requests], room),
        "qo_len": memory.ints([problem.query_lens[each] for each in requests], room),
        "kv_len": memory.ints([problem.kv_lens[each] for each in requests], room),
        "work_indptr": memory.ints(ends),
    }


def mla(problem: PlanProblem, memory: Memory) -> dict[str, int]:
    heads, clusters = problem.num_qo_heads, problem.multiprocessors
    tiles = [
        (request, tile, problem.visible(request, last, last)[1])
        for request, queries in enumerate(problem.query_lens)
        for tile in range(-(-queries * heads // MLA_TILE))
        for last in [min((tile + 1) * MLA_TILE, queries * heads) - 1]
    ]
    limit = max(1, -(-sum(each[2] for each in tiles) // clusters))
    works, merges, partials = [], [], 0
    for request, tile, keys in tiles:
        first, base = tile * MLA_TILE, problem.query_starts[request] * heads
        rows = min(MLA_TILE, problem.query_lens[request] * heads - first)
        parts = max(1, -(-keys // limit))
        if parts > 1:
            last = partials + parts * rows
            merges.append((base + first, base + first + rows, partials, last, rows))
        for part in range(parts):
            span = (part * limit, min((part + 1) * limit, keys))
            works.append((request, first, *span, partials if parts > 1 else -1))
            partials += rows if parts > 1 else 0
    share = -(-len(works) // clusters)
    of = [each[0] for each in works]
    idle = [(0, 0, 0, 0, 0)] * (clusters - len(merges))
    merge = [*merges, *idle]
    info = {
        "num_blks_x": 1,
        "num_blks_y": clusters,
        "q_indptr": memory.ints([problem.query_starts[each] for each in of], ROOM),
        "kv_indptr": memory.ints([problem.page_starts[each] for each in of], ROOM),
        "q_len": memory.ints([problem.query_lens[each] for each in of], ROOM),
        "kv_len": memory.ints([problem.kv_lens[each] for each in of], ROOM),
        "q_start": memory.ints([each[1] for each in works], ROOM),
        "kv_start": memory.ints([each[2] for each in works], ROOM),
        "kv_end": memory.ints([each[3] for each in works], ROOM),
        "partial_indptr": memory.ints([each[4] for each in works], ROOM),
        "work_indptr": memory.ints([min(i * share, len(works)) for i in range(clusters + 1)]),
        "partial_lse": 2 * MOST_PARTIALS * problem.head_dim,
    }
    names = ("start", "end", "partial_start", "partial_end", "stride")
    for place, name in enumerate(names):
        info[f"merge_{name}"] = memory.ints([each[place] for each in merge])
    return info
