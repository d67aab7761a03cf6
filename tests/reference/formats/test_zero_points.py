"""Caches with a zero point beside the scale of each token and head, against their definition."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import cast

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    KVCacheFormat,
    materialise,
    oracle,
    paged_attention,
    problem_from_json,
)
from kernelproof.reference.attention.append_bounds import as_compared
from kernelproof.reference.formats.kv_format import checked_cache
from kernelproof.reference.formats.zero_points import dequantize_zero_points, quantize_zero_points
from kernelproof.reference.tensors.inputs import AppendInputs, PagedAttentionInputs
from kernelproof.reference.validation import KVLayout

BITS = {"int8_zero_point": 8, "int4_zero_point": 4}
NAMES = pytest.mark.parametrize("name", BITS)
PROBLEM = AttentionProblem(
    query_lens=(1, 2),
    seq_lens=(9, 6),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=24,
    head_dim_vo=40,
    dtype="float16",
    page_size=4,
    kv_cache="int8_zero_point",
)


def read(codes: list[int], scale: float, zero_point: float, bits: int) -> list[float]:
    """Read a row by lmdeploy's definition, byte by byte."""
    if bits == 4:
        codes = [byte % 16 for byte in codes] + [byte // 16 for byte in codes]
    return [float((code - Fraction(zero_point)) * Fraction(scale)) for code in codes]


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_written_and_read_by_the_definition(bits: int) -> None:
    rows = torch.randn(40, 3, 10, generator=torch.Generator().manual_seed(5)).double()
    rows[1], rows[2] = rows[1].abs() + 3, -rows[2].abs()
    codes, pairs = quantize_zero_points(rows, bits)
    assert (codes.shape, codes.dtype) == ((40, 3, 10 * bits // 8), torch.uint8)
    assert (pairs.shape, pairs.dtype) == ((40, 3, 2), torch.float32)
    numbers = dequantize_zero_points(codes, pairs, bits)
    levels = 2**bits - 1
    for index in range(40):
        for head in range(3):
            row = rows[index, head].tolist()
            scale, zero_point = pairs[index, head].tolist()
            assert scale == pytest.approx((max(row) - min(row)) / levels)
            assert zero_point == pytest.approx(-min(row) / scale, rel=1e-6)
            wanted = [min(math.floor(x / scale + zero_point + 0.5), levels) for x in row]
            packed = codes[index, head].tolist()
            if bits == 4:
                packed = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
            assert packed == wanted
            assert numbers[index, head].tolist() == pytest.approx(
                read(codes[index, head].tolist(), scale, zero_point, bits)
            )
    assert (numbers - rows).abs().max() <= 0.51 * pairs[..., 0].max()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_one_value_have_a_scale_and_a_finite_zero_point(bits: int) -> None:
    rows = torch.tensor([[0.0], [3.0], [-1e4], [1e-5]]).expand(4, 8)
    codes, pairs = quantize_zero_points(rows, bits)
    assert pairs.half().isfinite().all()
    assert pairs[:, 0].gt(0).all()
    read_back = dequantize_zero_points(codes, pairs, bits)
    assert ((read_back - rows).abs() <= rows.abs() * 2.0**-12 + 1e-6).all()
    empty, none = quantize_zero_points(torch.empty(0, 2, 8), bits)
    assert (empty.shape, none.shape) == ((0, 2, bits), (0, 2, 2))


@NAMES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_attention_reads_each_token_by_its_own_pair(
    name: str, dtype: str, kv_layout: KVLayout
) -> None:
    problem = replace(PROBLEM, kv_cache=name, dtype=dtype, kv_layout=kv_layout)
    inputs = cast("PagedAttentionInputs", materialise(problem))
    assert inputs.kv_cache_sf is not None
    assert inputs.k_cache.dtype == torch.uint8
    assert inputs.k_cache.shape[-1] == 24 * BITS[name] // 8
    assert inputs.v_cache.shape[-1] == 40 * BITS[name] // 8
    wide = []
    for cache, pairs in zip((inputs.k_cache, inputs.v_cache), inputs.kv_cache_sf, strict=True):
        assert (pairs.dtype, pairs.shape[-1]) == (getattr(torch, dtype), 2)
        flat = zip(cache.flatten(0, 2).tolist(), pairs.flatten(0, 2).tolist(), strict=True)
        rows = [read(codes, scale, zero, BITS[name]) for codes, (scale, zero) in flat]
        wide.append(torch.tensor(rows, dtype=torch.float64).view(*cache.shape[:-1], -1))
    options = {name: value for name, value in inputs.keywords().items() if "kv_" not in name}
    found = oracle.attention(inputs)
    expected = paged_attention(
        inputs.q, wide[0], wide[1], inputs.metadata, kv_layout=inputs.kv_layout, **options
    )
    torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-12)
    assert drawn_features(problem) == ["zero_point_kv"]
    assert problem_from_json(problem.to_json()) == problem


@NAMES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_kernel_that_rounds_each_step_is_inside_of_its_bound_alone(name: str, dtype: str) -> None:
    """Zero points are taken off and scales multiplied in 16 bits, as lmdeploy does."""
    steps = Arithmetic(probabilities="inputs", row_scales="steps")
    once = Arithmetic(probabilities="inputs", dequantized="inputs")
    beyond = 0
    for seed in range(24):
        # Of one key or two: what each channel loses cancels in the logits of many.
        problem = replace(PROBLEM, kv_cache=name, dtype=dtype, seq_lens=(1, 2), seed=seed)
        inputs = cast("PagedAttentionInputs", materialise(problem))
        cache = checked_cache(
            inputs.k_cache, inputs.v_cache, inputs.kv_layout, inputs.kv_format, inputs.kv_cache_sf
        )
        rounded = []
        for codes, pairs in ((cache.k, cache.k_scales), (cache.v, cache.v_scales)):
            assert pairs is not None
            packed = BITS[name] == 4
            whole = torch.cat([codes & 15, codes >> 4], dim=-1) if packed else codes
            rounded.append((whole.to(pairs.dtype) - pairs[..., 1:]) * pairs[..., :1])
        found = oracle.attention(
            replace(
                inputs, k_cache=rounded[0], v_cache=rounded[1], kv_format=None, kv_cache_sf=None
            )
        )
        expected, bound = oracle.bounded_attention(inputs, steps)
        _, narrow = oracle.bounded_attention(inputs, once)
        off = (found.lse - expected.lse).abs()
        assert ((found.out - expected.out).abs() <= bound.out).all()
        assert (off <= bound.lse).all()
        beyond += int((off > narrow.lse).sum())
    assert beyond


@NAMES
@pytest.mark.parametrize("regime", ["iid", "exact_grid", "outlier_channels"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_appending_is_bounded_by_what_is_read(name: str, regime: str, dtype: str) -> None:
    problem = replace(
        PROBLEM, operation="append_paged_kv", kv_cache=name, regime=regime, dtype=dtype
    )
    inputs = cast("AppendInputs", materialise(problem))
    expected, bound = oracle.bounded_append(inputs)
    assert bound is not None

    def outside(caches: tuple[torch.Tensor, ...]) -> list[int]:
        found = as_compared(caches, inputs.kv_format)
        return [
            int((~((one.double() - other).abs() <= most) & (one.double() != other)).sum())
            for one, other, most in zip(found, expected, bound, strict=True)
        ]

    caches = oracle.append(inputs)
    assert outside(caches) == [0] * 6
    k_cache, v_cache, k_pairs, v_pairs = caches
    assert outside((k_cache, v_cache, v_pairs, k_pairs))[4]
    levels = 2 ** BITS[name] - 1
    assert outside((k_cache ^ levels, v_cache, k_pairs, v_pairs))[4]
    assert outside((k_cache, v_cache, k_pairs * torch.nan, v_pairs))[2]
    old = torch.where(bound[2] > 0, k_pairs, k_pairs + 1)
    assert outside((k_cache, v_cache, old, v_pairs))[2]


@NAMES
def test_any_scale_of_equal_numbers_is_right_that_gives_them_back(name: str) -> None:
    problem = replace(PROBLEM, operation="append_paged_kv", kv_cache=name)
    inputs = cast("AppendInputs", materialise(problem))
    inputs = replace(inputs, k=torch.full_like(inputs.k, 3.0))
    expected, bound = oracle.bounded_append(inputs)
    assert bound is not None
    k_cache, v_cache, k_pairs, v_pairs = oracle.append(inputs)
    new = bound[2][..., :1] > 0
    for pair, fits in (((3.0, -1.0), True), ((-1.5, 2.0), True), ((3.0, 0.0), False)):
        pairs = torch.where(new, torch.tensor(pair).half(), k_pairs)
        caches = torch.where(new, 0, k_cache), v_cache, pairs, v_pairs
        read_back = as_compared(caches, inputs.kv_format)[4]
        assert bool(((read_back - expected[4]).abs() <= bound[4]).all()) == fits


def test_problems_that_no_such_cache_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim_qk is 17; it must be a multiple of 2"):
        replace(PROBLEM, kv_cache="int4_zero_point", head_dim_qk=17)
    with pytest.raises(ValueError, match=r"k_scale is 2\.0; it must be 1, or a power of two with"):
        replace(PROBLEM, operation="append_paged_kv", k_scale=2.0)
    cache = torch.zeros(1, 4, 2, 8, dtype=torch.uint8)
    one, two = torch.zeros(1, 4, 2, 1), torch.zeros(1, 4, 2, 2)
    with pytest.raises(ValueError, match=r"must be float16 or bfloat16 or float32 \[1, 4, 2, 2\]"):
        checked_cache(cache, cache, "NHD", KVCacheFormat("int8_zero_point"), (one, two))
