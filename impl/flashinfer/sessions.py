"""Sessions of FlashInfer's wrappers, planned from metadata on the host as vLLM plans them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from .calls import flashinfer, new_wrapper, shared_workspace
from .plans import Kind, Pair, plan_batch_attention, run, run_batch_attention

RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"


def owned(metadata: BatchMetadata, device: torch.device) -> BatchMetadata:
    """Copy metadata on the host to where nobody overwrites them; page indices to the device.

    FlashInfer copies from the host without waiting (``non_blocking``), some time after ``plan`` has
    returned where the memory is pinned, as vLLM's is. torch keeps pinned memory until then. Page
    indices are on the device in vLLM.
    """
    copies = {name: on_host(tensor, device) for name, tensor in metadata.tensors().items()}
    copies["paged_kv_indices"] = copies["paged_kv_indices"].to(device, non_blocking=True)
    return BatchMetadata(**copies, page_size=metadata.page_size)


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor on the host, into pinned memory if it is for a GPU."""
    return torch.empty_like(tensor, pin_memory=device.type == "cuda").copy_(tensor)


def _kept(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs whose description of the batch is the session's own."""
    if isinstance(inputs, PagedAttentionInputs):
        return replace(inputs, metadata=owned(inputs.metadata, inputs.q.device))
    return replace(inputs, qo_indptr=inputs.qo_indptr.clone(), kv_indptr=inputs.kv_indptr.clone())


class PlannedSession:
    """A wrapper of its own, planned for a batch and run many times."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        plan: Callable[[Any, Any], None],
        run: Callable[[Any, Any], Pair],
    ) -> None:
        """Take what makes a wrapper for the inputs of its first batch, plans it and runs it."""
        self._make, self._plan, self._run = make, plan, run
        self._planned: Any = None
        self._device = torch.device("cpu")

    def plan(self, inputs: AttentionInputs) -> None:
        """Plan a batch."""
        if self._planned is None:
            self._device = inputs.q.device
            self._planned = self._make(inputs)
        self._plan(self._planned, _kept(inputs))

    def run(self, inputs: AttentionInputs) -> Pair:
        """Attend to the planned batch."""
        return self._run(self._planned, inputs)


class WorkspaceSession(PlannedSession):
    """A session whose wrapper works in the workspace that all sessions share."""

    def scratch(self) -> list[torch.Tensor]:
        """Return the float workspace: partial results of one run, which the same run merges."""
        return [shared_workspace(self._device)] if self._planned else []


def paged_session(kind: Kind) -> WorkspaceSession:
    """Make a session of a wrapper of attention to a paged cache."""
    return WorkspaceSession(
        lambda inputs: new_wrapper(
            kind.name, inputs.q.device, kv_layout=inputs.kv_layout, **kind.options
        ),
        lambda planned, inputs: kind.plan(planned, inputs, inputs.metadata, kind.backend),
        lambda planned, inputs: run(planned, inputs, kind.backend),
    )


def ragged_session(
    backend: str, plan: Callable[[Any, Any], None], run: Callable[[Any, Any], Pair]
) -> WorkspaceSession:
    """Make a session of the prefill wrapper of ragged keys."""
    return WorkspaceSession(
        lambda inputs: new_wrapper(RAGGED, inputs.q.device, kv_layout="NHD", backend=backend),
        plan,
        run,
    )


def batch_attention_session() -> PlannedSession:
    """Make a session of ``BatchAttention``, which brings its workspaces along."""
    return PlannedSession(
        lambda inputs: flashinfer().BatchAttention(
            kv_layout=inputs.kv_layout, device=str(inputs.q.device)
        ),
        lambda planned, inputs: plan_batch_attention(planned, inputs, inputs.metadata),
        run_batch_attention,
    )
