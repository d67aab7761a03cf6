"""The law of far experts where a CPU would take too long: refused with the reason, and no hang."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.properties.laws import find_law
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
    verdict = judged(grows)
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "time")
    assert "4,099 experts would take it about" in verdict.message
    assert max(CALLS) < 1000
    before = len(CALLS)
    assert judged(grows) == verdict
    assert len(CALLS) == before
