"""Sessions of FlashInfer's wrappers, planned from metadata on the host as vLLM plans them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from .calls import flashinfer, session_wrapper, shared_workspace
from .plans import Pair, plan_batch_attention, plan_decode, plan_prefill, run, run_batch_attention

Plan = Callable[[Any, PagedAttentionInputs, BatchMetadata, str], None]
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"


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


class PagedSession:
    """A wrapper of its own, planned for a batch and run many times."""

    def __init__(self, name: str, plan: Plan, backend: str, options: dict[str, Any]) -> None:
        self._name, self._plan, self._backend = name, plan, backend
        self._options = options
        self._planned: Any = None
        self._device = torch.device("cpu")

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch."""
        if self._planned is None:
            self._device = inputs.q.device
            self._planned = session_wrapper(
                self._name, self._device, kv_layout=inputs.kv_layout, **self._options
            )
        self._plan(self._planned, inputs, owned(inputs.metadata, self._device), self._backend)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the planned batch."""
        return run(self._planned, inputs, self._backend)

    def scratch(self) -> list[torch.Tensor]:
        """Give the float workspace: partial results of one run, which the same run merges."""
        return [shared_workspace(self._device)] if self._planned else []


def decode_session(*, tensor_cores: bool) -> PagedSession:
    """Make a session of the decode wrapper."""
    return PagedSession(
        DECODE,
        plan_decode,
        "fa2" if tensor_cores else "cuda-core",
        {"use_tensor_cores": tensor_cores, "backend": "fa2" if tensor_cores else "auto"},
    )


def prefill_session(backend: str) -> PagedSession:
    """Make a session of the prefill wrapper."""
    return PagedSession(PREFILL, plan_prefill, backend, {"backend": backend})


class BatchAttentionSession:
    """``BatchAttention``, which brings its workspaces along."""

    def __init__(self) -> None:
        self._planned: Any = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch."""
        if self._planned is None:
            self._planned = flashinfer().BatchAttention(
                kv_layout=inputs.kv_layout, device=str(inputs.q.device)
            )
        plan_batch_attention(self._planned, inputs, owned(inputs.metadata, inputs.q.device))

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the planned batch."""
        return run_batch_attention(self._planned, inputs)


class RaggedSession:
    """A ragged prefill wrapper of its own, planned for a batch and run many times."""

    def __init__(
        self,
        backend: str,
        plan: Callable[[Any, RaggedAttentionInputs], None],
        run: Callable[[Any, RaggedAttentionInputs], Pair],
    ) -> None:
        self._backend, self._plan, self._run = backend, plan, run
        self._planned: Any = None
        self._device = torch.device("cpu")

    def plan(self, inputs: RaggedAttentionInputs) -> None:
        """Plan a batch from offsets on the host."""
        if self._planned is None:
            self._device = inputs.q.device
            self._planned = session_wrapper(
                "BatchPrefillWithRaggedKVCacheWrapper",
                self._device,
                kv_layout="NHD",
                backend=self._backend,
            )
        self._plan(
            self._planned,
            replace(inputs, qo_indptr=inputs.qo_indptr.clone(), kv_indptr=inputs.kv_indptr.clone()),
        )

    def run(self, inputs: RaggedAttentionInputs) -> Pair:
        """Attend to the planned batch."""
        return self._run(self._planned, inputs)

    def scratch(self) -> list[torch.Tensor]:
        """Give the float workspace."""
        return [shared_workspace(self._device)] if self._planned else []
