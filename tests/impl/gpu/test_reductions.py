"""Reductions by slices have the bits of those by element, which Triton's interpreter has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproof.impl.targets.optional import missing

ABSENT = missing("triton", "triton")

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def both(a, b, c, d):
    return a * c, tl.maximum(b, d)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def runs(x, y):
    key: tl.constexpr = 0xFFFF0000
    return tl.where((x & key) == (y & key), x + y - (x & key), y)


@triton.jit
def kernel(x_ptr, out_ptr, run_ptr):
    r, c = tl.arange(0, 8), tl.arange(0, 16)
    place = r[:, None] * 16 + c[None, :]
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.sort(x, dim=1, descending=True))
    a, b = tl.reduce((x, x), 1, both)
    tl.store(out_ptr + 128 + r, a)
    tl.store(out_ptr + 136 + r, b)
    tl.store(out_ptr + 144 + c[None, :], tl.reduce(x, 0, product, keep_dims=True))
    tl.store(out_ptr + 160, tl.reduce(x, None, product))
    tl.store(out_ptr + 161, tl.reduce(tl.sort(tl.load(x_ptr + c), 0), 0, product))
    tl.store(out_ptr + 162 + r[:, None] * 4 + tl.arange(0, 4)[None, :], tl.topk(x, 4, dim=1))
    tl.store(out_ptr + 194 + place, tl.associative_scan(x, 1, product))
    keys = (tl.sort((x * 4).to(tl.int32).to(tl.uint32) << 16, 1)) | 1
    tl.store(run_ptr + place, tl.associative_scan(keys, 1, runs).to(tl.int64))
    tl.store(run_ptr + 128 + place, tl.associative_scan(keys, 1, runs, reverse=True).to(tl.int64))


@triton.jit
def best(x_ptr, out_ptr):
    r, c = tl.arange(0, 4), tl.arange(0, 8)
    x = tl.load(x_ptr + r[:, None] * 8 + c[None, :])
    tl.store(out_ptr + r, tl.argmax(x, axis=1))


def found():
    torch.manual_seed(1)
    x, out = torch.randn(8, 16), torch.zeros(322)
    run = torch.zeros(256, dtype=torch.int64)
    kernel[(1,)](x, out, run)
    assert out[:128].view(8, 16).equal(x.sort(dim=1, descending=True).values)
    return out, run


first = found()
from kernelproof.impl.gpu.triton_interpreter import hasten
from triton.runtime.interpreter import ReduceOps, ScanOps
before = ReduceOps.generic_reduce, ScanOps.generic_scan
hasten()
assert ReduceOps.generic_reduce is not before[0] and ScanOps.generic_scan is not before[1]
assert all(old.equal(new) for old, new in zip(first, found(), strict=True))

x, indices = torch.arange(32.0).view(4, 8), torch.zeros(4, dtype=torch.int32)
x[0] = x[1, 7] = x[2, :4:2] = torch.nan
best[(1,)](x, indices)
assert indices.tolist() == [7, 7, 7, 7], "as compiled: a later element takes the place of NaN"


@triton.jit
def picks(x_ptr, out_ptr, value_ptr, n: tl.constexpr, k: tl.constexpr):
    places = tl.arange(0, n)
    x = tl.load(x_ptr + places)
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(value_ptr, value)
    tl.store(value_ptr + 1, tl.max(x, axis=0))
    for rank in tl.static_range(k):
        index = tl.argmax(x, axis=0)
        tl.store(out_ptr + rank, index)
        x = tl.where(places == index, -float("inf"), x)


# As an H100 has answered, with triton 3.6, by one and by four warps.
some = torch.arange(64.0)
some[::3] = torch.nan
for given, wanted, largest in (
    (torch.full((256,), torch.nan), [255] * 6, torch.nan),
    (some, [63], 62.0),
    (some[:32], [31] * 6, 31.0),
    (some[:8], [7] * 6, 7.0),
):
    out, values = torch.zeros(6, dtype=torch.int32), torch.zeros(2)
    picks[(1,)](given, out, values, n=len(given), k=len(wanted))
    assert out[: len(wanted)].tolist() == wanted, (out, wanted)
    expected = torch.tensor([given[wanted[0]], largest])
    assert values.allclose(expected, equal_nan=True), (values, expected)
"""


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
def test_the_bits_are_those_of_reductions_by_element(tmp_path: Path) -> None:
    file = tmp_path / "reductions.py"
    file.write_text(KERNEL, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False
    )
    assert not run.returncode, run.stderr
