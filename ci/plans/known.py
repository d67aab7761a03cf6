"""What is known of released plan functions: each read in the source, with its smallest problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .problems import DECODE, FA2, MLA, PlanProblem

TILES_OF_MLA = 16384
"""Works for which an array of MLA's plan has room (`max_total_num_works`)."""


@dataclass(frozen=True)
class Known:
    """A finding that is settled.

    Attributes:
        id: its name.
        laws: the laws that it breaks.
        releases: the releases that were asked and have it.
        kind: the family of kernels.
        where: whether a problem may show it.
        reason: what is wrong, in the source.
        smallest: a smallest problem that shows it.
    """

    id: str
    laws: tuple[str, ...]
    releases: SpecifierSet
    where: Callable[[PlanProblem], bool]
    reason: str
    smallest: PlanProblem

    @property
    def kind(self) -> str:
        """The family of kernels."""
        return self.smallest.kind


def explanation(
    known: Sequence[Known], version: str, problem: PlanProblem, law: str
) -> Known | None:
    """Return the known finding that explains why a release breaks a law on a problem."""
    release = Version(version)
    return next(
        (
            each
            for each in known
            if each.kind == problem.kind
            and law in each.laws
            and each.releases.contains(release, prereleases=True)
            and each.where(problem)
        ),
        None,
    )


def _tiles(problem: PlanProblem) -> int:
    """Return the least works of an MLA plan, in tiles of two blocks."""
    return sum(-(-queries * problem.num_qo_heads // 128) for queries in problem.query_lens)


ASKED = SpecifierSet(">=0.6.13,<=0.7.2.post1")
"""The releases between the two that were asked, and these."""
KNOWN: tuple[Known, ...] = (
    Known(
        "decode-graph-empty-requests",
        ("rows", "keys", "merging", "padding", "leftovers", "chips", "replays"),
        ASKED,
        lambda problem: problem.graph and 0 in problem.kv_lens,
        "The search for a part's size (PartitionPagedKVCacheBinarySearchMinNumPagePerBatch) counts "
        "no part of a request without pages, and the plan makes one of it. The plan then has more "
        "parts than the graph has blocks: the last requests are not computed, and the indices "
        "behind the array's end are overwritten by the next array.",
        PlanProblem(
            DECODE, (1, 1), (129, 0), num_kv_heads=8, graph=True, causal=False, multiprocessors=17
        ),
    ),
    Known(
        "fa2-window-not-causal",
        ("keys",),
        ASKED,
        lambda problem: problem.window_left >= 0 and not problem.causal,
        "PrefillSplitQOKVIndptr counts window_left + cta_tile_q keys a tile, which is what a "
        "causal mask leaves of a window. Without one a row sees all later keys too, and split keys "
        "behind that count have no part. In the ledger: flashinfer-prefill-fa2-window-not-causal.",
        PlanProblem(FA2, (260,), (257,), causal=False, window_left=1, multiprocessors=16),
    ),
    Known(
        "fa2-graph-unsplit-padding",
        ("padding", "leftovers", "rows", "keys", "chips"),
        SpecifierSet("==0.6.13"),
        lambda problem: problem.graph and (not problem.split or problem.fixed_split > 0),
        "PrefillPlan makes the mask of valid blocks only where keys are split. A graph has more "
        "blocks than the batch has tiles, and without a mask they compute whatever tile the "
        "workspace held before. 0.7.2.post1 makes the mask for every graph.",
        PlanProblem(FA2, graph=True, split=False),
    ),
    Known(
        "mla-more-works-than-room",
        ("workspace", "rows", "keys", "description", "padding", "merging", "leftovers", "chips"),
        ASKED,
        lambda problem: _tiles(problem) > TILES_OF_MLA,
        "MLAPlan reserves max_total_num_works = 16384 indices an array and copies as many works as "
        "there are, without a check: each array runs into the next.",
        PlanProblem(MLA, (16385,), (16385,), page_size=64, group_size=128, head_dim=512),
    ),
)
"""All of them."""
