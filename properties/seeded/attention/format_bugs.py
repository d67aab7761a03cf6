"""Faults in reading FP8 of ragged keys, codes with zero points, and records of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ....impl import Target
from ....reference import AttentionProblem, Problem
from ....reference.formats.cache_elements import RECORDS
from ....reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..decoding import (
    HONEST_READING,
    bfloat16_values,
    e2m1_values,
    float32_tiles,
    fp8_values,
    less_zero,
    nibbles,
    query_values,
    record_values,
    transposed_blocks,
    widened,
    widened_rows,
    without_zero_points,
    zero_points,
)
from ..kernels import HONEST, attend

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED = "paged_attention", "ragged_attention"
FP8 = ("fp8_kv",)
FP8_QUERIES = (*FP8, "fp8_q")
INT4, ZERO_POINTS = ("int4_kv",), ("zero_point_kv",)
FP8_RECORD, FP4_RECORD = ("mla", "fp8_ds_mla"), ("mla", "nvfp4_ds_mla")


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


def _pages(inputs: PagedAttentionInputs, **steps: Any) -> Pair:  # noqa: ANN401  of a Reading
    return attend(widened(inputs, replace(HONEST_READING, **steps)))


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_nibbles_swapped(inputs: PagedAttentionInputs) -> Pair:
    """Read the high nibble of each byte of int4 codes first."""
    return _pages(
        inputs, nibbles=lambda codes: torch.stack([codes >> 4, codes & 0xF], -1).flatten(-2)
    )


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_nibbles_by_halves(inputs: PagedAttentionInputs) -> Pair:
    """Take the low nibbles of int4 codes for the first half of the channels."""
    return _pages(inputs, nibbles=lambda codes: torch.cat([codes & 0xF, codes >> 4], dim=-1))


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_zero_point_forgotten(inputs: PagedAttentionInputs) -> Pair:
    """Multiply int4 codes by their scale without taking the zero point off."""
    return _pages(inputs, zeros=torch.zeros_like)


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_codes_taken_as_signed(inputs: PagedAttentionInputs) -> Pair:
    """Read int4 codes with a zero point of 8 for all rows, as symmetric formats have it."""
    return _pages(inputs, zeros=lambda scales: torch.full_like(scales, 8.0))


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_zero_point_of_next_token(inputs: PagedAttentionInputs) -> Pair:
    """Take the zero point of the token behind each token of a page."""
    axis = 1 if inputs.kv_layout == "NHD" else 2
    return _pages(inputs, zeros=lambda scales: zero_points(scales.roll(-1, dims=axis)))


@seeded(BUGS, PAGED, "parity", features=INT4)
def int4_scale_of_next_head(inputs: PagedAttentionInputs) -> Pair:
    """Scale int4 codes by the scale of the next key-value head."""
    axis = 2 if inputs.kv_layout == "NHD" else 1
    return _pages(inputs, steps=lambda scales: without_zero_points(scales.roll(-1, dims=axis)))


@seeded(BUGS, PAGED, "parity", features=ZERO_POINTS)
def zero_point_codes_in_pairs(inputs: PagedAttentionInputs) -> Pair:
    """Take both nibbles of a byte for neighbours, where one half of the channels is in each."""
    return _pages(inputs, halves=nibbles)


@seeded(BUGS, PAGED, "parity", features=ZERO_POINTS)
def zero_point_taken_for_an_integer(inputs: PagedAttentionInputs) -> Pair:
    """Round the zero points, which other formats have as integers."""
    return _pages(
        inputs,
        less_zero=lambda codes, pairs: (
            (codes.float() - pairs[..., 1:].float().round()) * pairs[..., :1].float()
        ),
    )


@seeded(BUGS, PAGED, "parity", features=ZERO_POINTS)
def zero_point_taken_off_the_product(inputs: PagedAttentionInputs) -> Pair:
    """Multiply codes by their scale, and then take the zero point off."""
    return _pages(
        inputs,
        less_zero=lambda codes, pairs: (
            codes.float() * pairs[..., :1].float() - pairs[..., 1:].float()
        ),
    )


@seeded(BUGS, PAGED, "parity", features=ZERO_POINTS)
def zero_point_within_the_codes(inputs: PagedAttentionInputs) -> Pair:
    """Keep the zero point between 0 and the largest code, as formats with integers do."""

    def read(codes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        kept = pairs.clone()
        kept[..., 1].clamp_(0, 255)
        return less_zero(codes, kept)

    return _pages(inputs, less_zero=read)


@seeded(BUGS, PAGED, "parity", features=ZERO_POINTS)
def zero_point_of_the_next_token(inputs: PagedAttentionInputs) -> Pair:
    """Take the zero point of the token behind each token of a page."""
    axis = 1 if inputs.kv_layout == "NHD" else 2

    def read(codes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return less_zero(codes, torch.cat([pairs[..., :1], pairs[..., 1:].roll(-1, axis)], dim=-1))

    return _pages(inputs, less_zero=read)


def _latent_heads(problem: Problem, target: Target) -> bool | str:
    del target
    assert isinstance(problem, AttentionProblem)  # noqa: S101  of paged_attention
    return problem.head_dim_qk == 576 or "records have 576 channels"  # noqa: PLR2004


@seeded(CONTROLS, PAGED, control="honest", features=("mla", *RECORDS), supports=_latent_heads)
def records_float32(inputs: PagedAttentionInputs) -> Pair:
    """Widen the records of latent attention to float32, then loop over tiles of keys."""
    return _pages(inputs)


def _fp8_record(
    inputs: PagedAttentionInputs,
    *,
    fp8: Callable[[torch.Tensor], torch.Tensor] = lambda codes: fp8_values(codes, "e4m3"),
    tiles: Callable[[torch.Tensor], torch.Tensor] = float32_tiles,
    rotary: Callable[[torch.Tensor], torch.Tensor] = lambda record: bfloat16_values(
        record[..., 528:]
    ),
) -> Pair:
    """Attend to records of fp8_ds_mla, read in steps."""

    def read(record: torch.Tensor, element: str) -> torch.Tensor:
        del element
        compressed = fp8(record[..., :512]) * tiles(record[..., 512:528])
        return torch.cat([compressed, rotary(record)], dim=-1)

    return _pages(inputs, record=read) if _of_records(inputs) else _pages(inputs)


def _of_records(inputs: PagedAttentionInputs) -> bool:
    return bool(inputs.kv_format and inputs.kv_format.element in RECORDS)


@seeded(BUGS, PAGED, "parity", features=FP8_RECORD)
def record_scale_of_next_tile(inputs: PagedAttentionInputs) -> Pair:
    """Scale each tile of an fp8_ds_mla record by the scale of the tile behind it."""
    return _fp8_record(inputs, tiles=lambda scales: float32_tiles(scales.roll(-4, dims=-1)))


@seeded(BUGS, PAGED, "parity", features=FP8_RECORD)
def record_scale_of_first_tile(inputs: PagedAttentionInputs) -> Pair:
    """Scale all channels of an fp8_ds_mla record by the scale of its first tile."""
    return _fp8_record(inputs, tiles=lambda scales: float32_tiles(scales[..., :4].tile(4)))


@seeded(BUGS, PAGED, "parity", features=FP8_RECORD)
def record_read_as_e5m2(inputs: PagedAttentionInputs) -> Pair:
    """Read the codes of an fp8_ds_mla record as e5m2."""
    return _fp8_record(inputs, fp8=lambda codes: fp8_values(codes, "e5m2"))


@seeded(BUGS, PAGED, "parity", features=FP8_RECORD)
def record_rotary_part_behind_codes(inputs: PagedAttentionInputs) -> Pair:
    """Take the rotary part of an fp8_ds_mla record from behind its codes, scales included."""
    return _fp8_record(
        inputs,
        rotary=lambda record: bfloat16_values(record[..., 512:640]).nan_to_num(0.0, 0.0, 0.0),
    )


@seeded(BUGS, PAGED, "parity", features=FP8_RECORD)
def record_rotary_part_scaled(inputs: PagedAttentionInputs) -> Pair:
    """Scale the rotary part of an fp8_ds_mla record by the last tile's scale."""
    return _fp8_record(
        inputs,
        rotary=lambda record: (
            bfloat16_values(record[..., 528:]) * float32_tiles(record[..., 512:528])[..., -64:]
        ),
    )


