"""Quantised caches: what the bytes hold is said, and the oracle consumes the codes as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    KVCacheFormat,
    KVLayout,
    attention_error_bound,
    deinterleave_v_scales,
    dequantize_nvfp4,
    materialise,
    oracle,
    paged_attention,
)
from kernelproof.reference.formats.cache_elements import INT4, RECORDS, cache_element
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.problems.cache_names import KV_CACHES
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

# Records of latent attention have problems of their own: test_latent_records.py.
QUANTISED = [name for name in KV_CACHES if name and name not in RECORDS]
PROBLEM = AttentionProblem(
    query_lens=(1, 3, 2),
    seq_lens=(9, 20, 5),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="bfloat16",
    page_size=4,
    page_order=1,
    causal=True,
    k_scale=0.5,
    v_scale=2.0,
)


def of_tokens(name: str) -> bool:
    """Whether each token and head has a scale: bfloat16 does not hold such a cache's numbers."""
    return cache_element(name.partition(" ")[0]).scaled_by_token


def inputs_of(problem: AttentionProblem, unused: float = 11.0) -> PagedAttentionInputs:
    made = materialise(problem, unused=unused)
    assert isinstance(made, PagedAttentionInputs)
    return made


def by_hand(inputs: PagedAttentionInputs) -> PagedAttentionInputs:
    """Decode the whole cache another way: torch's casts, and e2m1 codes one by one."""
    assert inputs.kv_format is not None
    caches = []
    for which, cache in enumerate((inputs.k_cache, inputs.v_cache)):
        if inputs.kv_cache_sf is None:
            caches.append(cache.view(inputs.kv_format.entry.dtype).to(torch.float64))
            continue
        if inputs.kv_format.entry.zero_point:
            pairs = inputs.kv_cache_sf[which].to(torch.float64)
            packed = inputs.kv_format.packed == 2
            codes = torch.cat([cache & 15, cache >> 4], dim=-1) if packed else cache
            caches.append((codes.to(torch.float64) - pairs[..., 1:]) * pairs[..., :1])
            continue
        if inputs.kv_format.entry.scaled_by_token:
            scale = inputs.kv_cache_sf[which].to(torch.float64)
            if inputs.kv_format.element == INT4:
                bits = inputs.kv_cache_sf[which].contiguous().view(torch.int32)
                scale = (bits - bits % 16).view(torch.float32).to(torch.float64)
                codes = torch.stack([cache & 15, cache >> 4], dim=-1).flatten(-2)
                caches.append((codes.to(torch.float64) - bits % 16) * scale)
                continue
            caches.append(cache.to(torch.float64) * scale)
            continue
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        table = torch.cat([table, -table])
        codes = torch.stack([cache & 15, cache >> 4], dim=-1).flatten(-2).long()
        scales = inputs.kv_cache_sf[which].to(torch.float64)
        if which and inputs.kv_format.v_scale_layout == "interleaved":
            scales = deinterleave_v_scales(scales, kv_layout=inputs.kv_layout)
        caches.append(table[codes] * scales.repeat_interleave(16, dim=-1))
    return replace(inputs, k_cache=caches[0], v_cache=caches[1], kv_format=None, kv_cache_sf=None)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_the_codes_are_consumed_as_they_are(name: str, strided: bool, layout: KVLayout) -> None:
    problem = replace(PROBLEM, kv_cache=name, strided_kv=strided, kv_layout=layout)
    inputs = inputs_of(problem)
    found, expected = oracle.attention(inputs), oracle.attention(by_hand(inputs))
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("regime", ATTENTION_REGIMES)
@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_unused_is_never_read(name: str, regime: str) -> None:
    problem = replace(PROBLEM, kv_cache=name, regime=regime, kv_layout="HND")
    clean, poisoned = (oracle.attention(inputs_of(problem, unused)) for unused in (3.0, torch.nan))
    assert torch.equal(clean.out, poisoned.out)
    assert not poisoned.out.isnan().any()


