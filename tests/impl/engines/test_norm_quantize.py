"""Norms of engines that quantise: what they answer in the interpreter, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.properties.isolation.workers import Worker
from kernelproof.reference import NormQuantizeProblem
from kernelproof.tests.interpreting import ask

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
BLOCKS = NormQuantizeProblem(
    3, 256, block_channels=128, scale_format="e8m0", floor=2.0**-126, seed=1
)
MX = replace(BLOCKS, block_channels=32, scale_layout="swizzled")
GRID = replace(BLOCKS, block_channels=32, floor=1e-10, residual=True, spare_channels=5)
CALLS = {
    "sglang-rmsnorm-fp8-e8m0": BLOCKS,
    "sglang-rmsnorm-mxfp8": MX,
    "sglang-rmsnorm-fp8-grid": GRID,
    "triton-norm-quantize": replace(
        GRID, scale_format="ue8m0", scale_layout="padded_columns", gamma_offset=1.0
    ),
}


@pytest.mark.parametrize("regime", ["iid", "ties", "outliers", "faint", "large"])
@pytest.mark.parametrize("name", CALLS)
def test_what_they_answer(interpreter: Worker, name: str, regime: str) -> None:
    verdict = ask(interpreter, "norm_parity", name, replace(CALLS[name], regime=regime))
    if verdict.status == "UNSUPPORTED":
        pytest.skip(verdict.message)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("sglang-rmsnorm-fp8-e8m0", {"residual": True}, "adds no residual"),
        ("sglang-rmsnorm-fp8-e8m0", {"scale_format": "float32"}, "e8m0 codes"),
        ("sglang-rmsnorm-fp8-e8m0", {"floor": 1e-10}, "counts at least"),
        ("sglang-rmsnorm-mxfp8", {"dtype": "float16"}, "takes bfloat16"),
        ("sglang-rmsnorm-mxfp8", {"num_channels": 96}, "multiple of 128"),
        ("sglang-rmsnorm-fp8-grid", {"gamma_offset": 1.0}, "no offset"),
        ("triton-norm-quantize", {"block_channels": 48}, "power of two"),
    ],
)
def test_what_they_refuse(name: str, fields: dict[str, Any], said: str) -> None:
    found, here = find_implementation(name), Target.here("cpu")
    if (refusal := found.refusal(CALLS[name], here)) is not None:
        pytest.skip(str(refusal))
    refusal = found.refusal(replace(CALLS[name], **fields), here)
    assert refusal is not None
    assert said in refusal
