"""The int4 cache with a scale and a zero point for each token and head, against its definition."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    KVCacheFormat,
    append_paged_scaled,
    materialise,
    oracle,
    paged_attention,
    problem_from_json,
)
from kernelproof.reference.formats.int4 import dequantize_int4, quantize_int4
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.validation import KVLayout

NAME = "int4_per_token_head"
PROBLEM = AttentionProblem(
    query_lens=(1, 2),
    seq_lens=(9, 6),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=24,
    head_dim_vo=40,
    dtype="float16",
    page_size=4,
    kv_cache=NAME,
)


def read(codes: list[int], scale: float) -> list[Fraction]:
    """Read a row by vLLM's definition: byte by byte, with the scale's bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", scale))
    zero_point = bits & 15
    (step,) = struct.unpack("<f", struct.pack("<I", bits - zero_point))
    # The even channel is the low nibble.
    nibbles = [nibble for byte in codes for nibble in (byte % 16, byte // 16)]
    return [(nibble - zero_point) * Fraction(step) for nibble in nibbles]


def written(row: list[float]) -> tuple[list[int], int, float]:
    """Quantise a row as vLLM's kernel: codes, zero point, and the scale before it is packed."""
    scale = max((max(row) - min(row)) / 15, 1e-6)
    zero_point = min(max(math.floor(-min(row) / scale + 0.5), 0), 15)
    codes = [min(max(math.floor(x / scale + zero_point + 0.5), 0), 15) for x in row]
    return codes, zero_point, scale


def test_rows_are_written_and_read_by_the_definition() -> None:
    rows = torch.randn(40, 3, 10, generator=torch.Generator().manual_seed(5)).double()
    rows[0], rows[1], rows[2] = 0.0, rows[1].abs(), -rows[2].abs()
    codes, scales = quantize_int4(rows)
    assert codes.shape == (40, 3, 5)
    assert codes.dtype == torch.uint8
    assert (scales.shape, scales.dtype) == ((40, 3, 1), torch.float32)
    numbers = dequantize_int4(codes, scales)
    for index in range(40):
        for head in range(3):
            wanted, zero_point, scale = written(rows[index, head].tolist())
            bytes_of_row = codes[index, head].tolist()
            found = [nibble for byte in bytes_of_row for nibble in (byte & 15, byte >> 4)]
            assert found == wanted
            packed = scales[index, head].item()
            assert int(scales[index, head].view(torch.int32)) & 15 == zero_point
            assert packed == pytest.approx(scale, rel=2.0**-19)
            exact = [float(each) for each in read(bytes_of_row, packed)]
            assert numbers[index, head].tolist() == exact


def test_an_empty_batch_of_rows_is_quantised() -> None:
    codes, scales = quantize_int4(torch.empty(0, 2, 8))
    assert (codes.shape, scales.shape) == ((0, 2, 4), (0, 2, 1))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_attention_reads_each_token_by_its_own_scale_and_zero_point(kv_layout: KVLayout) -> None:
    problem = replace(PROBLEM, kv_layout=kv_layout, k_scale=0.5, v_scale=2.0, dtype="bfloat16")
    inputs = materialise(problem)
    assert isinstance(inputs, PagedAttentionInputs)
    assert inputs.kv_cache_sf is not None
    assert inputs.k_cache.dtype == torch.uint8
    assert inputs.k_cache.shape[-1] == 12
    assert inputs.v_cache.shape[-1] == inputs.head_dim_vo // 2 == 20
    wide = []
    for cache, scales in zip((inputs.k_cache, inputs.v_cache), inputs.kv_cache_sf, strict=True):
        flat, of_flat = cache.flatten(0, 2).tolist(), scales.flatten(0, 2)[:, 0].tolist()
        rows = [[float(x) for x in read(*each)] for each in zip(flat, of_flat, strict=True)]
        wide.append(torch.tensor(rows, dtype=torch.float64).view(*cache.shape[:-1], -1))
    options = {name: value for name, value in inputs.keywords().items() if "kv_" not in name}
    found = oracle.attention(inputs)
    expected = paged_attention(
        inputs.q, wide[0], wide[1], inputs.metadata, kv_layout=inputs.kv_layout, **options
    )
    torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-12)
    assert drawn_features(problem) == ["int4_kv"]
    assert problem_from_json(problem.to_json()) == problem
    implementation = find_implementation("torch-sdpa-paged")
    assert implementation.refusal(problem, Target()) is None
    out, _ = implementation(inputs)
    arithmetic = Arithmetic(probabilities="inputs", dequantized="inputs")
    bound = oracle.bounded_attention(inputs, arithmetic).bound.out
    assert ((out.double() - expected.out).abs() <= bound).all()


@pytest.mark.parametrize("values_in_codes", [1, 256])
def test_the_exact_grid_stays_exact(values_in_codes: int) -> None:
    problem = replace(PROBLEM, regime="exact_grid", seq_lens=(values_in_codes, 6))
    assert problem.exact
    out = oracle.attention(materialise(problem)).out  # type: ignore[arg-type]
    assert torch.equal(out.float(), out.half().float())
    assert out.any()


def test_appending_writes_codes_scales_and_zero_points() -> None:
    inputs = materialise(replace(PROBLEM, query_lens=(9, 6)))
    assert isinstance(inputs, PagedAttentionInputs)
    assert inputs.kv_cache_sf is not None
    k, v = torch.randn(15, 2, 24), torch.randn(15, 2, 40)
    empty = [torch.zeros_like(each) for each in (inputs.k_cache, inputs.v_cache)]
    scales = [torch.zeros_like(each) for each in inputs.kv_cache_sf]
    codes, made = append_paged_scaled(
        k,
        v,
        (empty[0], empty[1]),
        (scales[0], scales[1]),
        inputs.metadata,
        kv_format=KVCacheFormat(NAME),
    )
    page, slot = int(inputs.metadata.paged_kv_indices[1]), 2  # of token 6
    wanted, zero_point, _ = written(k[6, 1].tolist())
    found = codes[0][page, slot, 1].tolist()
    assert [nibble for byte in found for nibble in (byte & 15, byte >> 4)] == wanted
    assert int(made[0][page, slot, 1].view(torch.int32)) & 15 == zero_point


def test_problems_that_no_such_cache_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim_qk is 17; it must be a multiple of 2"):
        replace(PROBLEM, head_dim_qk=17)
    with pytest.raises(ValueError, match=r"k_scale is 2\.0; it must be 1,"):
        replace(PROBLEM, operation="append_paged_kv", k_scale=2.0)
