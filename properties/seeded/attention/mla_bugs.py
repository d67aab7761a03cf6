"""Faults of multi-head latent attention: one cache, of which a part is the keys' and V's alike."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ....impl.targets.target import Target
from ....reference import AttentionProblem, Problem
from ....reference.tensors.inputs import PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import widened
from ..kernels import HONEST, attend, page_ids

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


def _of_many_heads(problem: Problem, target: Target) -> bool:
    """Return whether it is a call of 128 query heads on one latent cache; no sentence."""
    del target
    assert isinstance(problem, AttentionProblem)  # noqa: S101  it is asked about no others
    return problem.values_in_keys and problem.group_size == 128 and problem.head_dim_qk == 576  # noqa: PLR2004


@seeded(BUGS, PAGED, "parity", features=("mla",), supports=_of_many_heads)
def pages_of_first_request(inputs: PagedAttentionInputs) -> Pair:
    """Read the first request's pages for all others, in a kernel of 128 latent heads only."""

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        found = page_ids(inputs)
        first = found[0] if found else None
        return [
            each if first is None or not len(first) else first[torch.arange(len(each)) % len(first)]
            for each in found
        ]

    return attend(inputs, replace(HONEST, pages=pages))
