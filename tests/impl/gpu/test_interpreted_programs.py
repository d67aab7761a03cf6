"""Programs that the interpreter runs: each that begins is a step of a call that goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import triton
import triton.language as tl

from kernelproof.impl.gpu.interpreted import at_each_program
from kernelproof.impl.gpu.triton_interpreter import hasten


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _number(out: Any) -> None:  # noqa: ANN401
    at = tl.program_id(0)
    tl.store(out + at, at)


@pytest.fixture
def begun() -> Iterator[list[int]]:
    """What is noted at each program."""
    begun: list[int] = []
    at_each_program(lambda: begun.append(1))
    yield begun
    at_each_program(None)


def test_each_program_of_a_grid_is_seen(begun: list[int]) -> None:
    hasten()
    out = torch.zeros(7, dtype=torch.int32)
    _number[(7,)](out)
    assert out.tolist() == list(range(7))
    assert len(begun) == 7
