"""Faults of strides: K and V are views of one allocation, and one of their strides is a guess."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, attend

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
STRIDES = ("different_kv_strides", "kv_views")


@seeded(BUGS, "paged_attention", "parity", features=STRIDES)
def rows_of_heads_taken_for_dense(inputs: PagedAttentionInputs) -> Pair:
    """Take the outer stride within a page for the inner one times its size."""

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        page, _, inner, channel = cache.stride()
        dense = cache.as_strided(cache.shape, (page, cache.shape[2] * inner, inner, channel))
        return HONEST.gather(dense, pages, inputs)

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, "paged_attention", "parity", features=("strided_channels",))
def channels_taken_for_dense(inputs: PagedAttentionInputs) -> Pair:
    """Take the channels of a key for neighbours, whatever their stride is."""

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        dense = cache.as_strided(cache.shape, (*cache.stride()[:-1], 1))
        return HONEST.gather(dense, pages, inputs)

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, "ragged_attention", "parity", features=("kv_views",))
def head_stride_from_channels(inputs: RaggedAttentionInputs) -> Pair:
    """Take the stride of heads for the number of channels."""
    views = [
        each.as_strided(each.shape, (each.stride(0), each.shape[-1], 1))
        for each in (inputs.k, inputs.v)
    ]
    return attend(replace(inputs, k=views[0], v=views[1]))
