"""The problem of slot mapping: the batches of an engine that keeps its block table and buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import BaseProblem, check_at_least, check_lengths, refuse
from .field_types import check_types

LARGEST_FIRST_PAGE = 2**30
"""Largest ``first_page``: page ids are int32."""


@dataclass(frozen=True)
class SlotsProblem(BaseProblem):
    """Several calls of map_slots in a row, into one buffer.

    Attributes:
        steps: a (query_lens, seq_lens) pair a call; new tokens are a request's last keys. A request
            of no keys is one of a CUDA graph's padding, which has no row of the block table.
        page_size: tokens a page of one rank.
        world: ranks of the context-parallel group.
        rank: the rank whose slots are asked for.
        interleave: consecutive tokens on one rank; it divides ``page_size``.
        spare_rows: rows of the block table that no request of a batch has, among the others.
        spare_columns: garbage entries at the end of each row.
        spare_slots: entries of the buffer behind the tokens of the largest batch.
        first_page: the least page id; with large ones slots do not fit into int32.
        seed: the seed of rows, page ids and garbage.
    """

    kind: ClassVar[str] = "slots"
    operation: ClassVar[str] = "map_slots"

    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((1,), (1,)),)
    page_size: int = 1
    world: int = 1
    rank: int = 0
    interleave: int = 1
    spare_rows: int = 0
    spare_columns: int = 0
    spare_slots: int = 0
    first_page: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        least = dict.fromkeys(("page_size", "world", "interleave"), 1)
        counts = ("rank", "spare_rows", "spare_columns", "spare_slots", "first_page", "seed")
        check_at_least(self, [*least.items(), *((name, 0) for name in counts)])
        if self.rank >= self.world:
            refuse("rank", self.rank, f"less than world = {self.world}")
        if self.page_size % self.interleave:
            refuse("interleave", self.interleave, f"a divisor of page_size = {self.page_size}")
        if self.first_page > LARGEST_FIRST_PAGE:
            refuse("first_page", self.first_page, f"at most {LARGEST_FIRST_PAGE}")
        check_steps(self.steps)
        for position, step in enumerate(self.steps):
            name = f"steps[{position}]"
            for tokens, keys in zip(*step, strict=True):
                if keys and tokens > keys:
                    refuse(name, step, "query_lens of at most as many tokens as a request has keys")

    @property
    def columns(self) -> int:
        """Entries of each row of the block table."""
        keys = max((s for _, seq_lens in self.steps for s in seq_lens), default=0)
        return -(-keys // (self.page_size * self.world)) + self.spare_columns

    @property
    def num_slots(self) -> int:
        """Entries of the buffer."""
        return max(sum(query_lens) for query_lens, _ in self.steps) + self.spare_slots

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Tokens of all steps."""
        return sum(sum(query_lens) for query_lens, _ in self.steps) + 1


def check_steps(steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> None:
    """Refuse a sequence of batches that is empty, or has one that is no pair of lengths."""
    if not steps:
        refuse("steps", steps, "at least one batch")
    for position, step in enumerate(steps):
        name = f"steps[{position}]"
        if len(step) != 2 or len(step[0]) != len(step[1]):  # noqa: PLR2004
            refuse(name, step, "a pair of equally many lengths")
        for lengths in step:
            check_lengths(name, lengths)
