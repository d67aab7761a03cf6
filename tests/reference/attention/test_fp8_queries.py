"""FP8 queries: consumed as codes, scaled by one number or one a query head."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    attention_error_bound,
    build_metadata,
    materialise,
    oracle,
    paged_attention,
    problem_from_json,
    ragged_attention,
)
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

FP8 = ("float8_e4m3fn", "float8_e5m2")
PROBLEM = AttentionProblem(
    query_lens=(1, 3, 2),
    seq_lens=(9, 20, 5),
    num_kv_heads=2,
    group_size=3,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="bfloat16",
    page_size=4,
    causal=True,
    kv_cache=FP8[0],
    q_dtype=FP8[0],
    q_scale=0.5,
)


def inputs_of(problem: AttentionProblem) -> PagedAttentionInputs:
    made = materialise(problem)
    assert isinstance(made, PagedAttentionInputs)
    return made


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("kv_cache", "q_dtype"),
    [*zip(FP8, FP8, strict=True), ("nvfp4", FP8[0]), ("nvfp4 interleaved", FP8[1])],
)
def test_the_codes_and_the_scale_are_consumed_as_they_are(
    kv_cache: str, q_dtype: str, per_head: bool
) -> None:
    problem = replace(PROBLEM, kv_cache=kv_cache, q_dtype=q_dtype, per_head_scales=per_head)
    inputs = inputs_of(problem)
    assert inputs.q.dtype == getattr(torch, q_dtype)
    assert inputs.out_dtype == torch.bfloat16
    assert isinstance(inputs.q_scale, torch.Tensor) == per_head
    scale = inputs.q_scale.reshape(-1, 1) if per_head else inputs.q_scale  # type: ignore[union-attr]
    wide = replace(inputs, q=inputs.q.double() * scale, q_scale=1.0)
    found, expected = oracle.attention(inputs), oracle.attention(wide)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_the_scale_acts_on_the_logits() -> None:
    inputs = inputs_of(PROBLEM)
    scaled = replace(inputs, q_scale=1.0, sm_scale=inputs.sm_scale * 0.5)
    assert torch.equal(oracle.attention(inputs).lse, oracle.attention(scaled).lse)
    q, k = torch.randn(2, 2, 8), torch.randn(5, 2, 8)
    indptr = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    heads = torch.tensor([2.0, 0.25])
    found = ragged_attention(q, k, k, *indptr, q_scale=heads)
    expected = ragged_attention(q * heads[:, None], k, k, *indptr)
    assert torch.equal(found.out, expected.out)


def test_probabilities_are_rounded_to_the_dtype_of_both_products() -> None:
    """FA3 rounds P to FP8 before P V; the bound grows by that, and by nothing else."""
    inputs = inputs_of(PROBLEM)
    rounded = oracle.bounded_attention(inputs, Arithmetic(probabilities="inputs")).bound.out
    named = oracle.bounded_attention(inputs, Arithmetic(probabilities=FP8[0])).bound.out
    assert torch.equal(rounded, named)
    kept = oracle.bounded_attention(inputs, Arithmetic()).bound.out
    assert (rounded >= kept).all()
    assert (rounded > 4 * kept).any()
    # A kernel that widens its queries first rounds P to their wider dtype.
    wide = replace(inputs, q=inputs.q.bfloat16())
    narrower = oracle.bounded_attention(wide, Arithmetic(probabilities="inputs")).bound.out
    assert torch.equal(
        narrower, oracle.bounded_attention(wide, Arithmetic(probabilities="bfloat16")).bound.out
    )


@pytest.mark.parametrize("q_dtype", FP8)
def test_the_exact_grid_is_exact(q_dtype: str) -> None:
    problem = replace(
        PROBLEM,
        kv_cache=q_dtype,
        q_dtype=q_dtype,
        regime="exact_grid",
        head_dim_qk=128,
        q_scale=16.0,
        seq_lens=(9, 200, 5),
    )
    assert problem.exact
    inputs = inputs_of(problem)
    weights = inputs.q.float()[0, 0]
    assert weights[weights > 0].log2().frac().eq(0).all()
    out = oracle.attention(inputs).out.float()
    assert torch.equal(out, out.bfloat16().float())
    assert not replace(problem, q_scale=1.0, q_dtype=FP8[0], kv_cache=FP8[0]).exact


def test_json_leaves_the_fields_out_where_they_say_nothing() -> None:
    plain = replace(PROBLEM, q_dtype="", q_scale=1.0)
    assert not {"q_dtype", "q_scale"} & set(plain.to_json())
    again = json.loads(json.dumps(PROBLEM.to_json()))
    assert {"q_dtype", "q_scale"} <= set(again)
    assert problem_from_json(again) == PROBLEM


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"q_dtype": "float8"}, "q_dtype is 'float8'; did you mean float8_e4m3fn or"),
        ({"q_dtype": FP8[1]}, "q_dtype is 'float8_e5m2'; it must be '', 'float8_e4m3fn' with"),
        ({"kv_cache": ""}, "q_dtype is 'float8_e4m3fn'; it must be '' with kv_cache ''"),
        ({"q_dtype": ""}, "q_scale is 0.5; it must be 1 where q_dtype is empty"),
        ({"kv_cache": "nvfp4 interleaved", "page_size": 6}, "page_size is 6; it must be a mult"),
        ({"kv_cache": "nvfp4 interleaved", "head_dim_vo": 96}, "head_dim_vo is 96; it must be"),
    ],
)
def test_what_no_call_looks_like_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {said}"):
        replace(PROBLEM, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q_scale", "said"),
    [
        (torch.ones(2), r"q_scale must be a float or floating \[qo_heads\] = \[6\]"),
        (float("nan"), "q_scale is nan; it must be a finite number or a tensor"),
    ],
)
def test_a_wrong_scale_is_refused(q_scale: float | torch.Tensor, said: str) -> None:
    q, cache = torch.zeros(1, 6, 8), torch.zeros(1, 4, 2, 8)
    metadata = build_metadata([1], [2], [[0]], 4)
    with pytest.raises(ValueError, match=said):
        paged_attention(q, cache, cache, metadata, q_scale=q_scale)
    with pytest.raises(ValueError, match=said):
        attention_error_bound(q, cache, cache, metadata, q_scale=q_scale)
