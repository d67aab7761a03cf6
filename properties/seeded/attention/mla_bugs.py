"""Faults of multi-head latent attention: one cache, of which a part is the keys' and V's alike."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import widened
from ..kernels import attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED = "paged_attention"
FEATURES = ("mla", "fp8_kv")


def _is_latent(inputs: PagedAttentionInputs) -> bool:
    """Whether V is a view of K."""
    return inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()


@seeded(CONTROLS, PAGED, control="honest", features=FEATURES)
def one_latent_cache(inputs: PagedAttentionInputs) -> Pair:
    """Read the cache once, as kernels of latent attention do: V is what the keys begin with."""
    wide = widened(inputs)
    if _is_latent(inputs):
        wide = replace(wide, v_cache=wide.k_cache[..., : inputs.v_cache.shape[-1]])
    return attend(wide)


@seeded(BUGS, PAGED, "parity", features=("mla",))
def values_from_last_channels(inputs: PagedAttentionInputs) -> Pair:
    """Read V from the last channels of the latent cache, where the rotary ones are."""
    if _is_latent(inputs):
        inputs = replace(inputs, v_cache=inputs.k_cache[..., -inputs.v_cache.shape[-1] :])
    return attend(inputs)


@seeded(BUGS, PAGED, "parity", features=("mla",))
def rotary_part_dropped(inputs: PagedAttentionInputs) -> Pair:
    """Leave the rotary channels out of the logits."""
    if _is_latent(inputs):
        q = inputs.q.clone()
        q[..., inputs.v_cache.shape[-1] :] = 0.0
        inputs = replace(inputs, q=q)
    return attend(inputs)


@seeded(BUGS, PAGED, "parity", features=("mla",))
def scale_of_values(inputs: PagedAttentionInputs) -> Pair:
    """Take the default scale from the compressed channels only, without the rotary ones."""
    whole, compressed = inputs.q.shape[-1], inputs.v_cache.shape[-1]
    if _is_latent(inputs) and inputs.sm_scale == 1.0 / math.sqrt(whole):
        inputs = replace(inputs, sm_scale=1.0 / math.sqrt(compressed))
    return attend(inputs)
