"""What the law of slack leaves behind a batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.torch.sdpa import paged as sdpa
from kernelproof.properties.laws import find_law
from kernelproof.properties.laws.slack import INTEGERS
from kernelproof.properties.seeded.slack_bugs import rows_that_are_named
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.tensors.allocation import CANARY, FENCE, SLACK_ROWS
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

PROBLEM = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2, causal=True)


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


def given(function: Any, **claims: Any) -> list[PagedAttentionInputs]:  # noqa: ANN401
    """Return what the law gives an implementation, over some seeds."""
    seen: list[PagedAttentionInputs] = []

    def watches(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401  a pair
        seen.append(inputs)
        return function(inputs)

    made = implementation("paged_attention", name="watches", **claims)(watches)
    subject = Subject(made, Target.here("cpu"), Stages())
    for seed in range(24):
        verdict = find_law("slack_rows").check(subject, replace(PROBLEM, seed=seed))
        assert verdict.status == "PASS", verdict
    assert not subject.materialise(PROBLEM).q.isnan().any()
    assert set(subject.materialise(PROBLEM).storages["q"][-FENCE:].tolist()) == {CANARY}
    return seen


def behind(inputs: PagedAttentionInputs, name: str, count: int) -> torch.Tensor:
    """Return the numbers in a storage behind a tensor of this many."""
    return inputs.storages[name][FENCE + count :]


def test_integers_behind_a_batch_are_of_no_page_and_no_request() -> None:
    seen = given(sdpa)
    for inputs in seen:
        values = {
            int(number)
            for name, tensor in inputs.metadata.tensors().items()
            for number in behind(inputs, name, tensor.numel())
        }
        assert len(values) == 1
        assert values <= set(INTEGERS)
        rows = behind(inputs, "q", inputs.q.numel())
        assert len(rows) == FENCE + SLACK_ROWS * inputs.q[0].numel()
        assert rows.isnan().all()
        assert len(inputs.q) == PROBLEM.num_tokens
    assert len({int(behind(each, "seq_lens", 2)[0]) for each in seen}) == len(INTEGERS)


def test_tensors_have_rows_that_no_request_has_where_that_is_named() -> None:
    seen = given(rows_that_are_named, features=("padded_rows",))
    longer = [each for each in seen if len(each.q) > PROBLEM.num_tokens]
    assert len(longer) > len(seen) // 2
    for inputs in longer:
        assert inputs.q[PROBLEM.num_tokens :].isnan().all()
        assert len(inputs.block_table) - 2 == len(inputs.q) - 3
        assert int(inputs.metadata.qo_indptr[-1]) == PROBLEM.num_tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_materialising_with_garbage_changes_nothing_within_tensors(dtype: str) -> None:
    problem = replace(PROBLEM, dtype=dtype)
    plain: Any = materialise(problem)
    padded: Any = materialise(problem, unused=torch.nan, garbage=-1)
    assert torch.equal(plain.q, padded.q)
    for name, tensor in plain.metadata.tensors().items():
        assert torch.equal(tensor, getattr(padded.metadata, name))
