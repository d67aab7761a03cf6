"""The law of far experts where a CPU would take too long: refused with the reason, and no hang."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.properties.isolation import machine
from kernelproof.properties.laws import find_law, moe_inert
from kernelproof.properties.laws.moe_inert import MOST_SECONDS
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.space.axis_values import Axes
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MoEProblem, oracle
from kernelproof.reference.tensors.moe_inputs import MoEInputs

PROBLEM = MoEProblem(num_tokens=2, num_experts=4, top_k=1)
CALLS: list[int] = []


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


def judged(kernel: Implementation) -> Verdict:
    subject = Subject(kernel, Target.here("cpu"), Stages())
    return find_law("far_experts").check(subject, PROBLEM)


@implementation("moe", name="a-program-an-expert", features=("large_weights",))
def grows(inputs: MoEInputs) -> torch.Tensor:
    """Take as long as an interpreter that runs a program for each expert."""
    experts = len(inputs.w2) if isinstance(inputs.w2, torch.Tensor) else 0
    CALLS.append(experts)
    time.sleep(0.002 * experts)
    return oracle.experts(inputs).to(inputs.out_dtype)


def test_what_would_take_too_long_is_refused() -> None:
    CALLS.clear()
    verdict = judged(grows)
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "time")
    assert "4,099 experts would take it about" in verdict.message
    assert max(CALLS) < 1000
    before = len(CALLS)
    assert judged(grows) == verdict
    assert len(CALLS) == before


def delayed(seconds: float) -> Implementation:
    """Return experts that take longer by seconds times their share of the full size."""

    def slow(inputs: MoEInputs) -> torch.Tensor:
        assert isinstance(inputs.w2, torch.Tensor)
        CALLS.append(inputs.w2.shape[1])
        time.sleep(seconds * inputs.w2.shape[1] * inputs.w2.shape[2] / (1024 * 512))
        return oracle.experts(inputs).to(inputs.out_dtype)

    return implementation("moe", name=f"takes-{seconds}-s", features=("large_weights",))(slow)


def test_a_call_that_takes_seconds_whatever_experts_there_are_is_judged() -> None:
    """As a kernel in the interpreter, which runs a program for each tile."""
    verdict = judged(delayed(1.0))
    assert (verdict.status, verdict.vacuous) == ("PASS", False)


def test_a_call_of_full_size_that_would_not_end_in_time_is_not_tried() -> None:
    CALLS.clear()
    verdict = judged(delayed(16.0))
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "time")
    assert "3 experts of 1024 by 512 would take it about" in verdict.message
    assert max(CALLS) <= 512


def test_the_deadline_is_that_of_calls_larger_than_the_problem() -> None:
    address = SimpleNamespace(device="cpu")
    candidate = Candidate("slow", address, Axes("moe", {}, 2000))  # type: ignore[arg-type]
    far, parity = find_law("far_experts"), find_law("parity")
    assert candidate.deadlines_of(parity, PROBLEM) == candidate.deadlines.of(PROBLEM)
    assert candidate.deadlines_of(far, PROBLEM, hurried=True).run >= 10 * MOST_SECONDS
    address.device = "cuda"
    assert candidate.deadlines_of(far, PROBLEM) == candidate.deadlines.of(PROBLEM)


def test_what_a_call_waits_for_a_processor_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "waited", time.perf_counter)  # it waits all the time
    subject = Subject(delayed(16.0), Target.here("cpu"), Stages())
    near = replace(PROBLEM, hidden=1024, inter=512, num_experts=3, top_k=1)
    assert moe_inert._seconds_of_full_size(subject, near) < MOST_SECONDS
