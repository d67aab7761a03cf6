"""The problem of planning: one batch, one family of kernels, one chip."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Final

from .base import MAX_SEQ_LEN, BaseProblem, check_at_least, check_lengths, check_one_of, refuse
from .field_types import check_types

DECODE, FA2, FA3, MLA = FAMILIES = ("decode", "fa2", "fa3", "mla")
"""Families of kernels that have a plan function of their own."""
LARGEST: Final = 1 << 20
"""Most tokens of a batch: a law follows each row."""
LEAST_KEYS: Final = 128
"""Keys of the shortest part of a request of decode, in whole pages."""
MOST: Final = 1024
"""Largest number of heads, channels, multiprocessors and the like."""


@dataclass(frozen=True)
class PlanProblem(BaseProblem):
    """One call of a plan function.

    Attributes:
        family: the family of kernels, of ``FAMILIES``.
        query_lens: query tokens of each request; a decode has one each.
        kv_lens: keys of each request.
        page_size: keys a page.
        num_kv_heads: KV heads; MLA has one.
        group_size: query heads a KV head.
        head_dim: head dim of the values.
        head_dim_qk: head dim of queries and keys; 0: that of the values. FA2 and FA3.
        kv_bytes: bytes of a number in the cache.
        causal: whether a query sees no later key.
        window_left: keys before its own that a query sees; -1: all. FA2 only.
        fixed_split: pages a part of a request's keys has; 0: as the plan chooses. FA2 only.
        split: whether keys may be split at all. FA2 only.
        graph: whether the plan is for a CUDA graph, which is launched again with other plans.
        spare_rows: query rows that the graph has above those of this batch.
        multiprocessors: those of the chip.
        blocks: blocks of the decode kernel that a multiprocessor holds.
        seed: the seed of what the workspaces hold before the first plan.
    """

    kind: ClassVar[str] = "plan"
    operation: ClassVar[str] = "plan"

    family: str = DECODE
    query_lens: tuple[int, ...] = (1,)
    kv_lens: tuple[int, ...] = (1,)
    page_size: int = 1
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 128
    head_dim_qk: int = 0
    kv_bytes: int = 2
    causal: bool = False
    window_left: int = -1
    fixed_split: int = 0
    split: bool = True
    graph: bool = False
    spare_rows: int = 0
    multiprocessors: int = 132
    blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("family", self.family, FAMILIES)
        sizes = ("page_size", "num_kv_heads", "group_size", "head_dim", "kv_bytes", "blocks")
        counts = ("head_dim_qk", "fixed_split", "spare_rows", "seed")
        least = [*((name, 1) for name in (*sizes, "multiprocessors")), ("window_left", -1)]
        check_at_least(self, [*least, *((name, 0) for name in counts)])
        for name in (*sizes, "multiprocessors", "head_dim_qk"):
            if getattr(self, name) > MOST:
                refuse(name, getattr(self, name), f"at most {MOST}")
        check_lengths("query_lens", self.query_lens)
        check_lengths("kv_lens", self.kv_lens)
        if not 1 <= len(self.kv_lens) == len(self.query_lens):
            refuse("query_lens", self.query_lens, "one length or more, as many as kv_lens has")
        if sum(self.query_lens) + self.spare_rows > LARGEST or sum(self.kv_lens) > LARGEST:
            refuse("query_lens", self.query_lens, f"a batch of at most {LARGEST} tokens")
        if self.family == DECODE and set(self.query_lens) != {1}:
            refuse("query_lens", self.query_lens, "one token each, as a decode has")
        if self.family == MLA and self.num_kv_heads != 1:
            refuse("num_kv_heads", self.num_kv_heads, "1, as MLA has")

    @property
    def exact(self) -> bool:
        """Integers are always compared bitwise."""
        return True

    @property
    def work(self) -> int:
        """Packed rows of all requests, each of which a law follows."""
        return 1 + len(self.kv_lens) + self.query_starts[-1] * self.packed

    @property
    def garbage(self) -> int:
        """The byte of which the workspaces consist before: four of it are a negative index."""
        return 0x80 + (0x25 + self.seed) % 0x80

    @property
    def empty_requests(self) -> bool:
        """Whether a request has no keys."""
        return 0 in self.kv_lens

    @property
    def crowded(self) -> bool:
        """Whether parts of keys, of the least size for which there are blocks, leave too few.

        Too few blocks for requests without keys, that is: one for each is missing. Where there is
        no block more than there are requests, keys are not split.
        """
        slots = self.multiprocessors * self.blocks // self.num_kv_heads
        if len(self.kv_lens) * self.num_kv_heads >= self.multiprocessors * self.blocks:
            return False

        def parts(size: int) -> int:
            return sum(-(-pages // size) for pages in self.pages)

        least = max(LEAST_KEYS // self.page_size, 1)
        sizes = range(least, max(least, *self.pages))
        size = least + bisect_left(sizes, -slots, key=lambda size: -parts(size))
        return parts(size) + self.pages.count(0) > slots

    @property
    def crowded_on_a_larger_chip(self) -> bool:
        """Whether it is crowded where there are twice as many multiprocessors."""
        larger = min(2 * self.multiprocessors, MOST)
        return replace(self, multiprocessors=larger).crowded

    @property
    def beyond_window(self) -> bool:
        """Whether a request has keys behind a window and a tile of 16 rows."""
        return 0 <= self.window_left < max(self.kv_lens) - 16

    @property
    def spare_rows_fill_a_tile(self) -> bool:
        """Whether requests have at most 64 packed rows on average, and more with spare ones."""
        at_most = 64 * len(self.kv_lens) + len(self.kv_lens) - 1
        return self.query_starts[-1] * self.packed <= at_most < self.graph_rows * self.packed

    @property
    def query_tiles(self) -> int:
        """Tiles of 128 packed rows, the largest that a block of MLA has."""
        return sum(-(-rows * self.packed // 128) for rows in self.query_lens)

    @cached_property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-keys // self.page_size) for keys in self.kv_lens)

    @cached_property
    def query_starts(self) -> tuple[int, ...]:
        """First query row of each request, and the number of all."""
        return (0, *accumulate(self.query_lens))

    @cached_property
    def page_starts(self) -> tuple[int, ...]:
        """First page of each request, and the number of all."""
        return (0, *accumulate(self.pages))

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def packed(self) -> int:
        """Rows that a query token has in a tile: one a query head that shares a KV head."""
        return 1 if self.family == FA3 else self.group_size

    @property
    def graph_rows(self) -> int:
        """Query rows that the plan function is given: those of the graph, or else of the batch."""
        return self.query_starts[-1] + (self.spare_rows if self.graph else 0)

    @property
    def promised_rows(self) -> int:
        """Query rows that each request promises to have in every plan of the graph; 0: none.

        Only plans of FA2 take such a promise, in releases behind 0.6.13 (``uniform_q_len``). Of
        0.6.13, whose plans hold for any rows of requests, batches with the same ones are asked.
        """
        uniform = self.graph and not self.spare_rows and len(set(self.query_lens)) == 1
        return self.query_lens[0] if uniform and self.family == FA2 else 0

    def visible(self, request: int, first: int, last: int) -> tuple[int, int]:
        """Return the range of the keys that the packed rows from first to last see together."""
        keys, queries = self.kv_lens[request], self.query_lens[request]
        lowest, highest = first // self.packed, last // self.packed
        begin = 0
        if self.window_left >= 0:
            begin = max(0, keys - queries + lowest - self.window_left)
        end = keys - queries + highest + 1 if self.causal else keys
        return begin, max(begin, min(end, keys))

    def earlier(self) -> PlanProblem:
        """Return another batch that may have been planned before into the same buffers."""
        longer = self.longer(lambda keys: 2 * keys + 3)
        return replace(self, query_lens=self.query_lens[::-1], kv_lens=longer[::-1])

    def longer(self, length: Callable[[int], int]) -> tuple[int, ...]:
        """Return other numbers of keys, as long as requests may be."""
        most = min(MAX_SEQ_LEN, LARGEST // len(self.kv_lens))
        return tuple(min(length(keys), most) for keys in self.kv_lens)
