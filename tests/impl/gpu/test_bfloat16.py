"""bfloat16 in Triton's interpreter: each operation as torch computes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernelproof.impl.gpu.bfloat16 import decoded, encoded

pytest.importorskip("triton")
KERNEL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from kernelproof.impl.gpu.triton_interpreter import hasten

@triton.jit
def kernel(a, b, dot, fused, larger, less, chosen, ints, back, N: tl.constexpr):
    row = tl.arange(0, N)
    places = row[:, None] * N + row[None, :]
    x, y = tl.load(a + places), tl.load(b + places)
    tl.store(dot + places, tl.dot(x, y))
    tl.store(fused + places, x * y + x)
    tl.store(larger + places, tl.maximum(x, y))
    tl.store(less + places, (x < y).to(tl.int32))
    tl.store(chosen + places, tl.where(x < y, -x, tl.abs(y)) / y)
    tl.store(ints + places, (x * 100).to(tl.int32))
    tl.store(back + places, (tl.load(dot + places) + 0.001).to(tl.bfloat16))

@triton.jit
def add_up(numbers, total, before, N: tl.constexpr):
    places = tl.arange(0, N)
    number = tl.load(numbers + places)
    tl.atomic_add(total + places % 2, number, mask=places < N - 1)
    old = tl.atomic_add(total + 2, 1.5)
    tl.store(before, old)

@triton.jit
def reduce(a, totals, running, larger, chosen, N: tl.constexpr):
    row = tl.arange(0, N)
    x = tl.load(a + row[:, None] * N + row[None, :])
    tl.store(totals + row, x.sum(axis=0))
    tl.store(running + row[:, None] * N + row[None, :], tl.cumsum(x, 0))
    tl.store(larger + row, tl.reduce(x, 0, tl.standard._elementwise_max))
    tl.store(chosen + row, tl.argmax(x, 0))

hasten()
torch.manual_seed(0)
N = 32
a, b = (torch.randn(N, N).bfloat16() for _ in range(2))
dot, fused, larger, chosen, back = (torch.empty(N, N, dtype=t) for t in
    (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16))
less, ints = (torch.empty(N, N, dtype=torch.int32) for _ in range(2))
kernel[(1,)](a, b, dot, fused, larger, less, chosen, ints, back, N)
torch.testing.assert_close(dot, a.float() @ b.float())
assert torch.equal(fused, a * b + a)
assert torch.equal(larger, torch.maximum(a, b))
assert torch.equal(less, (a < b).int())
assert torch.equal(chosen, torch.where(a < b, -a, b.abs()) / b)
assert torch.equal(ints, (a * 100).int())
assert torch.equal(back, (dot + 0.001).bfloat16())
totals, larger = torch.empty(N).bfloat16(), torch.empty(N).bfloat16()
running, chosen = torch.empty(N, N).bfloat16(), torch.empty(N, dtype=torch.int32)
reduce[(1,)](a, totals, running, larger, chosen, N)
steps = a[0].clone()
for each in a[1:]:
    steps = steps + each
assert torch.equal(totals, steps)
torch.testing.assert_close(running.float(), a.float().cumsum(0), rtol=0.05, atol=0.1)
assert torch.equal(larger, a.amax(0))
assert torch.equal(chosen, a.argmax(0).int())
numbers = torch.randn(16).bfloat16()
total, before = torch.full((3,), 3.0).bfloat16(), torch.zeros(1).bfloat16()
add_up[(1,)](numbers, total, before, 16)
wanted = torch.full((3,), 3.0).bfloat16()
for place, number in enumerate(numbers[:-1]):
    wanted[place % 2] += number
wanted[2] += 1.5
assert torch.equal(total, wanted), (total, wanted)
assert before.item() == 3.0
"""


def test_each_operation_is_torchs(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"  # Triton reads a kernel's source from a file
    script.write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    edges = [0.0, -0.0, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.39e38, 3.4e38, -3.4e38,
             float("inf"), float("-inf"), float("nan"), 2.0**-133, 2.0**-134, 1e-40]  # fmt: skip
    numbers = torch.cat([torch.tensor(edges), torch.randn(10_000), torch.randn(1000) * 1e-39])
    wanted = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    found = encoded(numbers.numpy())
    nan = numbers.isnan().numpy()
    assert (found == wanted)[~nan].all()
    assert np.isnan(decoded(found))[nan].all()
    every = np.arange(2**16, dtype=np.uint16)
    codes = torch.from_numpy(every.view(np.int16).copy()).view(torch.bfloat16)
    assert np.array_equal(decoded(every), codes.float().numpy(), equal_nan=True)
