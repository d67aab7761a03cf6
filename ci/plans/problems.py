"""Problems of planning: one batch, one kernel family, one chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec

from ..console.errors import UsageRefusedError

DECODE, FA2, FA3, MLA = KINDS = ("decode", "fa2", "fa3", "mla")
"""Families of kernels that have a plan function of their own."""
INT_BYTES, FLOAT_BYTES = 2 << 20, 1 << 30
"""Bytes of the workspace of a plan's integers, and of that of partial results."""
CHIPS: Mapping[str, int] = {
    "T4": 40, "L4": 58, "RTX 4090": 128, "A10": 72, "L40S": 142, "A100": 108, "H20": 78,
    "H100 PCIe": 114, "H100 SXM": 132, "B200": 148, "RTX PRO 6000": 188, "MIG slice": 16,
}  # fmt: skip
"""Multiprocessors of chips that serve models."""
LARGEST = 1 << 20
"""Most tokens of a batch: a law follows each row."""


@dataclass(frozen=True)
class PlanProblem:
    """One call of a plan function.

    Attributes:
        kind: the family of kernels, of ``KINDS``.
        query_lens, kv_lens: query tokens and keys of each request; a decode has one query each.
        page_size: keys a page.
        num_kv_heads, group_size: KV heads, and query heads a KV head; MLA has one KV head.
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
    """

    kind: str
    query_lens: tuple[int, ...] = (1,)
    kv_lens: tuple[int, ...] = (1,)
    page_size: int = 1
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim: int = 128
    head_dim_qk: int = 0
    kv_bytes: int = 2
    causal: bool = True
    window_left: int = -1
    fixed_split: int = 0
    split: bool = True
    graph: bool = False
    spare_rows: int = 0
    multiprocessors: int = 132
    blocks: int = 1

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
        return 1 if self.kind == FA3 else self.group_size

    @property
    def graph_rows(self) -> int:
        """Query rows that the plan function is given: those of the graph, or else of the batch."""
        return self.query_starts[-1] + (self.spare_rows if self.graph else 0)

    @property
    def promised_rows(self) -> int:
        """Query rows that each request promises to have in every plan of the graph; 0: none."""
        uniform = self.graph and not self.spare_rows and len(set(self.query_lens)) == 1
        return self.query_lens[0] if uniform else 0

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
        longer = tuple(2 * keys + 3 for keys in self.kv_lens[::-1])
        return replace(self, query_lens=self.query_lens[::-1], kv_lens=longer)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not as by default."""
        usual = {each.name: each.default for each in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if value != usual[name] or name in ("query_lens", "kv_lens")
        }


def problem_from_json(data: Mapping[str, Any]) -> PlanProblem:
    """Read what ``to_json`` returned.

    Raises:
        UsageRefusedError: it is no problem of planning.
    """
    known = {each.name for each in fields(PlanProblem)}
    strange = sorted(set(data) - known)
    if strange or data.get("kind") not in KINDS:
        what = f"field {strange[0]!r}" if strange else f"kind {data.get('kind')!r}"
        message = f"a problem of planning has no {what}"
        raise UsageRefusedError(message)
    try:
        problem = msgspec.convert(dict(data), PlanProblem)
    except msgspec.ValidationError as error:
        raise UsageRefusedError(str(error)) from error
    wrong = _wrong(problem)
    if wrong:
        raise UsageRefusedError(wrong)
    return problem


def _wrong(problem: PlanProblem) -> str:
    """Return why a problem has no plan that could be judged; empty where nothing is wrong."""
    queries, keys = problem.query_lens, problem.kv_lens
    bounds = {
        **dict.fromkeys(("window_left",), (-1, LARGEST)),
        **dict.fromkeys(("fixed_split", "spare_rows"), (0, LARGEST)),
        "head_dim_qk": (0, 1024),
        **dict.fromkeys(("page_size", "head_dim", "blocks", "kv_bytes"), (1, 1024)),
        **dict.fromkeys(("num_kv_heads", "group_size", "multiprocessors"), (1, 1024)),
    }
    for name, (least, most) in bounds.items():
        if not least <= getattr(problem, name) <= most:
            return f"{name} {getattr(problem, name)} is not within {least} to {most}"
    if not 1 <= len(keys) == len(queries):
        return f"query_lens has {len(queries)} requests, kv_lens {len(keys)}: one or more of both"
    if min(*queries, *keys) < 0 or sum(queries) > LARGEST or sum(keys) > LARGEST:
        return f"lengths are not negative, and their sum is at most {LARGEST}"
    if problem.kind == DECODE and set(queries) != {1}:
        return "query_lens of a decode are 1"
    return "num_kv_heads of mla is 1" if problem.kind == MLA and problem.num_kv_heads != 1 else ""
