"""A causal flag a request: some of a batch's requests are causal, the others are not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import (
    AttentionProblem,
    materialise,
    oracle,
    problem_from_json,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs

LENGTHS = ((3, 5, 1, 4), (7, 5, 3, 2))
FLAGS = (True, False, True, False)
RAGGED = AttentionProblem(
    operation="ragged_attention",
    query_lens=LENGTHS[0],
    seq_lens=LENGTHS[1],
    num_kv_heads=2,
    causal_by_request=True,
    causal=True,
)


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    (tokens, keys) = map(sum, LENGTHS)
    q, k, v = (torch.randn(n, 2, 8, generator=generator).double() for n in (tokens, keys, keys))
    ends = [torch.tensor([0, *itertools.accumulate(each)]) for each in LENGTHS]
    return q, k, v, *ends


def test_each_request_has_its_own_mask() -> None:
    q, k, v, q_ends, kv_ends = tensors()
    found = ragged_attention(q, k, v, q_ends, kv_ends, causal=torch.tensor(FLAGS)).out
    for request, causal in enumerate(FLAGS):
        rows, keys = (slice(*each[request : request + 2].tolist()) for each in (q_ends, kv_ends))
        t, s = LENGTHS[0][request], LENGTHS[1][request]
        mask = torch.ones(t, s, dtype=torch.bool)
        mask = mask.tril(s - t) if causal else mask
        heads = [each.transpose(0, 1) for each in (q[rows], k[keys], v[keys])]
        expected = scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        expected = expected.transpose(0, 1)
        assert torch.allclose(found[rows], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_flags_are_one_flag(*, causal: bool) -> None:
    arguments, flags = tensors(), torch.full((4,), causal)
    for function in (ragged_attention, ragged_attention_error_bound):
        pair = function(*arguments, causal=flags), function(*arguments, causal=causal)
        assert all(torch.equal(*each) for each in zip(*pair, strict=True))


@pytest.mark.parametrize(
    "flags", [torch.ones(3, dtype=torch.bool), torch.ones(4), torch.ones(4, 1, dtype=torch.bool)]
)
def test_other_tensors_are_refused(flags: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"causal must be bool \[requests\] = \[4\]"):
        ragged_attention(*tensors(), causal=flags)


@pytest.mark.parametrize("causal", [False, True])
def test_every_second_request_is_the_other_way_round(*, causal: bool) -> None:
    inputs = materialise(replace(RAGGED, causal=causal))
    assert isinstance(inputs, RaggedAttentionInputs)
    assert isinstance(inputs.causal, torch.Tensor)
    assert inputs.causal.tolist() == [causal, not causal, causal, not causal]
    assert oracle.attention(inputs).out.isfinite().all()


def test_a_request_keeps_its_flag() -> None:
    assert RAGGED.causal_flags == FLAGS
    alone = replace(RAGGED, query_lens=(4, 3), seq_lens=(2, 7), request_ids=(3, 0))
    assert alone.causal_flags == (False, True)
    assert not alone.rows_without_keys
    assert replace(alone, causal=False).rows_without_keys


def test_only_kernels_that_name_it_get_it() -> None:
    paged = replace(RAGGED, operation="paged_attention", seq_lens=(7, 5, 3, 4))
    refusal = find_implementation("torch-sdpa-paged").refusal(paged, Target.here("cpu"))
    assert refusal is not None
    assert (refusal.code, refusal.about) == ("feature", "causal_by_request")
    assert "causal_by_request" not in AttentionProblem().to_json()
    assert problem_from_json(RAGGED.to_json()) == RAGGED
