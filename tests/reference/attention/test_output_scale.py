"""Outputs in FP8, divided by a scale: of the oracle, of problems and of the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    materialise,
    oracle,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs

PROBLEM = AttentionProblem(
    "ragged_attention",
    (3, 1, 4),
    (7, 5, 4),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    output_scale=0.25,
)
SCALES = pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-8, 100.0])


def inputs_of(problem: AttentionProblem) -> RaggedAttentionInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    return inputs


def test_a_short_case_by_hand() -> None:
    """The mean of 1 and 3 over 0.25 is 8; that of 1,000 and 3,000 saturates at 448."""
    q, v = torch.zeros(1, 1, 2), torch.tensor([[[1.0, 1e3]], [[3.0, 3e3]]])
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    found = ragged_attention(q, torch.zeros(2, 1, 2), v, indptr, 2 * indptr, output_scale=0.25)
    assert found.out.flatten().tolist() == [8.0, 448.0]
    assert found.lse.item() == pytest.approx(math.log(2.0))


@SCALES
def test_it_is_the_usual_output_over_the_scale(scale: float) -> None:
    inputs = inputs_of(replace(PROBLEM, output_scale=scale))
    assert inputs.out_dtype == torch.float8_e4m3fn
    found, plain = (oracle.attention(each) for each in (inputs, replace(inputs, output_scale=None)))
    assert torch.equal(found.out, (plain.out / scale).clamp(-448, 448))
    assert torch.equal(found.lse, plain.lse)


@SCALES
def test_the_bound_is_half_an_ulp_of_fp8_and_little_more(scale: float) -> None:
    inputs = inputs_of(replace(PROBLEM, output_scale=scale))
    expected, bound = oracle.bounded_attention(inputs, Arithmetic())
    error = (expected.out.to(torch.float8_e4m3fn).double() - expected.out).abs()
    assert (error <= bound.out).all()
    half_an_ulp = 2.0**-4 * expected.out.abs() + 2.0**-10
    assert (bound.out <= half_an_ulp + 1e-4 * (1 + 1 / scale)).all()
    bits = expected.out.float().view(torch.int32) & ~((1 << 20) - 1)
    truncated = (bits.view(torch.float32).double() - expected.out).abs()
    assert scale == 100 or (truncated > bound.out).any()


def test_the_functions_with_tensors_take_it_too() -> None:
    inputs = inputs_of(PROBLEM)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr)
    bound = ragged_attention_error_bound(*tensors, **inputs.keywords())
    assert torch.equal(bound.out, oracle.bounded_attention(inputs, Arithmetic()).bound.out)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), True])
def test_scales_that_no_output_has(scale: float) -> None:
    inputs = inputs_of(PROBLEM)
    with pytest.raises(ValueError, match=r"output_scale is .*; it must be a positive, finite"):
        oracle.attention(replace(inputs, output_scale=scale))


def test_problems_that_have_one() -> None:
    assert drawn_features(PROBLEM) == ["output_scale"]
    assert not replace(PROBLEM, regime="exact_grid").exact
    with pytest.raises(ValueError, match="output_scale is 0"):
        replace(PROBLEM, output_scale=0.0)
    with pytest.raises(ValueError, match="null for append_paged_kv"):
        AttentionProblem("append_paged_kv", output_scale=1.0)
