"""Faults in plans: copies of a right plan with one thing wrong in each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...impl.protocol import Implementation
from ...impl.targets.target import Target
from ...reference import PlanProblem
from ...reference.problems.plan import DECODE, FA2, FA3, MLA
from ...reference.tensors.plan import FLOAT_BYTES, INT_BYTES, LAYOUTS, PlanInputs
from ...reference.tensors.planner import plan
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MANY_MULTIPROCESSORS = 201
"""Multiprocessors that no drawn chip has, and that a law asks for."""


class Copy:
    """A right plan, to be changed.

    Attributes:
        used: whether another batch was planned into the buffers before.
    """

    def __init__(self, inputs: PlanInputs) -> None:
        self.call, self.workspace = inputs.call, inputs.workspace
        self.used = bool((self.workspace[:4] != self.call.garbage).any())
        vector = plan(inputs).tolist()
        self.info: dict[str, int] = dict(zip(LAYOUTS[self.call.family], vector, strict=True))

    @property
    def vector(self) -> torch.Tensor:
        """The plan's vector, as it is now."""
        return torch.tensor(list(self.info.values()), device=self.workspace.device)

    def _place(self, name: str, index: int) -> slice:
        start = self.info[name] + 4 * index
        return slice(start, start + 4)

    def get(self, name: str, index: int = 0) -> int:
        """Return an index of an array."""
        return int(self.workspace[self._place(name, index)].clone().view(torch.int32))

    def put(self, name: str, value: int, index: int = 0) -> None:
        """Change an index of an array; nothing where it has no such index."""
        if index < 0:
            return
        data = torch.tensor([value], dtype=torch.int32).view(torch.uint8)
        self.workspace[self._place(name, index)] = data

    @property
    def valid(self) -> int:
        """The number of blocks that have work."""
        blocks = self.info["padded_batch_size"]
        if not (self.info["graph"] and self.info["split_kv"]):
            return blocks
        start = self.info["block_valid_mask"]
        return int((self.workspace[start : start + blocks] == 1).sum())

    @property
    def split(self) -> int:
        """The first block that has a part of the block's before it; 0 where keys are not split."""
        if not self.info["split_kv"]:
            return 0
        tiles = range(1, self.valid)
        return next((each for each in tiles if self.get("kv_tile_indices", each) > 0), 0)

    @property
    def works(self) -> int:
        """The number of works of FA3 and MLA."""
        of_fa3 = self.call.family == FA3
        return self.get("work_indptr", self.call.multiprocessors if of_fa3 else self.clusters)

    @property
    def clusters(self) -> int:
        """The number of clusters of MLA."""
        return self.info["num_blks_y"]

    def work_of(self, name: str, holds: Callable[[int], bool]) -> int:
        """Return the first work whose number in an array is so; -1 where none is."""
        return next((each for each in range(self.works) if holds(self.get(name, each))), -1)


Change = Callable[[Copy], bool]
"""Changes a plan; False where it has nothing to be changed, and is left as it was."""


def fault(
    family: str, law: str = "", *, honest: bool = False
) -> Callable[[Change], Implementation]:
    """Make an implementation of what changes the plans of a family, and enter it."""

    def supports(problem: PlanProblem, target: Target) -> bool | str:
        del target
        return problem.family == family or f"plans {family} only"

    def enter(change: Change) -> Implementation:
        def planned(inputs: PlanInputs) -> torch.Tensor:
            copy = Copy(inputs)
            right, integers = copy.vector, inputs.workspace.clone()
            if change(copy):
                return copy.vector
            inputs.workspace.copy_(integers)
            return right

        planned.__name__, planned.__doc__ = change.__name__, change.__doc__
        if honest:
            return seeded(CONTROLS, "plan", control="honest", supports=supports)(planned)
        return seeded(BUGS, "plan", law, supports=supports)(planned)

    return enter


@fault(DECODE, "plan_keys")
def part_of_keys_twice(copy: Copy) -> bool:
    """Have a block compute the part of the block before it."""
    block = copy.split
    copy.put("kv_tile_indices", copy.get("kv_tile_indices", block) - 1, block)
    return block > 0


