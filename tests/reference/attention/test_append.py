"""Appending to a paged cache: new tokens in their slots, all other slots as they were."""

from __future__ import annotations

import math

import pytest
import torch

from kernelproof.reference import (
    BatchMetadata,
    KVLayout,
    append_paged_kv,
    build_metadata,
    paged_attention,
)

NEW, LENGTHS = [1, 3, 0, 4, 7, 2], [5, 3, 6, 9, 7, 2]
TABLE = [[3, 8, -1], [0, -7, 99], [11, 5, 10**6], [9, 2, 6], [10, 1, 2**31 - 1], [4, -1, -1]]
PAGES = 12  # page 7 is nobody's

layouts = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as integers: NaN equals itself only there."""
    return tensor.contiguous().view(torch.uint8)


def make_caches(
    kv_layout: KVLayout, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make caches of distinct values among NaN, infinities and negative zeros."""
    generator = torch.Generator().manual_seed(3)
    caches = []
    for dim in (6, 5):
        shape = (PAGES, 4, 2, dim) if kv_layout == "NHD" else (PAGES, 2, 4, dim)
        cache = torch.randn(shape, generator=generator)
        kind = torch.randint(0, 8, shape, generator=generator)
        cache[kind == 0] = math.nan
        cache[kind == 1] = -math.inf
        cache[kind == 2] = -0.0
        caches.append(cache.to(dtype))
    return caches[0], caches[1]


def make_new(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn((sum(NEW), 2, dim), generator=generator).to(dtype) for dim in (6, 5))
    k[0, 0, 0], v[1, 1, 1] = math.nan, -0.0
    return k, v


def metadata() -> BatchMetadata:
    return build_metadata(NEW, LENGTHS, TABLE, 4)


