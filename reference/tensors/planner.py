"""A right plan of a batch, by the simplest rules, in the layout of FlashInfer's plans.

There are many right plans: laws judge what one achieves, and never compare it with this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..problems.plan import DECODE, FA2, FA3, LEAST_KEYS, MLA, PlanProblem
from .plan import FLOAT_BYTES, LAYOUTS, MLA_TILE, TILE, WIDE_TILE, PlanInputs

FA2_TILE = 64
"""Packed rows of a block of FA2."""
MLA_ROOM, MLA_PARTIALS = 24_000, 1 << 17
"""Works and partial results of MLA for which there is room, whatever the batch."""


class Memory:
    """A workspace of integers: what is reserved lies behind what was before."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self.workspace, self.end = workspace, 0

    def reserve(self, size: int) -> int:
        """Return where a number of bytes begins."""
        start = -(-self.end // 16) * 16
        self.end = start + size
        return start

    def ints(self, values: Sequence[int], room: int = 0) -> int:
        """Write indices, with room for some more, and return where they begin."""
        start = self.reserve(4 * max(room, len(values)))
        data = torch.tensor(values, dtype=torch.int32).view(torch.uint8)
        self.workspace[start : start + len(data)] = data
        return start

    def flags(self, count: int, true: int) -> int:
        """Write bytes of which the first are 1, and return where they begin."""
        start = self.reserve(count)
        self.workspace[start : start + count] = (torch.arange(count) < true).byte()
        return start


def plan(inputs: PlanInputs) -> torch.Tensor:
    """Write a plan into the workspace, and return its vector, int64, in the order of ``LAYOUTS``.

    Work is divided among as many blocks as a chip holds at once: rows into tiles, and keys into
    parts no shorter than ``LEAST_KEYS``, whose partial results are merged.
    """
    call = inputs.call
    plans = {DECODE: _decode, FA2: _fa2, FA3: _fa3, MLA: _mla}
    found = plans[call.family](call, Memory(inputs.workspace))
    vector = [int(found.get(name, 0)) for name in LAYOUTS[call.family]]
    return torch.tensor(vector, dtype=torch.int64, device=inputs.workspace.device)


def _parts(lengths: Sequence[int], size: int) -> list[int]:
    """Return how many parts each has, at least one."""
    return [max(1, -(-length // size)) for length in lengths]


def _starts(counts: Sequence[int]) -> list[int]:
    """Return where each of several runs begins, and where the last one ends."""
    return [sum(counts[:place]) for place in range(len(counts) + 1)]


def _decode(call: PlanProblem, memory: Memory) -> dict[str, int]:
    batch, slots = len(call.kv_lens), call.multiprocessors * call.blocks // call.num_kv_heads
    size, split = max(1, *call.pages), batch < slots
    if split:
        size = max(LEAST_KEYS // call.page_size, 1)
        while sum(_parts(call.pages, size)) > slots:
            size += 1
    parts = _parts(call.pages, size)
    split = split and (call.graph or sum(parts) > batch)
    blocks = slots if split and call.graph else sum(parts)
    requests = [request for request, count in enumerate(parts) for _ in range(count)]
    tiles = [part for count in parts for part in range(count)]
    return {
        "padded_batch_size": blocks,
        "graph": call.graph,
        "split_kv": split,
        "request_indices": memory.ints(requests, blocks),
        "kv_tile_indices": memory.ints(tiles, blocks),
        "o_indptr": memory.ints(_starts(parts), blocks + 1),
        "kv_chunk_size": memory.ints([size * call.page_size]),
        "block_valid_mask": memory.flags(blocks, len(requests)),
        "s": blocks * call.num_qo_heads * call.head_dim * 4,
    }


def _fa2(call: PlanProblem, memory: Memory) -> dict[str, int]:
    batch, group = len(call.kv_lens), call.group_size
    tiles = [-(-count * group // FA2_TILE) for count in call.query_lens]
    window = -(-(call.window_left + FA2_TILE) // call.page_size)
    pages = [min(each, window) if call.window_left >= 0 else each for each in call.pages]
    most = -(-call.graph_rows * group // FA2_TILE) + batch - 1
    slots = 2 * call.multiprocessors // call.num_kv_heads
    size = max(LEAST_KEYS // call.page_size, 1)
    while size < max(pages) and (
        sum(a * b for a, b in zip(tiles, _parts(pages, size), strict=True)) > slots
    ):
        size += 1
    parts = _parts(pages, size)
    blocks = max(slots, most)
    if not call.graph:
        blocks = sum(a * b for a, b in zip(tiles, parts, strict=True))
    width = blocks * FA2_TILE * call.num_qo_heads * 4
    room = width * (call.head_dim + 1) <= FLOAT_BYTES
    # A window ends the keys of a tile only where a causal mask ends them too.
    may = call.split and room and (call.window_left < 0 or call.causal)
    split = may and (call.graph or max(parts) > 1)
    parts = parts if split else [1] * batch
    works = [
        (request, tile, part)
        for request, count in enumerate(tiles)
        for tile in range(count)
        for part in range(parts[request])
    ]
    blocks = blocks if call.graph else len(works)
    rows = [parts[request] for request in range(batch) for _ in range(call.query_lens[request])]
    partials = [a * b for a, b in zip(call.query_lens, parts, strict=True)]
    found = {
        "padded_batch_size": blocks,
        "total_num_rows": call.graph_rows,
        "cta_tile_q": FA2_TILE,
        "graph": call.graph,
        "split_kv": split,
        "request_indices": memory.ints([each[0] for each in works], blocks),
        "qo_tile_indices": memory.ints([each[1] for each in works], blocks),
        "kv_tile_indices": memory.ints([each[2] for each in works], blocks),
        "o_indptr": memory.ints(_starts(partials)),
        "kv_chunk_size": memory.ints([size * call.page_size]),
    }
    if call.graph:
        found["total_num_rows_at"] = memory.ints([call.query_starts[-1]])
    if split:
        ends = torch.tensor([0, *rows]).cumsum(0).tolist()
        found["merge_indptr"] = memory.ints(ends, call.graph_rows + 1)
        found["s"] = width * call.head_dim
    if call.graph:
        found["block_valid_mask"] = memory.flags(blocks, len(works))
    return found


def _fa3(call: PlanProblem, memory: Memory) -> dict[str, int]:
    tile_rows = WIDE_TILE if call.head_dim == 64 else TILE  # noqa: PLR2004  as the kernel has it
    works = [
        (request, head, tile)
        for head in range(call.num_qo_heads)
        for request, queries in enumerate(call.query_lens)
        for tile in range(-(-queries // tile_rows))
    ]
    most = -(-call.graph_rows // tile_rows) + len(call.kv_lens) - 1
    room = most * call.num_qo_heads if call.graph else len(works)
    requests = [each[0] for each in works]
    return {
        "head_indices": memory.ints([each[1] for each in works], room),
        "qo_tile_indices": memory.ints([each[2] for each in works], room),
        "batch_indices": memory.ints(requests, room),
        "qo_indptr": memory.ints([call.query_starts[each] for each in requests], room),
        "kv_indptr": memory.ints([call.page_starts[each] for each in requests], room),
        "qo_len": memory.ints([call.query_lens[each] for each in requests], room),
        "kv_len": memory.ints([call.kv_lens[each] for each in requests], room),
        "work_indptr": memory.ints(_shares(len(works), call.multiprocessors)),
    }


def _shares(works: int, blocks: int) -> list[int]:
    """Return where the works of each block begin, and where the last one's end."""
    share = -(-works // blocks)
    return [min(block * share, works) for block in range(blocks + 1)]


def _mla(call: PlanProblem, memory: Memory) -> dict[str, int]:
    heads, clusters = call.num_qo_heads, call.multiprocessors
    tiles = [
        (request, tile, call.visible(request, last, last)[1])
        for request, queries in enumerate(call.query_lens)
        for tile in range(-(-queries * heads // MLA_TILE))
        for last in [min((tile + 1) * MLA_TILE, queries * heads) - 1]
    ]
    # More than an even share is split: fewer tiles than there are clusters.
    limit = max(1, -(-sum(each[2] for each in tiles) // clusters))
    works, merges, partials = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
    for request, tile, keys in tiles:
        first, base = tile * MLA_TILE, call.query_starts[request] * heads
        rows = min(MLA_TILE, call.query_lens[request] * heads - first)
        parts = max(1, -(-keys // limit))
        if parts > 1:
            last = partials + parts * rows
            merges.append((base + first, base + first + rows, partials, last, rows))
        for part in range(parts):
            span = (part * limit, min((part + 1) * limit, keys))
            works.append((request, first, *span, partials if parts > 1 else -1))
            partials += rows if parts > 1 else 0
    of = [each[0] for each in works]
    merge = [*merges, *[(0, 0, 0, 0, 0)] * (clusters - len(merges))]
    room = max(MLA_ROOM, len(works))
    found = {
        "num_blks_x": 1,
        "num_blks_y": clusters,
        "q_indptr": memory.ints([call.query_starts[each] for each in of], room),
        "kv_indptr": memory.ints([call.page_starts[each] for each in of], room),
        "q_len": memory.ints([call.query_lens[each] for each in of], room),
        "kv_len": memory.ints([call.kv_lens[each] for each in of], room),
        "q_start": memory.ints([each[1] for each in works], room),
        "kv_start": memory.ints([each[2] for each in works], room),
        "kv_end": memory.ints([each[3] for each in works], room),
        "partial_indptr": memory.ints([each[4] for each in works], room),
        "work_indptr": memory.ints(_shares(len(works), clusters)),
        "partial_lse": 2 * MLA_PARTIALS * call.head_dim,
    }
    for place, name in enumerate(("start", "end", "partial_start", "partial_end", "stride")):
        found[f"merge_{name}"] = memory.ints([each[place] for each in merge])
    return found
