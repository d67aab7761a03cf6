"""A metadata builder with torch operations only, the way serving stacks compute it on the device.

It shares no code with the oracle's builder, which works with Python integers.
"""

from __future__ import annotations

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import MetadataInputs
from ..protocol import implementation


@implementation(
    "build_metadata",
    name="reference-metadata",
    backend="reference",
    features=("large_rows",),
)
def build(inputs: MetadataInputs) -> BatchMetadata:
    """Compute page counts, the two indptrs, the indices and the last page lengths."""
    lengths, page_size = inputs.seq_lens, inputs.page_size
    counts = (lengths + page_size - 1) // page_size
    columns = torch.arange(inputs.block_table.shape[1], device=lengths.device)
    used = columns.unsqueeze(0) < counts.unsqueeze(1)
    last = torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    return BatchMetadata(
        qo_indptr=_indptr(inputs.query_lens),
        paged_kv_indptr=_indptr(counts),
        paged_kv_indices=inputs.block_table[used],
        paged_kv_last_page_len=last.to(torch.int32),
        seq_lens=lengths.to(torch.int32),
        page_size=page_size,
    )


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = torch.cumsum(counts, dim=0)
    return indptr