@pytest.mark.parametrize("name", [name for name in QUANTISED if not of_tokens(name)])
def test_the_bound_is_as_tight_as_that_of_the_widened_cache(name: str) -> None:
    inputs = inputs_of(replace(PROBLEM, kv_cache=name))
    arithmetic = Arithmetic(probabilities="inputs")
    bound = oracle.bounded_attention(inputs, arithmetic).bound.out
    hand = by_hand(inputs)
    plain = replace(hand, k_cache=hand.k_cache.bfloat16(), v_cache=hand.v_cache.bfloat16())
    expected = oracle.bounded_attention(plain, arithmetic).bound.out
    assert torch.equal(bound, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", QUANTISED)
def test_the_exact_grid_is_exact_in_every_format(name: str, dtype: str) -> None:
    problem = replace(
        PROBLEM,
        kv_cache=name,
        regime="exact_grid",
        dtype=dtype,
        head_dim_qk=128,
        seq_lens=(9, 200, 5),
    )
    assert problem.exact
    inputs = inputs_of(problem)
    out = oracle.attention(inputs).out.float()  # float64 does not lose exp(-128) times a value
    assert torch.equal(out, out.to(getattr(torch, dtype)).float())
    single = paged_attention(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.metadata,
        kv_layout=inputs.kv_layout,
        **{**inputs.keywords(), "compute_dtype": torch.float32},
    ).out
    assert torch.equal(single, out)


def test_the_exact_grid_is_no_promise_where_the_digits_do_not_fit() -> None:
    quantised = replace(PROBLEM, kv_cache="nvfp4", regime="exact_grid", head_dim_qk=128)
    assert quantised.exact
    assert not replace(quantised, seq_lens=(9, 300, 5)).exact
    assert not replace(quantised, head_dim_qk=16, sm_scale=0.05, k_scale=1.0).exact
    assert replace(quantised, kv_cache="", seq_lens=(9, 300, 5)).exact


class TestRefusals:
    def test_bytes_that_do_not_say_what_they_are(self) -> None:
        inputs = inputs_of(replace(PROBLEM, kv_cache="float8_e4m3fn as uint8"))
        options = {**inputs.keywords(), "kv_format": None}
        with pytest.raises(ValueError, match="vLLM stores FP8 caches as uint8, FlashInfer reads"):
            paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, **options)
        with pytest.raises(ValueError, match="does not say what the bytes hold"):
            attention_error_bound(
                inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, **options
            )

    def test_a_float8_cache_says_what_it_is(self) -> None:
        inputs = inputs_of(replace(PROBLEM, kv_cache="float8_e5m2"))
        plain = replace(inputs, kv_format=None)
        assert torch.equal(oracle.attention(plain).out, oracle.attention(inputs).out)

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"element": "uint8"}, "does not say what the bytes hold"),
            ({"element": "int4"}, "element is 'int4'; it must be one of"),
            ({"element": "bfloat16", "storage": "uint8"}, "bfloat16 may be stored as"),
            ({"element": "nvfp4", "kv_layout": "DNH"}, "kv_layout is 'DNH'"),
            ({"element": "nvfp4", "v_scale_layout": "x"}, "v_scale_layout is 'x'"),
        ],
    )
    def test_a_format_that_no_cache_has(self, fields: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            KVCacheFormat(**fields)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"kv_cache_sf": None}, "kv_cache_sf is missing: an nvfp4 cache has block scales"),
            ({"kv_format": KVCacheFormat("float8_e4m3fn")}, "k_cache is torch.uint8; "),
            ({"kv_format": KVCacheFormat("nvfp4", kv_layout="HND")}, "is in layout HND, but"),
            (
                {"kv_format": KVCacheFormat("float8_e4m3fn", "uint8")},
                "kv_cache_sf is given, but float8_e4m3fn has no block scales",
            ),
        ],
    )
    def test_a_cache_that_is_not_what_it_says(self, changes: dict[str, object], said: str) -> None:
        inputs = replace(inputs_of(replace(PROBLEM, kv_cache="nvfp4")), **changes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=said):
            oracle.attention(inputs)

    def test_scales_of_another_shape(self) -> None:
        inputs = inputs_of(replace(PROBLEM, kv_cache="nvfp4"))
        assert inputs.kv_cache_sf is not None
        k, v = inputs.kv_cache_sf
        wrong = replace(inputs, kv_cache_sf=(k, v[..., :1]))
        with pytest.raises(ValueError, match=r"kv_cache_sf of v is torch.float8_e4m3fn .* must be"):
            oracle.attention(wrong)

    def test_channels_without_a_whole_block(self) -> None:
        inputs = inputs_of(replace(PROBLEM, kv_cache="nvfp4"))
        wrong = replace(inputs, v_cache=inputs.v_cache[..., :12])
        with pytest.raises(ValueError, match="v_cache has 24 channels; nvfp4 needs a multiple"):
            oracle.attention(wrong)

    @pytest.mark.parametrize(
        "fields",
        [
            {"kv_cache": "uint8"},
            {"kv_cache": "nvfp4", "head_dim_vo": 24},
            {"kv_cache": "nvfp4", "operation": "ragged_attention"},
        ],
    )
    def test_a_problem_that_no_call_looks_like(self, fields: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="problem field"):
            replace(PROBLEM, **fields)  # type: ignore[arg-type]


def test_decoding_is_exact_in_sixteen_bits() -> None:
    """Six significant bits: bfloat16 holds them, and float16 from 2^-10 to 2688."""
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)
    for start in range(0, 127 - 31, 31):
        scales = torch.arange(start, start + 32, dtype=torch.uint8).view(32, 1)
        values = dequantize_nvfp4(codes, scales.view(torch.float8_e4m3fn), 1.0)
        assert torch.equal(values, values.bfloat16().double())
        assert torch.equal(values, values.half().double())
