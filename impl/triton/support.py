"""What Kernelproof's Triton implementations share: where they run, and how they round there.

On a GPU the kernels are compiled; on a CPU they run in Triton's interpreter, which is slow, casts
float32 to bfloat16 by dropping bits, and multiplies bfloat16 by its bit patterns in ``tl.dot``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..gpu.triton_interpreter import uninterpreted
from ..protocol import implementation
from ..targets.optional import missing, require
from ..targets.refusal import Refusal
from ..targets.target import Target

LEAST_SM = 80
"""bfloat16 and asynchronous copies begin with Ampere."""


def unavailable(target: Target) -> Refusal | None:
    """Return in one sentence why Triton cannot run here; None if it can."""
    if target.sm is not None and target.sm < LEAST_SM:
        reason = f"these Triton kernels need sm_{LEAST_SM} or newer, not sm_{target.sm}"
        return Refusal(reason, "device", f"sm_{LEAST_SM} or newer")
    return uninterpreted(target) or missing("triton", "triton")


def supports(_: Any, target: Target) -> bool | str:  # noqa: ANN401  a problem of any operation
    """Whether Triton can run here, or why not: of kernels that take every problem."""
    return unavailable(target) or True


kernel = functools.partial(
    implementation,
    supports=supports,
    backend="triton",
    build_ahead="cuda",
    build_compilers=1,
)
"""``implementation``, with what Kernelproof's Triton kernels declare alike."""


def require_triton() -> None:
    """Import triton.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    require("triton", "triton")


def stored(out: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a kernel stores ``out`` to: a float32 one where its cast is wrong.

    The interpreter drops the low bits of a float32 that it stores as bfloat16, which is twice the
    error of rounding, and biased. ``finish`` lets torch round instead.
    """
    if out.is_cuda or out.dtype != torch.bfloat16:
        return out
    return torch.empty(out.shape, dtype=torch.float32)


def finish(out: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Round what a kernel wrote into ``out``, unless it was written there."""
    return out if written is out else out.copy_(written)


def ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least this."""
    return 1 << max(number - 1, 0).bit_length()
