"""Faults of sessions: plans that are stale, shared, or not their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...reference import BatchMetadata
from ...reference.inputs import PagedAttentionInputs
from .catalogue import SeededBug, seeded
from .kernels import attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED = "paged_attention"


def copied(inputs: PagedAttentionInputs) -> BatchMetadata:
    """Copy a batch's metadata to where its queries are."""
    tensors = {
        name: tensor.to(inputs.q.device, copy=True)
        for name, tensor in inputs.metadata.tensors().items()
    }
    return BatchMetadata(**tensors, page_size=inputs.metadata.page_size)


def lengths_of(metadata: BatchMetadata) -> Hashable:
    """Give what tells batches apart but for their pages."""
    return (*metadata.qo_indptr.tolist(), *metadata.seq_lens.tolist())


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
        """Attend to what was planned last, by whomever."""
        return attend(replace(inputs, metadata=self.workspace["plan"]))


def _once(session: type[Session], inputs: PagedAttentionInputs) -> Pair:
    made = session()
    made.plan(inputs)
    return made.run(inputs)


@seeded(BUGS, PAGED, "life_cycle", model="vllm#23737", session=KeepsReferences)
def plan_keeps_host_buffers(inputs: PagedAttentionInputs) -> Pair:
    """Plan from host buffers by reference, which the engine overwrites for its next step."""
    return _once(KeepsReferences, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="TensorRT-LLM#18769", session=PlansByLengths)
def plan_by_lengths(inputs: PagedAttentionInputs) -> Pair:
    """Skip planning where the lengths are those of the last plan, though the pages are others."""
    return _once(PlansByLengths, inputs)


@seeded(BUGS, PAGED, "life_cycle", model="vllm#25520", session=SharesPlans)
def plan_in_shared_workspace(inputs: PagedAttentionInputs) -> Pair:
    """Keep the plan in a workspace that another session plans into."""
    return _once(SharesPlans, inputs)


@seeded(CONTROLS, PAGED, control="honest", session=Session)
def planned(inputs: PagedAttentionInputs) -> Pair:
    """Plan once, run as planned."""
    return _once(Session, inputs)
