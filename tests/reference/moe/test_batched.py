"""Batched experts against a loop over rows, and against ``moe`` on the rows in use."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    BatchedMoEProblem,
    QuantizedMatrix,
    batched_moe,
    materialise,
    moe,
    problem_from_json,
)
from kernelproof.reference.operations import bounded_answer
from kernelproof.reference.tensors.batched_moe import BatchedMoEInputs

MIXED = BatchedMoEProblem(counts=(3, 0, 5, 1), most_rows=5, hidden=16, inter=24)


def made(problem: BatchedMoEProblem, unused: float = math.nan) -> BatchedMoEInputs:
    inputs = materialise(problem, unused=unused)
    assert isinstance(inputs, BatchedMoEInputs)
    return inputs


def dense(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix.double()


def by_rows(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Compute silu(gate) * up and the second product row by row, with Python's loops."""
    hidden, w13, w2 = dense(inputs.hidden), dense(inputs.w13), dense(inputs.w2)
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for expert in range(hidden.shape[0]):
        for row in range(int(inputs.counts[expert])):
            projected = w13[expert] @ hidden[expert, row]
            gate, up = projected[: len(projected) // 2], projected[len(projected) // 2 :]
            out[expert, row] = w2[expert] @ (gate / (1 + (-gate).exp()) * up)
    return out


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (5, 5), (0, 0, 0), (0, 5, 0), (2,)])
def test_it_is_each_expert_on_its_own_rows(counts: tuple[int, ...]) -> None:
    inputs = made(replace(MIXED, counts=counts))
    found = batched_moe(*inputs.tensors(), **inputs.keywords())
    torch.testing.assert_close(found, by_rows(inputs), rtol=1e-12, atol=1e-13)


def test_rows_behind_counts_hold_what_is_unused() -> None:
    hidden = dense(made(MIXED).hidden)
    used = torch.arange(5) < torch.tensor(MIXED.counts).unsqueeze(1)
    assert torch.equal(hidden.isnan().all(dim=2), ~used)
    assert torch.equal(hidden.isnan().any(dim=2), ~used)


def test_values_of_a_row_do_not_depend_on_the_room_or_on_other_counts() -> None:
    small, large = made(MIXED), made(replace(MIXED, counts=(3, 4, 2, 1), most_rows=9))
    assert torch.equal(dense(small.hidden)[0, :3], dense(large.hidden)[0, :3])
    assert torch.equal(dense(small.hidden)[2, :2], dense(large.hidden)[2, :2])
    assert torch.equal(dense(small.w13), dense(large.w13))


FIELDS: dict[str, dict[str, Any]] = {
    "biases": {"biases": True, "dtype": "bfloat16"},
    "numbers": {"swiglu_parameters": "each"},
    "relu2": {"activation": "relu2"},
    "interleaved": {"activation": "geglu", "interleaved": True},
    **{
        name: {"quantized": name, "quantized_hidden": True, "hidden": 32, "inter": 32}
        for name in ("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4", "mxfp4")
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_it_is_moe_on_tokens_of_one_expert_each(name: str) -> None:
    problem = replace(MIXED, **FIELDS[name])
    inputs = made(problem)
    tokens: Any = materialise(problem.rows)
    ids = torch.repeat_interleave(torch.tensor(problem.counts)).unsqueeze(1)
    options = {**inputs.keywords()}
    expected = moe(tokens.hidden, tokens.w13, tokens.w2, ids, torch.ones(ids.shape), **options)
    found = batched_moe(*inputs.tensors(), **options)
    used = ~inputs.unused().squeeze(2)
    torch.testing.assert_close(found[used], expected, rtol=0, atol=0)
    assert not found[~used].any()


@pytest.mark.parametrize("name", FIELDS)
def test_float32_is_within_the_bound(name: str) -> None:
    inputs = made(replace(MIXED, **FIELDS[name]))
    expected, bound = (each.out for each in bounded_answer(inputs, Arithmetic()))
    found = batched_moe(*inputs.tensors(), **inputs.keywords(), compute_dtype=torch.float32)
    assert bool(((found - expected).abs() <= bound).all())
    assert bool(bound.isfinite().all())


def test_problems_come_back_from_json() -> None:
    assert problem_from_json(MIXED.to_json()) == MIXED


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"counts": (6, 0)}, r"field counts\[0\] is 6; it must be from 0 to most_rows = 5"),
        ({"counts": (0, -1)}, r"field counts\[1\] is -1"),
        ({"counts": ()}, r"field counts is \(\)"),
        ({"most_rows": 2000}, "field most_rows is 2000; it must be at most 1024"),
        ({"quantized": "mxfp4", "hidden": 24}, "field hidden is 24"),
    ],
)
def test_what_no_call_can_look_like_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(MIXED, **fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"counts": torch.tensor([1, 2, 6, 0])}, r"counts\[2\] is 6; hidden has 5 rows"),
        ({"counts": torch.tensor([1, -2, 3, 0])}, r"counts\[1\] is -2"),
        ({"counts": torch.tensor([1, 2])}, "counts has 2 entries, but hidden has 4 experts"),
        ({"counts": torch.ones(4)}, "counts must hold integers"),
        ({"hidden": torch.ones(4, 16)}, r"hidden must be a tensor \[experts, rows, hidden\]"),
        ({"hidden": torch.ones(3, 5, 16)}, "w2 has 4 experts, but hidden has 3"),
    ],
)
def test_arguments_that_disagree_are_refused(change: dict[str, Any], said: str) -> None:
    inputs = made(MIXED)
    names = ("hidden", "w13", "w2", "counts")
    arguments = {**dict(zip(names, inputs.tensors(), strict=True)), **change}
    with pytest.raises(ValueError, match=said):
        batched_moe(**arguments, **inputs.keywords())
