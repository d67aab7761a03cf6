"""Parity where bounds exceed all that the oracle gives: nothing is judged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.features import MOE_FEATURES
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import Arithmetic, AttentionProblem, MoEProblem, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.tensors.moe_inputs import MoEInputs

LOST = MoEProblem(
    num_tokens=5,
    num_experts=16,
    top_k=8,
    activation="gelu_tanh",
    quantized="nvfp4",
    quantized_hidden=True,
    assignment="duplicates",
    regime="exact_grid",
    seed=3096,
)
"""A call of which every number is smaller than its bound in the arithmetic ``NARROW``."""
NARROW = Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True)


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def judged(kernel: Callable[[MoEInputs], torch.Tensor], arithmetic: Arithmetic) -> Verdict:
    decorate = implementation("moe", name="mine", features=MOE_FEATURES, arithmetic=arithmetic)
    subject = Subject(decorate(kernel), Target.here("cpu"), Stages())
    return find_law("parity").check(subject, LOST)


def honest(inputs: MoEInputs) -> torch.Tensor:
    return oracle.experts(inputs).to(inputs.out_dtype)


def zeros(inputs: MoEInputs) -> torch.Tensor:
    return torch.zeros_like(honest(inputs))


def test_zeros_within_all_bounds_are_no_evidence() -> None:
    for kernel in (honest, zeros):
        verdict = judged(kernel, NARROW)
        assert (verdict.status, verdict.vacuous) == ("PASS", True)
    assert judged(lambda inputs: honest(inputs) + 1e6, NARROW).status == "FAIL"


def test_the_same_problem_judges_a_kernel_of_float32() -> None:
    verdict = judged(honest, Arithmetic())
    assert (verdict.status, verdict.vacuous) == ("PASS", False)
    assert judged(zeros, Arithmetic()).status == "FAIL"


@pytest.mark.parametrize("with_lse", [False, True])
def test_attention_in_few_bits_is_judged_by_its_lse_alone(*, with_lse: bool) -> None:
    """Sums of 2,000 keys in bfloat16 promise less than the average of as many values."""
    rough = Arithmetic(accumulate="bfloat16")
    problem = AttentionProblem(seq_lens=(2000,), page_size=16)

    def attention(inputs: PagedAttentionInputs, add: float) -> tuple[Any, Any]:
        out, lse = oracle.attention(inputs)
        return out.to(inputs.out_dtype) * 0 + add, lse.float() if with_lse else None

    def of(add: float) -> Verdict:
        decorate = implementation("paged_attention", name="mine", arithmetic=rough)
        subject = Subject(
            decorate(lambda inputs: attention(inputs, add)), Target.here("cpu"), Stages()
        )
        return find_law("parity").check(subject, problem)

    zeros_given = of(0.0)
    assert (zeros_given.status, zeros_given.vacuous) == ("PASS", not with_lse)
    assert of(1e6).status == "FAIL"
