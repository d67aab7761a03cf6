"""Where Triton kernels run in these tests: in the interpreter, and on a GPU if there is one.

And how they are compiled for a GPU that is not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernelproof.impl.targets.optional import missing
from kernelproof.properties.isolation.workers import DEFAULT_MEMORY_LIMIT, Worker, WorkerPool
from kernelproof.properties.worker.pools import HANDLER

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
    preload = ("torch", "kernelproof.properties.worker.tasks")
    interpret = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    limit = DEFAULT_MEMORY_LIMIT if device == "cpu" else None
    with (
        # Nothing dies here: a process in reserve would only import torch.
        WorkerPool(
            HANDLER, preload=preload, environment=interpret, memory_limit=limit, standby=False
        ) as pool,
        pool.lease() as lent,
    ):
        yield lent


@pytest.fixture(scope="session")
def printed_by() -> Callable[[str], Any]:
    """Run code that compiles kernels, without the interpreter, and give the JSON that it prints."""

    def run(code: str) -> Any:  # noqa: ANN401  JSON
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TRITON_INTERPRET": "0"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
