"""Two-sided windows: the oracle against masks, and a kernel that ignores the right side."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import (
    AttentionOutput,
    AttentionProblem,
    materialise,
    oracle,
    problem_from_json,
    ragged_attention,
)
from kernelproof.reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs

CPU = Target.here("cpu")
LENGTHS = ((1, 7, 4, 5, 0), (9, 7, 11, 3, 4))
"""Queries and keys: a decode, a prefill, a chunk, more queries than keys, no query."""
PROBLEM = AttentionProblem(query_lens=LENGTHS[0], seq_lens=LENGTHS[1], page_size=4, num_kv_heads=2)
WINDOWED = replace(PROBLEM, window_right=1)


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


def mask(left: int, right: int) -> torch.Tensor:
    """Return the requests' masks as a flat custom mask."""
    found = []
    for queries, keys in zip(*LENGTHS, strict=True):
        position = torch.arange(queries).unsqueeze(1) + keys - queries
        key = torch.arange(keys).unsqueeze(0)
        kept = torch.ones((queries, keys), dtype=torch.bool)
        if left >= 0:
            kept &= key >= position - left
        if right >= 0:
            kept &= key <= position + right
        found.append(kept.flatten())
    return torch.cat(found)


@pytest.mark.parametrize("left", [-1, 0, 2, 100])
@pytest.mark.parametrize("right", [0, 1, 3, 100])
def test_it_is_what_a_mask_makes_of_it(left: int, right: int) -> None:
    inputs = materialise(replace(PROBLEM, operation="ragged_attention"))
    assert isinstance(inputs, RaggedAttentionInputs)
    call = (inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr)
    found = ragged_attention(*call, causal=False, window_left=left, window_right=right)
    masked = ragged_attention(*call, causal=False, custom_mask=mask(left, right))
    for got, wanted in zip(found, masked, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("right", [0, 1, 5])
def test_causal_rows_see_nothing_to_their_right(right: int) -> None:
    causal = oracle.attention(materialise(replace(PROBLEM, causal=True)))  # type: ignore[arg-type]
    both = replace(PROBLEM, causal=True, window_right=right)
    assert all(map(torch.equal, oracle.attention(materialise(both)), causal))  # type: ignore[arg-type]
    none = oracle.attention(materialise(replace(PROBLEM, window_right=0)))  # type: ignore[arg-type]
    assert all(map(torch.equal, none, causal))


@pytest.mark.parametrize("window", [-2, 1.0])
def test_a_wrong_window_is_refused(window: Any) -> None:  # noqa: ANN401  no integer, too
    inputs = materialise(replace(PROBLEM, operation="ragged_attention"))
    assert isinstance(inputs, RaggedAttentionInputs)
    call = (inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr)
    with pytest.raises(ValueError, match="window_right is "):
        ragged_attention(*call, window_right=window)


@implementation("paged_attention", name="left-only", features=("window_right",))
def left_only(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Ignore the right side of the window."""
    out, lse = oracle.attention(replace(inputs, window_right=-1))
    return AttentionOutput(out.to(inputs.out_dtype), lse.float())


LAWS = ("parity", "sensitivity", "split_kv", "doubled_keys", "request_order", "keys_behind_window",
        "chunked_prefill", "contiguity", "batch_independence")  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
def test_no_law_accuses_a_right_kernel(law: str, operation: str) -> None:
    name = {"paged_attention": "torch-sdpa-paged", "ragged_attention": "torch-sdpa-ragged"}
    subject = Subject(find_implementation(name[operation]), CPU, Stages())
    for left, right, seed in ((-1, 0, 0), (2, 1, 1), (0, 3, 2), (-1, 100, 3), (1, -1, 4)):
        problem = replace(WINDOWED, window_left=left, window_right=right, seed=seed)
        problem = replace(problem, two_sided_window=right < 0)
        problem = replace(problem, operation=operation)
        if operation in find_law(law).operations:
            assert find_law(law).check(subject, problem).status == "PASS", problem


def test_a_kernel_that_ignores_the_right_side_is_found() -> None:
    subject = Subject(left_only, CPU, Stages())
    assert find_law("parity").check(subject, PROBLEM).status == "PASS"
    assert find_law("parity").check(subject, WINDOWED).status == "FAIL"
    verdict = find_law("sensitivity").check(subject, WINDOWED)
    assert (verdict.status, verdict.kind) == ("FAIL", "insensitive")
    assert "window_right" in verdict.message


@pytest.mark.parametrize("left", [-1, 0, 3])
def test_a_window_with_two_sides_is_as_wide_on_the_right(left: int) -> None:
    problem = replace(PROBLEM, window_left=left, two_sided_window=True)
    both = replace(PROBLEM, window_left=left, window_right=left)
    assert problem_from_json(problem.to_json()) == problem
    assert materialise(problem).keywords() == materialise(both).keywords()  # type: ignore[union-attr]
    found, wanted = (oracle.attention(materialise(each)) for each in (problem, both))  # type: ignore[arg-type]
    assert all(map(torch.equal, found, wanted))


def test_problems_without_it_keep_their_ids() -> None:
    assert not {"window_right", "two_sided_window"} & PROBLEM.to_json().keys()
    assert problem_from_json(WINDOWED.to_json()) == WINDOWED
    assert WINDOWED.id != PROBLEM.id
    refusal = find_implementation("flashinfer-trace-paged-decode").refusal(WINDOWED, CPU)
    assert refusal is not None
