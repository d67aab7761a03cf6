"""FP8 keys, values and queries of ragged attention, against loops over single numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    materialise,
    oracle,
    problem_from_json,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.tensors.inputs import RaggedAttentionInputs

FP8 = ("float8_e4m3fn", "float8_e5m2")
BITS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}
PROBLEM = AttentionProblem(
    operation="ragged_attention",
    query_lens=(2, 3),
    seq_lens=(4, 3),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=6,
    head_dim_vo=4,
    dtype="bfloat16",
    causal=True,
    kv_cache=FP8[0],
    k_scale=0.5,
    v_scale=1.25,
)


def inputs_of(problem: AttentionProblem) -> RaggedAttentionInputs:
    made = materialise(problem)
    assert isinstance(made, RaggedAttentionInputs)
    return made


def number(code: int, dtype: str) -> float:
    """Read one byte by the OCP formats' definition."""
    fraction_bits, bias = BITS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> fraction_bits
    fraction = (code & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def numbers(tensor: torch.Tensor) -> list[list[list[float]]]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FP8:
        return tensor.double().tolist()
    codes = tensor.contiguous().view(torch.uint8).tolist()
    return [[[number(code, dtype) for code in head] for head in row] for row in codes]


def scale_of(scale: float | torch.Tensor, head: int) -> float:
    return float(scale[head]) if isinstance(scale, torch.Tensor) else scale


def by_loops(inputs: RaggedAttentionInputs) -> torch.Tensor:
    """Attend number by number, causally."""
    q, k, v = numbers(inputs.q), numbers(inputs.k), numbers(inputs.v)
    out = torch.zeros(*inputs.q.shape[:2], inputs.v.shape[-1], dtype=torch.float64)
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q_ends, k_ends = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    for request in range(len(q_ends) - 1):
        rows = range(q_ends[request], q_ends[request + 1])
        keys = range(k_ends[request], k_ends[request + 1])
        for row in rows:
            seen = [key for key in keys if key - keys.stop <= row - rows.stop]
            for head in range(inputs.q.shape[1]):
                of = head // group
                factor = inputs.sm_scale * scale_of(inputs.q_scale, head)
                factor *= scale_of(inputs.k_scale, of)
                pairs = [zip(q[row][head], k[key][of], strict=True) for key in seen]
                weights = [math.exp(factor * sum(a * b for a, b in each)) for each in pairs]
                for channel in range(out.shape[-1]):
                    weighted = zip(weights, (v[key][of][channel] for key in seen), strict=True)
                    total = sum(weight * value for weight, value in weighted)
                    out[row, head, channel] = total / sum(weights) * scale_of(inputs.v_scale, of)
    return out


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("q_dtype", ["", "same"])
@pytest.mark.parametrize("kv_cache", FP8)
def test_codes_are_read_by_their_bits(kv_cache: str, q_dtype: str, per_head: bool) -> None:
    problem = replace(PROBLEM, kv_cache=kv_cache, per_head_scales=per_head)
    if q_dtype:
        problem = replace(problem, q_dtype=kv_cache, q_scale=2.0)
    inputs = inputs_of(problem)
    assert inputs.k.dtype == inputs.v.dtype == getattr(torch, kv_cache)
    assert inputs.q.dtype == getattr(torch, kv_cache if q_dtype else "bfloat16")
    assert inputs.out_dtype == torch.bfloat16
    expected = by_loops(inputs)
    torch.testing.assert_close(oracle.attention(inputs).out, expected, rtol=1e-12, atol=1e-12)
    if per_head:
        return
    found, _ = find_implementation("torch-sdpa-ragged")(inputs)
    bound = oracle.bounded_attention(inputs, Arithmetic(probabilities="inputs")).bound.out
    assert ((found.double() - expected).abs() <= bound).all()


def test_the_bound_is_that_of_the_queries_dtype() -> None:
    """Kernels widen keys and values to it, or multiply FP8 by FP8 and round P to FP8."""
    for q_dtype in ("", FP8[0]):
        inputs = inputs_of(replace(PROBLEM, q_dtype=q_dtype))
        arithmetic = Arithmetic(probabilities="inputs")
        named = Arithmetic(probabilities=q_dtype or "bfloat16")
        assert torch.equal(
            oracle.bounded_attention(inputs, arithmetic).bound.out,
            oracle.bounded_attention(inputs, named).bound.out,
        )
        public = ragged_attention_error_bound(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.qo_indptr,
            inputs.kv_indptr,
            **inputs.keywords(),
            arithmetic=arithmetic,
            out_dtype=torch.bfloat16,
        )
        assert torch.equal(public.out, oracle.bounded_attention(inputs, arithmetic).bound.out)


@pytest.mark.parametrize("kv_cache", ["nvfp4", "float8_e4m3fn as uint8", "int8_per_token_head"])
def test_other_formats_have_no_ragged_rows(kv_cache: str) -> None:
    with pytest.raises(ValueError, match=r"kv_cache is .* for ragged_attention"):
        replace(PROBLEM, kv_cache=kv_cache, head_dim_qk=64, head_dim_vo=64, q_dtype="")


def test_it_is_drawn_only_where_named_and_written_as_json() -> None:
    assert drawn_features(PROBLEM) == ["fp8_kv"]
    problem = replace(PROBLEM, q_dtype=FP8[0], q_scale=2.0)
    assert drawn_features(problem) == ["fp8_kv", "fp8_q"]
    assert problem_from_json(problem.to_json()) == problem
    here, problem = Target(), replace(problem, v_scale=2.0)
    assert find_implementation("torch-sdpa-ragged").refusal(problem, here) is None
    assert find_implementation("torch-flex-attention").refusal(problem, here) is not None


def test_keys_and_values_are_of_one_dtype() -> None:
    inputs = inputs_of(PROBLEM)
    with pytest.raises(ValueError, match=r"v is torch\.bfloat16, but k is torch\.float8_e4m3fn"):
        ragged_attention(
            inputs.q, inputs.k, inputs.v.bfloat16(), inputs.qo_indptr, inputs.kv_indptr
        )


def test_the_exact_grid_stays_exact() -> None:
    problem = replace(PROBLEM, regime="exact_grid", v_scale=1.0, head_dim_qk=64)
    assert problem.exact
    inputs = inputs_of(problem)
    out = oracle.attention(inputs).out
    assert torch.equal(out.float(), out.bfloat16().float())
