"""ALiBi of the oracle, of problems and of the laws, against torch's own attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernelproof.impl import Target, find_implementation, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import (
    Arithmetic,
    AttentionOutput,
    AttentionProblem,
    materialise,
    oracle,
    paged_attention,
    problem_from_json,
    ragged_attention,
)
from kernelproof.reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs

CPU = Target.here("cpu")
PLAIN = AttentionProblem(
    "ragged_attention", (3, 1, 4), (7, 5, 4), num_kv_heads=2, group_size=3, causal=True
)
PROBLEM = replace(PLAIN, alibi=True)


def inputs_of(problem: AttentionProblem) -> RaggedAttentionInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    return inputs


def biased(inputs: RaggedAttentionInputs, dtype: torch.dtype, first: str = "query") -> Any:  # noqa: ANN401  out and lse
    """Attend by torch to each request, distances being counted from the query or the first key."""
    outs, lses = [], []
    assert inputs.alibi_slopes is not None
    slopes = inputs.alibi_slopes.to(dtype)
    for request in range(len(inputs.qo_indptr) - 1):
        rows, keys = (
            slice(*indptr[request : request + 2].tolist())
            for indptr in (inputs.qo_indptr, inputs.kv_indptr)
        )
        q, k, v = (
            tensor.to(dtype).transpose(0, 1)
            for tensor in (inputs.q[rows], inputs.k[keys], inputs.v[keys])
        )
        k, v = (each.repeat_interleave(3, dim=0) for each in (k, v))
        key = torch.arange(k.shape[1])
        position = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1]
        distance = key - position if first == "query" else key.expand(q.shape[1], -1)
        bias = slopes.view(-1, 1, 1) * distance.to(dtype)
        bias = bias.masked_fill(key > position, -torch.inf)
        outs.append(scaled_dot_product_attention(q, k, v, bias).transpose(0, 1))
        logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + bias
        lse = logits.logsumexp(-1)
        if first != "query":
            lse = lse - slopes.unsqueeze(1) * position.flatten().to(dtype)
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_attention_with_a_bias(seed: int) -> None:
    inputs = inputs_of(replace(PROBLEM, seed=seed))
    found = oracle.attention(inputs)
    expected = biased(inputs, torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_short_case_by_hand() -> None:
    q, v = torch.zeros(1, 1, 2), torch.tensor([[[1.0]], [[3.0]]])
    out, lse = ragged_attention(
        q,
        torch.ones(2, 1, 2),
        v,
        torch.tensor([0, 1]),
        torch.tensor([0, 2]),
        alibi_slopes=torch.tensor([2.0]),
        sinks=torch.tensor([0.0]),
    )
    weights = torch.tensor([-2.0, 0.0, 0.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(out.flatten(), (weights[:2] * v.flatten()).sum().view(1))
    torch.testing.assert_close(lse.exp().item(), 2 + torch.tensor(-2.0).double().exp().item())


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_pages_change_nothing(window: int, causal: bool) -> None:
    options: dict[str, Any] = {"causal": causal, "window_left": window, "logits_soft_cap": 5.0}
    ragged = oracle.attention(inputs_of(replace(PROBLEM, **options)))
    problem = replace(PROBLEM, operation="paged_attention", page_size=2, page_order=1, **options)
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    found = paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, **inputs.keywords()
    )
    for mine, theirs in zip(found, ragged, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("first", ["query", "key"])
def test_a_float32_kernel_is_within_the_bound_wherever_it_counts_from(first: str) -> None:
    for seed in range(10):
        problem = replace(PROBLEM, query_lens=(40, 1), seq_lens=(300, 200), seed=seed)
        inputs = inputs_of(problem)
        expected, bound = oracle.bounded_attention(inputs, Arithmetic())
        for name, found in zip(("out", "lse"), biased(inputs, torch.float32, first), strict=True):
            error = (found.double() - getattr(expected, name)).abs()
            assert (error <= getattr(bound, name)).all(), (seed, name)


def test_slopes_in_bfloat16_are_not() -> None:
    problem = replace(PROBLEM, num_kv_heads=1, query_lens=(3,), seq_lens=(60,))
    inputs = inputs_of(problem)
    assert inputs.alibi_slopes is not None
    expected, bound = oracle.bounded_attention(inputs, Arithmetic())
    rounded = replace(inputs, alibi_slopes=inputs.alibi_slopes.bfloat16().float())
    out, lse = biased(rounded, torch.float32)
    assert ((out - expected.out).abs() > bound.out).any()
    assert ((lse - expected.lse).abs() > bound.lse).any()


@implementation("ragged_attention", name="without-alibi", features=("alibi",))
def unbiased(inputs: RaggedAttentionInputs) -> AttentionOutput:
    """Leave ALiBi out."""
    out, lse = oracle.attention(replace(inputs, alibi_slopes=None))
    return AttentionOutput(out.to(inputs.out_dtype), lse.float())


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


@pytest.mark.parametrize("law", ["parity", "sensitivity"])
def test_a_kernel_that_ignores_it_is_found(law: str) -> None:
    subject = Subject(unbiased, CPU, Stages())
    verdict = find_law(law).check(subject, PROBLEM)
    assert verdict.status == "FAIL"
    assert law == "parity" or "alibi" in verdict.message


def test_slopes_are_one_a_head() -> None:
    inputs = inputs_of(PROBLEM)
    assert inputs.alibi_slopes is not None
    assert torch.equal(inputs.alibi_slopes, torch.exp2(torch.arange(1, 7) * -8 / 6))
    with pytest.raises(ValueError, match=r"alibi_slopes must be floating \[qo_heads\] = \[6\]"):
        oracle.attention(replace(inputs, alibi_slopes=inputs.alibi_slopes[:3]))


def test_only_kernels_that_name_it_get_it() -> None:
    refusal = find_implementation("torch-varlen-attn").refusal(PROBLEM, CPU)
    assert refusal is not None
    assert (refusal.code, refusal.about) == ("feature", "alibi")
    assert "alibi" not in PLAIN.to_json()
    assert problem_from_json(PROBLEM.to_json()) == PROBLEM
    with pytest.raises(ValueError, match="without soft cap, ALiBi and bias"):
        replace(PROBLEM, regime="exact_grid")
