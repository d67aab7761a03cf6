"""Routing and experts in plain torch, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import find_implementation
from kernelproof.impl.gpu.wide_memory import WideMemory
from kernelproof.impl.torch.moe_rows import activated, sorted_rows
from kernelproof.properties.verdicts.comparison import within
from kernelproof.reference import (
    ACTIVATIONS,
    METHODS,
    Arithmetic,
    MoEProblem,
    RouteProblem,
    Routing,
    materialise,
    oracle,
)
from kernelproof.reference.problems.moe import QUANTISED
from kernelproof.reference.tensors.moe_inputs import MoEInputs, RouteInputs

PROBLEM = MoEProblem(
    num_tokens=9,
    hidden=160,
    inter=96,
    num_experts=6,
    top_k=3,
    local_experts=4,
    expert_offset=2,
    assignment="masked",
    strided_hidden=True,
)


@pytest.mark.parametrize("quantized", QUANTISED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_agree_with_the_oracle(activation: str, quantized: str) -> None:
    gated = ACTIVATIONS[activation].gated
    swiglu = "each" if ACTIVATIONS[activation].parameters else ""
    for hidden in (False, True) if quantized else (False,):
        problem = replace(
            PROBLEM,
            activation=activation,
            quantized=quantized,
            quantized_hidden=hidden,
            interleaved=gated and hidden,
            swiglu_parameters=swiglu,
            biases=not hidden,
            regime="saturated" if hidden else "iid",
        )
        inputs = materialise(problem, unused=torch.nan)
        assert isinstance(inputs, MoEInputs)
        bounded = oracle.bounded_experts(inputs, Arithmetic())
        out = find_implementation("torch-moe")(inputs)
        said = within("out", out, bounded.expected, bounded.bound)
        assert not said.bad, said.message


def test_an_activation_has_its_own_numbers_where_floats_are_widened() -> None:
    inputs = materialise(MoEProblem(num_tokens=3, activation="swiglu_oai"))
    assert isinstance(inputs, MoEInputs)
    projected = torch.linspace(-9.0, 9.0, 32).reshape(4, 8)
    with WideMemory() as memory:
        wide = memory.wide(activated(inputs, projected, sorted_rows(inputs)))
    gate, up = projected.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    wanted = gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    torch.testing.assert_close(wide, wanted, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_routes_agree_with_the_oracle(method: str) -> None:
    groups = (1, 1) if METHODS[method].score == "logit" else (4, 2)
    for masked_groups, bias in (("-inf", False), ("zero", method != "sparsemixer")):
        problem = RouteProblem(
            num_tokens=20,
            num_experts=16,
            top_k=3,
            method=method,
            bias=bias,
            num_groups=groups[0],
            topk_groups=groups[1],
            masked_groups=masked_groups,
            regime="negative_scores",
            scaling_factor=2.5,
        )
        inputs = materialise(problem)
        assert isinstance(inputs, RouteInputs)
        found = find_implementation("torch-route")(inputs)
        assert oracle.judge_routing(inputs, Routing(*found), Arithmetic()).right
