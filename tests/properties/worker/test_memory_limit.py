"""A worker's limit of memory: a problem that does not fit is nobody's fault, a terabyte is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kernelproof.properties.isolation import process
from kernelproof.properties.isolation.outcome import (
    ABORTED_FOR_MEMORY,
    KILLED,
    KILLED_FOR_MEMORY,
    Outcome,
)
from kernelproof.properties.isolation.process import FORKS
from kernelproof.properties.verdicts.memory_need import LIMIT_VARIABLE
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.memory_deaths import of_earlier_calls
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import Address, verdict_of
from kernelproof.reference import AttentionProblem

TEXT = """
import ctypes
import os
import signal

import torch
from kernelproof.impl import implementation
from kernelproof.reference import oracle

kept = []


@implementation("paged_attention", name="kernel")
def kernel(inputs):
    ALLOCATE
    result = oracle.attention(inputs)
    return result.out.to(inputs.out_dtype), result.lse


def new(size):
    ctypes.CDLL("libstdc++.so.6")._Znwm(ctypes.c_size_t(size))


def kill(size=0):
    kept.append(torch.ones(size // 4 + 1))
    os.kill(os.getpid(), signal.SIGKILL)


def fill():
    try:
        while True:
            kept.append(torch.zeros(16 << 18))
    except RuntimeError:
        kept[-4:] = []
"""
SMALL = AttentionProblem()
OTHER = AttentionProblem(query_lens=(2,), seq_lens=(5,))
LARGE = AttentionProblem(query_lens=(1,), seq_lens=(2**18,), head_dim_qk=128, num_kv_heads=8)


def outcomes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allocate: str,
    *problems: AttentionProblem,
    distrust: bool = False,
) -> list[Outcome]:
    name = f"allocating_{abs(hash(allocate))}"
    (tmp_path / f"{name}.py").write_text(TEXT.replace("ALLOCATE", allocate), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    address = Address(f"{name}:kernel", None, "cpu", distrust=distrust)
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        return [worker.run(address.case("parity", problem)) for problem in problems]


def verdicts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allocate: str,
    *problems: AttentionProblem,
    distrust: bool = False,
) -> list[Verdict]:
    found = outcomes(tmp_path, monkeypatch, allocate, *problems, distrust=distrust)
    return [verdict_of(each) for each in found]


@pytest.mark.parametrize(
    "allocate",
    [
        "torch.zeros(1 << 40)",
        "bytearray(1 << 44)",
        "while True: kept.append(torch.zeros(16 << 18))",
    ],
)
def test_a_call_that_asks_for_far_too_much_is_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocate: str
) -> None:
    (verdict,) = verdicts(tmp_path, monkeypatch, allocate, SMALL)
    assert (verdict.status, verdict.kind) == ("CRASH", "out of memory"), verdict


def test_a_problem_that_does_not_fit_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, after = verdicts(tmp_path, monkeypatch, "pass", LARGE, SMALL)
    assert (large.status, large.kind) == ("UNSUPPORTED", "memory"), large
    assert large.message.startswith("too large for a worker's 1 GiB: ")
    assert after.status == "PASS"


@pytest.mark.parametrize("distrust", [False, True])
def test_a_process_that_a_problem_has_filled_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, distrust: bool
) -> None:
    allocate = "fill() if inputs.q.shape[0] == 2 else torch.zeros(32 << 20)"
    *_, bystander, again = verdicts(
        tmp_path, monkeypatch, allocate, OTHER, SMALL, SMALL, distrust=distrust
    )
    assert (bystander.status, bystander.kind) == ("UNSUPPORTED", "memory"), bystander
    assert again.status == "PASS", again


@pytest.mark.parametrize("distrust", [False, True])
@pytest.mark.parametrize("ask", ["torch.zeros(32 << 20)", "new(128 << 20)"])
def test_calls_that_have_filled_their_process_are_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str, *, distrust: bool
) -> None:
    allocate = f"fill() if inputs.q.shape[0] == 2 else {ask}"
    first, _, full = outcomes(
        tmp_path, monkeypatch, allocate, SMALL, OTHER, SMALL, distrust=distrust
    )
    verdict = verdict_of(full)
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "memory"), verdict
    assert of_earlier_calls(first, verdict) is None
    blamed = of_earlier_calls(full, verdict)
    assert blamed is not None
    assert blamed.message.startswith("earlier calls had left ")


def test_an_exception_of_cpp_that_nobody_catches_is_no_crash_where_room_is_wanting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = "fill() if inputs.q.shape[0] == 2 else new(128 << 20)"
    *_, bystander = verdicts(tmp_path, monkeypatch, allocate, OTHER, SMALL)
    assert (bystander.status, bystander.kind) == ("UNSUPPORTED", "memory"), bystander
    assert bystander.message.startswith("too large for a worker's 1 GiB: the call had ")
    assert "std::bad_alloc" in bystander.message
    assert bystander.message.endswith("KERNELPROOF_WORKER_GIB raises the limit")


@pytest.mark.parametrize(
    ("allocate", "kind", "said"),
    [
        ("new(1 << 50)", ABORTED_FOR_MEMORY, "an allocation failed, in stage run: the call had"),
        ("os.abort()", "SIGABRT", "the process died: SIGABRT in stage run"),
        ("print('std::bad_alloc is rare'); os.abort()", "SIGABRT", "died: SIGABRT in stage run"),
        ("kill()", KILLED, "by whom is unknown"),
    ],
)
def test_a_process_that_ends_itself_is_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocate: str, kind: str, said: str
) -> None:
    (verdict,) = verdicts(tmp_path, monkeypatch, allocate, SMALL)
    assert (verdict.status, verdict.kind) == ("CRASH", kind), verdict
    assert said in verdict.message


@pytest.mark.parametrize(
    ("allocate", "status", "kind", "said"),
    [
        ("kill()", "UNSUPPORTED", "memory", "the kernel ended its process for lack of memory in"),
        ("kill(400 << 20)", "CRASH", KILLED_FOR_MEMORY, "the call had taken 4"),
    ],
)
def test_whom_the_kernel_ends_for_lack_of_memory_is_to_blame_where_it_took_much(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allocate: str,
    status: str,
    kind: str,
    said: str,
) -> None:
    monkeypatch.setattr(process, "kills", itertools.count().__next__)  # one more at each look
    (verdict,) = verdicts(tmp_path, monkeypatch, allocate, SMALL)
    assert (verdict.status, verdict.kind) == (status, kind), verdict
    assert said in verdict.message


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_of_each_device_are_forks(device: str) -> None:
    # A start costs hundredths of a second then, not an import of torch.
    with open_pool(device, started=False) as pool:
        assert pool._supply.recipe.are_forks == FORKS
