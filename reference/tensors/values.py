"""Tensor values from a counter-based hash: the same bits on every CPU and GPU.

Element (row, column) of tensor ``tag`` under ``seed`` is a pure function of these integers, by
32-bit multiply-xorshift mixing, mapped to dyadic rationals that float32 holds exactly. It is done
in int32, whose products wrap around: half the memory of int64, of which there is much. Nothing
depends on a generator's state, on the order of evaluation or on the shape asked for, so
a value stays with its logical token when pages, layouts or batches change around it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mix_int(x: int) -> int:
    """Scramble a 32-bit integer (the finalizer of MurmurHash3, Appleby 2011)."""
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def stream(seed: int, tag: str) -> int:
    """Return the 32-bit key of one tensor's values."""
    high = mix_int((seed >> 32) * _GOLDEN)  # not symmetric: 2**32 is another seed than 1
    return mix_int(mix_int(seed & _MASK) ^ high ^ zlib.crc32(tag.encode()))


def choose(seed: int, tag: str, index: int, options: int) -> int:
    """Choose one of ``options`` integers from 0, by hash."""
    return mix_int(stream(seed, tag) + index * _GOLDEN) % options


def bits(key: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [rows, columns] int64 hashes below 2**32 for these row numbers, where they are."""
    return bits_of([Part(key, rows, columns)])[0]


class Part(NamedTuple):
    """Values of one tensor: the stream's key, the numbers [rows] int64 of its rows, its columns."""

    key: int
    rows: torch.Tensor
    columns: int


def bits_of(parts: Sequence[Part]) -> list[torch.Tensor]:
    """Return the [rows, columns] ``bits`` of several tensors, which take little more than one."""
    return _split(parts, _hashes(parts, parts[0].rows.device).to(torch.int64) & _MASK)


def bells(parts: Sequence[Part], device: torch.device | None = None) -> list[torch.Tensor]:
    """Return [rows, columns] float32 values that look normal: mean 0, deviation 1.15, below 4.

    The sum of a hash's four bytes (Irwin-Hall) with the hash's low bits behind it, so that all 24
    bits of a float32 are in use and a kernel that rounds its inputs is seen to do so.

    Args:
        parts: the tensors; their row numbers may all be on the host, which hashes them quickly.
        device: the device of the values; that of the row numbers if None.
    """
    hashes = _hashes(parts, device or parts[0].rows.device)
    pairs = (hashes & 0x00FF00FF).add_((hashes >> 8).bitwise_and_(0x00FF00FF))
    total = (pairs & 0xFFFF).add_(pairs >> 16)
    # Below 2**24: float32 holds the number exactly, and its difference to the mean.
    number = (hashes * 5).bitwise_and_(0x3FFF).add_(total, alpha=2**14)
    return _split(parts, number.to(torch.float32).mul_(2.0**-21).sub_(510 * 2.0**-7))


def bell(key: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the [rows, columns] ``bells`` of one tensor."""
    return bells([Part(key, rows, columns)])[0]


def _hashes(parts: Sequence[Part], device: torch.device) -> torch.Tensor:
    """Return the hashes of all parts, one after another, as int32.

    Rows and columns are hashed where the rows are, and brought to the device at once.
    """
    keys = torch.cat([(part.rows * _GOLDEN).add_(part.key) for part in parts])
    most = max(part.columns for part in parts)
    columns = torch.arange(most, device=keys.device, dtype=torch.int32) * 0x7FEB352D
    both = torch.cat([mix(keys.to(torch.int32)), columns]).to(device, non_blocking=True)
    *row_keys, column_keys = both.split([*(part.rows.shape[0] for part in parts), most])
    found = torch.empty(sum(_sizes(parts)), dtype=torch.int32, device=device)
    for part, of_rows, table in zip(parts, row_keys, _split(parts, found), strict=True):
        torch.add(of_rows.unsqueeze(1), column_keys[: part.columns], out=table)
    return mix(found)


def _split(parts: Sequence[Part], values: torch.Tensor) -> list[torch.Tensor]:
    """Return the [rows, columns] of each part out of all of them one after another."""
    return [
        tensor.view(part.rows.shape[0], part.columns)
        for part, tensor in zip(parts, values.split(_sizes(parts)), strict=True)
    ]


def _sizes(parts: Sequence[Part]) -> list[int]:
    return [part.rows.shape[0] * part.columns for part in parts]


def mix(x: torch.Tensor) -> torch.Tensor:
    """Do what ``mix_int`` does, to an int32 tensor of the same bits, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x.bitwise_xor_((x >> shift).bitwise_and_(_MASK >> shift)).mul_(factor - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def integers(key: int, rows: torch.Tensor, columns: int, low: int, high: int) -> torch.Tensor:
    """Return [rows, columns] float32 integers from low to high inclusive."""
    return (bits(key, rows, columns) % (high - low + 1) + low).to(torch.float32)


def power_of_two_at_least(x: float) -> float:
    """Round up to a power of two."""
    power = 1.0
    while power < x:
        power *= 2
    while power / 2 >= x:
        power /= 2
    return power
