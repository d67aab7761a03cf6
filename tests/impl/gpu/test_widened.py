"""Triton's interpreter computes in float64, and rounds only where a kernel does so on purpose."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.impl.targets.optional import missing

KERNELS = Path(__file__).with_name("widened_kernels.py")
GIVEN = torch.tensor([0.1, 1.0, 2.5, 3.0, 70.0, -7.0, 0.5, 9.0], dtype=torch.float32).double()
"""The numbers that kernels are given, as float32 has them."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if (reason := missing("triton", "triton")) is not None:
        pytest.skip(reason)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, str(KERNELS)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def _chain() -> torch.Tensor:
    value = ((GIVEN * 0.1).exp2() / 3).sqrt().sub(5).abs()
    return torch.where(value > 1, value, value * value + 1e-12)


def _product() -> torch.Tensor:
    tile = GIVEN[:, None] * GIVEN[None, :]
    made = tile @ tile.T + 0.1
    return made.sum(dim=1) + made.amax(dim=0)


WANTED = {
    "third": GIVEN / 3,
    "chain": _chain(),
    "product": _product(),
    "constants": GIVEN * 0.1 * math.log2(math.e),
    "added": GIVEN / 3 * 2,
    "masked": torch.tensor([0.0, 0.0, 2.5 / 3, 1.0, *[0.1 / 3] * 4], dtype=torch.float64),
    "twice": GIVEN / 9,
}


@pytest.mark.parametrize("name", WANTED)
def test_a_kernel_computes_in_float64(name: str, found: dict[str, Any]) -> None:
    told = found[name]
    wide = torch.tensor(told["wide"], dtype=torch.float64)
    torch.testing.assert_close(wide, WANTED[name], rtol=1e-14, atol=0.0)
    assert not told["rounded"]
    assert told["stored"] != told["wide"], "memory has the declared dtype"


@pytest.mark.parametrize("name", ["codes", "bits", "integers"])
def test_what_a_kernel_rounds_on_purpose_is_rounded(name: str, found: dict[str, Any]) -> None:
    assert found[name]["rounded"]


def test_a_cast_on_purpose_that_changes_nothing_rounds_nothing(found: dict[str, Any]) -> None:
    told = found["bits_of_numbers"]
    assert (told["wide"], told["rounded"]) == (GIVEN.tolist(), False)


def test_a_constant_of_a_module_is_exact_while_kernels_are_widened(found: dict[str, Any]) -> None:
    assert found["third"]["constant"] == math.log2(math.e)
    assert found["third"]["outdated"], "what was called before had the rounded one"
    assert found["constant"] == 1.4426950216293335


def test_afterwards_a_kernel_rounds_as_ever(found: dict[str, Any]) -> None:
    assert found["after"] == (GIVEN / 3).to(torch.bfloat16).tolist()
