"""Outputs of any dtype that are divided by a number, as by a factor of the second product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import find_implementation
from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    materialise,
    oracle,
    problem_from_json,
)
from kernelproof.reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs

PROBLEM = AttentionProblem(
    query_lens=(1, 3),
    seq_lens=(9, 20),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=32,
    head_dim_vo=32,
    dtype="float16",
    page_size=4,
    causal=True,
    v_scale=2.0,
    output_divisor=4.0,
)


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
@pytest.mark.parametrize("divisor", [4.0, 3.0, 0.5])
def test_outputs_are_divided_and_nothing_else(operation: str, divisor: float) -> None:
    problem = replace(PROBLEM, operation=operation, output_divisor=divisor, dtype="float32")
    inputs = materialise(problem)
    assert isinstance(inputs, (PagedAttentionInputs, RaggedAttentionInputs))
    plain = replace(inputs, output_divisor=1.0)
    found, expected = oracle.attention(inputs), oracle.attention(plain)
    torch.testing.assert_close(found.out * divisor, expected.out, rtol=1e-14, atol=0.0)
    assert torch.equal(found.lse, expected.lse)
    assert inputs.out_dtype == torch.float32
    name = "torch-sdpa-paged" if operation == "paged_attention" else "torch-sdpa-ragged"
    out, _ = find_implementation(name)(inputs)
    bound = oracle.bounded_attention(inputs, Arithmetic()).bound.out
    assert ((out.double() - expected.out / divisor).abs() <= bound).all()


def test_the_bound_shrinks_as_the_output_does() -> None:
    inputs = materialise(PROBLEM)
    assert isinstance(inputs, PagedAttentionInputs)
    bound = oracle.bounded_attention(inputs, Arithmetic()).bound.out
    plain = oracle.bounded_attention(replace(inputs, output_divisor=1.0), Arithmetic()).bound.out
    assert (bound < 0.26 * plain + 2.0**-24).all()


def test_problems_without_it_keep_their_ids() -> None:
    assert "output_divisor" not in replace(PROBLEM, output_divisor=1.0).to_json()
    assert problem_from_json(PROBLEM.to_json()) == PROBLEM
    assert drawn_features(PROBLEM) == ["output_divisor"]
    exact = replace(PROBLEM, regime="exact_grid")
    assert exact.exact
    assert not replace(exact, output_divisor=3.0).exact
    with pytest.raises(ValueError, match="output_divisor is 0"):
        replace(PROBLEM, output_divisor=0.0)
    with pytest.raises(ValueError, match=r"output_divisor is 4\.0; it must be 1"):
        replace(PROBLEM, operation="append_paged_kv", v_scale=1.0)
