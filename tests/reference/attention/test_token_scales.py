"""Caches with a scale for each token and head: of the oracle, of problems and of the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    KVCacheFormat,
    build_metadata,
    materialise,
    oracle,
    paged_attention,
)
from kernelproof.reference.formats.cache_elements import TOKEN_SCALED
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

NAMES = pytest.mark.parametrize("name", TOKEN_SCALED)
PROBLEM = AttentionProblem(
    query_lens=(1, 3),
    seq_lens=(9, 20),
    num_kv_heads=2,
    group_size=2,
    page_size=4,
    causal=True,
    dtype="float16",
    kv_cache=TOKEN_SCALED[0],
)
VLLM = Arithmetic(probabilities="inputs", row_scales="products")


def inputs_of(problem: AttentionProblem) -> PagedAttentionInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    return inputs


def test_a_short_case_by_hand() -> None:
    """One query of zeros weighs both values alike: (3 * 0.5 + -2 * 4) / 2."""
    codes = torch.tensor([3, -2], dtype=torch.int8).view(1, 2, 1, 1)
    scales = torch.tensor([0.5, 4.0]).view(1, 2, 1, 1)
    lengths = torch.ones(1, dtype=torch.int32)
    metadata = build_metadata(lengths, 2 * lengths, torch.zeros(1, 1, dtype=torch.int32), 2)
    found = paged_attention(
        torch.zeros(1, 1, 1),
        codes,
        codes,
        metadata,
        kv_format=KVCacheFormat("int8_per_token_head"),
        kv_cache_sf=(scales, scales),
    )
    assert found.out.item() == -3.25


@NAMES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_problems_have_a_scale_for_each_token_and_head(name: str, layout: str) -> None:
    problem = replace(PROBLEM, kv_cache=name, kv_layout=layout, strided_kv=True)  # type: ignore[arg-type]
    assert drawn_features(problem) == ["per_token_head_kv"]
    inputs = inputs_of(problem)
    assert inputs.kv_cache_sf is not None
    for cache, scales in zip((inputs.k_cache, inputs.v_cache), inputs.kv_cache_sf, strict=True):
        assert scales.dtype == torch.float32
        assert scales.shape == (*cache.shape[:-1], 1)
        assert len(scales.unique()) > problem.num_kv_heads * 20


def test_int8_says_by_which_scales_it_is_read() -> None:
    inputs = inputs_of(PROBLEM)
    with pytest.raises(ValueError, match=r"k_cache is torch\.int8: kv_format must say"):
        paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata)


def as_vllm(inputs: PagedAttentionInputs) -> torch.Tensor:
    """Attend one request of one head, with V's scales on probabilities, as vLLM does: in float16.

    Sums are of float64, so that nothing else is lost.
    """
    assert inputs.kv_cache_sf is not None
    (page,) = inputs.metadata.paged_kv_indices.tolist()
    q = inputs.q.flatten(0, 1).double()
    (k, v, k_scale, v_scale) = (
        each[page].flatten(0, 1).double()
        for each in (inputs.k_cache, inputs.v_cache, *inputs.kv_cache_sf)
    )
    logits = q @ k.T * k_scale.T * inputs.sm_scale
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    rounded = (weights * v_scale.T).half().double()
    return rounded @ v / weights.sum(dim=-1, keepdim=True)


def test_small_scales_of_values_cost_probabilities_digits() -> None:
    """P times 2^-20 is subnormal in float16: the bound allows for it where P is scaled."""
    inputs = inputs_of(
        replace(
            PROBLEM,
            query_lens=(1,),
            seq_lens=(16,),
            num_kv_heads=1,
            group_size=1,
            page_size=16,
            dtype="float32",
        )
    )
    assert inputs.kv_cache_sf is not None
    small = (inputs.kv_cache_sf[0], torch.full_like(inputs.kv_cache_sf[1], 2.0**-20))
    inputs = replace(inputs, q=inputs.q.half(), kv_cache_sf=small, out_dtype=torch.float32)
    found = as_vllm(inputs).view(1, 1, -1)
    expected, bound = oracle.bounded_attention(inputs, VLLM)
    error = (found - expected.out).abs()
    assert (error <= bound.out).all()
    widened = Arithmetic(probabilities="inputs", dequantized="inputs")
    assert (error > oracle.bounded_attention(inputs, widened).bound.out).any()


def test_scales_on_products_leave_nothing_to_round_in_keys_and_values() -> None:
    inputs = inputs_of(PROBLEM)
    found = oracle.bounded_attention(
        inputs, replace(VLLM, dequantized="inputs", probabilities=None)
    )
    plain = oracle.bounded_attention(inputs, Arithmetic())
    assert torch.equal(found.bound.out, plain.bound.out)
