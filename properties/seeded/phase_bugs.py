"""Faults in splitting a batch into decodes and prefills, as the builders of serving stacks do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...reference.tensors.inputs import MetadataInputs
from .catalogue import SeededBug, seeded
from .honest import Phased, build, num_decodes_of, split

BUGS: list[SeededBug] = []
METADATA = "build_metadata"
PHASES = ("phases",)


def _with_prefills(inputs: MetadataInputs, **changes: torch.Tensor) -> Phased:
    phased = split(build(inputs), num_decodes_of(inputs))
    return replace(phased, prefills=replace(phased.prefills, **changes))


@seeded(BUGS, METADATA, "metadata_phases", features=PHASES)
def pages_counted_in_tokens(inputs: MetadataInputs) -> Phased:
    """Accumulate the prefills' keys where their pages are asked for."""
    built, start = build(inputs), num_decodes_of(inputs)
    tokens = torch.cat([torch.zeros(1), built.seq_lens[start:].cumsum(0)]).int()
    return _with_prefills(inputs, cum_pages_kv=tokens)


@seeded(BUGS, METADATA, "metadata_phases", features=PHASES)
def prefills_not_rebased(inputs: MetadataInputs) -> Phased:
    """Leave the prefills' qo_indptr counting from the batch's first token."""
    built, start = build(inputs), num_decodes_of(inputs)
    return _with_prefills(inputs, qo_indptr=built.qo_indptr[start:])


@seeded(BUGS, METADATA, "metadata_phases", features=PHASES)
def decodes_of_one_token(inputs: MetadataInputs) -> Phased:
    """Take only requests with one query for decodes, whatever the threshold is."""
    return split(build(inputs), num_decodes_of(replace(inputs, decode_threshold=1)))


@dataclass
class _Buffer:
    """The page pointer that a builder keeps for CUDA graphs."""

    pointer: torch.Tensor


_kept = _Buffer(torch.zeros(1, dtype=torch.int32))


@seeded(BUGS, METADATA, "metadata_phases", model="vllm#39546", features=PHASES)
def pointer_of_previous_step(inputs: MetadataInputs) -> Phased:
    """Slice a mixed batch's page pointer out of the buffer before this step fills it."""
    built, start = build(inputs), num_decodes_of(inputs)
    phased = split(built, start)
    requests = len(built.seq_lens)
    stale, _kept.pointer = _kept.pointer, built.paged_kv_indptr
    if 0 < start < requests and len(stale) > requests:
        pointer = stale[start : requests + 1]
        phased = replace(phased, prefills=replace(phased.prefills, cum_pages_kv=pointer))
    return phased


@seeded(BUGS, METADATA, "metadata_phases", features=PHASES)
def indices_of_whole_batch(inputs: MetadataInputs) -> Phased:
    """Return the page indices of the whole batch for the prefills."""
    return _with_prefills(inputs, paged_kv_indices=build(inputs).paged_kv_indices)
