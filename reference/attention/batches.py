"""Requests side by side: short ones padded to one dense block, long ones alone.

Whatever fills up a block is hidden by number, never by value: it may be NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..formats.kv_format import KVCacheFormat
from ..scratch import Scratch
from ..validation import KVLayout
from .alibi import Span
from .masks import seen_range
from .options import Options

MAX_BATCH_WORK = 2**20
"""Most work of a block of several requests, see ``_work``: 8 MiB of keys and values in float64."""
PADDING = 2**17
"""Work that a request may add by padding: it saves a pass over the definition of its own."""
LOGIT_WORK = 4
"""A logit takes several times the work of an element of a key: it is masked, exponentiated, ..."""


class Request(NamedTuple):
    """Where one request lies."""

    tokens: range  # rows of q
    num_keys: int
    pages: Sequence[int]  # physical pages of its keys
    mask_start: int  # of its [queries, keys] in the flat custom mask
    causal: bool
    spans: tuple[Span, ...] = ()  # that are not empty

    @property
    def num_queries(self) -> int:
        """Query rows."""
        return len(self.tokens)

    @property
    def mask_end(self) -> int:
        """Where the next request's mask starts."""
        return self.mask_start + self.num_queries * self.num_keys

    @property
    def offset(self) -> int:
        """Position of query row 0: queries are aligned to the end of the keys."""
        return self.num_keys - self.num_queries

    def key_range(self, options: Options, rows: slice) -> slice:
        """Return the keys that any of these rows may see; the others have no part in the answer."""
        positions = range(rows.start + self.offset, max(rows.stop, rows.start) + self.offset)
        seen = seen_range(options, self.spans, positions, self.num_keys, causal=self.causal)
        return slice(seen.start, seen.stop)


@dataclass(frozen=True)
class Call:
    """An attention call whose arguments agree.

    Attributes:
        q: [tokens, H, D], as given.
        k, v: NHD [pages, page_size, K, D or E] or HND, as stored; keys without pages are pages of
            one key.
        k_scales, v_scales: block scales, laid out as k and v; None where there are none.
        kv_format: how codes are decoded; None: k and v are numbers.
        kv_layout, page_size: layout and page size of k and v.
        requests: those that have queries.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    requests: list[Request]
    kv_layout: KVLayout = "NHD"
    page_size: int = 1
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    kv_format: KVCacheFormat | None = None


class Batch(NamedTuple):
    """N requests with dense tensors, ready for the definition, until the next is taken.

    T and S are the most queries and keys of any of them. Rows past a request's queries repeat its
    last query; entries past its keys hold anything.
    """

    requests: list[Request]
    first: list[int]  # the key that each request's entry 0 is
    q: torch.Tensor  # [N, T, H, D], as given
    k: torch.Tensor  # [N, S, K, D], as given, or decoded
    v: torch.Tensor  # [N, S, K, E], as given, or decoded


def batches(call: Call, options: Options) -> Iterator[Batch]:
    """Gather the requests' queries, and their keys and values out of their pages."""
    for requests in _groups(call, options):
        rows = max(request.num_queries for request in requests)
        tokens = [
            request.tokens.start + min(row, request.num_queries - 1)
            for request in requests
            for row in range(rows)
        ]
        keys = [_keys_read(options, request) for request in requests]
        gather, token_ids = _Gather.of(call, requests, keys, tokens)
        yield Batch(
            requests,
            [each.start for each in keys],
            call.q.index_select(0, token_ids).unflatten(0, (len(requests), rows)),
            gather.values(call, "k", options.scratch),
            gather.values(call, "v", options.scratch),
        )


def _keys_read(options: Options, request: Request) -> slice:
    return request.key_range(options, slice(0, request.num_queries))


