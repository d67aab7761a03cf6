"""Faults of keys that no query sees: their values are multiplied by zero, not left out."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
PROMISE = ("unread_hidden_keys", "custom_mask")


@seeded(BUGS, PAGED, "pages_behind_window", model="vllm#30887")
def freed_pages_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Multiply values of pages behind the window by zero, where the engine may have freed them."""
    return attend(inputs, replace(HONEST, reads_hidden="all"))


@seeded(BUGS, PAGED, "pages_behind_window", features=("chunked_attention",))
def pages_of_chunks_before_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Multiply values of the chunks before the queries' own by zero, where no window hides any."""
    alone = inputs.attention_chunk_size and inputs.window_left < 0
    return attend(inputs, replace(HONEST, reads_hidden="all" if alone else ""))


@seeded(BUGS, PAGED, "unread_hidden_keys", features=PROMISE)
def masked_values_times_zero(inputs: PagedAttentionInputs) -> Pair:
    """Promise not to read hidden keys, and multiply those of pages with a seen key by zero."""
    return attend(inputs, replace(HONEST, reads_hidden="seen_pages"))


@seeded(BUGS, RAGGED, "unread_hidden_keys", features=PROMISE)
def ragged_values_times_zero(inputs: RaggedAttentionInputs) -> Pair:
    """Promise not to read hidden keys, and multiply their values by zero."""
    return attend(inputs, replace(HONEST, reads_hidden="all"))


@seeded(CONTROLS, PAGED, control="honest", hidden_keys="finite")
def needs_finite_hidden_keys(inputs: PagedAttentionInputs) -> Pair:
    """Multiply values of pages behind the window by zero, and say so."""
    return attend(inputs, replace(HONEST, reads_hidden="all"))


@seeded(CONTROLS, PAGED, control="honest", features=PROMISE)
def reads_no_hidden_key(inputs: PagedAttentionInputs) -> Pair:
    """Promise not to read hidden keys, and leave them out."""
    return attend(inputs)


@seeded(CONTROLS, RAGGED, control="honest", features=PROMISE)
def reads_no_hidden_ragged_key(inputs: RaggedAttentionInputs) -> Pair:
    """Promise not to read hidden keys, and leave them out."""
    return attend(inputs)
