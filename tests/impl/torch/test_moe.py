"""Routing and experts in plain torch, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import find_implementation
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
