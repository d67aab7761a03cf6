"""What found no memory on a CPU is judged again: an earlier problem may have filled the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.reference import AttentionProblem


@pytest.mark.parametrize(
    ("kind", "device", "status"),
    [
        ("memory", "cpu", "PASS"),
        ("out of memory", "cpu", "PASS"),
        ("nan", "cpu", "first"),
        ("memory", "cuda", "first"),
    ],
)
def test_a_fresh_process_decides(kind: str, device: str, status: str) -> None:
    runner: Any = object.__new__(CaseRunner)
    runner.candidate = SimpleNamespace(
        address=SimpleNamespace(device=device, case=lambda *_: {}), deadlines_of=lambda *_: None
    )
    runner.law = SimpleNamespace(name="parity")
    runner.warm_up = lambda: None
    runner._worker = SimpleNamespace(run=lambda *_: Outcome("done", {"status": "PASS"}))
    first = Outcome("done", {"status": "first", "kind": kind})
    result = runner._with_memory(AttentionProblem(), first).result
    assert result is not None
    assert result["status"] == status
