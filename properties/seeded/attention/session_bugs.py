"""Faults of sessions: plans that are stale, shared, or not their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ....reference import BatchMetadata, build_metadata
from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"


def copied(inputs: PagedAttentionInputs) -> BatchMetadata:
    """Copy a batch's metadata to where its queries are."""
    tensors = {
        name: tensor.to(inputs.q.device, copy=True)
        for name, tensor in inputs.metadata.tensors().items()
    }
    return BatchMetadata(**tensors, page_size=inputs.metadata.page_size)


def lengths_of(metadata: BatchMetadata) -> Hashable:
    """Return a key of the batch that ignores its pages."""
    return (*metadata.qo_indptr.tolist(), *metadata.seq_lens.tolist())


def with_lengths(inputs: PagedAttentionInputs, lengths: torch.Tensor) -> BatchMetadata:
    """Describe a batch with other lengths, as far as its pages reach; on the device."""
    batch = inputs.metadata
    reach = batch.paged_kv_indptr.diff() * batch.page_size
    described = build_metadata(
        batch.qo_indptr.diff(),
        torch.minimum(lengths.cpu(), reach),
        inputs.block_table,
        batch.page_size,
    )
    return described.to(inputs.q.device)


class Session:
    """Keeps a copy of the metadata that it was planned from."""

    keep: Callable[[PagedAttentionInputs], BatchMetadata] = staticmethod(copied)

    def __init__(self) -> None:
        self.metadata: BatchMetadata | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch."""
        self.metadata = self.keep(inputs)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend as planned, whatever the metadata of these inputs say."""
        assert self.metadata is not None  # noqa: S101  plan comes first
        return attend(replace(inputs, metadata=self.metadata))


class KeepsReferences(Session):
    """Keeps the very tensors that it was planned from."""

    keep = staticmethod(lambda inputs: inputs.metadata)


class PlansByLengths(Session):
    """Does not plan again for a batch of the same lengths."""

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, unless its lengths are those of the last one."""
        if self.metadata is None or lengths_of(self.metadata) != lengths_of(inputs.metadata):
            self.metadata = copied(inputs)


class SharesPlans(Session):
    """Keeps the plan in a workspace that all sessions share."""

    workspace: ClassVar[dict[str, Any]] = {}

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch for every session."""
        self.workspace["plan"] = copied(inputs)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the batch that any session planned last."""
        return attend(replace(inputs, metadata=self.workspace["plan"]))


class PlansByRequests(Session):
    """Plans lengths only for the first batch with a number of requests, and pages each time."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths: dict[int, BatchMetadata] = {}

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, with the lengths of the first one that had as many requests."""
        new = copied(inputs)
        first = self._lengths.setdefault(new.num_requests, new)
        self.metadata = with_lengths(inputs, first.seq_lens)


class KeepsMask(Session):
    """Takes up a plan's custom mask, and forgets none where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self._mask: torch.Tensor | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Remember a batch, and its mask if it has one."""
        super().plan(inputs)
        if inputs.custom_mask is not None:
            self._mask = inputs.custom_mask.clone()

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend as planned, with the last mask there was, read as far as this batch goes."""
        mask, metadata = self._mask, self.metadata
        if mask is not None and metadata is not None:
            size = int((metadata.qo_indptr.diff() * metadata.seq_lens).sum())
            mask = torch.nn.functional.pad(mask, (0, max(0, size - len(mask))))[:size]
        return super().run(replace(inputs, custom_mask=mask))


class GathersOnce(Session):
    """Gathers the cache of a plan at its first run, and again where it is another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: torch.Tensor | None = None
        self._copy: Pair | None = None

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to a copy of the cache."""
        if self._copy is None or self._seen is not inputs.k_cache:
            self._seen = inputs.k_cache
            self._copy = inputs.k_cache.clone(), inputs.v_cache.clone()
        return super().run(replace(inputs, k_cache=self._copy[0], v_cache=self._copy[1]))


class RoundsAsFirst(Session):
    """Keeps a buffer for queries by their shape, in the dtype of the first that had it."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend with queries that went through the buffer."""
        buffer = self._buffers.setdefault(inputs.q.shape, torch.empty_like(inputs.q))
        return super().run(replace(inputs, q=buffer.copy_(inputs.q).to(inputs.q.dtype)))