def define(new: torch.Tensor, cache: torch.Tensor, kv_layout: KVLayout) -> torch.Tensor:
    """Write token by token and head by head."""
    expected, token = cache.clone(), 0
    for count, length, row in zip(NEW, LENGTHS, TABLE, strict=True):
        for position in range(length - count, length):
            page, slot = row[position // 4], position % 4
            for head in range(2):
                at = (page, slot, head) if kv_layout == "NHD" else (page, head, slot)
                expected[at] = new[token, head].to(cache.dtype)
            token += 1
    return expected


@layouts
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_definition(kv_layout: KVLayout, *, in_place: bool, dtype: torch.dtype) -> None:
    caches, new = make_caches(kv_layout, dtype), make_new()
    before = [tensor.clone() for tensor in (*caches, *new)]
    found = append_paged_kv(*new, *caches, metadata(), kv_layout=kv_layout, in_place=in_place)
    for fresh, old, result in zip(new, before, found, strict=False):
        assert torch.equal(bits(result), bits(define(fresh, old, kv_layout)))
        assert result.dtype == dtype
    for fresh, old in zip(new, before[2:], strict=True):
        assert torch.equal(bits(fresh), bits(old))
    for cache, old, result in zip(caches, before, found, strict=False):
        if in_place:
            assert result is cache
        else:
            assert torch.equal(bits(cache), bits(old))
            assert result.data_ptr() != cache.data_ptr()


@layouts
def test_it_changes_the_new_slots_alone(kv_layout: KVLayout) -> None:
    caches = make_caches(kv_layout)
    found = append_paged_kv(*make_new(), *caches, metadata(), kv_layout=kv_layout)
    mine = torch.zeros((PAGES, 4), dtype=torch.bool)
    for count, length, row in zip(NEW, LENGTHS, TABLE, strict=True):
        for position in range(length - count, length):
            mine[row[position // 4], position % 4] = True
    for cache, result in zip(caches, found, strict=True):
        slots = [c if kv_layout == "NHD" else c.transpose(1, 2) for c in (cache, result)]
        old, new = (each[~mine].contiguous().view(torch.int16) for each in slots)
        assert torch.equal(old, new)


@layouts
def test_strided_caches_are_written_where_they_lie(kv_layout: KVLayout) -> None:
    k_cache, v_cache = make_caches(kv_layout)
    wide_k = torch.full((PAGES, 2, *k_cache.shape[1:]), 7.0, dtype=k_cache.dtype)
    wide_v = torch.full((*v_cache.shape[:-1], 9), 7.0, dtype=v_cache.dtype)
    wide_k[:, 1], wide_v[..., 2:7] = k_cache, v_cache
    k, v = make_new()
    packed = torch.zeros((sum(NEW), 2, 20), dtype=k.dtype)
    packed[..., 1:7], packed[..., 9:14] = k, v
    append_paged_kv(
        packed[..., 1:7],
        packed[..., 9:14],
        wide_k[:, 1],
        wide_v[..., 2:7],
        metadata(),
        kv_layout=kv_layout,
        in_place=True,
    )
    assert torch.equal(bits(wide_k[:, 1]), bits(define(k, k_cache, kv_layout)))
    assert torch.equal(bits(wide_v[..., 2:7]), bits(define(v, v_cache, kv_layout)))
    assert (wide_k[:, 0] == 7).all()
    assert (wide_v[..., :2] == 7).all()
    assert (wide_v[..., 7:] == 7).all()


def test_token_by_token_equals_all_at_once() -> None:
    k, v = make_new()
    caches = make_caches("NHD")
    at_once = append_paged_kv(k, v, *caches, metadata())
    starts = metadata().qo_indptr.tolist()
    for step in range(max(NEW)):
        chosen = [i for i, count in enumerate(NEW) if count > step]
        rows = [starts[i] + step for i in chosen]
        lengths = [LENGTHS[i] - NEW[i] + step + 1 for i in chosen]
        one = build_metadata([1] * len(chosen), lengths, [TABLE[i] for i in chosen], 4)
        append_paged_kv(k[rows], v[rows], *caches, one, in_place=True)
    for cache, expected in zip(caches, at_once, strict=True):
        assert torch.equal(bits(cache), bits(expected))


def test_nothing_to_append() -> None:
    caches = make_caches("NHD")
    k, v = (torch.zeros((0, 2, dim), dtype=torch.bfloat16) for dim in (6, 5))
    for lengths in ([], [0, 5]):
        batch = build_metadata([0] * len(lengths), lengths, [[0, 1]] * len(lengths), 4)
        found = append_paged_kv(k, v, *caches, batch)
        for cache, result in zip(caches, found, strict=True):
            assert torch.equal(bits(cache), bits(result))


def test_a_refused_append_writes_nothing() -> None:
    caches = make_caches("NHD")
    before = [cache.clone() for cache in caches]
    k, v = make_new()
    with pytest.raises(ValueError, match=r"^v has 1 kv_heads"):
        append_paged_kv(k, v[:, :1], *caches, metadata(), in_place=True)
    outside = build_metadata(NEW, LENGTHS, [*TABLE[:-1], [PAGES, -1, -1]], 4)
    with pytest.raises(ValueError, match=r"paged_kv_indices\[10\] is page 12"):
        append_paged_kv(k, v, *caches, outside, in_place=True)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(bits(cache), bits(old))


@layouts
def test_what_was_appended_is_what_attention_reads(kv_layout: KVLayout) -> None:
    k, v = (tensor.nan_to_num() for tensor in make_new(torch.float32))
    k_cache, v_cache = (torch.zeros_like(c) for c in make_caches(kv_layout, torch.float32))
    caches = append_paged_kv(k, v, k_cache, v_cache, metadata(), kv_layout=kv_layout)
    q = torch.ones((sum(NEW), 2, 6))
    found = paged_attention(q, *caches, metadata(), kv_layout=kv_layout, window_left=0)
    assert torch.equal(found.out, v.double())  # each new token sees its own key and no other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@layouts
def test_cuda_agrees(kv_layout: KVLayout) -> None:
    caches, new = make_caches(kv_layout), make_new()
    expected = append_paged_kv(*new, *caches, metadata(), kv_layout=kv_layout)
    k, v, k_cache, v_cache = (tensor.cuda() for tensor in (*new, *caches))
    found = append_paged_kv(k, v, k_cache, v_cache, metadata().to("cuda"), kv_layout=kv_layout)
    for result, wanted in zip(found, expected, strict=True):
        assert torch.equal(bits(result.cpu()), bits(wanted))


@pytest.mark.parametrize(
    ("k_dtype", "v_dtype"),
    [
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_each_cache_is_written_in_its_own_dtype(k_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    k, v = (new.nan_to_num(0.0) for new in make_new())
    k_cache, v_cache = make_caches("NHD", k_dtype)[0], make_caches("NHD", v_dtype)[1]
    got = append_paged_kv(k, v, k_cache, v_cache, metadata())
    for cache, new, stored in zip(got, (k, v), (k_cache, v_cache), strict=True):
        assert torch.equal(bits(cache), bits(define(new, stored, "NHD")))
