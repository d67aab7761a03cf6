"""Faults of scratch memory: what a kernel allocates, does not write, and reads all the same."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, Request, assemble, attend, close, key_counts
from .padding_bugs import in_parts, merged

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PARTS, LENGTH, ROWS = 3, 32, 8
WORKSPACE = 9 * 2**20
"""Numbers of a workspace. It is so large that malloc always takes fresh pages, which hold zeros."""


@seeded(BUGS, "paged_attention", "parity")
def unwritten_parts_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Weigh parts that a short request does not have by 0, in a workspace that nobody wrote to."""
    workspace = torch.empty(WORKSPACE)
    parts = max(PARTS, *(-(-count // LENGTH) for count in (0, *key_counts(inputs))))

    def one(request: Request) -> Pair:
        states = in_parts(request, inputs, LENGTH)
        shape = (parts, *states[0].weighted.shape)
        # Each request has a room of its own: none finds what another has left.
        begin = request.rows.start * math.prod(shape) // request.num_queries
        scratch = workspace[begin : begin + math.prod(shape)].view(shape)
        for place, state in zip(scratch, states, strict=False):
            place.copy_(state.weighted)
        return close(merged(states, scratch), request, inputs)

    return assemble(inputs, one)


@seeded(BUGS, "ragged_attention", "parity")
def unwritten_rows_times_zero(inputs: RaggedAttentionInputs) -> Pair:
    """Multiply rows of a tile of values that no key has by 0, in a workspace of whole tiles."""
    workspace = torch.empty(WORKSPACE)

    def weigh(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads, keys, channels = v.shape
        shape = (heads, -(-keys // ROWS) * ROWS, channels)
        tile = workspace[: math.prod(shape)].view(shape)
        tile[:, :keys] = v
        weights = torch.nn.functional.pad(probabilities, (0, tile.shape[1] - keys))
        return weights @ tile

    return attend(inputs, replace(HONEST, weigh=weigh))
