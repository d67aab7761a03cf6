"""torch's flex_attention: each option arrives, and what it does not claim is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.reference import AttentionProblem, materialise, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs

NAMES = {
    "ragged_attention": "torch-flex-attention",
    "paged_attention": "torch-flex-attention-paged",
}
MIXED = AttentionProblem(
    query_lens=(3, 1, 0, 4, 2),
    seq_lens=(5, 7, 2, 0, 2),
    page_size=2,
    page_order=1,
    num_kv_heads=2,
    group_size=2,
    v_scale=2.0,
    k_scale=0.5,
    strided_q=True,
)
CPU = Target.here("cpu")


@pytest.mark.parametrize("operation", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_left": 1, "window_right": 0},
        {"custom_mask": True, "kv_layout": "HND"},
        {"alibi": True, "logits_soft_cap": 3.0},
        {"dtype": "float16", "v_scale": 1.0, "causal": True},
        {"dtype": "bfloat16", "logits_soft_cap": 3.0},
    ],
    ids=str,
)
def test_each_option_arrives(operation: str, options: dict[str, object]) -> None:
    problem = replace(MIXED, operation=operation, **options)  # type: ignore[arg-type]
    kernel = find_implementation(NAMES[operation])
    assert kernel.refusal(problem, CPU) is None
    inputs = materialise(problem)
    assert isinstance(inputs, (PagedAttentionInputs, RaggedAttentionInputs))
    expected, bound = oracle.bounded_attention(inputs, kernel.arithmetic)
    out, lse = kernel(inputs)
    assert ((out - expected.out).abs() <= bound.out).all()
    empty = expected.lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert ((lse - expected.lse).abs() <= bound.lse)[~empty].all()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"sinks": True}, "no attention sinks"), ({"dtype": "float16", "v_scale": 0.75}, "twice")],
)
def test_what_it_does_not_claim_is_said(options: dict[str, object], said: str) -> None:
    problem = replace(MIXED, **options)  # type: ignore[arg-type]
    refusal = find_implementation(NAMES["paged_attention"]).refusal(problem, CPU)
    assert refusal is not None
    assert said in refusal
