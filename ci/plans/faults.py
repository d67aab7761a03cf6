"""Seeded faults: copies of a release's plans with one thing wrong, which the laws must find."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from ...properties.space.hypothesis_settings import without_local_constants
from .answers import Answer, Planner
from .drawing import plan_problems
from .known import Known
from .laws import Case, broken
from .problems import DECODE, FA2, FA3, FLOAT_BYTES, MLA, PlanProblem
from .reading import LAYOUTS

PROBLEMS_A_FAULT = 120
"""Most problems that are drawn for a fault."""
MANY_MULTIPROCESSORS = 201
"""Multiprocessors that no drawn chip has, and that a law asks for."""


class Copy:
    """A copy of a plan, to be changed."""

    def __init__(self, problem: PlanProblem, answer: Answer, after: PlanProblem | None) -> None:
        self.problem, self.answer, self.after = problem, answer, after
        self.names = LAYOUTS[problem.kind]
        self.info = dict(zip(self.names, answer.info, strict=True))
        self.data = bytearray(answer.integers)

    def get(self, name: str, index: int = 0) -> int:
        """Return an index of an array."""
        found: int = struct.unpack_from("i", self.data, self.info[name] + 4 * index)[0]
        return found

    def put(self, name: str, value: int, index: int = 0) -> None:
        """Change an index of an array."""
        struct.pack_into("i", self.data, self.info[name] + 4 * index, value)

    @property
    def valid(self) -> int:
        """The number of blocks that have work."""
        blocks = self.info["padded_batch_size"]
        if not (self.info["graph"] and self.info["split_kv"]):
            return blocks
        start = self.info["block_valid_mask"]
        return self.data[start : start + blocks].count(1)

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
        of_fa3 = self.problem.kind == FA3
        blocks = self.problem.multiprocessors if of_fa3 else self.info["num_blks_y"]
        return self.get("work_indptr", blocks)

    def work_of(self, name: str, holds: Callable[[int], bool]) -> int:
        """Return the first work whose number in an array is so; -1 where none is."""
        return next((each for each in range(self.works) if holds(self.get(name, each))), -1)

    def done(self) -> Answer:
        """Return the changed plan."""
        info = tuple(self.info[name] for name in self.names)
        return replace(self.answer, info=info, integers=bytes(self.data))


Change = Callable[[Copy], bool]
"""Changes a copy; False where the plan has nothing to be changed."""


@dataclass(frozen=True)
class Fault:
    """A fault in the copies of the plans of one kind.

    Attributes:
        name: its name.
        kind: the family of kernels.
        law: the law that must find it.
        change: makes it.
    """

    name: str
    kind: str
    law: str
    change: Change


FAULTS: list[Fault] = []
"""All of them."""


def fault(kind: str, law: str) -> Callable[[Change], Change]:
    """Enter a function into ``FAULTS``, under its own name."""

    def enter(change: Change) -> Change:
        FAULTS.append(Fault(change.__name__.replace("_", "-"), kind, law, change))
        return change

    return enter


@fault(DECODE, "answers")
def an_error_instead_of_a_plan(copy: Copy) -> bool:
    """Raise an error that says nothing of what to do."""
    copy.answer = replace(copy.answer, error="Internal Error")
    return True


@fault(DECODE, "keys")
def part_of_keys_twice(copy: Copy) -> bool:
    """Have a block compute the part of the block before it."""
    block = copy.split
    copy.put("kv_tile_indices", copy.get("kv_tile_indices", block) - 1, block)
    return block > 0


@fault(DECODE, "keys")
def parts_half_as_long(copy: Copy) -> bool:
    """Make every part half as long as the plan counted."""
    copy.put("kv_chunk_size", copy.get("kv_chunk_size") // 2)
    return copy.split > 0


@fault(DECODE, "rows")
def last_block_not_launched(copy: Copy) -> bool:
    """Launch one block fewer than there are requests."""
    copy.info["padded_batch_size"] -= 1
    return not copy.info["split_kv"]


@fault(DECODE, "padding")
def block_of_padding_is_valid(copy: Copy) -> bool:
    """Let the first block work that only the graph has."""
    if not (copy.info["graph"] and copy.valid < copy.info["padded_batch_size"]):
        return False
    copy.data[copy.info["block_valid_mask"] + copy.valid] = 1
    return bool(copy.info["split_kv"])


@fault(DECODE, "merging")
def first_request_merges_a_part_more(copy: Copy) -> bool:
    """Merge the second request's first part into the first request."""
    copy.put("o_indptr", copy.get("o_indptr", 1) + 1, 1)
    return bool(copy.info["split_kv"]) and len(copy.problem.kv_lens) > 1


