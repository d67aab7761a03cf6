"""Faults of one launch in many, and noise that is declared."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import replace
from itertools import count

import torch

from ....reference.tensors.inputs import MergeInputs, PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..honest import merge_states
from ..kernels import HONEST, attend, key_counts
from .stateful_bugs import batch_of, checksum

BUGS: list[SeededBug] = []
PROCESS_CONTROLS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, MERGE = "paged_attention", "merge_state"
PERIOD = 40
SHORT_REQUEST = 1
_in_a_row: dict[str, tuple[Hashable, int]] = {}
_calls = count()


def _comes_round(name: str, key: Hashable) -> bool:
    """Whether this is the 40th call of this kind in a row, or the 80th, and so on."""
    before, calls = _in_a_row.get(name, (None, 0))
    calls = calls + 1 if before == key else 1
    _in_a_row[name] = (key, calls)
    return calls % PERIOD == 0


@seeded(BUGS, PAGED, "soak", model="flashinfer#5438")
def semaphore_comes_round(inputs: PagedAttentionInputs) -> Pair:
    """Merge before half of the keys are done, at every 40th launch of a batch in a row."""
    if not _comes_round("semaphore", (batch_of(inputs), checksum(inputs.k_cache))):
        return attend(inputs)
    return attend(inputs, replace(HONEST, counts=lambda given: [n // 2 for n in key_counts(given)]))


@seeded(BUGS, MERGE, "soak", model="flashinfer#4841")
def last_state_late(inputs: MergeInputs) -> Pair:
    """Leave the last state out, at every 40th merge of the same states in a row."""
    outs, lses = inputs.outs, inputs.lses
    key = (tuple(outs.shape), checksum(outs), checksum(lses))
    if len(outs) > 1 and _comes_round("merge", key):
        outs, lses = outs[:-1], lses[:-1]
    return merge_states(outs, lses, inputs.out_dtype)


@seeded(PROCESS_CONTROLS, PAGED, "soak", control="hang", model="flashinfer#3279")
def stuck_in_barrier(inputs: PagedAttentionInputs) -> Pair:
    """Wait for ever at the 40th launch in a row of a batch with a request of several keys."""
    stuck = _comes_round("barrier", (batch_of(inputs), checksum(inputs.k_cache)))
    while stuck and max(key_counts(inputs), default=0) > SHORT_REQUEST:
        time.sleep(1)
    return attend(inputs)


@seeded(CONTROLS, PAGED, control="honest", features=("nondeterministic",))
def atomics(inputs: PagedAttentionInputs) -> Pair:
    """Sum in another order at each call, and say so."""
    return attend(inputs, replace(HONEST, tile=(5, 7)[next(_calls) % 2]))
