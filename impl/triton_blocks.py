"""Sizes of the blocks that the Triton attention kernel works on.

They follow from shapes alone: asking the device for a length would wait for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..reference.kv_format import NVFP4
from .optional import require
from .triton_support import next_power_of_two

LEAST_BLOCK = 16
"""Tensor cores multiply 16 by 16."""
LEAST_PACKED_BLOCK = 32
"""Triton (3.6, seen on an H200) gives a thread eight neighbours of a 16-bit operand that was joined
from halves of bytes; a product over only 16 of them then comes out wrong, without an error."""
SHARED_MEMORY = 97 * 1024
"""Bytes that untuned blocks may take: every GPU from Ampere on has 99 KiB a multiprocessor."""
MOST_SHARED_MEMORY = 224 * 1024
"""Bytes that tuned blocks may take; what does not fit the GPU at hand drops out of the tuning."""
TUNED_ELEMENTS = 2**24
"""Queries and keys from which on a call is long enough to be worth the seconds of tuning."""
TUNED = ((16, 4, 2), (32, 4, 2), (32, 8, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (128, 4, 2),
         (128, 4, 3), (128, 8, 2), (128, 8, 3))  # fmt: skip
"""Keys a block, warps and stages that were the fastest on an H200 for some problem, or nearly."""
WARP_GROUP_ROWS = 64
EXCHANGE = 4 * 1024
INTERPRETED_BLOCK_N = 32
"""Small, so that short sequences take several blocks there too."""


@dataclass(frozen=True)
class Blocks:
    """How the kernel cuts its work.

    Attributes:
        qk, vo: channels, rounded up to powers of two.
        m: rows, that is pairs of a query token and a head, at a time.
        n: keys at a time.
        num_warps, num_stages: of the compiled kernel.
    """

    qk: int
    vo: int
    m: int
    n: int
    num_warps: int
    num_stages: int


def attention_blocks(
    head_dims: tuple[int, int],
    element_size: int,
    rows: int,
    *,
    interpreted: bool,
    packed: bool = False,
) -> Blocks:
    """Choose blocks that fit every GPU.

    Args:
        head_dims: head_dim_qk and head_dim_vo.
        element_size: bytes of an element of q.
        rows: mean number of rows a request: query tokens times heads that share keys.
        interpreted: whether they are for the interpreter, which knows no shared memory.
        packed: whether keys and values come two a byte. Quantised ones need less shared memory
            than plain ones, and take blocks of the same sizes.
    """
    least = least_block(element_size, packed=packed)
    qk, vo = (max(next_power_of_two(dim), least) for dim in head_dims)
    # float32 products run on the plain cores, and unroll: large blocks would take minutes to build.
    most = 32 if element_size > 2 else 128 if max(qk, vo) <= 128 else 64  # noqa: PLR2004  bytes
    if interpreted:
        most = 64
    m = min(max(next_power_of_two(rows), LEAST_BLOCK), most)
    if interpreted:
        return Blocks(qk, vo, m, INTERPRETED_BLOCK_N, 1, 1)
    while (
        m > LEAST_BLOCK and shared_memory(qk, vo, m, LEAST_BLOCK, 2, element_size) > SHARED_MEMORY
    ):
        m //= 2
    n = 32 if element_size > 2 else 64 if m >= WARP_GROUP_ROWS else 128  # noqa: PLR2004  bytes
    while n > least and shared_memory(qk, vo, m, n, 2, element_size) > SHARED_MEMORY:
        n //= 2
    return Blocks(qk, vo, m, n, 8 if m * max(qk, vo) > 64 * 128 else 4, 2)


def least_block(element_size: int, *, packed: bool) -> int:
    """Give the fewest channels and keys that products are made over; see ``attention_blocks``."""
    return LEAST_PACKED_BLOCK if packed and element_size == 2 else LEAST_BLOCK  # noqa: PLR2004


def shared_memory(qk: int, vo: int, m: int, n: int, stages: int, element_size: int) -> int:
    """Estimate the bytes of shared memory: the queries, and the keys and values under way.

    Hopper's products of 64 rows and more read their operands from there, so that no stage is free
    while they do. Smaller ones copy them to registers first, and need room to exchange results.
    """
    if m < WARP_GROUP_ROWS:
        return element_size * (m * qk + (stages - 1) * n * (qk + vo)) + EXCHANGE
    return element_size * (m * qk + stages * n * (qk + vo))


@functools.cache
def tuned(kernel: Any) -> Any:  # noqa: ANN401  Triton JIT functions
    """Give the attention kernel with keys a block, warps and stages found by measurement."""
    triton = require("triton", "triton")
    configs = [
        triton.Config({"BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for n, warps, stages in TUNED
    ]
    return triton.autotune(
        configs,
        key=["HEAD_DIM_QK", "HEAD_DIM_VO", "BLOCK_M", "KV_FORMAT", "SOFT_CAP", "CUSTOM_MASK"],
        prune_configs_by={"early_config_prune": _fitting},
    )(kernel)


def _fitting(configs: list[Any], arguments: dict[str, Any], **more: Any) -> list[Any]:  # noqa: ANN401
    """Drop what takes more shared memory than any GPU has; keep the smallest at least."""
    given = {**arguments, **more}
    least = least_block(given["q"].element_size(), packed=given["KV_FORMAT"] == NVFP4)
    configs = [config for config in configs if config.kwargs["BLOCK_N"] >= least]

    def needs(config: Any) -> int:  # noqa: ANN401  a triton.Config
        return shared_memory(
            given["BLOCK_QK"],
            given["BLOCK_VO"],
            given["BLOCK_M"],
            config.kwargs["BLOCK_N"],
            config.num_stages,
            given["q"].element_size(),
        )

    fitting = [config for config in configs if needs(config) <= MOST_SHARED_MEMORY]
    return fitting or [min(configs, key=needs)]