@fault(DECODE, "replays")
def as_many_blocks_as_the_batch_needs(copy: Copy) -> bool:
    """Launch as many blocks as this batch needs, in a graph that is launched with others."""
    valid = copy.valid
    copy.info["padded_batch_size"] = valid
    return bool(copy.info["graph"] and copy.info["split_kv"])


@fault(DECODE, "chips")
def part_lost_on_a_large_chip(copy: Copy) -> bool:
    """Lose the last part where a chip has more multiprocessors than any had when it was written."""
    if copy.problem.multiprocessors < MANY_MULTIPROCESSORS:
        return True
    copy.info["padded_batch_size"] -= 1
    return True


@fault(FA2, "rows")
def last_tile_of_rows_lost(copy: Copy) -> bool:
    """Have the last block compute the tile before its own."""
    last = copy.valid - 1
    tile = copy.get("qo_tile_indices", last) if last >= 0 and not copy.info["split_kv"] else 0
    if not tile or copy.info["graph"]:
        return False
    copy.put("qo_tile_indices", tile - 1, last)
    return True


@fault(FA2, "keys")
def part_counted_in_pages(copy: Copy) -> bool:
    """Leave the size of a part in pages, where the kernel reads keys."""
    copy.put("kv_chunk_size", copy.get("kv_chunk_size") // copy.problem.page_size)
    return copy.split > 0 and copy.problem.page_size > 1


@fault(FA2, "merging")
def row_merges_one_part_fewer(copy: Copy) -> bool:
    """End the first row's parts one too early, and begin the second's there."""
    if not copy.split:
        return False
    copy.put("merge_indptr", copy.get("merge_indptr", 1) - 1, 1)
    return True


@fault(FA2, "merging")
def parts_of_the_request_before(copy: Copy) -> bool:
    """Write the parts of the last request to where those of the one before begin."""
    last = len(copy.problem.kv_lens) - 1
    if last < 1 or not copy.split or 0 in copy.problem.query_lens:
        return False
    copy.put("o_indptr", copy.get("o_indptr", last - 1), last)
    return True


@fault(FA2, "padding")
def rows_of_the_graph_are_merged(copy: Copy) -> bool:
    """Merge as many rows as the graph may have, and not as this batch has."""
    if not (copy.info["graph"] and copy.info["split_kv"] and copy.problem.spare_rows):
        return False
    copy.put("total_num_rows_at", copy.problem.graph_rows)
    return True


@fault(FA2, "padding")
def graph_without_a_mask(copy: Copy) -> bool:
    """Have no mask of valid blocks."""
    more = copy.info["padded_batch_size"] > copy.valid
    copy.info["block_valid_mask"] = 0
    return bool(copy.info["graph"]) and more


@fault(FA2, "workspace")
def partial_results_behind_the_workspace(copy: Copy) -> bool:
    """Begin the partial results where the workspace ends."""
    copy.info["v"] = FLOAT_BYTES
    return copy.split > 0


@fault(FA2, "workspace")
def sums_in_the_partial_results(copy: Copy) -> bool:
    """Keep sums of weights where the partial results lie."""
    copy.info["s"] = copy.info["v"]
    return copy.split > 0


@fault(FA2, "leftovers")
def merging_of_the_batch_before(copy: Copy) -> bool:
    """Keep the rows' parts of the batch that was planned into the buffers before."""
    if copy.after is not None and copy.info["split_kv"]:
        copy.put("merge_indptr", copy.get("merge_indptr", 1) + 1, 1)
    return True


@fault(FA3, "rows")
def last_work_of_a_chip_lost(copy: Copy) -> bool:
    """End the works of the last multiprocessor one too early."""
    if copy.works < 1:
        return False
    for block in range(1, copy.problem.multiprocessors + 1):
        copy.put("work_indptr", min(copy.get("work_indptr", block), copy.works - 1), block)
    return True


@fault(FA3, "rows")
def work_of_the_first_head(copy: Copy) -> bool:
    """Have a work of another head compute the first."""
    work = copy.work_of("head_indices", lambda head: head > 0)
    copy.put("head_indices", 0, work)
    return work >= 0 and not copy.info["same_schedule_for_all_heads"]


@fault(FA3, "description")
def keys_of_the_longest_request(copy: Copy) -> bool:
    """State for each work the number of keys of the longest request."""
    most = max(copy.problem.kv_lens)
    work = copy.work_of("kv_len", lambda keys: keys < most)
    copy.put("kv_len", most, work)
    return work >= 0


@fault(FA3, "workspace")
def two_arrays_in_one_place(copy: Copy) -> bool:
    """Read the indices of requests where those of heads lie."""
    copy.info["batch_indices"] = copy.info["head_indices"]
    return copy.works > 0 and not copy.info["same_schedule_for_all_heads"]


@fault(FA3, "replays")
def arrays_as_long_as_the_batch_needs(copy: Copy) -> bool:
    """Place an array of a graph by what this batch needs."""
    copy.info["batch_indices"] += 4 * (sum(copy.problem.kv_lens) % 64)
    return copy.problem.graph


@fault(MLA, "keys")
def last_key_of_a_part_lost(copy: Copy) -> bool:
    """End a part one key too early."""
    if copy.problem.causal:
        return False
    work = copy.work_of("kv_end", lambda end: end > 0)
    copy.put("kv_end", copy.get("kv_end", max(work, 0)) - 1, work)
    return work >= 0


@fault(MLA, "keys")
def part_begins_a_key_early(copy: Copy) -> bool:
    """Begin a part at the last key of the one before it."""
    work = copy.work_of("kv_start", lambda start: start > 0)
    copy.put("kv_start", copy.get("kv_start", max(work, 0)) - 1, work)
    return work >= 0 and not copy.problem.causal


@fault(MLA, "merging")
def parts_in_one_place(copy: Copy) -> bool:
    """Write a part to the place of the first."""
    work = copy.work_of("partial_indptr", lambda place: place > 0)
    copy.put("partial_indptr", 0, work)
    return work >= 0


@fault(MLA, "merging")
def stride_of_a_whole_tile(copy: Copy) -> bool:
    """Look for the parts of a row a whole tile apart, where the tile has fewer rows."""
    tile = 64 * copy.info["num_blks_x"]
    if copy.work_of("partial_indptr", lambda place: place >= 0) < 0:
        return False
    short = 0 < copy.get("merge_stride") < tile
    copy.put("merge_stride", tile)
    return short


@fault(MLA, "merging")
def last_part_not_merged(copy: Copy) -> bool:
    """End the merging of a row before its last part."""
    copy.put("merge_partial_end", copy.get("merge_partial_end") - copy.get("merge_stride"))
    return copy.work_of("partial_indptr", lambda place: place >= 0) >= 0


@fault(MLA, "merging")
def part_written_as_the_result(copy: Copy) -> bool:
    """Write a part of a split row as if it were the result."""
    work = copy.work_of("partial_indptr", lambda place: place >= 0)
    copy.put("partial_indptr", -1, work)
    return work >= 0


@fault(MLA, "leftovers")
def works_of_the_batch_before(copy: Copy) -> bool:
    """Keep a request's keys of the batch that was planned into the buffers before."""
    if copy.after is not None and copy.works > 0:
        copy.put("kv_end", copy.get("kv_end") + 1)
    return True


@fault(MLA, "replays")
def sums_behind_as_many_results_as_there_are(copy: Copy) -> bool:
    """Place the sums of a graph's parts by what this batch needs."""
    copy.info["partial_lse"] += 4 * (sum(copy.problem.kv_lens) % 64)
    return copy.problem.graph


class FaultyPlanner:
    """A planner whose plans are changed, each in its copy."""

    def __init__(self, planner: Planner, seeded: Fault) -> None:
        self.planner, self.seeded = planner, seeded
        self.changed = False

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        """Return the changed plan; the plan as it is where nothing in it can be changed."""
        answer = self.planner.plan(problem, after=after)
        if not answer.info:
            return answer
        copy = Copy(problem, answer, after)
        if not self.seeded.change(copy):
            return answer
        self.changed = True
        return copy.done()


class FoundError(Exception):
    """A problem by which a fault is found."""


def found_after(
    planner: Planner,
    seeded: Fault,
    start: int = 0,
    known: Sequence[Known] = (),
) -> int:
    """Return how many changed plans a fault's own law needed to find it; 0 where it did not.

    Args:
        planner: the planner whose plans are changed.
        seeded: the fault.
        start: the seed of the drawn problems.
        known: known findings, whose effects are taken out of the plans before they are judged.
    """
    tried = 0
    entries = [each for each in known if each.kind == seeded.kind]
    mends = [mend for each in entries for mend in each.mends]
    left_out = [out for each in entries for out in each.leaves_out]

    def examine(problem: PlanProblem) -> None:
        nonlocal tried
        honest = Case(planner, problem)
        if not honest.answer.info or any(each.holds and each.holds(honest) for each in entries):
            return  # a law would speak of the release
        faulty = FaultyPlanner(planner, seeded)
        case = Case(faulty, problem, mends, left_out)
        if not faulty.changed:
            return
        tried += 1
        if seeded.law in broken(case):
            raise FoundError

    limits = settings(
        max_examples=PROBLEMS_A_FAULT,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    run = given(plan_problems(seeded.kind))(examine)
    try:
        with without_local_constants():
            limits(seed(start)(run))()
    except FoundError:
        return tried
    return 0


def score(planner: Planner, known: Sequence[Known] = ()) -> Mapping[str, int]:
    """Return, by the name of each fault, how many changed plans it took; 0 where it was missed."""
    return {each.name: found_after(planner, each, known=known) for each in FAULTS}
