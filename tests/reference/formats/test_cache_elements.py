"""The table of cache elements: complete, and each entry reads back what it wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import UnsupportedError
from kernelproof.impl.features import FEATURES, drawn_features
from kernelproof.impl.gating import Feature
from kernelproof.impl.gating.of_problem import feature_of
from kernelproof.impl.triton.attention_call import Call
from kernelproof.properties.seeded.decoding import widened
from kernelproof.reference import AttentionProblem, KVCacheFormat, materialise, oracle
from kernelproof.reference.formats.cache_elements import (
    CACHE_ELEMENTS,
    FP8,
    PLAIN,
    RECORDS,
    SCALE_LAYOUTS,
    CacheElement,
    cache_element,
)
from kernelproof.reference.formats.kv_format import checked_cache
from kernelproof.reference.problems.base import DTYPES
from kernelproof.reference.problems.cache_names import KV_CACHES, layout_of
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

QUANTISED = [name for name in KV_CACHES if name]
PROBLEM = {
    "query_lens": (1, 3), "seq_lens": (9, 20), "num_kv_heads": 2, "head_dim_qk": 64,
    "head_dim_vo": 64, "dtype": "bfloat16", "page_size": 4,
}  # fmt: skip
LATENT = {"head_dim_qk": 576, "head_dim_vo": 512, "num_kv_heads": 1, "values_in_keys": True}
# What rounding to nearest loses at most: a share of the number, one of the largest number that it
# shares a scale with (half a step of e2m1 is a sixth of the largest; a scale that was rounded down
# lets that one saturate, by a sixteenth), and half of the smallest number.
LOST = {
    "float64": (0.0, 0.0, 0.0),
    "float32": (2.0**-24, 0.0, 2.0**-150),
    "float16": (2.0**-11, 0.0, 2.0**-25),
    "bfloat16": (2.0**-8, 0.0, 2.0**-134),
    "float8_e4m3fn": (2.0**-4, 0.0, 2.0**-10),
    "float8_e5m2": (2.0**-3, 0.0, 2.0**-17),
    "nvfp4": (0.0, (1 + 2.0**-4) / 6, 2.0**-10),
    # The scale is the largest number of the row over 127 or 448, and rounded to float32.
    "int8_per_token_head": (0.0, (1 + 2.0**-10) / 254, 0.0),
    "fp8_per_token_head": (2.0**-4, 2.0**-10 / 448, 0.0),
    # Of a range that is at most twice the largest number: half a step of fifteen, and as much again
    # at the ends, where the rounded zero point moves the codes.
    "int4_per_token_head": (0.0, 2 * (1 + 2.0**-10) / 15, 0.0),
    # Half a step of a range that is at most twice the largest number; the zero point is exact.
    "int8_zero_point": (0.0, (1 + 2.0**-10) / 255, 0.0),
    "int4_zero_point": (0.0, (1 + 2.0**-10) / 15, 0.0),
}
ROWS = [entry for entry in CACHE_ELEMENTS.values() if not entry.record]
"""Elements whose rows are codes, of any number of channels."""
ENTRIES = pytest.mark.parametrize("entry", ROWS, ids=lambda entry: entry.name)


def problem_of(name: str) -> AttentionProblem:
    """Return a problem that may have such a cache."""
    fields = {**PROBLEM, **(LATENT if name in RECORDS else {})}
    return AttentionProblem(**fields, kv_cache=name)  # type: ignore[arg-type]


def rows_of(scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return scale * torch.randn(50, 2, 64, generator=generator, dtype=torch.float64)


def test_every_cache_of_problems_has_an_entry() -> None:
    assert set(DTYPES) <= set(PLAIN) <= set(CACHE_ELEMENTS)
    problems = {name: problem_of(name) for name in KV_CACHES}
    named = {problem.kv_element for problem in problems.values() if problem.kv_cache}
    assert named == set(CACHE_ELEMENTS) - set(PLAIN)
    assert {layout_of(name) for name in KV_CACHES} == set(SCALE_LAYOUTS)
    for problem in problems.values():
        assert problem.cache_entry.name == (problem.kv_element or "bfloat16")
        assert set(drawn_features(problem)) <= set(FEATURES)
        assert bool(drawn_features(problem)) == bool(problem.kv_cache)


@pytest.mark.parametrize("name", QUANTISED)
def test_the_support_rules_know_every_cache(name: str) -> None:
    problem = problem_of(name)
    assert feature_of(problem, "fa2").kv_dtype == Feature(kv_dtype=problem.kv_element).kv_dtype


@pytest.mark.parametrize("name", QUANTISED)
def test_honest_implementations_read_every_cache(name: str) -> None:
    inputs = materialise(problem_of(name))
    assert isinstance(inputs, PagedAttentionInputs)
    cache = checked_cache(
        inputs.k_cache, inputs.v_cache, inputs.kv_layout, inputs.kv_format, inputs.kv_cache_sf
    )
    read = widened(inputs)
    # No page is shared, and what is unused is the same number everywhere.
    assert torch.equal(cache.kv_format.decode(cache.k, cache.k_scales).float(), read.k_cache)
    values = cache.kv_format.decode(cache.v, cache.v_scales)[..., : cache.head_dim_vo]
    assert torch.equal(values.float(), read.v_cache)


@ENTRIES
def test_the_fields_agree_with_one_another(entry: CacheElement) -> None:
    quantised = bool(entry.feature)
    assert quantised == (entry.dtype.itemsize == 1)
    assert quantised == bool(entry.variants) == bool(entry.extremes)
    assert entry.scaled == bool(entry.scale_dtype)
    # The bytes of scales that have the model's dtype depend on it.
    assert bool(entry.extreme_scales) == (entry.scaled and not entry.zero_point)
    assert entry.scaled or not entry.block
    assert entry.block % entry.packed == 0
    for storage in ("", "uint8") if quantised else ("",):
        assert KVCacheFormat(entry.name, storage).entry is entry
        assert KVCacheFormat(entry.name, storage).quantised == quantised
    codes, scales = entry.encode(rows_of(), 1.0)
    assert codes.dtype == entry.dtype
    assert codes.shape[-1] * entry.packed == 64
    assert (scales is None) == (not entry.scaled)
    if scales is not None:
        assert scales.dtype == entry.scale_dtype
        assert scales.shape[-1] == entry.scales_of(64)


@ENTRIES
@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
def test_what_is_read_back_is_the_nearest(entry: CacheElement, scale: float) -> None:
    rows = rows_of(scale)
    read = scale * entry.decode(entry.encode(rows, scale)).double()
    of_own, of_largest, smallest = LOST[entry.name]
    together = entry.block or rows.shape[-1]
    largest = rows.abs().unflatten(-1, (-1, together)).amax(dim=-1)
    largest = largest.repeat_interleave(together, dim=-1)
    room = of_own * rows.abs() + of_largest * largest + scale * smallest
    if entry.name != "float64":
        assert ((read - rows).abs() <= room).all()
        assert ((read - rows).abs() > room / 8).any()  # or the bounds would say nothing
    elif scale == 1:
        assert torch.equal(read, rows)


@ENTRIES
@pytest.mark.parametrize("exactly", [False, True])
def test_numbers_of_the_format_stay_what_they_are(entry: CacheElement, exactly: bool) -> None:
    numbers = entry.decode(entry.encode(rows_of(), 1.0, exactly=exactly)).double()
    again = entry.decode(entry.encode(numbers, 1.0, exactly=exactly)).double()
    assert torch.equal(again, numbers)


@ENTRIES
def test_the_exact_grid_keeps_its_digits(entry: CacheElement) -> None:
    digits = (torch.arange(2 * 64).view(1, 2, 64) * 7 % 4).float()
    read = entry.decode(entry.encode(digits, 1.0, exactly=True))
    assert torch.equal(read.double(), digits.double())


@pytest.mark.parametrize("name", [entry.name for entry in ROWS if entry.extremes])
def test_the_extreme_codes_are_zeros_the_smallest_and_the_largest(name: str) -> None:
    entry = cache_element(name)
    every = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 16)

    def numbers(codes: torch.Tensor) -> torch.Tensor:
        one = torch.ones(len(codes), entry.scales_of(16 * entry.packed))
        one[:, 1:] = 0 if entry.zero_point else 1
        scales = one.to(entry.scale_dtype) if entry.scale_dtype else None
        return (
            KVCacheFormat(name, "uint8")
            .decode(codes.view(entry.dtype), scales)
            .double()
            .nan_to_num(0.0, 0.0, 0.0)
        )

    finite = numbers(every).unique()
    zeros, smallest, largest = (
        numbers(torch.tensor(pattern, dtype=torch.uint8).repeat(1, 8)) for pattern in entry.extremes
    )
    assert not zeros.any()
    assert finite[finite > 0].min() in smallest
    assert largest.max() == finite.max()
    assert largest.min() == finite.min()
    scales = [
        torch.tensor(pattern, dtype=torch.uint8).view(entry.scale_dtype).double().item()
        for pattern in entry.extreme_scales
        if entry.scale_dtype is not None
    ]
    assert scales in ([], [0.0, 2.0**-9, 448.0], [0.0, 2.0**-20, 32.0]) or int4_scales(scales)


def int4_scales(scales: list[float]) -> bool:
    """Whether scales are 0, 2^-20 and 32 with zero points of 15, 0 and 8 in their lowest bits."""
    return scales == [15 * 2.0**-149, 2.0**-20, 32.0 + 8 * 2.0**-18]


def test_an_unknown_element_is_an_error_that_names_the_table() -> None:
    table = r"\(CACHE_ELEMENTS in kernelproof/reference/formats/cache_elements.py\)"
    with pytest.raises(ValueError, match=f"element is 'int4'; it must be one of .*nvfp4.* {table}"):
        cache_element("int4")
    with pytest.raises(ValueError, match=f"element is 'int4'.*{table}"):
        KVCacheFormat("int4")
    cache = torch.zeros(1, 1, 1, 16, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"element is 'bool'.*{table}"):
        checked_cache(cache, cache, "NHD", None, None)


@pytest.fixture
def made_up_inputs(monkeypatch: pytest.MonkeyPatch) -> PagedAttentionInputs:
    """A call on a cache of an element that only the table has."""
    fp8 = CACHE_ELEMENTS[FP8[0]]
    made_up = CacheElement("int5", torch.int8, fp8.encoder, "int8_kv")
    monkeypatch.setitem(CACHE_ELEMENTS, "int5", made_up)
    inputs = materialise(AttentionProblem(**PROBLEM, kv_cache=FP8[0]))  # type: ignore[arg-type]
    assert isinstance(inputs, PagedAttentionInputs)
    k, v = (cache.view(torch.int8) // 32 for cache in (inputs.k_cache, inputs.v_cache))
    return replace(inputs, k_cache=k, v_cache=v, kv_format=KVCacheFormat("int5"))


def test_the_oracle_reads_what_the_table_has(made_up_inputs: PagedAttentionInputs) -> None:
    plain = replace(
        made_up_inputs,
        k_cache=made_up_inputs.k_cache.double(),
        v_cache=made_up_inputs.v_cache.double(),
        kv_format=None,
    )
    found, expected = oracle.attention(made_up_inputs), oracle.attention(plain)
    assert torch.equal(found.out, expected.out)
    as_bytes = replace(
        made_up_inputs,
        k_cache=made_up_inputs.k_cache.view(torch.uint8),
        v_cache=made_up_inputs.v_cache.view(torch.uint8),
        kv_format=KVCacheFormat("int5", "uint8"),
    )
    assert torch.equal(oracle.attention(as_bytes).out, expected.out)


def test_no_implementation_guesses_how_an_element_is_read(
    made_up_inputs: PagedAttentionInputs,
) -> None:
    with pytest.raises(ValueError, match="'int5', of CACHE_ELEMENTS in"):
        widened(made_up_inputs)
    with pytest.raises(UnsupportedError, match="not int5"):
        Call(made_up_inputs)
