"""Kernelproof's own Triton attention, replayed from CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference import AttentionProblem, BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.cuda_graphs import Pair, Recorded, Replays, padded, room_for
from ..targets.refusal import Refusal
from ..targets.target import Target
from .attention import PAGED_FEATURES, TritonSession, attention_kernel, paged
from .attention_call import Call, rows_a_request
from .attention_keys import block_rows, compile_key, graph_kernels


class Buffers:
    """A batch's metadata on the device, at addresses that stay.

    Attributes:
        requests: the requests that there is room for.
        metadata: the batch that is here, with requests without keys behind it.
    """

    def __init__(self, metadata: BatchMetadata, pages: int, device: torch.device) -> None:
        """Make room for some requests more, each on any of the cache's pages."""
        self.requests = room_for(metadata.num_requests)
        indices = metadata.paged_kv_indices.new_zeros(pages * self.requests)
        room = {**padded(metadata, self.requests).tensors(), "paged_kv_indices": indices}
        self._tensors = {name: tensor.to(device, copy=True) for name, tensor in room.items()}
        self.fill(metadata)

    def fill(self, metadata: BatchMetadata) -> None:
        """Write another batch here, of as many requests or fewer; its metadata are on the host."""
        batch = padded(metadata, self.requests)
        for name, tensor in batch.tensors().items():
            self._tensors[name][: len(tensor)].copy_(tensor)
        # A graph keeps addresses, and a tensor without elements has none: captured on a batch
        # without pages, it would read page ids of later batches from nowhere. So it has all the
        # room that there is for them.
        indices = self._tensors["paged_kv_indices"]
        if indices.device.type == "cpu":
            indices = indices[: len(batch.paged_kv_indices)]
        self.metadata = BatchMetadata(
            **{**self._tensors, "paged_kv_indices": indices}, page_size=metadata.page_size
        )

    def publish(self, seq_lens: torch.Tensor) -> None:
        """Write exact lengths of the batch that is here, whose pages stay the planned ones."""
        self._tensors["seq_lens"][: len(seq_lens)].copy_(seq_lens)


class TritonGraphSession(TritonSession):
    """A session whose launch can be captured, on buffers into which batches are planned."""

    def __init__(self) -> None:
        super().__init__()
        self._host: BatchMetadata | None = None
        self._buffers: Buffers | None = None
        self._recorded: Recorded | None = None
        self._tokens = 0

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Copy a batch's metadata to the device, also to where a captured launch reads them."""
        super().plan(inputs)
        self._host = padded(inputs.metadata, inputs.metadata.num_requests)
        if self._buffers is not None and self._host.num_requests <= self._buffers.requests:
            self._buffers.fill(self._host)

    def publish(self, seq_lens: torch.Tensor) -> None:
        """Write exact lengths to where a launch, or a captured one, reads them."""
        super().publish(seq_lens)
        if self._buffers is not None and len(seq_lens) <= self._buffers.requests:
            self._buffers.publish(seq_lens)

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Capture a launch on the planned batch."""
        if self._host is None:
            message = "capture comes after plan"
            raise ValueError(message)
        buffers = Buffers(self._host, len(inputs.k_cache), inputs.q.device)
        buffers.publish(self._planned().seq_lens)
        self._buffers, self._tokens = buffers, room_for(len(inputs.q))

        def attend(values: PagedAttentionInputs) -> Pair:
            return Call(replace(values, metadata=buffers.metadata)).attend()

        self._recorded = Recorded(attend, inputs, self._tokens)

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Replay the captured launch on the planned batch.

        Raises:
            ValueError: nothing was captured, or the batch is larger than what was.
        """
        if self._recorded is None or self._buffers is None or self._host is None:
            message = "replay comes after plan and capture"
            raise ValueError(message)
        if self._host.num_requests > self._buffers.requests or len(inputs.q) > self._tokens:
            message = (
                f"a batch of {self._host.num_requests} requests and {len(inputs.q)} tokens does "
                f"not fit the graph of {self._buffers.requests} and {self._tokens}"
            )
            raise ValueError(message)
        return self._recorded.replay(inputs)


def _on_a_gpu(problem: AttentionProblem, target: Target) -> bool | str:
    refusal = paged.refusal(problem, target)
    if refusal is None and target.device != "cuda":
        reason = "CUDA graphs need a GPU: elsewhere it would be triton-attention"
        return Refusal(reason, "device", "a GPU")
    return refusal or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    """Name the compiled kernels: that of a batch, and that of the room which is captured for it."""
    room = room_for(problem.num_tokens), room_for(len(problem.seq_lens))
    return compile_key(problem), block_rows(problem, rows_a_request(*room, problem.group_size))


_replays = functools.cache(Replays)
NOT_IN_GRAPHS = ("custom_mask", "tree", "large_tensors")
"""Features that a graph has not: it copies the caches that it is given."""


@attention_kernel(
    "paged_attention",
    name="triton-attention-graph",
    supports=_on_a_gpu,
    features=tuple(name for name in PAGED_FEATURES if name not in NOT_IN_GRAPHS),
    compile_key=_compile_key,
    kernels=graph_kernels,
    session=TritonGraphSession,
)
def paged_graph(inputs: PagedAttentionInputs) -> Pair:
    """Attend as ``triton-attention`` does, replayed from a CUDA graph."""
    return _replays(TritonGraphSession)(inputs)
