"""States of merging that are padded, or lie by themselves: the same values, other strides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import MergeProblem, materialise, oracle, problem_from_json
from kernelproof.reference.tensors.inputs import MergeInputs

DENSE = MergeProblem(num_states=4, num_tokens=5, num_heads=3, empty="some", dtype="float16")
FEATURES = {"padded": "padded_states", "different": "different_state_strides"}


def made(strides: str) -> MergeInputs:
    inputs = materialise(replace(DENSE, strides=strides))
    assert isinstance(inputs, MergeInputs)
    return inputs


@pytest.mark.parametrize("strides", ["", "padded", "different"])
def test_the_values_are_those_of_dense_states(strides: str) -> None:
    inputs, dense = made(strides), made("")
    assert torch.equal(torch.stack(inputs.states), dense.outs)
    pairs = zip(oracle.merged(inputs), oracle.merged(dense), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_padded_states_share_their_strides_and_others_do_not() -> None:
    padded, different = made("padded"), made("different")
    assert padded.outs.stride() == (5 * 3 * 32, 3 * 32, 32, 1)
    assert {state.stride() for state in padded.states} == {(96, 32, 1)}
    strides = [state.stride() for state in different.states]
    assert len(set(strides)) == 4
    assert different.outs.is_contiguous()


@pytest.mark.parametrize("strides", ["padded", "different"])
def test_only_kernels_that_name_it_get_it(strides: str) -> None:
    problem, cpu = replace(DENSE, strides=strides), Target.here("cpu")
    refusal = find_implementation("flashinfer-trace-merge-states").refusal(problem, cpu)
    assert refusal is not None
    assert (refusal.code, refusal.about) == ("feature", FEATURES[strides])


def test_dense_problems_keep_their_ids() -> None:
    assert "strides" not in DENSE.to_json()
    other = replace(DENSE, strides="different")
    assert problem_from_json(other.to_json()) == other
    with pytest.raises(ValueError, match=r"strides is .wide.; .*one of"):
        replace(DENSE, strides="wide")
