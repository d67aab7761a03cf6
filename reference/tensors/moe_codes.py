"""Quantising the matrices of MoE problems: codes and scales that kernels read.

Scales of FP8 and int4, and global scales, have three significant bits, and those of int8 are powers
of two: the numbers which codes stand for fit into bfloat16, so that a matrix of these numbers can
be given in its place.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..formats.int4_groups import LARGEST_CODE, encode_int4_groups, groups_of
from ..formats.mx import quantize_e8m0
from ..moe.weights import SCALE_BLOCK, MatrixFormat
from .values import bits

LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
POWERS = 3
"""Powers of two among which a scale of int8 is chosen, whose codes leave no bits for others."""
ZERO_POINTS = (3, 10)
"""The least zero point of int4, and how many there are: they leave room on both sides."""


class Codes(NamedTuple):
    """A quantised matrix before it is placed; only some formats have a global scale."""

    codes: torch.Tensor
    scales: torch.Tensor
    format: MatrixFormat
    global_scale: torch.Tensor | None = None
    zero_points: torch.Tensor | None = None


def quantised(
    values: torch.Tensor,
    form: MatrixFormat,
    key: int,
    ids: torch.Tensor,
    largest: float | None = None,
) -> Codes:
    """Quantise weights, or hidden states.

    Args:
        values: [experts, rows, columns] or [tokens, columns], float32.
        form: format of the codes.
        key: key of the hash that chooses the scales' significant bits.
        ids: int64, global ids of the experts, or identities of the tokens.
        largest: the largest of hidden states, a bound on |values|: one scale for all must not
            depend on which tokens there are. Weights have one scale an expert instead.
    """
    entry, amax = form.entry, values.abs()
    if form.scales == "channel":
        amax = amax.amax(dim=-1)
    elif form.in_blocks:
        amax = functools.reduce(_block_amax, range(1, values.dim()), amax)
    elif entry.dtype == torch.uint8 and entry.largest:
        return _int4(values, form, key, ids)
    elif entry.block and not entry.has_global_scale:
        codes, scales = entry.encode(values, 1.0)
        return Codes(codes, scales, form)
    elif largest is None:
        amax = amax.amax(dim=(1, 2))
    else:
        amax, ids = torch.tensor(largest, device=values.device), ids.new_zeros(1)
    hashes = bits(key, ids, amax.shape[1:].numel()).view(amax.shape)
    if entry.has_global_scale:
        # e2m1, e4m3 and two bits make eight.
        scale = _scale(amax, 2 * hashes, LARGEST_E2M1 * LARGEST_E4M3)
        codes, scales, _ = entry.encode(values, _fitted(scale, values))
        return Codes(codes, scales, form, scale)
    choose = _power if entry.dtype == torch.int8 or form.powers else _scale
    scales = spread = choose(amax, hashes, entry.largest)
    if form.in_blocks:
        for dim in range(1, values.dim()):
            spread = _spread(spread, dim, values.shape[dim])
    codes = entry.encode(values, _fitted(spread, values).expand_as(values))[0]
    return Codes(codes, quantize_e8m0(scales) if form.powers else scales, form)


def quantised_by_half(
    values: torch.Tensor, form: MatrixFormat, key: int, ids: torch.Tensor, *, interleaved: bool
) -> Codes:
    """Quantise a w13 with global scales [experts, 2], one of its gate and one of its up rows."""
    experts, rows, columns = values.shape
    axis = 2 if interleaved else 1
    halves = [experts, rows // 2, rows // 2, columns]
    halves[axis] = 2
    split = values.view(halves).movedim(axis, 1).flatten(0, 1).contiguous()
    made = quantised(split, form, key, torch.stack([2 * ids, 2 * ids + 1], dim=1).flatten())
    assert made.global_scale is not None  # noqa: S101  the format has one

    def joined(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.view(torch.uint8).view(experts, 2, rows // 2, -1).movedim(1, axis)
        return found.reshape(experts, rows, -1).view(tensor.dtype)

    scale = made.global_scale.view(experts, 2)
    return made._replace(codes=joined(made.codes), scales=joined(made.scales), global_scale=scale)


def _int4(values: torch.Tensor, form: MatrixFormat, key: int, ids: torch.Tensor) -> Codes:
    """Quantise groups of columns to 4 bits, with zero points by hash where the format has them."""
    amax = groups_of(values, form.entry.block).abs().amax(dim=-1).to(torch.float32)
    hashes = bits(key, ids, amax.shape[1:].numel()).view(amax.shape)
    zero_points, room = None, torch.tensor(form.entry.largest, device=values.device)
    if form.entry.has_zero_points:
        least, many = ZERO_POINTS
        zero_points = ((hashes >> 2) % many + least).to(torch.uint8)
        room = torch.minimum(zero_points, LARGEST_CODE - zero_points).to(amax.dtype)
    scales = _scale(amax / room, hashes, 1.0)
    codes = encode_int4_groups(values, form.entry.block, scales, zero_points)
    return Codes(codes, scales, form, zero_points=zero_points)


def _fitted(scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return scales of the first axes with an axis of one for each other of the values."""
    return scales.view(*scales.shape, *[1] * (values.dim() - scales.dim()))


def _scale(largest: torch.Tensor, hashes: torch.Tensor, room: float) -> torch.Tensor:
    """Return 1, 1.25, 1.5 or 1.75 times the least power of two that keeps all within room."""
    exponent = torch.frexp(largest / room).exponent
    return torch.ldexp(1.0 + (hashes % 4).to(torch.float32) / 4, exponent)


def _power(largest: torch.Tensor, hashes: torch.Tensor, room: float) -> torch.Tensor:
    """Return 1, 2 or 4 times the least power of two that keeps all within room."""
    exponent = torch.frexp(largest / room).exponent + (hashes % POWERS).to(torch.int32)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _block_amax(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the largest of each 128 along an axis, the last of what is left."""
    parts = [part.amax(dim=dim, keepdim=True) for part in values.split(SCALE_BLOCK, dim=dim)]
    return torch.cat(parts, dim=dim)


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return scales.repeat_interleave(SCALE_BLOCK, dim=dim).narrow(dim, 0, size)
