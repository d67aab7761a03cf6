"""Tests of tensors whose rows lie far apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelproof.reference import AttentionProblem, MergeProblem, MoEProblem, materialise
from kernelproof.reference.tensors.allocation import FAR, rows_apart


@pytest.mark.parametrize(("shape", "axis"), [((4, 3, 5), 0), ((2, 7, 3), 1), ((6,), 0)])
def test_the_last_row_begins_beyond_what_32_bits_hold(shape: tuple[int, ...], axis: int) -> None:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    found = rows_apart(shape, torch.int32, axis=axis).copy_(numbers)
    assert found.stride(axis) < 2**31
    assert found.stride(axis) * (shape[axis] - 1) > FAR
    assert found.select(axis, 0).is_contiguous()
    assert torch.equal(found, numbers)


def test_rows_that_are_named_lie_apart_and_hold_what_they_held() -> None:
    problem = AttentionProblem(operation="append_paged_kv", query_lens=(3, 2), seq_lens=(3, 9))
    near: Any = materialise(problem)
    far: Any = materialise(problem, apart={"new_k": (0,)})
    assert far.k.stride(0) > 2**29 > far.v.stride(0)
    assert torch.equal(far.k, near.k)
    assert torch.equal(far.v, near.v)


@pytest.mark.parametrize(("states", "axis"), [(4, 0), (2, 1)])
def test_states_lie_apart_or_their_tokens(states: int, axis: int) -> None:
    problem = MergeProblem(num_states=states, num_tokens=5)
    near: Any = materialise(problem)
    far: Any = materialise(problem, apart={"outs": (0, 1)})
    assert far.outs.stride(axis) > 2**29 > far.outs.stride(1 - axis)
    assert torch.equal(far.outs, near.outs)


def test_rows_of_experts_lie_apart() -> None:
    near: Any = materialise(MoEProblem())
    far: Any = materialise(MoEProblem(), apart={"w13": (1,)})
    assert far.w13.stride(1) > 2**24 > far.w13.stride(0)
    assert torch.equal(far.w13, near.w13)
