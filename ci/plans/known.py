"""What is known of released plan functions: each read in the source, with its smallest problem.

An entry explains a plan that has its very effect, and not any plan of a problem like it. Where the
effect can be taken out of the plan, what remains is judged by all laws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .answers import Answer
from .laws import CHIPS_LAW, Case, LeaveOut, Mend, later_batches
from .problems import DECODE, FA2, MLA, PlanProblem
from .reading import ALL_HEADS, LAYOUTS, MLA_TILE, Item, Plan, Reader

MOST_WORKS_OF_MLA = 16384
"""Works for which an array of MLA's plan has room (`max_total_num_works`)."""


@dataclass(frozen=True)
class Known:
    """A finding that is settled.

    Attributes:
        id: its name.
        laws: the laws that it breaks.
        releases: the releases that were asked and have it.
        reason: what is wrong, in the source.
        smallest: a smallest problem that shows it.
        mends: takes its effect out of a plan, of which something is left then.
        leaves_out: whether it keeps a graph of the first problem from the second.
        holds: whether a plan has the effect, where nothing is left of such a plan.
    """

    id: str
    laws: tuple[str, ...]
    releases: SpecifierSet
    reason: str
    smallest: PlanProblem
    mends: tuple[Mend, ...] = ()
    leaves_out: tuple[LeaveOut, ...] = ()
    holds: Callable[[Case], bool] | None = None

    @property
    def kind(self) -> str:
        """The family of kernels."""
        return self.smallest.kind

    def in_release(self, version: str) -> bool:
        """Whether a release has it."""
        return self.releases.contains(Version(version), prereleases=True)

    def explains(self, case: Case, law: str) -> bool:
        """Whether it is why a plan breaks a law."""
        if case.problem.kind != self.kind or law not in self.laws:
            return False
        judged = case.on_a_larger_chip if law == CHIPS_LAW else case
        return bool(judged.answer.info) and self.affects(judged)

    def affects(self, case: Case) -> bool:
        """Whether a plan of its kind has its effect."""
        if self.holds is not None and self.holds(case):
            return True
        problem, plan = case.problem, case.plan
        if any(mend(problem, case.answer, plan) is not plan for mend in self.mends):
            return True
        later = later_batches(problem) if problem.graph else ()
        return any(out(problem, each) for out in self.leaves_out for each in later)


def explanation(known: Sequence[Known], version: str, case: Case, law: str) -> Known | None:
    """Return the known finding that explains why a release's plan breaks a law."""
    found = (each for each in known if each.in_release(version) and each.explains(case, law))
    return next(found, None)


def _vector(problem: PlanProblem, answer: Answer) -> dict[str, int]:
    return dict(zip(LAYOUTS[problem.kind], answer.info, strict=True))


