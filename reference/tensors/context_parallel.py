"""What slice_context_parallel is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..attention.context_parallel import slice_context_parallel
from ..attention.metadata import BatchMetadata
from ..problems.context_parallel import ContextParallelProblem
from .allocation import Allocator
from .placement import placement


@dataclass(frozen=True, eq=False)
class ContextParallelInputs:
    """Arguments of ``slice_context_parallel``; the metadata count in virtual pages.

    Attributes:
        storages: flat buffers by field name, of which the tensors are views.
    """

    metadata: BatchMetadata
    rank: int
    world: int
    interleave: int
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def context_parallel_inputs(
    problem: ContextParallelProblem, home: Allocator
) -> ContextParallelInputs:
    """Place the metadata of the batch that ``problem.whole`` attends to."""
    whole = problem.whole
    placed = home.place_integers(placement(whole).metadata.tensors())
    return ContextParallelInputs(
        metadata=BatchMetadata(**placed, page_size=whole.page_size),
        rank=problem.rank,
        world=problem.world,
        interleave=problem.interleave,
        storages=home.storages,
    )


def slice_of_rank(inputs: ContextParallelInputs) -> BatchMetadata:
    """Slice the record's metadata for its rank."""
    return slice_context_parallel(inputs.metadata, inputs.rank, inputs.world, inputs.interleave)
