"""Problems of context parallelism: one rank's share of a batch in virtual pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .attention import AttentionProblem
from .base import BaseProblem, check_at_least, refuse
from .field_types import check_types


@dataclass(frozen=True)
class ContextParallelProblem(BaseProblem):
    """One call of slice_context_parallel.

    Attributes:
        query_lens: query tokens of each request.
        seq_lens: keys of each request; as in an engine, its query tokens are among them.
        page_size: keys a page of one rank; a virtual page has ``world`` times as many.
        world: ranks of the group.
        rank: the rank whose keys are asked for.
        interleave: consecutive keys on one rank.
        page_order: order of the virtual pages in the cache, by hash; 0: ascending.
        seed: the seed of the values of keys, for the laws that attend to them.
    """

    kind: ClassVar[str] = "context_parallel"
    operation: ClassVar[str] = "slice_context_parallel"

    query_lens: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (1,)
    page_size: int = 1
    world: int = 2
    rank: int = 0
    interleave: int = 1
    page_order: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_at_least(self, (("page_size", 1), ("world", 1), ("rank", 0), ("interleave", 1)))
        if self.rank >= self.world:
            refuse("rank", self.rank, f"less than world = {self.world}")
        if self.page_size % self.interleave:
            refuse("interleave", self.interleave, f"a divisor of page_size = {self.page_size}")
        _ = self.whole  # checks the lengths
        for position, (t, s) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if t > s:
                refuse(f"query_lens[{position}]", t, f"at most seq_lens[{position}] = {s}")

    @property
    def whole(self) -> AttentionProblem:
        """Causal attention of the batch on one machine, whose pages are the virtual ones."""
        return AttentionProblem(
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
            page_size=self.page_size * self.world,
            page_order=self.page_order,
            causal=True,
            seed=self.seed,
        )

    @property
    def contexts(self) -> tuple[int, ...]:
        """Keys of each request that its queries see without a mask.

        All keys of a decode; of a prefill, those before its new tokens.
        """
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return tuple(s if t <= 1 else s - t for t, s in pairs)

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Work of attending to the whole batch, which the ranks divide among themselves."""
        return self.whole.work
