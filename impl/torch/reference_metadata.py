"""A metadata builder with torch operations only, the way serving stacks compute it on the device.

It shares no code with the oracle's builder, which works with Python integers.
"""

from __future__ import annotations

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import MetadataInputs
from ..features import INT64_INPUTS, REFUSES
from ..protocol import implementation


@implementation(
    "build_metadata",
    name="reference-metadata",
    backend="reference",
    features=("large_rows", INT64_INPUTS, REFUSES),
)
def build(inputs: MetadataInputs) -> BatchMetadata:
    """Compute page counts, the two indptrs, the indices and the last page lengths.

    Raises:
        ValueError: a length or a page is negative, or a row of the block table is too narrow.
    """
    lengths, page_size = inputs.seq_lens, inputs.page_size
    counts = (lengths + page_size - 1) // page_size
    columns = torch.arange(inputs.block_table.shape[1], device=lengths.device)
    used = columns.unsqueeze(0) < counts.unsqueeze(1)
    _check("query_lens", inputs.query_lens < 0)
    _check("seq_lens", (lengths < 0) | (counts > len(columns)))
    _check("block_table", (used & (inputs.block_table < 0)).any(1))
    last = torch.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    return BatchMetadata(
        qo_indptr=_indptr(inputs.query_lens),
        paged_kv_indptr=_indptr(counts),
        paged_kv_indices=inputs.block_table[used].to(torch.int32),
        paged_kv_last_page_len=last.to(torch.int32),
        seq_lens=lengths.to(torch.int32),
        page_size=page_size,
    )


def _check(name: str, wrong: torch.Tensor) -> None:
    if wrong.any():
        message = f"{name} of request {int(wrong.nonzero()[0])} is negative, or beyond the table"
        raise ValueError(message)


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = torch.cumsum(counts, dim=0)
    return indptr
