"""Records of latent attention, against vLLM's layouts read byte by byte."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.features import drawn_features
from kernelproof.properties.space.attention_axes import ATTENTION_AXES, attention_example
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    KVCacheFormat,
    materialise,
    oracle,
    paged_attention,
    problem_from_json,
)
from kernelproof.reference.formats.cache_elements import RECORDS, cache_element
from kernelproof.reference.formats.kv_format import checked_cache
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.validation import KVLayout

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PROBLEM = AttentionProblem(
    query_lens=(1, 3),
    seq_lens=(9, 6),
    group_size=3,
    head_dim_qk=576,
    head_dim_vo=512,
    dtype="bfloat16",
    page_size=4,
    values_in_keys=True,
    kv_cache=RECORDS[0],
)
NAMES = pytest.mark.parametrize("name", RECORDS)


def e4m3(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, (byte & 127) >> 3, (byte & 7) / 8
    return sign * (fraction * 2.0**-6 if not exponent else (1 + fraction) * 2.0 ** (exponent - 7))


def e2m1(nibble: int) -> float:
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble & 7]


def by_bytes(name: str, record: list[int]) -> list[float]:
    """Return 576 numbers of one record by the layouts that vLLM and FlashMLA document."""
    if name == "fp8_ds_mla":
        assert len(record) == 656
        scales = struct.unpack("<4f", bytes(record[512:528]))
        compressed = [e4m3(record[i]) * scales[i // 128] for i in range(512)]
        halves = struct.unpack("<64H", bytes(record[528:656]))
        rotary = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        return compressed + rotary
    assert len(record) == 352
    compressed = []
    for channel in range(512):
        byte = record[channel // 2]
        nibble = byte >> 4 if channel % 2 else byte & 15
        block = channel // 16
        compressed.append(e2m1(nibble) * e4m3(record[320 + 8 * (block & 3) + (block >> 2)]))
    return compressed + [e4m3(byte) for byte in record[256:320]]


def inputs_of(problem: AttentionProblem, unused: float = 11.0) -> PagedAttentionInputs:
    made = materialise(problem, unused=unused)
    assert isinstance(made, PagedAttentionInputs)
    return made


def decoded(inputs: PagedAttentionInputs, name: str) -> torch.Tensor:
    flat = inputs.k_cache.reshape(-1, inputs.k_cache.shape[-1]).tolist()
    rows = torch.tensor([by_bytes(name, record) for record in flat], dtype=torch.float64)
    return rows.view(*inputs.k_cache.shape[:-1], 576)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@NAMES
def test_attention_reads_records_by_their_bytes(name: str, kv_layout: KVLayout) -> None:
    problem = replace(PROBLEM, kv_cache=name, kv_layout=kv_layout, k_scale=0.5, v_scale=2.0)
    inputs = inputs_of(problem)
    assert inputs.k_cache.dtype == torch.uint8
    assert inputs.k_cache.data_ptr() == inputs.v_cache.data_ptr()
    assert inputs.k_cache.shape == inputs.v_cache.shape
    assert inputs.head_dim_vo == 512
    keys = decoded(inputs, name)
    options = {key: value for key, value in inputs.keywords().items() if "kv_" not in key}
    expected = paged_attention(
        inputs.q, keys, keys[..., :512], inputs.metadata, kv_layout=inputs.kv_layout, **options
    )
    found = oracle.attention(inputs)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-12)
    out, _ = find_implementation("torch-sdpa-paged")(inputs)
    arithmetic = Arithmetic(probabilities="inputs", dequantized="inputs")
    bound = oracle.bounded_attention(inputs, arithmetic).bound.out
    assert ((out.double() - expected.out).abs() <= bound).all()


def test_what_is_read_back_is_near() -> None:
    """Half an ulp of e4m3 and bfloat16; half of e2m1's largest step, a sixth, and e4m3's scale."""
    rows = torch.randn(20, 1, 576, generator=torch.Generator().manual_seed(2)).double()
    rows[0] = 0.0
    for name, of_own, of_largest, rotary in (
        ("fp8_ds_mla", 2.0**-4, 2.0**-10 / 448, 2.0**-8),
        ("nvfp4_ds_mla", 0.0, (1 + 2.0**-3) / 6, 2.0**-4),
    ):
        entry = cache_element(name)
        assert entry.record is not None
        codes = entry.encode(rows, 1.0).codes
        assert codes.shape == (20, 1, entry.record.size)
        lost = (entry.decode(entry.encode(rows, 1.0)) - rows).abs()
        tiles = rows[..., :512].unflatten(-1, (-1, entry.record.block)).abs().amax(dim=-1)
        largest = tiles.repeat_interleave(entry.record.block, dim=-1)
        room = of_own * rows[..., :512].abs() + of_largest * largest + 2.0**-40
        assert (lost[..., :512] <= room).all()
        assert (lost[..., 512:] <= rotary * rows[..., 512:].abs() + 2.0**-10).all()
        numbers = entry.decode(entry.encode(rows, 1.0, exactly=True))
        assert torch.equal(entry.decode(entry.encode(numbers, 1.0, exactly=True)), numbers)


@NAMES
def test_no_scale_of_fp4_lets_a_block_saturate(name: str) -> None:
    rows = torch.zeros(1, 1, 576, dtype=torch.float64)
    rows[..., :16] = 6 * 2.0**-9 * 1.4  # between e4m3's two smallest scales
    entry = cache_element(name)
    read = entry.decode(entry.encode(rows, 1.0))[0, 0, :16]
    assert (read >= rows[0, 0, :16] * 0.75).all()


@NAMES
def test_the_exact_grid_is_exact(name: str) -> None:
    problem = replace(PROBLEM, kv_cache=name, regime="exact_grid", seq_lens=(9, 200))
    assert problem.exact
    out = oracle.attention(inputs_of(problem)).out.float()
    assert torch.equal(out, out.bfloat16().float())
    assert out.any()


@NAMES
def test_what_is_unused_is_nan_and_never_read(name: str) -> None:
    problem = replace(PROBLEM, kv_cache=name, strided_kv=True)
    clean, poisoned = (inputs_of(problem, unused) for unused in (3.0, torch.nan))
    assert torch.equal(oracle.attention(clean).out, oracle.attention(poisoned).out)
    assert poisoned.kv_format is not None
    whole = poisoned.kv_format.decode(poisoned.k_cache, None)
    assert whole.isnan().all(dim=-1).any()


@NAMES
def test_problems_say_it(name: str) -> None:
    problem = replace(PROBLEM, kv_cache=name)
    assert drawn_features(problem) == ["mla", name]
    assert problem_from_json(problem.to_json()) == problem
    assert find_implementation("torch-sdpa-paged").refusal(problem, Target()) is None
    assert find_implementation("torch-flex-attention-paged").refusal(problem, Target()) is not None
    axes = {axis: values[0] for axis, values in ATTENTION_AXES.items()}
    assert attention_example("paged_attention", {**axes, "caches": (name, "")}).kv_cache == name
    with pytest.raises(ValueError, match="head_dim_qk is 512"):
        replace(problem, head_dim_qk=512, head_dim_vo=256)
    with pytest.raises(ValueError, match="must be one of values_in_keys and head dims 576 and 512"):
        replace(problem, values_in_keys=False)
    with pytest.raises(ValueError, match="kv_cache"):
        replace(problem, operation="append_paged_kv", values_in_keys=False)


@NAMES
def test_rows_of_another_size_are_refused(name: str) -> None:
    kv_format = KVCacheFormat(name)
    for shape in ((2, 4, 1, 576), (2, 4, 2, 656), (2, 4, 2, 352)):
        cache = torch.zeros(shape, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"k_cache has .*{name} has records of"):
            checked_cache(cache, cache, "NHD", kv_format, None)
