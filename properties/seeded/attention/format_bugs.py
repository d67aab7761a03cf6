"""Faults in reading FP8 of ragged keys, int4 with zero points, and records of latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....reference.tensors.inputs import RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import HONEST_READING, fp8_values, query_values, widened_rows
from ..kernels import attend

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
FP8 = ("fp8_kv",)
FP8_QUERIES = (*FP8, "fp8_q")


def _rows(inputs: RaggedAttentionInputs, **steps: Any) -> Pair:  # noqa: ANN401  of a Reading
    return attend(widened_rows(inputs, replace(HONEST_READING, **steps)))


def _is_fp8(inputs: RaggedAttentionInputs) -> bool:
    return inputs.k.dtype.itemsize == 1


@seeded(BUGS, RAGGED, "parity", features=FP8)
def ragged_e5m2_taken_for_e4m3(inputs: RaggedAttentionInputs) -> Pair:
    """Read all FP8 keys and values of ragged attention as e4m3."""
    return _rows(inputs, fp8=lambda codes, _: fp8_values(codes & ~1, "e4m3"))


@seeded(BUGS, RAGGED, "parity", features=FP8)
def ragged_v_scale_dropped(inputs: RaggedAttentionInputs) -> Pair:
    """Ignore v_scale where the values of ragged attention are FP8."""
    return attend(replace(widened_rows(inputs), v_scale=1.0)) if _is_fp8(inputs) else _rows(inputs)


@seeded(BUGS, RAGGED, "parity", features=(*FP8, "per_head_scales"))
def ragged_k_scale_of_first_head(inputs: RaggedAttentionInputs) -> Pair:
    """Scale FP8 keys of all heads of ragged attention by the k_scale of the first one."""
    scale = inputs.k_scale
    if _is_fp8(inputs) and isinstance(scale, torch.Tensor):
        scale = scale[:1].expand_as(scale)
    return attend(replace(widened_rows(inputs), k_scale=scale))


@seeded(BUGS, RAGGED, "parity", features=FP8_QUERIES)
def ragged_q_scale_dropped(inputs: RaggedAttentionInputs) -> Pair:
    """Ignore q_scale of ragged attention's FP8 queries."""
    wide = inputs.q.dtype.itemsize > 1
    return _rows(inputs, queries=lambda given: given.q if wide else query_values(given))