def _groups(call: Call, options: Options) -> Iterator[list[Request]]:
    """Put requests of like size together as long as padding them costs little."""

    def size(request: Request) -> tuple[int, int]:
        keys = _keys_read(options, request)
        return request.num_queries, keys.stop - keys.start

    group: list[Request] = []
    useful = longest = 0
    for request in sorted(call.requests, key=size):
        queries, keys = size(request)
        work, longest = _work(call, queries, keys), max(longest, keys)
        padded = (len(group) + 1) * _work(call, queries, longest)
        wasted = padded - useful - work
        if group and (padded > MAX_BATCH_WORK or wasted > (len(group) + 1) * PADDING):
            yield group
            group, useful, longest = [], 0, keys
        group.append(request)
        useful += work
    if group:
        yield group


def _work(call: Call, queries: int, keys: int) -> int:
    """Count elements of keys and values, and logits for several each."""
    heads = call.k.shape[2 if call.kv_layout == "NHD" else 1]
    channels = call.q.shape[2] + call.v.shape[-1]
    return keys * (heads * channels + LOGIT_WORK * queries * call.q.shape[1])


class _Gather(NamedTuple):
    """Which pages to read for N requests, and which S of the entries in them each takes."""

    page_ids: torch.Tensor  # [N * pages] int64; what fills up is a page that is read anyway
    taken: slice | torch.Tensor  # of each request's entries; [N * S] int64 where these differ
    shape: tuple[int, int]  # N, S

    @classmethod
    def of(
        cls, call: Call, requests: list[Request], keys: list[slice], tokens: list[int]
    ) -> tuple[_Gather, torch.Tensor]:
        """Choose the pages of these keys; give the rows of q on the device, too."""
        size = call.page_size
        pages = [
            request.pages[each.start // size : -(-each.stop // size)]
            for request, each in zip(requests, keys, strict=True)
        ]
        most = max(map(len, pages))
        filler = next((each[0] for each in pages if each), 0)
        chosen = [page for each in pages for page in (*each, *[filler] * (most - len(each)))]
        begins = [each.start % size for each in keys]
        count = max(each.stop - each.start for each in keys)
        shape = (len(requests), count)
        if len(set(begins)) == 1:
            page_ids, token_ids = on_device(call.q.device, chosen, tokens)
            return cls(page_ids, slice(begins[0], begins[0] + count), shape), token_ids
        width = most * size
        entries = [
            n * width + min(begin + entry, width - 1)
            for n, begin in enumerate(begins)
            for entry in range(count)
        ]
        page_ids, taken, token_ids = on_device(call.q.device, chosen, entries, tokens)
        return cls(page_ids, taken, shape), token_ids

    def values(self, call: Call, name: str, scratch: Scratch) -> torch.Tensor:
        """Return [N, S, K, D]: as stored, or decoded."""
        rows = self._gathered(call, name, getattr(call, name), scratch)
        if call.kv_format is None:
            return rows
        scales = getattr(call, f"{name}_scales")
        if scales is not None:
            scales = self._gathered(call, f"{name}_sf", scales, scratch)
        values = call.kv_format.decode(rows, scales)
        record = call.kv_format.entry.record
        return values[..., : record.head_dim_vo] if record and name == "v" else values

    def _gathered(
        self, call: Call, name: str, stored: torch.Tensor, scratch: Scratch
    ) -> torch.Tensor:
        shape = (len(self.page_ids), *stored.shape[1:])
        pages = scratch.take(f"{name}_pages", shape, stored.dtype, stored.device)
        # index_select copies whole pages; plain indexing takes six times as long.
        torch.index_select(stored, 0, self.page_ids, out=pages)
        if call.kv_layout == "HND":
            pages = pages.transpose(1, 2)
        heads = pages.shape[2:]
        if isinstance(self.taken, slice):
            return pages.reshape(self.shape[0], -1, *heads)[:, self.taken]
        return pages.reshape(-1, *heads).index_select(0, self.taken).view(*self.shape, *heads)


def on_device(device: torch.device, *lists: Sequence[int]) -> list[torch.Tensor]:
    """Bring lists of integers to a device as int64, in one transfer that nothing waits for."""
    joined = torch.tensor([number for each in lists for number in each], dtype=torch.int64)
    return list(joined.to(device, non_blocking=True).split([len(each) for each in lists]))