def _fp4_record(
    inputs: PagedAttentionInputs,
    *,
    codes: Callable[[torch.Tensor], torch.Tensor] = nibbles,
    blocks: Callable[[torch.Tensor], torch.Tensor] = transposed_blocks,
) -> Pair:
    """Attend to records of nvfp4_ds_mla, read in steps."""

    def read(record: torch.Tensor, element: str) -> torch.Tensor:
        whole = record_values(record, element)
        compressed = e2m1_values(codes(record[..., :256])) * blocks(record[..., 320:])
        return torch.cat([compressed, whole[..., 512:]], dim=-1)

    return _pages(inputs, record=read) if _of_records(inputs) else _pages(inputs)


@seeded(BUGS, PAGED, "parity", features=FP4_RECORD)
def record_block_scales_in_order(inputs: PagedAttentionInputs) -> Pair:
    """Take the scales of an nvfp4_ds_mla record for those of its blocks in order."""
    return _fp4_record(
        inputs, blocks=lambda scales: fp8_values(scales, "e4m3").repeat_interleave(16, dim=-1)
    )


@seeded(BUGS, PAGED, "parity", features=FP4_RECORD)
def record_scale_of_next_block(inputs: PagedAttentionInputs) -> Pair:
    """Scale each block of an nvfp4_ds_mla record by the scale of the block behind it."""
    return _fp4_record(inputs, blocks=lambda scales: transposed_blocks(scales).roll(-16, dims=-1))


@seeded(BUGS, PAGED, "parity", features=FP4_RECORD)
def record_nibbles_swapped(inputs: PagedAttentionInputs) -> Pair:
    """Read the high nibble of each byte of an nvfp4_ds_mla record first."""
    return _fp4_record(
        inputs, codes=lambda packed: torch.stack([packed >> 4, packed & 0xF], -1).flatten(-2)
    )


@seeded(BUGS, RAGGED, "parity", features=("output_divisor",))
def output_divisor_dropped(inputs: RaggedAttentionInputs) -> Pair:
    """Leave outputs of 16 bits or more as they are, where they are to be divided."""
    return attend(inputs, replace(HONEST, divide=lambda out, _: out))


@seeded(BUGS, PAGED, "parity", features=("output_divisor",))
def output_divisor_multiplied(inputs: PagedAttentionInputs) -> Pair:
    """Multiply outputs by their divisor."""
    return attend(inputs, replace(HONEST, divide=torch.mul))
