"""Slices of context-parallel groups with torch operations only, as a serving stack takes them.

It shares no code with the oracle: that counts runs of keys, this looks lengths up among positions.
"""

from __future__ import annotations

import torch

from ...reference import BatchMetadata
from ...reference.tensors.context_parallel import ContextParallelInputs
from ..protocol import implementation


@implementation("slice_context_parallel", name="torch-slice-context-parallel")
def slice_context_parallel(inputs: ContextParallelInputs) -> BatchMetadata:
    """Look up how many of the rank's positions come before each request's end; keep their pages."""
    whole, page_size = inputs.metadata, inputs.metadata.page_size // inputs.world
    virtual = whole.paged_kv_indptr.diff()
    most = int(virtual.max()) if len(virtual) else 0
    keys = torch.arange(most * page_size, dtype=torch.int32, device=virtual.device)
    turns, within = keys // inputs.interleave, keys % inputs.interleave
    positions = (turns * inputs.world + inputs.rank) * inputs.interleave + within
    seq_lens = torch.searchsorted(positions, whole.seq_lens.contiguous(), out_int32=True)
    counts = (seq_lens + page_size - 1) // page_size
    # Of each entry of the indices: which page of its request it is.
    request = torch.repeat_interleave(virtual)
    page = torch.arange(len(request), device=virtual.device) - whole.paged_kv_indptr[request]
    last = torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0)
    return BatchMetadata(
        qo_indptr=whole.qo_indptr.clone(),
        paged_kv_indptr=torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        paged_kv_indices=whole.paged_kv_indices[page < counts[request]],
        paged_kv_last_page_len=last.to(torch.int32),
        seq_lens=seq_lens,
        page_size=page_size,
    )
