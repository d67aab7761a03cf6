"""Where Triton kernels run in these tests: in the interpreter, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernelproof.impl.optional import missing
from kernelproof.properties.isolation import DEFAULT_MEMORY_LIMIT, Worker, WorkerPool
from kernelproof.properties.judge import HANDLER

ABSENT = missing("triton", "triton")
needs_triton = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=needs_triton), pytest.param("cuda", marks=needs_cuda)],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(device: str) -> Iterator[Worker]:
    preload = ("torch", "kernelproof.properties.judge")
    interpret = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    limit = DEFAULT_MEMORY_LIMIT if device == "cpu" else None
    with (
        WorkerPool(HANDLER, preload=preload, environment=interpret, memory_limit=limit) as pool,
        pool.lease() as lent,
    ):
        yield lent
