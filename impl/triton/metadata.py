"""Kernelproof's own Triton kernel for building batch metadata on the device, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...reference.tensors.inputs import MetadataInputs
from ..features import INT64_INPUTS
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.optional import require
from .support import ceil_div, kernel, next_power_of_two, require_triton

KERNEL = "kernelproof.impl.triton.kernels.metadata"
BUILD_MINUTES = 0.03
BLOCK = 1024
"""Page ids a program, on a GPU however few there are: other blocks would be other kernels."""


@dataclass(frozen=True, eq=False)
class DeviceMetadata:
    """Batch metadata whose size the host does not know; the fields are ``BatchMetadata``'s.

    Attributes:
        paged_kv_indices: [requests * columns of the block table]: as many as there can be. Entries
            from ``paged_kv_indptr[-1]`` on are undefined.
    """

    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int


@kernel(
    "build_metadata",
    name="triton-metadata",
    features=("no_host_sync", "large_rows", INT64_INPUTS),
    compile_key=lambda _: "build",
    build_minutes=BUILD_MINUTES,
)
def build(inputs: MetadataInputs) -> DeviceMetadata:
    """Compute the indptrs, the page ids and the last page lengths without waiting for the GPU.

    Args:
        inputs: query_lens [R], seq_lens [R] and block_table [R, columns], integers.

    Returns:
        int32 tensors; ``paged_kv_indices`` has room for every column, see ``DeviceMetadata``. Only
        who knows the lengths on the host can cut it without a synchronisation.
    """
    require_triton()
    table = inputs.block_table
    requests, columns = table.shape

    def empty(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=table.device)

    built = DeviceMetadata(
        qo_indptr=empty(requests + 1),
        paged_kv_indptr=empty(requests + 1),
        paged_kv_indices=empty(requests * columns),
        paged_kv_last_page_len=empty(requests),
        seq_lens=empty(requests),
        page_size=inputs.page_size,
    )
    block = BLOCK if table.is_cuda else min(next_power_of_two(max(columns, 1)), BLOCK)
    with scalars_as_bounds(table):
        require(KERNEL, "triton").build[(requests + 1, max(ceil_div(columns, block), 1))](
            inputs.query_lens,
            inputs.seq_lens,
            table,
            built.qo_indptr,
            built.paged_kv_indptr,
            built.paged_kv_indices,
            built.paged_kv_last_page_len,
            built.seq_lens,
            requests,
            inputs.page_size,
            inputs.query_lens.stride(0),
            inputs.seq_lens.stride(0),
            *table.stride(),
            BLOCK=block,
        )
    return built
