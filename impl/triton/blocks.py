"""How the Triton attention kernel cuts its work: blocks, and splits of a request's keys.

Both follow only from shapes: reading a length from the device would wait for it. Without splits a
decode of one request runs on as few programs as it has key-value heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .support import ceil_div, next_power_of_two

LEAST_BLOCK = 16
"""Tensor cores multiply 16 by 16."""
LEAST_PACKED_BLOCK = 32
"""Triton (3.6, seen on an H200) gives a thread eight neighbours of a 16-bit operand that was joined
from halves of bytes; a product over only 16 of them then comes out wrong, without an error."""
SHARED_MEMORY = 97 * 1024
"""Bytes that blocks may take anywhere: every GPU from Ampere on has 99 KiB a multiprocessor."""
MARGIN = 2 * 1024
"""Bytes that the compiler may take besides, of what a GPU has."""
SMALL_DIM = MOST_ROWS = 128
MOST_SINGLE_ROWS = 32
MEASURED = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 8, 4)}
"""Keys a block, warps and stages by rows a block: the fastest on an H200 in bfloat16 with 128
channels. Where they do not fit, stages go first."""
LARGEST_TILE = max(keys for keys, _, _ in MEASURED.values())
"""Most keys of a block, on a GPU; blocks are smaller in the interpreter."""
WARP_GROUP_ROWS = 64
EXCHANGE = 4 * 1024
INTERPRETED_ROWS, INTERPRETED_BLOCK_N = 64, 32
"""Small, so that short sequences take several blocks there too."""
LONG, INTERPRETED_LONG_BLOCK_N = 2**12, 128
"""Keys of a request from which on the interpreter's blocks are larger: each takes it 15 ms."""


@dataclass(frozen=True)
class Blocks:
    """How the kernel cuts its work.

    Attributes:
        qk, vo: channels, rounded up to powers of two.
        m: rows, that is pairs of a query token and a head, at a time.
        n: keys at a time.
        num_warps, num_stages: numbers of warps and of pipeline stages of the compiled kernel.
    """

    qk: int
    vo: int
    m: int
    n: int
    num_warps: int
    num_stages: int

    @property
    def resident(self) -> int:
        """How many programs a multiprocessor holds, by registers and shared memory, on Hopper."""
        return 2 if self.m < MOST_ROWS else 1


def attention_blocks(
    head_dims: tuple[int, int],
    element_size: int,
    rows: int,
    *,
    interpreted: bool,
    packed: bool = False,
    keys: int = 0,
    available: int = SHARED_MEMORY,
) -> Blocks:
    """Choose blocks that fit a GPU.

    Args:
        head_dims: head_dim_qk and head_dim_vo.
        element_size: bytes of an element of q.
        rows: mean number of rows a request: query tokens times heads that share keys.
        interpreted: whether they are for the interpreter, which knows no shared memory.
        packed: whether keys and values come two a byte. Quantised ones need less shared memory
            than plain ones, and take blocks of the same sizes.
        keys: mean number of keys a request, at most; only the interpreter's blocks depend on it.
        available: bytes of shared memory that a program may take.
    """
    least = least_block(element_size, packed=packed)
    qk, vo = (max(next_power_of_two(dim), least) for dim in head_dims)
    is_single = element_size > 2  # noqa: PLR2004  bytes
    most = INTERPRETED_ROWS if interpreted else most_rows(max(qk, vo), element_size)
    m = min(max(next_power_of_two(rows), LEAST_BLOCK), most)
    if interpreted:
        n = INTERPRETED_LONG_BLOCK_N if keys >= LONG else INTERPRETED_BLOCK_N
        return Blocks(qk, vo, m, n, 1, 1)
    while m > LEAST_BLOCK and shared_memory(qk, vo, m, LEAST_BLOCK, 2, element_size) > available:
        m //= 2
    n, num_warps, num_stages = MEASURED[m]
    if is_single:
        n, num_stages = 32, 2
    if m * max(qk, vo) > WARP_GROUP_ROWS * SMALL_DIM:
        num_warps = 8
    while num_stages > 2 and shared_memory(qk, vo, m, n, num_stages, element_size) > available:  # noqa: PLR2004
        num_stages -= 1
    while n > least and shared_memory(qk, vo, m, n, num_stages, element_size) > available:
        n //= 2
    return Blocks(qk, vo, m, n, num_warps, num_stages)


def most_rows(channels: int, element_size: int) -> int:
    """Return the most rows of a block on a GPU.

    float32 products run on the plain cores, and unroll: large blocks would take minutes to build.
    """
    if element_size > 2:  # noqa: PLR2004  bytes
        return MOST_SINGLE_ROWS
    return MOST_ROWS if channels <= SMALL_DIM else WARP_GROUP_ROWS


def least_block(element_size: int, *, packed: bool) -> int:
    """Return the fewest channels and keys that products are made over; see ``attention_blocks``."""
    return LEAST_PACKED_BLOCK if packed and element_size == 2 else LEAST_BLOCK  # noqa: PLR2004


def shared_memory(qk: int, vo: int, m: int, n: int, stages: int, element_size: int) -> int:
    """Estimate the bytes of shared memory: the queries, and the keys and values under way.

    Hopper's products of 64 rows and more read their operands from there, so that no stage is free
    while they do; eight warps on 64 rows exchange the probabilities. Smaller ones copy them to
    registers first, and need room to exchange results.
    """
    if m < WARP_GROUP_ROWS:
        return element_size * (m * qk + (stages - 1) * n * (qk + vo)) + EXCHANGE
    shared = m * n if m == WARP_GROUP_ROWS < m * max(qk, vo) // SMALL_DIM else 0
    return element_size * (m * qk + stages * n * (qk + vo) + shared)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many the GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def available_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may take, with a margin."""
    if device.type != "cuda":
        return SHARED_MEMORY
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SHARED_MEMORY + MARGIN)) - MARGIN


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the chip converts and multiplies e4m3 itself, which begins with Ada."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


FEWEST_KEYS = 64
"""Fewest keys of a split: one block."""
# Measured on an H200 with one request of 1,024 to 32,768 keys.
ALWAYS_WORTH = 16
"""Number of splits that pay as soon as each has its fewest keys."""
KEYS_WORTH_ONE_MORE = 512
"""Keys that each split needs where there are more splits than that."""
NEARLY = 1.1
"""Ratio to the least time up to which fewer splits are preferred: they leave less to merge."""


def most_splits(keys: int) -> int:
    """Return the most splits that pay for a request with this number of keys; at least 1."""
    worth = max(ALWAYS_WORTH, keys // KEYS_WORTH_ONE_MORE)
    return max(1, min(ceil_div(keys, FEWEST_KEYS), worth))


def splits_that_fill(programs: int, room: int, most: int) -> int:
    """Return the fewest splits with which the programs take nearly the least time.

    Programs run in waves, and the last wave takes as long as a full one. More splits make each
    wave shorter.

    Args:
        programs: number of programs without splits.
        room: number of programs that the GPU runs at the same time.
        most: most splits that pay for the keys.
    """

    def time(splits: int) -> float:
        return ceil_div(programs * splits, room) / splits

    least = min(time(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if time(splits) <= NEARLY * least)
