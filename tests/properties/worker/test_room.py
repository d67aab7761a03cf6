"""Judging where the GPU has no room, with a law that finds it full so many times."""

from __future__ import annotations

import time

import pytest
import torch

from kernelproof.properties.verdicts.contained import OUT_OF_MEMORY, crash
from kernelproof.properties.verdicts.memory_need import NO_ROOM
from kernelproof.properties.verdicts.verdict import PASS, Verdict
from kernelproof.properties.worker import room

FULL = (
    RuntimeError("CUDA out of memory. Tried to allocate 110.00 MiB."),
    RuntimeError("CUDA error: out of memory\nSearch for it"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("no room for the tensors"),
)


class Law:
    """Meets a full GPU so many times, in its own code or in the implementation's call."""

    def __init__(self, times: int, error: BaseException, *, of_the_call: bool = False) -> None:
        self.left, self.error, self.of_the_call = times, error, of_the_call

    def check(self) -> Verdict:
        """Judge."""
        self.left -= 1
        if self.left < 0:
            return PASS
        if self.of_the_call:
            return crash(self.error)
        raise self.error


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.mark.parametrize("error", FULL, ids=str)
@pytest.mark.parametrize("of_the_call", [False, True], ids=["suite", "call"])
def test_what_has_room_later_is_judged_then(
    pauses: list[float], error: BaseException, of_the_call: bool
) -> None:
    law = Law(2, error, of_the_call=of_the_call)
    assert room.judged_with_room(law.check, "cuda") == PASS
    assert pauses == list(room.PAUSES)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_a_problem_without_room_is_no_error_of_the_suite(error: BaseException) -> None:
    verdict = room.judged_with_room(Law(9, error).check, "cuda")
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", NO_ROOM)
    assert verdict.message.startswith("the GPU has no room for the problem beside what else runs")


def test_a_call_that_never_has_room_is_a_crash() -> None:
    verdict = room.judged_with_room(Law(9, FULL[0], of_the_call=True).check, "cuda")
    assert (verdict.status, verdict.kind) == ("CRASH", OUT_OF_MEMORY)


def test_other_errors_and_a_cpu_are_tried_once(pauses: list[float]) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        room.judged_with_room(Law(1, RuntimeError("illegal memory access")).check, "cuda")
    verdict = room.judged_with_room(Law(1, FULL[-1]).check, "cpu")
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", NO_ROOM)
    assert "no room for the tensors; KERNELPROOF_WORKER_GIB raises the limit" in verdict.message
    assert not pauses


@pytest.mark.parametrize(("kept", "returned"), [(room.KEPT_BYTES, 0), (room.KEPT_BYTES + 1, 1)])
def test_much_memory_that_torch_keeps_is_given_back(
    monkeypatch: pytest.MonkeyPatch, kept: int, returned: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: kept + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    assert room.judged_with_room(Law(0, FULL[0]).check, "cuda") == PASS
    assert len(calls) == returned
