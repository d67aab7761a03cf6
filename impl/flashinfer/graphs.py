"""FlashInfer's wrappers with ``use_cuda_graph=True``: planned into buffers that stay, and replayed.

A wrapper fixes its number of requests when it is made, the prefill wrapper its number of query
tokens at its first plan, and the decode wrapper those of each request. So a batch is padded by
requests without keys, as engines do, and the first plan is one of as many tokens as there is room
for. A prefill's plan owns every row of the queries (0.7.2.post1 asks for it): the requests that are
added, always one at least, own those that are added. ``uniform_q_len`` is a promise for all plans
of a wrapper, and ``q_len_per_req`` part of what it keeps, so that a graph is of one number of
tokens a request. A decode of several tokens asks for as many keys of each request: those that are
added have them, on the cache's first page, and nobody reads what comes of them. A wrapper that has
room for a mask reads one in every run, so that batches with and without a mask have wrappers of
their own.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.cuda_graphs import Recorded, Replays, options_of, padded, room_for, with_rows
from ..protocol import Implementation
from .backends import FA3
from .calls import new_wrapper, shared_workspace
from .paged import (
    cuda_core_decode,
    fast_planned_decode,
    prefill_fa2,
    prefill_fa3,
    tensor_core_decode,
    uniform_prefill,
)
from .plans import (
    DECODE,
    DECODE_FA2,
    DECODE_FAST,
    PREFILL_FA2,
    PREFILL_FA3,
    PREFILL_UNIFORM,
    Kind,
    Pair,
    run,
    tokens_a_request,
)
from .sessions import owned

MOST_PAGES = 2**17
"""Entries of the persistent buffer of page indices, at least: 512 KiB."""
MOST_MASK_BYTES = 2**22
"""Bytes of the persistent buffer of mask bits: 1,024 query tokens of 32 k keys."""


class _Fixed:
    """A wrapper of fixed sizes, and the options that it is planned with."""

    def __init__(self, kind: Kind, inputs: PagedAttentionInputs) -> None:
        self.kind = kind
        self.options = options_of(inputs)
        self.most = self.requests = room_for(inputs.metadata.num_requests)
        each, self.keys = tokens_a_request(inputs.metadata), 0
        if kind.takes_queries:
            self.requests = self.most + 1
        else:
            each = max(each, 1)
            self.keys = each if each > 1 else 0
        self.tokens = self.requests * each if kind.uniform else room_for(len(inputs.q))
        self.device = inputs.q.device
        # Each request that is added may have as many pages as it has keys.
        self.most_pages = max(MOST_PAGES, room_for(len(inputs.metadata.paged_kv_indices)))
        self.pages = self.most_pages + self.requests * self.keys
        sizes = {
            "qo_indptr": self.requests + 1,
            "paged_kv_indptr": self.requests + 1,
            "paged_kv_indices": self.pages,
            "paged_kv_last_page_len": self.requests,
        }
        self.masked = kind.masks and inputs.custom_mask is not None
        self.wrapper = new_wrapper(
            kind.name,
            self.device,
            kv_layout=inputs.kv_layout,
            use_cuda_graph=True,
            **kind.options,
            **{
                argument: torch.zeros(sizes[name], dtype=torch.int32, device=self.device)
                for name, argument in kind.buffers.items()
            },
            **(self._mask_buffers() if self.masked else {}),
        )
        if kind.takes_queries:
            largest = self._largest(inputs.metadata.page_size)
            # Of each token of the first request, its one key.
            seen = torch.ones(int(largest.qo_indptr[1]), dtype=torch.bool, device=self.device)
            self._plan(replace(inputs, custom_mask=seen) if self.masked else inputs, largest, 1)

    def _mask_buffers(self) -> dict[str, torch.Tensor]:
        """Return room for a mask's bits, uint8, and for their places, int32 [requests + 1]."""
        return {
            "custom_mask_buf": torch.zeros(MOST_MASK_BYTES, dtype=torch.uint8, device=self.device),
            "mask_indptr_buf": torch.zeros(
                self.requests + 1, dtype=torch.int32, device=self.device
            ),
        }

    def _largest(self, page_size: int) -> BatchMetadata:
        """Return a batch with all the tokens, and one key of the first request."""

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        each = max(1, self.tokens // self.requests)
        one = BatchMetadata(int32(0, each), int32(0, 1), int32(0), int32(1), int32(1), page_size)
        return padded(one, self.requests, self.tokens)

    def fits(self, inputs: PagedAttentionInputs) -> bool:
        """Whether a batch may be planned here."""
        requests, tokens = inputs.metadata.num_requests, len(inputs.q)
        alike = not self.kind.uniform or tokens * self.requests == self.tokens * requests
        return (
            options_of(inputs) == self.options
            and requests <= self.most
            and tokens <= self.tokens
            and len(inputs.metadata.paged_kv_indices) <= self.most_pages
            and alike
        )

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch into the buffers."""
        batch = padded(inputs.metadata, self.requests, self.tokens, keys=self.keys)
        metadata = owned(batch, self.device)
        self._plan(inputs, metadata, inputs.metadata.num_requests)

    def _plan(self, inputs: PagedAttentionInputs, metadata: BatchMetadata, requests: int) -> None:
        """Plan a batch that has this many requests before those that were added."""
        if self.masked:
            # FlashInfer counts (pages - 1) * page_size + last_page_len keys of a mask: without
            # pages that is nothing only where the last page is full.
            metadata.paged_kv_last_page_len[requests:] = metadata.page_size
        self.kind.plan(self.wrapper, inputs, metadata, self.kind.backend)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Run on queries of as many tokens as there is room for."""
        return run(self.wrapper, inputs, self.kind.backend)


class FixedSession:
    """Wrappers for CUDA graphs: one for each of the options and sizes, planned again and again.

    A batch is planned where a run was captured, if it fits there.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._wrappers: list[_Fixed] = []
        self._planned: _Fixed | None = None
        self._captured: tuple[_Fixed, Recorded] | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch from metadata on the host."""
        known = [self._captured[0]] if self._captured else []
        fitting = [each for each in [*known, *self._wrappers] if each.fits(inputs)]
        if fitting:
            self._planned = fitting[0]
        else:
            self._planned = _Fixed(self._kind, inputs)
            self._wrappers.append(self._planned)
        self._planned.plan(inputs)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the planned batch without a graph."""
        planned = self._ready()
        tokens = len(inputs.q)
        out, lse = planned.run(replace(inputs, q=with_rows(inputs.q, planned.tokens)))
        return out[:tokens], lse[:tokens]

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Capture a run of the planned batch."""
        planned = self._ready()
        self._captured = planned, Recorded(planned.run, inputs, planned.tokens)

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Replay the captured run on the planned batch.

        Raises:
            ValueError: nothing was captured, or the batch that was planned last is larger.
        """
        if self._captured is None or self._planned is not self._captured[0]:
            message = "replay comes after capture, and after a plan of a batch that fits"
            raise ValueError(message)
        return self._captured[1].replay(inputs)

    def scratch(self) -> list[torch.Tensor]:
        """Return the float workspace: partial results of one run, which the same run merges."""
        return [shared_workspace(self._planned.device)] if self._planned else []

    def _ready(self) -> _Fixed:
        if self._planned is None:
            message = "run and capture come after plan"
            raise ValueError(message)
        return self._planned


_replays = functools.cache(Replays)


def _replayed(eager: Implementation, kind: Kind, *without: str) -> Implementation:
    """Make of an adapter one that replays its calls from CUDA graphs.

    Args:
        eager: the adapter.
        kind: the kind of its wrapper.
        *without: features of the adapter that its graphs do not have.
    """
    session = functools.partial(FixedSession, kind)

    def replayed(inputs: PagedAttentionInputs) -> Pair:
        return _replays(session, uniform=kind.uniform)(inputs)

    return replace(
        eager,
        name=f"{eager.name}-graph",
        function=replayed,
        # Each call copies its caches to where the graph reads.
        features=eager.features.difference((*without, "large_caches")),
        session=session,
    )


decode_graph = _replayed(cuda_core_decode, DECODE)
decode_fa2_graph = _replayed(tensor_core_decode, DECODE_FA2)
decode_fast_graph = _replayed(fast_planned_decode, DECODE_FAST)
prefill_fa2_graph = _replayed(prefill_fa2, PREFILL_FA2)
prefill_fa3_graph = _replayed(prefill_fa3, PREFILL_FA3, *FA3.features)
prefill_uniform_graph = _replayed(uniform_prefill, PREFILL_UNIFORM)
