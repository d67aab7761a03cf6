"""The problem of preparing batches: an engine's batches, and the tensor that it builds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..attention.preparation import OUTPUTS, RESTS
from .base import BaseProblem, check_at_least, check_one_of, refuse
from .field_types import check_types
from .slots import check_steps

KEYS_OF_WORK = 256
"""Keys that are as much work as a request."""


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
        seed: the seed of rows, page ids and garbage.
    """

    kind: ClassVar[str] = "batch"
    operation: ClassVar[str] = "prepare_batch"

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

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("output", self.output, tuple(OUTPUTS))
        check_one_of("rest", self.rest, RESTS)
        least = {"page_size": 1, "world": 1, "interleave": 1, "window_left": -1}
        counts = ("rank", "spare_rows", "spare_columns", "spare_entries", "seed")
        check_at_least(self, [*least.items(), *((name, 0) for name in counts)])
        if self.rank >= self.world:
            refuse("rank", self.rank, f"less than world = {self.world}")
        if self.rest == "zero_tails" and not OUTPUTS[self.output].is_table:
            refuse("rest", self.rest, "of a table: other outputs have no tails")
        check_steps(self.steps)
        for step in self.steps:
            if any(tokens > keys for tokens, keys in zip(*step, strict=True)):
                refuse("steps", step, "query_lens of at most as many tokens as a request has keys")

    @property
    def columns(self) -> int:
        """Entries of each row of the block table."""
        keys = max((s for _, seq_lens in self.steps for s in seq_lens), default=0)
        return -(-keys // self.page_size) + self.spare_columns

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the buffer, which has room for each of the batches."""
        output = OUTPUTS[self.output]
        if output.is_table:
            return max(len(s) for _, s in self.steps) + self.spare_entries, self.columns
        entries = max(self._entries(*step)[output.size] for step in self.steps)
        return (len(output.first) + entries + self.spare_entries,)

    def _entries(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> dict[str, int]:
        pages = sum(-(-keys // self.page_size) for keys in seq_lens)
        sums = {"tokens": sum(query_lens), "keys": sum(seq_lens), "pages": pages}
        return {**sums, "requests": len(seq_lens)}

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Requests and blocks of keys of all steps: engines' kernels take a block at once."""
        return 1 + sum(1 + s // KEYS_OF_WORK for _, seq_lens in self.steps for s in seq_lens)
