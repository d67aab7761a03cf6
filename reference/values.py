"""Tensor values from a counter-based hash: the same bits on every CPU and GPU.

Element (row, column) of tensor ``tag`` under ``seed`` is a pure function of these integers, by
32-bit multiply-xorshift mixing in int64, mapped to dyadic rationals that float32 holds exactly.
Nothing depends on a generator's state, on the order of evaluation or on the shape asked for, so
a value stays with its logical token when pages, layouts or batches change around it.
"""

from __future__ import annotations

import zlib

import torch

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble int64 tensors of 32-bit values (the finalizer of MurmurHash3, Appleby 2011)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def mix_int(x: int) -> int:
    """Do what ``mix`` does, to one Python integer."""
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def stream(seed: int, tag: str) -> int:
    """Give the 32-bit key of one tensor's values."""
    high = mix_int((seed >> 32) * _GOLDEN)  # not symmetric: 2**32 is another seed than 1
    return mix_int(mix_int(seed & _MASK) ^ high ^ zlib.crc32(tag.encode()))


def choose(seed: int, tag: str, index: int, options: int) -> int:
    """Choose one of ``options`` integers from 0, by hash."""
    return mix_int(stream(seed, tag) + index * _GOLDEN) % options


def bits(key: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Give [rows, columns] int64 hashes below 2**32 for these row numbers."""
    row_keys = mix((rows.to(torch.int64) * _GOLDEN + key) & _MASK)
    column_keys = torch.arange(columns, device=rows.device, dtype=torch.int64) * 0x7FEB352D
    return mix((row_keys.unsqueeze(1) + column_keys.unsqueeze(0)) & _MASK)


def bell(key: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Give [rows, columns] float32 values that look normal: mean 0, deviation 1.15, below 4.

    The sum of a hash's four bytes (Irwin-Hall) with the hash's low bits behind it, so that all 24
    bits of a float32 are in use and a kernel that rounds its inputs is seen to do so.
    """
    h = bits(key, rows, columns)
    total = (h & 0xFF) + ((h >> 8) & 0xFF) + ((h >> 16) & 0xFF) + (h >> 24) - 510
    return (total * 2**14 + ((h * 5) & 0x3FFF)).to(torch.float32) * 2.0**-21


def integers(key: int, rows: torch.Tensor, columns: int, low: int, high: int) -> torch.Tensor:
    """Give [rows, columns] float32 integers from low to high inclusive."""
    return (bits(key, rows, columns) % (high - low + 1) + low).to(torch.float32)


def power_of_two_at_least(x: float) -> float:
    """Round up to a power of two."""
    power = 1.0
    while power < x:
        power *= 2
    while power / 2 >= x:
        power /= 2
    return power
