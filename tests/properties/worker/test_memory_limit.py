"""A worker's limit of memory: a problem that does not fit is nobody's fault, a terabyte is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproof.properties.isolation.workers import Worker
from kernelproof.properties.verdicts.memory_need import LIMIT_VARIABLE
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import open_pool
from kernelproof.properties.worker.requests import Address, verdict_of
from kernelproof.reference import AttentionProblem

TEXT = """
import torch
from kernelproof.impl import implementation
from kernelproof.reference import oracle

kept = []


@implementation("paged_attention", name="kernel")
def kernel(inputs):
    ALLOCATE
    result = oracle.attention(inputs)
    return result.out.to(inputs.out_dtype), result.lse


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


def ask(worker: Worker, address: Address, problem: AttentionProblem) -> Verdict:
    return verdict_of(worker.run(address.case("parity", problem)))


def verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocate: str, *problems: AttentionProblem
) -> list[Verdict]:
    name = f"allocating_{abs(hash(allocate))}"
    (tmp_path / f"{name}.py").write_text(TEXT.replace("ALLOCATE", allocate), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    address = Address(f"{name}:kernel", None, "cpu")
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        return [ask(worker, address, problem) for problem in problems]


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


def test_a_process_that_a_problem_has_filled_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = "fill() if inputs.q.shape[0] == 2 else torch.zeros(32 << 20)"
    *_, bystander, again = verdicts(tmp_path, monkeypatch, allocate, OTHER, SMALL, SMALL)
    assert (bystander.status, bystander.kind) == ("UNSUPPORTED", "memory"), bystander
    assert again.status == "PASS", again
