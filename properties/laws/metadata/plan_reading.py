"""Reads a plan as the kernels do: which block computes which rows over which keys.

The order of a plan's vector and what each array means are those of `flashinfer/attention/
scheduler.cuh` and of the kernels that read it (`decode.cuh`, `prefill.cuh`, `mla.cuh`,
`hopper/tile_scheduler.cuh`) of the releases 0.6.13 to 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ....reference import PlanProblem
from ....reference.problems.plan import DECODE, FA2, FA3, MLA
from ....reference.tensors.plan import INT_BYTES, LAYOUTS, MLA_TILE, TILE, WIDE_TILE

ALL_HEADS = -1
INT, SUM, PARTIAL = 4, 4, 2
"""Bytes of an index, of a sum of partial results, and of their values: kernels write and read those
in the dtype of the output, which has 16 bits, though plans of decode and FA2 reserve 4 bytes."""
MOST_BLOCKS = INT_BYTES // INT + 1
"""Blocks that are followed: one index of each no longer fits; a wrong plan may name billions."""


@dataclass(frozen=True)
class Extent:
    """Bytes of a workspace that the kernels read or write."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Item:
    """The work of one block, or of one turn of it.

    Attributes:
        block: number of the item in its launch.
        request, head: the request and the query head; ``ALL_HEADS`` where all have the same work.
        rows: range of packed rows of the request.
        keys: range of its keys.
        partial: the place of the first row's partial result; None where the result is final.
        stride: places from the partial results of one packed query token to those of the next.
        stated: what the plan repeats of its request, by name.
    """

    block: int
    request: int
    head: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    partial: int | None = None
    stride: int = 1
    stated: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A plan as its kernels read it.

    Attributes:
        integers, floats: what is used of both workspaces.
        items: the work of all blocks that are launched and do not return at once.
        merges: places of the partial results that are merged, by the packed row of the batch.
        merged_rows: packed rows that the merging kernel visits; -1 where it finds them itself.
        stray: sentences about blocks that work on what is no request of the batch, by block.
    """

    integers: tuple[Extent, ...]
    floats: tuple[Extent, ...]
    items: tuple[Item, ...]
    merges: Mapping[int, tuple[int, ...]]
    merged_rows: int
    stray: Mapping[int, str]


class Reader:
    """A plan's vector by name, and its arrays in the workspace of integers."""

    def __init__(
        self, problem: PlanProblem, vector: Sequence[int], workspace: torch.Tensor
    ) -> None:
        self.problem, self.workspace = problem, workspace
        self.info = dict(zip(LAYOUTS[problem.family], vector, strict=True))
        self.used: dict[str, Extent] = {}

    def ints(self, name: str, count: int, *, at: str = "") -> Sequence[int]:
        """Return an array of indices; as many as lie in the workspace."""
        start = self.info[at or name]
        self.used[name] = Extent(name, start, start + count * INT)
        # A block past the workspace reads anything; the law of the workspace speaks of it.
        room = max(0, (len(self.workspace) - start) // INT) if start >= 0 else 0
        inside = min(max(count, 0), room)
        data = self.workspace[max(start, 0) : max(start, 0) + inside * INT]
        return [*data.clone().view(torch.int32).tolist(), *[-1] * (count - inside)]

    def flags(self, name: str, count: int) -> Sequence[bool]:
        """Return an array of bytes as booleans."""
        start = self.info[name]
        self.used[name] = Extent(name, start, start + count)
        found = self.workspace[max(start, 0) : max(start, 0) + count].tolist()
        return [each != 0 for each in found] + [False] * (count - len(found))


def read_plan(problem: PlanProblem, vector: Sequence[int], workspace: torch.Tensor) -> Plan:
    """Return what the kernels make of a plan.

    Args:
        problem: the batch that was planned.
        vector: the plan's vector.
        workspace: its integers, on the host.
    """
    return READERS[problem.family](Reader(problem, vector, workspace))


def _decode(reader: Reader) -> Plan:
    problem, info = reader.problem, reader.info
    blocks = min(info["padded_batch_size"], MOST_BLOCKS)
    split = bool(info["split_kv"])
    requests = reader.ints("request_indices", blocks)
    tiles = reader.ints("kv_tile_indices", blocks)
    # As the launcher decides (csrc/batch_decode.cu): only a split plan of a graph has a mask.
    masked = split and bool(info["graph"])
    valid = reader.flags("block_valid_mask", blocks) if masked else [True] * blocks
    items, stray, group = list[Item](), dict[int, str](), problem.group_size
    starts = reader.ints("o_indptr", len(problem.kv_lens) + 1) if split else []
    chunk = reader.ints("kv_chunk_size", 1)[0] if split else 0
    merges: dict[int, tuple[int, ...]] = {}
    for block in (block for block in range(blocks) if valid[block]):
        request, tile = requests[block], tiles[block]
        if not 0 <= request < len(problem.kv_lens):
            stray[block] = f"block {block} works on request {request}"
            continue
        keys = problem.kv_lens[request]
        span = (tile * chunk, min((tile + 1) * chunk, keys)) if split else (0, keys)
        # Block b leaves its partial result at place b.
        place = block * group if split else None
        items.append(Item(block, request, ALL_HEADS, (0, group), span, place))
    floats = list[Extent]()
    if split:
        for request in range(len(problem.kv_lens)):
            for head in range(group):
                places = range(starts[request], _end(starts, request))
                merges[request * group + head] = tuple(each * group + head for each in places)
        floats = _partials(reader, blocks * problem.num_qo_heads, "v", "s")
    return _plan(reader, floats, items, merges, len(merges) if split else -1, stray)


def _end(starts: Sequence[int], index: int) -> int:
    """Return an end of a range that is never absurdly far from its start."""
    return min(starts[index + 1], starts[index] + MOST_MERGED)


MOST_MERGED = 1 << 16
"""Most partial results that are followed for one row: a wrong plan may name billions."""


def _fa2(reader: Reader) -> Plan:
    problem, info = reader.problem, reader.info
    blocks = min(info["padded_batch_size"], MOST_BLOCKS)
    split = bool(info["split_kv"])
    graph, group, tile_rows = bool(info["graph"]), problem.group_size, info["cta_tile_q"]
    requests = reader.ints("request_indices", blocks)
    row_tiles = reader.ints("qo_tile_indices", blocks)
    key_tiles = reader.ints("kv_tile_indices", blocks)
    starts = reader.ints("o_indptr", len(problem.kv_lens) + 1)
    chunk = reader.ints("kv_chunk_size", 1)[0]
    # Without an offset of its own there is no mask, and every block of the launch works.
    masked = graph and info["block_valid_mask"] != 0
    valid = reader.flags("block_valid_mask", blocks) if masked else [True] * blocks
    items, stray = list[Item](), dict[int, str]()
    for block in (block for block in range(blocks) if valid[block]):
        request, row_tile, key_tile = requests[block], row_tiles[block], key_tiles[block]
        if not 0 <= request < len(problem.kv_lens):
            stray[block] = f"block {block} works on request {request}"
            continue
        keys, queries = problem.kv_lens[request], problem.query_lens[request]
        first, last = row_tile * tile_rows, min((row_tile + 1) * tile_rows, queries * group)
        window = problem.window_left if problem.window_left >= 0 else keys
        begin = max(0, keys + first // group - queries - window)
        span, place, parts = (begin, keys), None, 1
        if split:
            span = (min(key_tile * chunk + begin, keys), min((key_tile + 1) * chunk + begin, keys))
            # The kernel counts the parts itself, from the keys that a tile may see.
            parts = -(-min(max(keys, 1), window + tile_rows) // max(chunk, 1))
            place = (starts[request] + first // group * parts + key_tile) * group + first % group
        rows = (first, max(first, last))
        items.append(Item(block, request, ALL_HEADS, rows, span, place, parts * group))
    merges: dict[int, tuple[int, ...]] = {}
    floats, visited = list[Extent](), -1
    if split:
        indptr = reader.ints("merge_indptr", problem.query_starts[-1] + 1)
        for row in range(problem.query_starts[-1]):
            for head in range(group):
                places = range(indptr[row], _end(indptr, row))
                merges[row * group + head] = tuple(each * group + head for each in places)
        count = info["total_num_rows"]
        if graph:  # so that a later plan of the graph may have another number
            count = reader.ints("total_num_rows", 1, at="total_num_rows_at")[0]
        visited = count * group
        most = max((_last(each, group) for each in items), default=-1) // group + 1
        floats = _partials(reader, most * problem.num_qo_heads, "v", "s")
    return _plan(reader, floats, items, merges, visited, stray)


def _last(item: Item, group: int) -> int:
    """Return the highest place of an item's partial results; -1 where it has none."""
    if item.partial is None or item.rows[0] == item.rows[1]:
        return -1
    return place_of(item, item.rows[1] - 1, group)


def place_of(item: Item, row: int, group: int) -> int:
    """Return the place of a packed row's partial result, of an item that has them."""
    (token, head), (first, first_head) = divmod(row, group), divmod(item.rows[0], group)
    return (item.partial or 0) + (token - first) * item.stride + head - first_head


def _fa3(reader: Reader) -> Plan:
    problem, info = reader.problem, reader.info
    ends = reader.ints("work_indptr", problem.multiprocessors + 1)
    works = min(max(ends[-1], 0), MOST_WORKS)
    names = ("qo_tile_indices", "qo_indptr", "kv_indptr", "qo_len", "kv_len", "batch_indices")
    arrays = {name: reader.ints(name, works) for name in names}
    same = bool(info["same_schedule_for_all_heads"])
    heads = [ALL_HEADS] * works if same else reader.ints("head_indices", works)
    tile_rows = WIDE_TILE if problem.head_dim == 64 else TILE  # noqa: PLR2004
    items, stray = list[Item](), dict[int, str]()
    for work in _works(ends, works):
        request, tile = arrays["batch_indices"][work], arrays["qo_tile_indices"][work]
        if not 0 <= request < len(problem.kv_lens):
            stray[work] = f"work {work} is of request {request}"
            continue
        queries = arrays["qo_len"][work]
        rows = (tile * tile_rows, max(tile * tile_rows, min((tile + 1) * tile_rows, queries)))
        stated = {name: arrays[name][work] for name in ("qo_indptr", "kv_indptr", "qo_len")}
        keys = arrays["kv_len"][work]
        stated["kv_len"] = keys
        items.append(Item(work, request, heads[work], rows, (0, keys), stated=stated))
    return _plan(reader, [], items, {}, -1, stray)


MOST_WORKS = 1 << 17
"""Most works that are followed; a wrong plan may name billions."""


def _works(ends: Sequence[int], works: int) -> list[int]:
    """Return the works in the order of the blocks that do them, as often as they are done."""
    return [work for begin, end in pairwise(ends) for work in range(max(begin, 0), min(end, works))]


def _mla(reader: Reader) -> Plan:
    problem, info = reader.problem, reader.info
    heads, clusters = problem.num_qo_heads, min(info["num_blks_y"], MOST_BLOCKS)
    tile = info["num_blks_x"] * MLA_TILE
    ends = reader.ints("work_indptr", clusters + 1)
    works = min(max(ends[-1], 0), MOST_WORKS)
    names = (
        *("q_indptr", "kv_indptr", "partial_indptr", "q_len", "kv_len"),
        *("q_start", "kv_start", "kv_end"),
    )
    arrays = {name: reader.ints(name, works) for name in names}
    # A request without queries has no work, so that each start is of one request.
    owners = {
        start: request
        for request, start in enumerate(problem.query_starts[:-1])
        if problem.query_lens[request]
    }
    items, stray = list[Item](), dict[int, str]()
    for work in _works(ends, works):
        request = owners.get(arrays["q_indptr"][work], -1)
        if request < 0:
            stray[work] = f"work {work} begins at query row {arrays['q_indptr'][work]}"
            continue
        first = arrays["q_start"][work]
        rows = (first, max(first, min(first + tile, arrays["q_len"][work] * heads)))
        place = arrays["partial_indptr"][work]
        stated = {
            "qo_indptr": arrays["q_indptr"][work],
            "kv_indptr": arrays["kv_indptr"][work],
            "qo_len": arrays["q_len"][work],
            "kv_len": arrays["kv_len"][work],
        }
        span = (arrays["kv_start"][work], arrays["kv_end"][work])
        partial = None if place == -1 else place
        items.append(Item(work, request, ALL_HEADS, rows, span, partial, heads, stated))
    blocks = info["num_blks_x"] * clusters
    merge = {
        name: reader.ints(f"merge_{name}", blocks)
        for name in ("start", "end", "partial_start", "partial_end", "stride")
    }
    merges: dict[int, tuple[int, ...]] = {}
    for block in range(blocks):
        start, end = merge["start"][block], merge["end"][block]
        for local in range(min(max(0, end - start), MOST_MERGED)):
            places = range(
                merge["partial_start"][block] + local,
                merge["partial_end"][block],
                max(merge["stride"][block], 1),
            )
            merges[start + local] = (*merges.get(start + local, ()), *places[:MOST_MERGED])
    most = max((_last(each, heads) for each in items), default=-1) + 1
    floats = _partials(reader, most, "partial_o", "partial_lse")
    return _plan(reader, floats, items, merges, -1, stray)


def _partials(reader: Reader, rows: int, values: str, sums: str) -> list[Extent]:
    """Return the parts of the workspace of floats that partial results of these rows use."""
    v, s = reader.info[values], reader.info[sums]
    wide = rows * reader.problem.head_dim * PARTIAL
    return [Extent(values, v, v + wide), Extent(sums, s, s + rows * SUM)]


def _plan(
    reader: Reader,
    floats: Sequence[Extent],
    items: Sequence[Item],
    merges: Mapping[int, tuple[int, ...]],
    merged_rows: int,
    stray: Mapping[int, str],
) -> Plan:
    used = tuple(reader.used.values())
    return Plan(used, tuple(floats), tuple(items), merges, merged_rows, stray)


READERS: Mapping[str, Callable[[Reader], Plan]] = {
    DECODE: _decode, FA2: _fa2, FA3: _fa3, MLA: _mla,
}  # fmt: skip
