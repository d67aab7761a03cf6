"""Faults of which kernel runs: the answer is right, and another one has given it.

A CPU has no profiler of kernels: these note what they would launch, as each launch of Triton does.
On a GPU torch's own kernels are named beside them, which are in nobody's place.

No comparison of outputs can see such a fault, and no law that compares any.
"""

from __future__ import annotations

import torch

from ....impl.gpu import launch_names
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
TILED, PLAIN = "attend_in_tiles", "attend_row_by_row"
MOST_KEYS = 64
"""Keys of a request from which on the bug falls back."""


@seeded(BUGS, "paged_attention", "parity", runs=(TILED,))
def silent_fallback(inputs: PagedAttentionInputs) -> Pair:
    """Launch another kernel than the one that is claimed, where a request has many keys."""
    lengths = inputs.metadata.seq_lens
    long = lengths.numel() > 0 and int(lengths.max()) >= MOST_KEYS
    launch_names.note(PLAIN if long else TILED)
    return attend(inputs)


@seeded(CONTROLS, "paged_attention", runs=(TILED,), control="honest")
def launches_what_it_claims(inputs: PagedAttentionInputs) -> Pair:
    """Launch the kernel that is claimed, and one that prepares the call, however long it is."""
    launch_names.note("prepare")
    launch_names.note(TILED)
    return attend(inputs)
