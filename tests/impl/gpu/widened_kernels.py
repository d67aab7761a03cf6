"""Kernels that a process with TRITON_INTERPRET=1 runs in float64: it prints what each one gave."""

# ruff: noqa: ANN401  what a kernel takes has no type that Triton would not specialise by
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from kernelproof.impl.gpu.widened import widened

LOG2_E = 1.4426950216293335  # the float32 next to it
GIVEN = torch.tensor([0.1, 1.0, 2.5, 3.0, 70.0, -7.0, 0.5, 9.0])
SIZE = len(GIVEN)


@triton.jit
def third(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out + at, (tl.load(x + at) * 0.3333333333333333).to(out.dtype.element_ty))


@triton.jit
def chain(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    value = tl.load(x + at).to(tl.float32)
    value = (tl.exp2(value.to(tl.float16).to(tl.float32) * 0.1) / 3.0).to(tl.bfloat16)
    value = tl.abs(tl.sqrt(value.to(tl.float32)) - 5.0)
    tl.store(out + at, tl.where(value > 1.0, value, tl.fma(value, value, 1e-12)))


@triton.jit
def product(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tile = tl.load(x + at).to(tl.float16)[:, None] * tl.load(x + at).to(tl.float16)[None, :]
    made = tl.dot(tile, tl.trans(tile), tl.full((8, 8), 0.1, tl.float32))
    tl.store(out + at, tl.sum(made, axis=1) + tl.max(made, axis=0))


@triton.jit
def constants(x: Any, out: Any, scale: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out + at, tl.load(x + at) * (scale * 1.44269504))


@triton.jit
def added(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.atomic_add(out + at, tl.load(x + at) / 3.0)


@triton.jit
def masked(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out + at, tl.load(x + at, mask=at < 4, other=0.1) / 3.0, mask=at > 1)


@triton.jit
def codes(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out + at, tl.load(x + at).to(tl.float8e4nv).to(tl.float32))


@triton.jit
def bits(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    word = (tl.load(x + at) / 3.0).to(tl.int32, bitcast=True)
    tl.store(out + at, (word & 0x7F800000).to(tl.float32, bitcast=True))


@triton.jit
def integers(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    tl.store(out + at, tl.load(x + at).to(tl.int32).to(tl.float32))


@triton.jit
def bits_of_numbers(x: Any, out: Any) -> None:
    at = tl.arange(0, 8)
    word = tl.load(x + at).to(tl.int32, bitcast=True)
    tl.store(out + at, word.to(tl.float32, bitcast=True))


def run(kernel: Any, dtype: torch.dtype, *arguments: float, times: int = 1) -> dict[str, Any]:
    x, out = GIVEN.to(torch.float32), torch.zeros(SIZE, dtype=dtype)
    with widened() as memory:
        for _ in range(times):
            kernel[(1,)](x, out, *arguments)
        wide, constant = memory.wide(out).tolist(), LOG2_E
    return {"wide": wide, "stored": out.tolist(), "rounded": memory.rounded,
            "outdated": memory.outdated, "constant": constant}  # fmt: skip


def twice() -> dict[str, Any]:
    """Launch a kernel on what another one, and then torch, made in 16 bits."""
    x = GIVEN.to(torch.float32)
    part, out = torch.empty(SIZE, dtype=torch.bfloat16), torch.empty(SIZE, dtype=torch.float16)
    with widened() as memory:
        third[(1,)](x, part)
        third[(1,)](part.float(), out)
        wide = memory.wide(out).tolist()
    return {"wide": wide, "stored": out.tolist(), "rounded": memory.rounded}


if __name__ == "__main__":
    found = {
        "third": run(third, torch.bfloat16),
        "chain": run(chain, torch.float32),
        "product": run(product, torch.float32),
        "constants": run(constants, torch.float32, 0.1),
        "added": run(added, torch.float32, times=2),
        "masked": run(masked, torch.float16),
        "codes": run(codes, torch.float32),
        "bits": run(bits, torch.float32),
        "integers": run(integers, torch.float32),
        "bits_of_numbers": run(bits_of_numbers, torch.float32),
        "twice": twice(),
    }
    x, out = GIVEN.to(torch.float32), torch.zeros(SIZE, dtype=torch.bfloat16)
    third[(1,)](x, out)  # as ever, once the context is over
    sys.stdout.write(json.dumps({**found, "after": out.tolist(), "constant": LOG2_E}))
