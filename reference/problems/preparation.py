"""The problem of preparing batches: an engine's batches, and the tensor that it builds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..attention.branches import ONE_BRANCH, Branches
from ..attention.drafts import LONGEST_MODEL, entry_counts
from ..attention.preparation import OUTPUTS, RESTS
from ..attention.splits import USUAL_SPLITS
from .base import BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types
from .slots import check_steps

KEYS_OF_WORK = 256
"""Keys that are as much work as a request."""
BRANCHED = ("draft_kv_indices", "draft_kv_indptr")
"""Outputs of branches that are drafted."""
LOOKAHEAD = {"next_slots": (1, 0), "query_slots": (1, 1)}
"""Keys behind a request's that have pages, and how many more for each drafted token, by output."""


@dataclass(frozen=True)
class BatchProblem(BaseProblem):
    """Several calls of prepare_batch in a row, into one buffer.

    Attributes:
        output: the tensor that is built, one of ``OUTPUTS``.
        steps: a (query_lens, seq_lens) pair a call; new tokens are a request's last keys.
        page_size: keys a page.
        rest: what becomes of the buffer behind the entries, one of ``RESTS``; a table alone has
            tails.
        window_left: keys before its own that a request's first new token sees; -1: all.
        world: ranks of a context-parallel group.
        rank: the rank whose keys are counted.
        interleave: consecutive keys on one rank.
        spare_rows: rows of the block table that no request of a batch has, among the others.
        spare_columns: garbage entries at the end of each row.
        spare_entries: entries of the buffer behind those of the largest batch, rows of a table.
        seed: the seed of rows, page ids, token ids and garbage.
        rejected: how many of each request's new tokens are rejected, a call; empty: none.
        drafts: tokens that are drafted next, of each request.
        is_shifted: whether a drafter is not given a request's first new token.
        max_model_len: keys that a request has at most.
        is_tree: whether new tokens are those of a tree by the seed, not of a chain.
        splits: query heads, key-value heads, most parts of a request's keys, and cores of a GPU.
        branches: branches that are drafted of each request, its last keys that each of them sees
            (0: all), and the first keys that it sees beside these.
    """

    kind: ClassVar[str] = "batch"
    operation: ClassVar[str] = "prepare_batch"
    later_fields: ClassVar[tuple[str, ...]] = (
        "rejected", "drafts", "is_shifted", "max_model_len", "is_tree", "splits",
        "branches",
    )  # fmt: skip

    output: str = "kv_indices"
    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((1,), (1,)),)
    page_size: int = 1
    rest: str = "kept"
    window_left: int = -1
    world: int = 1
    rank: int = 0
    interleave: int = 1
    spare_rows: int = 0
    spare_columns: int = 0
    spare_entries: int = 0
    seed: int = 0
    rejected: tuple[tuple[int, ...], ...] = ()
    drafts: int = 0
    is_shifted: bool = False
    max_model_len: int = LONGEST_MODEL
    is_tree: bool = False
    splits: tuple[int, ...] = tuple(USUAL_SPLITS)
    branches: tuple[int, ...] = tuple(ONE_BRANCH)

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("output", self.output, tuple(OUTPUTS))
        check_one_of("rest", self.rest, RESTS)
        least = {"page_size": 1, "world": 1, "interleave": 1, "window_left": -1, "max_model_len": 1}
        counts = ("rank", "spare_rows", "spare_columns", "spare_entries", "seed", "drafts")
        check_at_least(self, [*least.items(), *((name, 0) for name in counts)])
        if self.rank >= self.world:
            refuse("rank", self.rank, f"less than world = {self.world}")
        if self.rest == "zero_tails" and not OUTPUTS[self.output].is_table:
            refuse("rest", self.rest, "of a table: other outputs have no tails")
        check_steps(self.steps)
        for step in self.steps:
            if any(tokens > keys for tokens, keys in zip(*step, strict=True)):
                refuse("steps", step, "query_lens of at most as many tokens as a request has keys")
        _check_drafts(self)

    @property
    def columns(self) -> int:
        """Entries of each row of the block table."""
        keys = max((s for _, seq_lens in self.steps for s in seq_lens), default=0)
        return -(-(keys + self.lookahead) // self.page_size) + self.spare_columns

    @property
    def lookahead(self) -> int:
        """Keys behind each request's that its pages have room for."""
        if self.output in BRANCHED:
            count, *_ = self.branches
            worst = Branches(count).room(self.page_size - 1, self.drafts, self.page_size)
            return count * worst
        more, per_draft = LOOKAHEAD.get(self.output, (0, 0))
        return more + per_draft * self.drafts

    def rejected_in(self, step: int) -> tuple[int, ...]:
        """Return how many new tokens of each request of a batch are rejected."""
        return self.rejected[step] if self.rejected else (0,) * len(self.steps[step][0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the buffer, which has room for each of the batches."""
        output = OUTPUTS[self.output]
        if output.is_table:
            longest = max((t for news, _ in self.steps for t in news), default=0)
            width = self.columns if output.size == "pages" else longest + self.spare_columns
            return max(len(s) for _, s in self.steps) + self.spare_entries, width
        entries = max(self._entries(step) for step in range(len(self.steps)))
        return (len(output.first) + entries + self.spare_entries,)

    def _entries(self, step: int) -> int:
        """Return how many entries the requests of a batch have."""
        size, (query_lens, seq_lens) = OUTPUTS[self.output].size, self.steps[step]
        if size in {"pages", "keys", "requests"}:
            pages = sum(-(-keys // self.page_size) for keys in seq_lens)
            return {"keys": sum(seq_lens), "pages": pages, "requests": len(seq_lens)}[size]
        requests = zip(query_lens, self.rejected_in(step), seq_lens, strict=True)
        if size in {"branches", "seen"}:
            branches, kept = Branches(*self.branches), [keys - out for _, out, keys in requests]
            seen = sum(len(branches.seen(keys)) + self.drafts for keys in kept)
            return branches.topk * (seen if size == "seen" else len(kept))
        shift = self.is_shifted
        return sum(entry_counts(*each, self.drafts, shift=shift)[size] for each in requests)

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Requests and blocks of keys of all steps: engines' kernels take a block at once."""
        return 1 + sum(1 + s // KEYS_OF_WORK for _, seq_lens in self.steps for s in seq_lens)


def _check_drafts(problem: BatchProblem) -> None:
    """Refuse what became of drafts, or parts of keys, that no call can have."""
    if len(problem.splits) != len(USUAL_SPLITS) or min(problem.splits) < 1:
        refuse("splits", problem.splits, "four numbers of at least 1")
    if problem.splits[0] % problem.splits[1]:
        refuse("splits", problem.splits, "of query heads that key-value heads divide")
    if (
        len(problem.branches) != len(ONE_BRANCH)
        or min(problem.branches[0] - 1, *problem.branches) < 0
    ):
        refuse("branches", problem.branches, "a number from 1 on and two from 0 on")
    has_no_key = any(not keys for _, seq_lens in problem.steps for keys in seq_lens)
    if problem.output == "num_kv_splits" and has_no_key:
        refuse("steps", problem.steps, "requests with keys, where these are divided")
    news = [query_lens for query_lens, _ in problem.steps]
    if problem.rejected and [len(each) for each in problem.rejected] != [
        len(each) for each in news
    ]:
        refuse("rejected", problem.rejected, "a number for each request of each batch")
    for of_step, tokens in zip(problem.rejected, news, strict=False):
        if any(not 0 <= out <= new for out, new in zip(of_step, tokens, strict=True)):
            refuse("rejected", of_step, "at most as many as a request has new tokens")
