"""FP8 in Triton's interpreter: casts as a GPU rounds, and products of what a code means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernelproof.impl.gpu.float8 import Format

pytest.importorskip("triton")
KERNEL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from kernelproof.impl.gpu.triton_interpreter import hasten

@triton.jit
def kernel(numbers, cast, stored, N: tl.constexpr):
    places = tl.arange(0, N)
    number = tl.load(numbers + places)
    tl.store(cast + places, number.to(cast.dtype.element_ty))
    tl.store(stored + places, number)

@triton.jit
def widen(codes, wide, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(wide + places, tl.load(codes + places).to(wide.dtype.element_ty))

@triton.jit
def multiply(a, b, dot, N: tl.constexpr):
    row = tl.arange(0, N)
    places = row[:, None] * N + row[None, :]
    tl.store(dot + places, tl.dot(tl.load(a + places), tl.load(b + places)))

hasten()
torch.manual_seed(0)
edges = torch.tensor([1.97, 0.0, -0.0, 1.0625, 1.1875, 447.0, 464.0, 465.0, 1e9, -1e9, 57344.0,
    61440.0, 65500.0, float("inf"), -float("inf"), 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-17])
spread = torch.cat([edges, torch.randn(2000), torch.randn(1000) * 1e-3, torch.randn(1077) * 400])
for fp8, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        numbers = spread.to(dtype)[:4096]
        numbers = torch.cat([numbers, numbers.new_zeros(4096 - len(numbers))])
        cast, stored = (torch.empty(4096, dtype=fp8) for _ in range(2))
        kernel[(1,)](numbers, cast, stored, 4096)
        wanted = numbers.float().clamp(-largest, largest).to(fp8)
        assert torch.equal(cast.view(torch.uint8), wanted.view(torch.uint8)), (fp8, dtype)
        assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8)), (fp8, dtype)
        codes = torch.arange(256, dtype=torch.uint8).view(fp8)
        wide = torch.empty(256, dtype=dtype)
        widen[(1,)](codes, wide, 256)
        assert torch.equal(wide.nan_to_num(7e4), codes.to(dtype).nan_to_num(7e4)), (fp8, dtype)
    a, b = ((torch.randn(32, 32) * 2.0**-4).to(fp8) for _ in range(2))
    dot = torch.empty(32, 32)
    multiply[(1,)](a, b, dot, 32)
    torch.testing.assert_close(dot, a.float() @ b.float())
"""


def test_each_operation_is_a_gpus(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"  # Triton reads a kernel's source from a file
    script.write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_the_nearest_code_is_chosen(dtype: torch.dtype, mantissa: int) -> None:
    """Of all finite numbers of a format, the one nearest; of two, that with an even mantissa."""
    made = Format.of(dtype)
    codes = np.arange(128)
    finite = codes[np.isfinite(made.numbers[:128])]
    magnitudes = made.numbers[finite].astype(np.float64)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    numbers = np.concatenate([magnitudes, between, between * (1 + 2**-20), between * (1 - 2**-20)])
    numbers = numbers.astype(np.float32)
    distances = np.abs(numbers[:, None].astype(np.float64) - magnitudes[None, :])
    odd = finite % 2 * 1e-12 * numbers[:, None]
    nearest = finite[np.argmin(distances + odd, axis=1)]
    assert (made.encoded(numbers, cut=False) == nearest).all()
    below = finite[(magnitudes[None, :] <= numbers[:, None]).sum(axis=1) - 1]
    assert (made.encoded(numbers, cut=True) == below).all()
    assert (made.encoded(-numbers, cut=True) == below + 128).all()
    beyond = np.array([np.inf, 1e30, np.nan], dtype=np.float32)
    assert made.encoded(beyond, cut=False).tolist() == [finite[-1], finite[-1], 0x7F]
    assert made.numbers[1] == 2.0 ** (2 - mantissa - (7 if mantissa == 3 else 15) - 1)