@fault(DECODE, "plan_keys")
def parts_half_as_long(copy: Copy) -> bool:
    """Make every part half as long as the plan counted."""
    copy.put("kv_chunk_size", copy.get("kv_chunk_size") // 2)
    return copy.split > 0


@fault(DECODE, "plan_rows")
def last_block_not_launched(copy: Copy) -> bool:
    """Launch one block fewer than there are requests."""
    copy.info["padded_batch_size"] -= 1
    return not copy.info["split_kv"]


@fault(DECODE, "plan_workspace")
def indices_between_words(copy: Copy) -> bool:
    """Lay an array of indices at an address that no multiprocessor loads them from."""
    start, size = copy.info["request_indices"], 4 * copy.info["padded_batch_size"]
    place = INT_BYTES - size - 3
    copy.workspace[place : place + size] = copy.workspace[start : start + size].clone()
    copy.info["request_indices"] = place
    return True


@fault(DECODE, "plan_padding")
def block_of_padding_is_valid(copy: Copy) -> bool:
    """Let the first block work that only the graph has."""
    if not (copy.info["graph"] and copy.valid < copy.info["padded_batch_size"]):
        return False
    copy.workspace[copy.info["block_valid_mask"] + copy.valid] = 1
    return bool(copy.info["split_kv"])


@fault(DECODE, "plan_merging")
def first_request_merges_a_part_more(copy: Copy) -> bool:
    """Merge the second request's first part into the first request."""
    copy.put("o_indptr", copy.get("o_indptr", 1) + 1, 1)
    return bool(copy.info["split_kv"]) and len(copy.call.kv_lens) > 1


@fault(DECODE, "plan_replays")
def as_many_blocks_as_the_batch_needs(copy: Copy) -> bool:
    """Launch as many blocks as this batch needs, in a graph that is launched with others."""
    valid = copy.valid
    copy.info["padded_batch_size"] = valid
    return bool(copy.info["graph"] and copy.info["split_kv"])


@fault(DECODE, "plan_chips")
def part_lost_on_a_large_chip(copy: Copy) -> bool:
    """Lose the last part where a chip has more multiprocessors than any had when it was written."""
    if copy.call.multiprocessors < MANY_MULTIPROCESSORS:
        return True
    copy.info["padded_batch_size"] -= 1
    return True


@fault(FA2, "plan_rows")
def last_tile_of_rows_lost(copy: Copy) -> bool:
    """Have the last block compute the tile before its own."""
    last = copy.valid - 1
    tile = copy.get("qo_tile_indices", last) if last >= 0 and not copy.info["split_kv"] else 0
    if not tile or copy.info["graph"]:
        return False
    copy.put("qo_tile_indices", tile - 1, last)
    return True


@fault(FA2, "plan_keys")
def part_counted_in_pages(copy: Copy) -> bool:
    """Leave the size of a part in pages, where the kernel reads keys."""
    copy.put("kv_chunk_size", copy.get("kv_chunk_size") // copy.call.page_size)
    return copy.split > 0 and copy.call.page_size > 1


@fault(FA2, "plan_merging")
def row_merges_one_part_fewer(copy: Copy) -> bool:
    """End the first row's parts one too early, and begin the second's there."""
    if not copy.split:
        return False
    copy.put("merge_indptr", copy.get("merge_indptr", 1) - 1, 1)
    return True


@fault(FA2, "plan_merging")
def parts_of_the_request_before(copy: Copy) -> bool:
    """Write the parts of the last request to where those of the one before begin."""
    last = len(copy.call.kv_lens) - 1
    if last < 1 or not copy.split or 0 in copy.call.query_lens:
        return False
    copy.put("o_indptr", copy.get("o_indptr", last - 1), last)
    return True


@fault(FA2, "plan_padding")
def rows_of_the_graph_are_merged(copy: Copy) -> bool:
    """Merge as many rows as the graph may have, and not as this batch has."""
    if not (copy.info["graph"] and copy.info["split_kv"] and copy.call.spare_rows):
        return False
    copy.put("total_num_rows_at", copy.call.graph_rows)
    return True


@fault(FA2, "plan_padding")
def graph_without_a_mask(copy: Copy) -> bool:
    """Have no mask of valid blocks."""
    more = copy.info["padded_batch_size"] > copy.valid
    copy.info["block_valid_mask"] = 0
    return bool(copy.info["graph"]) and more


@fault(FA2, "plan_workspace")
def partial_results_behind_the_workspace(copy: Copy) -> bool:
    """Begin the partial results where the workspace ends."""
    copy.info["v"] = FLOAT_BYTES
    return copy.split > 0


@fault(FA2, "plan_workspace")
def sums_in_the_partial_results(copy: Copy) -> bool:
    """Keep sums of weights where the partial results lie."""
    copy.info["s"] = copy.info["v"]
    return copy.split > 0


@fault(FA2, "plan_leftovers")
def merging_of_the_batch_before(copy: Copy) -> bool:
    """Keep the rows' parts of the batch that was planned into the buffers before."""
    if copy.used and copy.info["split_kv"]:
        copy.put("merge_indptr", copy.get("merge_indptr", 1) + 1, 1)
    return True


@fault(FA3, "plan_rows")
def last_work_of_a_chip_lost(copy: Copy) -> bool:
    """End the works of the last multiprocessor one too early."""
    if copy.works < 1:
        return False
    for block in range(1, copy.call.multiprocessors + 1):
        copy.put("work_indptr", min(copy.get("work_indptr", block), copy.works - 1), block)
    return True


@fault(FA3, "plan_rows")
def work_of_the_first_head(copy: Copy) -> bool:
    """Have a work of another head compute the first."""
    work = copy.work_of("head_indices", lambda head: head > 0)
    copy.put("head_indices", 0, work)
    return work >= 0 and not copy.info["same_schedule_for_all_heads"]


@fault(FA3, "plan_description")
def keys_of_the_longest_request(copy: Copy) -> bool:
    """State for each work the number of keys of the longest request."""
    most = max(copy.call.kv_lens)
    work = copy.work_of("kv_len", lambda keys: keys < most)
    copy.put("kv_len", most, work)
    return work >= 0


@fault(FA3, "plan_description")
def pages_of_the_first_request(copy: Copy) -> bool:
    """State for a work of another request where the pages of the first begin."""
    work = copy.work_of("kv_indptr", lambda start: start > 0)
    copy.put("kv_indptr", 0, work)
    return work >= 0


@fault(FA3, "plan_workspace")
def two_arrays_in_one_place(copy: Copy) -> bool:
    """Read the indices of requests where those of heads lie."""
    copy.info["batch_indices"] = copy.info["head_indices"]
    return copy.works > 0 and not copy.info["same_schedule_for_all_heads"]


@fault(FA3, "plan_replays")
def arrays_as_long_as_the_batch_needs(copy: Copy) -> bool:
    """Place an array of a graph by what this batch needs."""
    copy.info["batch_indices"] += 4 * (sum(copy.call.kv_lens) % 64)
    return copy.call.graph


@fault(MLA, "plan_keys")
def last_key_of_a_part_lost(copy: Copy) -> bool:
    """End a part one key too early."""
    if copy.call.causal:
        return False
    work = copy.work_of("kv_end", lambda end: end > 0)
    copy.put("kv_end", copy.get("kv_end", max(work, 0)) - 1, work)
    return work >= 0


@fault(MLA, "plan_keys")
def part_begins_a_key_early(copy: Copy) -> bool:
    """Begin a part at the last key of the one before it."""
    work = copy.work_of("kv_start", lambda start: start > 0)
    copy.put("kv_start", copy.get("kv_start", max(work, 0)) - 1, work)
    return work >= 0 and not copy.call.causal


@fault(MLA, "plan_merging")
def parts_in_one_place(copy: Copy) -> bool:
    """Write a part to the place of the first."""
    work = copy.work_of("partial_indptr", lambda place: place > 0)
    copy.put("partial_indptr", 0, work)
    return work >= 0


@fault(MLA, "plan_merging")
def stride_of_a_whole_tile(copy: Copy) -> bool:
    """Look for the parts of a row a whole tile apart, where the tile has fewer rows."""
    tile = 64 * copy.info["num_blks_x"]
    if copy.work_of("partial_indptr", lambda place: place >= 0) < 0:
        return False
    short = 0 < copy.get("merge_stride") < tile
    copy.put("merge_stride", tile)
    return short


@fault(MLA, "plan_merging")
def last_part_not_merged(copy: Copy) -> bool:
    """End the merging of a row before its last part."""
    copy.put("merge_partial_end", copy.get("merge_partial_end") - copy.get("merge_stride"))
    return copy.work_of("partial_indptr", lambda place: place >= 0) >= 0


@fault(MLA, "plan_merging")
def part_written_as_the_result(copy: Copy) -> bool:
    """Write a part of a split row as if it were the result."""
    work = copy.work_of("partial_indptr", lambda place: place >= 0)
    copy.put("partial_indptr", -1, work)
    return work >= 0


@fault(MLA, "plan_leftovers")
def works_of_the_batch_before(copy: Copy) -> bool:
    """Keep a request's keys of the batch that was planned into the buffers before."""
    if copy.used and copy.works > 0:
        copy.put("kv_end", copy.get("kv_end") + 1)
    return True


@fault(MLA, "plan_replays")
def sums_behind_as_many_results_as_there_are(copy: Copy) -> bool:
    """Place the sums of a graph's parts by what this batch needs."""
    copy.info["partial_lse"] += 4 * (sum(copy.call.kv_lens) % 64)
    return copy.call.graph


@fault(FA3, honest=True)
def works_from_the_last_to_the_first(copy: Copy) -> bool:
    """Do the works of FA3 in another order."""
    names = ("qo_tile_indices", "qo_indptr", "kv_indptr", "qo_len", "kv_len", "head_indices")
    for name in (*names, "batch_indices"):
        values = [copy.get(name, work) for work in range(copy.works)]
        for work, value in enumerate(reversed(values)):
            copy.put(name, value, work)
    return True