def _with_lost_parts(problem: PlanProblem, answer: Answer, plan: Plan) -> Plan:
    """Add the parts of a decode for which its graph has no blocks, as far as that explains them.

    That is so if the parts fit without those of requests that have no pages.
    """
    info = _vector(problem, answer)
    if not (info["graph"] and info["split_kv"]):
        return plan
    size = Reader(problem, answer).ints("kv_chunk_size", 1)[0] // problem.page_size
    blocks = info["padded_batch_size"]
    if size < 1 or sum(-(-pages // size) for pages in problem.pages) > blocks:
        return plan
    lost = [item for item in _parts(problem, size) if item.block >= blocks]
    return replace(plan, items=(*plan.items, *lost)) if lost else plan


def _parts(problem: PlanProblem, size: int) -> Iterator[Item]:
    """Yield the work of a split decode in parts of a size in pages."""
    block, group, chunk = 0, problem.group_size, size * problem.page_size
    for request, keys in enumerate(problem.kv_lens):
        for part in range(max(1, -(-problem.pages[request] // size))):
            span = (part * chunk, min((part + 1) * chunk, keys))
            yield Item(block, request, ALL_HEADS, (0, group), span, block * group)
            block += 1


def _with_later_keys(problem: PlanProblem, answer: Answer, plan: Plan) -> Plan:
    """Let the last part of a tile of rows have the keys behind those that a causal tile sees.

    Its part must end where the plan counts the keys of a tile to end.
    """
    info = _vector(problem, answer)
    if problem.causal or problem.window_left < 0 or not info["split_kv"]:
        return plan
    last: dict[tuple[int, int], Item] = {}
    for item in plan.items:
        tile = item.request, item.rows[0]
        if tile not in last or item.keys[1] > last[tile].keys[1]:
            last[tile] = item
    longer: dict[int, Item] = {}
    for item in last.values():
        keys, queries = problem.kv_lens[item.request], problem.query_lens[item.request]
        first = item.rows[0] // problem.packed
        begin = max(0, keys - queries + first - problem.window_left)
        counted = begin + problem.window_left + info["cta_tile_q"]
        if counted <= item.keys[1] < keys:
            longer[item.block] = replace(item, keys=(item.keys[0], keys))
    return (
        replace(plan, items=tuple(longer.get(each.block, each) for each in plan.items))
        if longer
        else plan
    )


def _without_padding(problem: PlanProblem, answer: Answer, plan: Plan) -> Plan:
    """Leave out the blocks of a graph without a mask that are behind those of the batch."""
    info = _vector(problem, answer)
    if not info["graph"] or info["split_kv"] or info["block_valid_mask"]:
        return plan
    rows = (queries * problem.packed for queries in problem.query_lens)
    tiles = sum(-(-each // info["cta_tile_q"]) for each in rows)
    if info["padded_batch_size"] <= tiles:
        return plan
    items = tuple(each for each in plan.items if each.block < tiles)
    stray = {block: said for block, said in plan.stray.items() if block < tiles}
    return replace(plan, items=items, stray=stray)


def _more_works_than_room(case: Case) -> bool:
    reader = Reader(case.problem, case.answer)
    clusters = reader.info["num_blks_y"]
    return reader.ints("work_indptr", clusters + 1)[-1] > MOST_WORKS_OF_MLA


def _of_other_clusters(problem: PlanProblem, later: PlanProblem) -> bool:
    """Whether the clusters of MLA's blocks have another size for a later batch."""
    return _is_long(problem) != _is_long(later)


def _is_long(problem: PlanProblem) -> bool:
    """Whether MLA's plan makes clusters of two blocks: by the mean packed rows of a request."""
    mean = problem.query_starts[-1] * problem.num_qo_heads // len(problem.query_lens)
    return mean > MLA_TILE


ASKED = SpecifierSet(">=0.6.13,<=0.7.2.post1")
"""The releases between the two that were asked, and these."""
KNOWN: tuple[Known, ...] = (
    Known(
        "decode-graph-empty-requests",
        ("rows", "keys", "merging", "padding", "leftovers", CHIPS_LAW, "replays"),
        ASKED,
        "The search for a part's size (PartitionPagedKVCacheBinarySearchMinNumPagePerBatch) counts "
        "no part of a request without pages, and the plan makes one of it. The plan then has more "
        "parts than the graph has blocks: the last requests are not computed, and the indices "
        "behind the array's end are overwritten by the next array.",
        PlanProblem(
            DECODE, (1, 1), (129, 0), num_kv_heads=8, graph=True, causal=False, multiprocessors=17
        ),
        mends=(_with_lost_parts,),
    ),
    Known(
        "fa2-window-not-causal",
        ("keys", CHIPS_LAW),
        ASKED,
        "PrefillSplitQOKVIndptr counts window_left + cta_tile_q keys a tile, which is what a "
        "causal mask leaves of a window. Without one a row sees all later keys too, and split keys "
        "behind that count have no part. In the ledger: flashinfer-prefill-fa2-window-not-causal.",
        PlanProblem(FA2, (260,), (257,), causal=False, window_left=1, multiprocessors=16),
        mends=(_with_later_keys,),
    ),
    Known(
        "fa2-graph-unsplit-padding",
        ("padding", "leftovers", "rows", "keys", CHIPS_LAW),
        SpecifierSet("==0.6.13"),
        "PrefillPlan makes the mask of valid blocks only where keys are split. A graph has more "
        "blocks than the batch has tiles, and without a mask they compute whatever tile the "
        "workspace held before. 0.7.2.post1 makes the mask for every graph.",
        PlanProblem(FA2, graph=True, split=False),
        mends=(_without_padding,),
    ),
    Known(
        "mla-more-works-than-room",
        ("workspace", "rows", "keys", "description", "padding", "merging", "leftovers", CHIPS_LAW),
        ASKED,
        "MLAPlan reserves max_total_num_works = 16384 indices an array and copies as many works as "
        "there are, without a check: each array runs into the next.",
        PlanProblem(MLA, (16385,), (16385,), page_size=64, group_size=128, head_dim=512),
        holds=_more_works_than_room,
    ),
    Known(
        "mla-graph-other-clusters",
        ("replays",),
        ASKED,
        "MLAPlan makes clusters of two blocks where the mean request has more than 64 packed rows, "
        "and has no number of rows of the graph to go by, as FA2's has. A graph that is launched "
        "again with more or fewer rows keeps its grid, while the plan divides the work among "
        "another number of clusters. Where each request keeps its rows nothing changes.",
        PlanProblem(MLA, (1, 0), (1, 1), group_size=128, head_dim=512, graph=True, spare_rows=1),
        leaves_out=(_of_other_clusters,),
    ),
)
"""All of them."""
