"""Merging with a first state that only the first tokens have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import (
    MergeProblem,
    materialise,
    merge_error_bound,
    merge_states,
    oracle,
    problem_from_json,
)
from kernelproof.reference.tensors.inputs import MergeInputs

SOME = MergeProblem(num_states=3, num_tokens=7, num_heads=2, empty="some", context="some", seed=4)


@pytest.mark.parametrize(("context", "tokens"), [("some", 4), ("none", 0)])
def test_tokens_behind_the_context_have_the_state_of_the_others(context: str, tokens: int) -> None:
    inputs = materialise(replace(SOME, context=context))
    assert isinstance(inputs, MergeInputs)
    assert inputs.context_tokens == tokens
    for name in ("outs", "lses"):
        missing = getattr(inputs, name).isnan()
        assert missing[0, tokens:].all()
        assert missing.sum() == missing[0, tokens:].numel()
    merged = oracle.merged(inputs)
    before = merge_states(inputs.outs[:, :tokens], inputs.lses[:, :tokens])
    behind = merge_states(inputs.outs[1:, tokens:], inputs.lses[1:, tokens:])
    for name in ("out", "lse"):
        expected = torch.cat([getattr(before, name), getattr(behind, name)])
        assert torch.equal(getattr(merged, name), expected)


def test_the_bound_behind_the_context_is_that_of_the_others() -> None:
    inputs = materialise(SOME)
    assert isinstance(inputs, MergeInputs)
    n = inputs.context_tokens
    bound = merge_error_bound(inputs.outs, inputs.lses, context_tokens=n)
    # Growth counts the states that are merged, of which there is one more.
    others = merge_error_bound(inputs.outs[1:, n:], inputs.lses[1:, n:])
    assert bool((bound.out[n:] >= others.out).all())
    assert bool((bound.out[n:] <= 2 * others.out).all())
    assert bool(bound.out.isfinite().all())


def test_a_context_of_all_tokens_is_none() -> None:
    inputs = materialise(replace(SOME, context="all"))
    assert isinstance(inputs, MergeInputs)
    assert inputs.context_tokens is None
    whole = oracle.merged(inputs)
    assert torch.equal(whole.out, merge_states(inputs.outs, inputs.lses, context_tokens=7).out)


def test_only_kernels_that_name_it_get_it() -> None:
    refusal = find_implementation("flashinfer-trace-merge-states").refusal(SOME, Target.here("cpu"))
    assert refusal is not None
    assert (refusal.code, refusal.about) == ("feature", "context_tokens")


def test_problems_with_a_whole_first_state_keep_their_ids() -> None:
    assert "context" not in MergeProblem().to_json()
    assert problem_from_json(SOME.to_json()) == SOME
    with pytest.raises(ValueError, match=r"context is .few.; .*one of"):
        replace(SOME, context="few")


def test_what_is_no_number_of_tokens_is_refused_and_shapes_are_checked_first() -> None:
    outs, lses = torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1)
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match=f"context_tokens is {wrong}"):
            merge_states(outs, lses, context_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lses"):
        merge_states(outs, lses[0, 0], context_tokens=1)
