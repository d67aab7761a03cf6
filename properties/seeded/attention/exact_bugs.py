"""Faults of lengths that are written late: what was copied or derived from the first ones stays."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ....reference import BatchMetadata
from ....reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, Request, State, assemble, attend, close, key_counts
from .graph_bugs import Recording
from .padding_bugs import PART, in_parts, merged
from .session_bugs import PAGED, Pair, Session, copied, once, with_lengths

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MODEL = "TensorRT-LLM#17264"
FIRST_LENGTHS, FIRST_COUNTS = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
"""What tensors of lengths held when they were first seen."""


def _request_of(rows: slice, metadata: BatchMetadata) -> int:
    """Return which request the rows are of."""
    start = torch.tensor(rows.start)
    return int(torch.searchsorted(metadata.qo_indptr, start, right=True)) - 1


@seeded(BUGS, PAGED, "exact_lengths", model=MODEL)
def lengths_kept_by_tensor(inputs: PagedAttentionInputs) -> Pair:
    """Copy lengths to the host when their tensor is first seen, and know it again."""
    lengths = inputs.metadata.seq_lens
    first = FIRST_LENGTHS.setdefault(lengths, lengths.clone())
    return attend(replace(inputs, metadata=with_lengths(inputs, first)))


@seeded(BUGS, PAGED, "exact_lengths", model=MODEL)
def positions_kept_by_tensor(inputs: PagedAttentionInputs) -> Pair:
    """Read lengths anew, and keep the positions of queries that followed from the first ones."""
    metadata = inputs.metadata
    starts = metadata.seq_lens - metadata.qo_indptr.diff()
    first = FIRST_COUNTS.setdefault(metadata.seq_lens, starts)

    def position(request: Request, _: AttentionInputs) -> int:
        return int(first[_request_of(request.rows, metadata)])

    return attend(inputs, replace(HONEST, position=position))


class Published(Session):
    """Takes exact lengths after the plan."""

    def publish(self, seq_lens: torch.Tensor) -> None:
        """Write the lengths to where runs read them."""
        assert self.metadata is not None  # noqa: S101  plan comes first
        self.metadata.seq_lens.copy_(seq_lens)


class PublishedRecording(Published, Recording):
    """Takes exact lengths after the plan, for replays too."""


class KeepsPlannedForReplays(PublishedRecording):
    """Has a copy of the plan for replays, which exact lengths do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: BatchMetadata | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, here for runs and there for replays."""
        super().plan(inputs)
        self._buffers = copied(inputs)

    def batch(self) -> BatchMetadata:
        """Return the batch as it was planned."""
        assert self._buffers is not None  # noqa: S101  plan comes first
        return self._buffers


class MergesPlannedParts(Published):
    """Plans how many parts of a request's keys are merged."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[int] = []

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, and count its parts."""
        super().plan(inputs)
        self._parts = [max(-(-keys // PART), 1) for keys in key_counts(inputs)]

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend in parts, and merge as many as were planned."""
        metadata = self.metadata
        assert metadata is not None  # noqa: S101  plan comes first
        inputs = replace(inputs, metadata=metadata)

        def one(request: Request) -> Pair:
            states = in_parts(request, inputs, PART)
            planned = self._parts[_request_of(request.rows, metadata)]
            # Memory that no part was written to holds anything.
            unwritten = State(*(torch.ones_like(each) for each in states[0]))
            states += [unwritten] * (planned - len(states))
            outs = torch.stack([state.weighted for state in states])
            return close(merged(states, outs), request, inputs)

        return assemble(inputs, one)


@seeded(BUGS, PAGED, "life_cycle", model=MODEL, session=KeepsPlannedForReplays)
def replays_keep_planned_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Replay with the planned lengths, though exact ones were published."""
    return once(KeepsPlannedForReplays, inputs)


@seeded(BUGS, PAGED, "life_cycle", model=MODEL, session=MergesPlannedParts)
def merges_planned_parts(inputs: PagedAttentionInputs) -> Pair:
    """Merge as many parts as the planned lengths have, of which exact ones leave some unwritten."""
    return once(MergesPlannedParts, inputs)


@seeded(CONTROLS, PAGED, control="honest", session=PublishedRecording)
def published(inputs: PagedAttentionInputs) -> Pair:
    """Plan with bounds, run and replay with exact lengths."""
    return once(PublishedRecording, inputs)
