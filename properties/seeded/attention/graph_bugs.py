"""Faults of recorded runs: replays that see what was there when they were recorded.

There are no CUDA graphs on a CPU: what a graph does, reading and writing the memory that it was
recorded on and nothing else, is done here by hand.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import torch

from ....reference import BatchMetadata
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import attend
from .session_bugs import PAGED, Pair, Session, copied, once, with_lengths

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []


class Recording(Session):
    """Records a run on tensors of its own; replays copy their values there first."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: PagedAttentionInputs | None = None

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Record a run of the batch that is planned."""
        self.recorded = replace(
            inputs,
            q=inputs.q.clone(),
            k_cache=inputs.k_cache.clone(),
            v_cache=inputs.v_cache.clone(),
            sinks=None if inputs.sinks is None else inputs.sinks.clone(),
        )

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Run what was recorded on these values and on the batch that is planned."""
        recorded = self.recorded
        assert recorded is not None  # noqa: S101  capture comes first
        tokens = len(inputs.q)
        self.fill(recorded, inputs)
        out, lse = attend(replace(recorded, metadata=self.batch(), q=recorded.q))
        return out[:tokens], lse[:tokens]

    def fill(self, recorded: PagedAttentionInputs, inputs: PagedAttentionInputs) -> None:
        """Copy values to where the recorded run reads them."""
        recorded.q[: len(inputs.q)] = inputs.q
        recorded.k_cache.copy_(inputs.k_cache)
        recorded.v_cache.copy_(inputs.v_cache)
        if recorded.sinks is not None and inputs.sinks is not None:
            recorded.sinks.copy_(inputs.sinks)

    def batch(self) -> BatchMetadata:
        """Return the batch that the recorded run attends to."""
        assert self.metadata is not None  # noqa: S101  plan comes first
        return self.metadata


class KeepsBatch(Recording):
    """Holds the batch that was planned when the run was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.held: BatchMetadata | None = None

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Record a run, and remember the batch."""
        super().capture(inputs)
        self.held = self.metadata

    def both(self) -> tuple[BatchMetadata, BatchMetadata]:
        """Return the batch that is planned, and the one of the recording."""
        now, then = self.metadata, self.held
        assert now is not None  # noqa: S101  plan comes first
        assert then is not None  # noqa: S101  capture comes first
        return now, then


class KeepsPages(KeepsBatch):
    """Replays on the page indices of capture time, where the new batch has as many."""

    def batch(self) -> BatchMetadata:
        """Return the planned lengths with the captured pages."""
        now, then = self.both()
        if len(now.paged_kv_indices) != len(then.paged_kv_indices):
            return now
        return replace(now, paged_kv_indices=then.paged_kv_indices)


class KeepsLengths(KeepsBatch):
    """Replays with the lengths of capture time, where the new batch has as many requests."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: PagedAttentionInputs | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, and its pages apart."""
        super().plan(inputs)
        metadata, table = copied(inputs), inputs.block_table.clone()
        self._inputs = replace(inputs, metadata=metadata, block_table=table)

    def batch(self) -> BatchMetadata:
        """Return the planned pages with the captured lengths."""
        now, then = self.both()
        assert self._inputs is not None  # noqa: S101  plan comes first
        if now.num_requests != then.num_requests:
            return now
        return with_lengths(self._inputs, then.seq_lens)


class KeepsQueries(Recording):
    """Does not copy the queries of a replay."""

    def fill(self, recorded: PagedAttentionInputs, inputs: PagedAttentionInputs) -> None:
        """Copy only keys and values."""
        super().fill(recorded, replace(inputs, q=inputs.q[:0]))


class KeepsScratch(Recording):
    """Adds to scratch memory that the capture zeroed, and no replay does."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = torch.zeros(0)

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Record a run on memory that is zero now."""
        super().capture(inputs)
        self._sums = torch.zeros(inputs.q.shape[:2])

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Run, and leave the sums there for the next replay."""
        out, lse = super().replay(inputs)
        sums = self._sums[: len(out)]
        result = out + sums.unsqueeze(-1).to(out), lse
        sums += 1.0
        return result


class IndicesAtOldOffsets(Recording):
    """Writes page indices into a persistent buffer at the offsets of the plan before."""

    def __init__(self) -> None:
        super().__init__()
        self._offsets: torch.Tensor | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch; its indices go where the last batch's were, if it had as many."""
        new = copied(inputs)
        old = self._offsets
        self._offsets = new.paged_kv_indptr
        if old is not None and len(old) == len(new.paged_kv_indptr):
            pages = [new.paged_kv_indices[a:b] for a, b in pairwise(new.paged_kv_indptr.tolist())]
            indices = new.paged_kv_indices.new_zeros(sum(map(len, pages)) + int(old[-1]))
            for start, some in zip(old.tolist(), pages, strict=False):
                indices[start : start + len(some)] = some
            new = replace(new, paged_kv_indices=indices[: len(new.paged_kv_indices)])
        self.metadata = new


class SharesBuffers(Recording):
    """Keeps what a replay reads of the plan in buffers that all sessions share."""

    shared: ClassVar[list[BatchMetadata]] = []

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, here for runs and there for replays."""
        super().plan(inputs)
        self.shared[:] = [copied(inputs)]

    def batch(self) -> BatchMetadata:
        """Return the batch that any session planned last."""
        return self.shared[0]


@seeded(BUGS, PAGED, "life_cycle", model="TensorRT-LLM#18769", session=KeepsPages)
def graph_keeps_page_indices(inputs: PagedAttentionInputs) -> Pair:
    """Replay a recorded run on the page indices of its recording."""
    return once(KeepsPages, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="rtp-llm#1084", session=KeepsLengths)
def graph_keeps_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Replay a recorded run with the lengths of its recording."""
    return once(KeepsLengths, inputs)


@seeded(BUGS, PAGED, "life_cycle", session=KeepsQueries)
def graph_keeps_queries(inputs: PagedAttentionInputs) -> Pair:
    """Replay a recorded run on the queries of its recording."""
    return once(KeepsQueries, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="flashinfer#3474", session=KeepsScratch)
def graph_scratch_not_reset(inputs: PagedAttentionInputs) -> Pair:
    """Reset a workspace before the recording, and not within it."""
    return once(KeepsScratch, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="vllm#39546", session=IndicesAtOldOffsets)
def indices_at_old_offsets(inputs: PagedAttentionInputs) -> Pair:
    """Place page indices by the offsets of the plan before, which are still in the buffer."""
    return once(IndicesAtOldOffsets, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="vllm#25520", session=SharesBuffers)
def graph_buffers_shared(inputs: PagedAttentionInputs) -> Pair:
    """Replay on buffers that another session plans into."""
    return once(SharesBuffers, inputs)


@seeded(CONTROLS, PAGED, control="honest", session=Recording)
def recorded(inputs: PagedAttentionInputs) -> Pair:
    """Record a run once, replay it as planned."""
    return once(Recording, inputs)