class AddsToScratch(Session):
    """Adds partial results to scratch memory that was zeroed once, and takes them off again."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = torch.zeros(1)

    def scratch(self) -> list[torch.Tensor]:
        """Return memory that this kernel wrongly treats as scratch."""
        return [self._sums]

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend, and add what the memory holds."""
        out, lse = super().run(inputs)
        return out + self._sums.to(out), lse


class RaggedSession:
    """Keeps a copy of the offsets that it was planned from."""

    def __init__(self) -> None:
        self._indptrs: Pair | None = None

    def plan(self, inputs: RaggedAttentionInputs) -> None:
        """Remember a batch."""
        self._indptrs = self._kept(inputs.qo_indptr), self._kept(inputs.kv_indptr)

    def run(self, inputs: RaggedAttentionInputs) -> Pair:
        """Attend as planned."""
        assert self._indptrs is not None  # noqa: S101  plan comes first
        return attend(replace(inputs, qo_indptr=self._indptrs[0], kv_indptr=self._indptrs[1]))

    def _kept(self, indptr: torch.Tensor) -> torch.Tensor:
        return indptr.clone()


class KeepsRaggedReferences(RaggedSession):
    """Keeps the very offsets that it was planned from."""

    def _kept(self, indptr: torch.Tensor) -> torch.Tensor:
        return indptr


def once(session: Callable[[], Any], inputs: Any) -> Pair:  # noqa: ANN401  of either operation
    """Plan and run with a session of one call."""
    made = session()
    made.plan(inputs)
    result: Pair = made.run(inputs)
    return result


@seeded(BUGS, PAGED, "life_cycle", model="vllm#23737", session=KeepsReferences)
def plan_keeps_host_buffers(inputs: PagedAttentionInputs) -> Pair:
    """Plan from host buffers by reference, which the engine overwrites for its next step."""
    return once(KeepsReferences, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="TensorRT-LLM#18769", session=PlansByLengths)
def plan_by_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Skip planning where the lengths are those of the last plan, though the pages are others."""
    return once(PlansByLengths, inputs)


@seeded(BUGS, PAGED, "life_cycle", features=("custom_mask",), session=KeepsMask)
def plan_keeps_mask(inputs: PagedAttentionInputs) -> Pair:
    """Keep the custom mask of an earlier plan where the new one has none."""
    return once(KeepsMask, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="vllm#25520", session=SharesPlans)
def plan_in_shared_workspace(inputs: PagedAttentionInputs) -> Pair:
    """Keep the plan in a workspace that another session plans into."""
    return once(SharesPlans, inputs)


@seeded(BUGS, PAGED, "life_cycle", session=PlansByRequests)
def plan_keeps_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Keep the lengths of the first plan of as many requests, and take only the pages anew."""
    return once(PlansByRequests, inputs)


@seeded(BUGS, PAGED, "life_cycle", session=GathersOnce)
def cache_gathered_once(inputs: PagedAttentionInputs) -> Pair:
    """Keep a copy of the cache that does not see what is appended in place."""
    return once(GathersOnce, inputs)


@seeded(BUGS, PAGED, "life_cycle", session=RoundsAsFirst)
def buffer_of_first_dtype(inputs: PagedAttentionInputs) -> Pair:
    """Find a buffer by the shape of the queries, and not by their dtype."""
    return once(RoundsAsFirst, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="flashinfer#3474", session=AddsToScratch)
def scratch_assumed_zero(inputs: PagedAttentionInputs) -> Pair:
    """Add to a workspace that was zeroed when it was made."""
    return once(AddsToScratch, inputs)


@seeded(BUGS, RAGGED, "life_cycle", model="vllm#23737", session=KeepsRaggedReferences)
def ragged_plan_keeps_host_buffers(inputs: RaggedAttentionInputs) -> Pair:
    """Plan ragged keys from host buffers by reference, which are overwritten."""
    return once(KeepsRaggedReferences, inputs)


@seeded(CONTROLS, PAGED, control="honest", session=Session)
def planned(inputs: PagedAttentionInputs) -> Pair:
    """Plan once, run as planned."""
    return once(Session, inputs)


@seeded(CONTROLS, RAGGED, control="honest", session=RaggedSession)
def planned_ragged(inputs: RaggedAttentionInputs) -> Pair:
    """Plan ragged keys once, run as planned."""
    return once(RaggedSession, inputs)
