"""Appending to FP8 and nvfp4 caches: rounded once, in the cache's format."""

from __future__ import annotations

import pytest
import torch

from kernelproof.reference import (
    KVCacheFormat,
    KVLayout,
    append_error_bound,
    append_paged_kv,
    append_paged_nvfp4,
    append_paged_scaled,
    build_metadata,
    dequantize_fp8,
    paged_attention,
    quantize_fp8,
    quantize_nvfp4,
)
from kernelproof.reference.formats.cache_elements import LEAST_TOKEN_SCALE
from kernelproof.reference.formats.scale_layouts import deinterleave_v_scales, interleave_v_scales

NEW, LENGTHS, TABLE = [2, 5], [6, 5], [[4, 1], [0, 3]]
METADATA = build_metadata(NEW, LENGTHS, TABLE, 4)
SLOTS = [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (0, 3), (3, 0)]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

layouts = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])


def new_rows(dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(sum(NEW), 2, dim, generator=generator).bfloat16() for _ in range(2))
    k[0, 0, :4] = torch.tensor([1024.0, -1e6, 0.0, -0.0])
    return k, v


def pages(kv_layout: KVLayout, channels: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (5, 4, 2, channels) if kv_layout == "NHD" else (5, 2, 4, channels)
    return torch.full(shape, 0x2B, dtype=torch.uint8).view(dtype)


def by_token(cache: torch.Tensor, kv_layout: KVLayout) -> torch.Tensor:
    """Read the new tokens' rows, as bytes."""
    rows = cache.view(torch.uint8)
    rows = rows if kv_layout == "NHD" else rows.transpose(1, 2)
    return torch.stack([rows[page, slot] for page, slot in SLOTS])


@layouts
@pytest.mark.parametrize("storage", ["", "uint8"])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("in_place", [False, True])
def test_fp8_is_scaled_and_rounded_once(
    dtype: torch.dtype, storage: str, kv_layout: KVLayout, in_place: bool
) -> None:
    k, v = new_rows()
    caches = [pages(kv_layout, 64, torch.uint8 if storage else dtype) for _ in range(2)]
    kv_format = KVCacheFormat(str(dtype).removeprefix("torch."), storage, kv_layout)
    heads = torch.tensor([0.5, 4.0])
    found = append_paged_kv(
        k,
        v,
        caches[0],
        caches[1],
        METADATA,
        kv_layout=kv_layout,
        in_place=in_place,
        k_scale=heads,
        v_scale=2.0,
        kv_format=kv_format,
    )
    assert (found[0] is caches[0]) == in_place
    expected = quantize_fp8(k, dtype, heads[:, None]), quantize_fp8(v, dtype, 2.0)
    for cache, codes in zip(found, expected, strict=True):
        assert cache.dtype == caches[0].dtype
        assert torch.equal(by_token(cache, kv_layout), codes.view(torch.uint8))
        untouched = cache.view(torch.uint8).eq(0x2B).all(dim=-1).sum()
        assert untouched == 5 * 4 * 2 - 2 * len(SLOTS)
    largest = dequantize_fp8(expected[0])[0, 0, :2].tolist()
    assert largest == [min(2048.0, torch.finfo(dtype).max), -torch.finfo(dtype).max]


def test_a_plain_cache_is_divided_by_the_scale_too() -> None:
    """Whatever the cache, attention multiplies by what appending divided by."""
    k, v = new_rows()
    caches = [torch.zeros(5, 4, 2, 64, dtype=torch.float32) for _ in range(2)]
    plain = append_paged_kv(k, v, caches[0], caches[1], METADATA)
    scaled = append_paged_kv(k, v, caches[0], caches[1], METADATA, k_scale=0.5, v_scale=2.0)
    q = torch.randn(sum(NEW), 4, 64)
    expected = paged_attention(q, *plain, METADATA)
    found = paged_attention(q, *scaled, METADATA, k_scale=0.5, v_scale=2.0)
    assert torch.equal(found.out, expected.out)


@layouts
@pytest.mark.parametrize("scale_layout", ["linear", "interleaved"])
@pytest.mark.parametrize("in_place", [False, True])
def test_nvfp4_writes_codes_and_block_scales(
    scale_layout: str, kv_layout: KVLayout, in_place: bool
) -> None:
    k, v = new_rows()
    kv_format = KVCacheFormat("nvfp4", kv_layout=kv_layout, v_scale_layout=scale_layout)
    caches = pages(kv_layout, 32, torch.uint8), pages(kv_layout, 32, torch.uint8)
    e4m3 = torch.float8_e4m3fn
    scales = pages(kv_layout, 4, e4m3), pages(kv_layout, 4, e4m3)
    if scale_layout == "interleaved":
        scales = scales[0], interleave_v_scales(scales[1], kv_layout=kv_layout)
    codes, found = append_paged_nvfp4(
        k,
        v,
        caches,
        scales,
        METADATA,
        kv_format=kv_format,
        k_scale=0.01,
        v_scale=0.5,
        in_place=in_place,
    )
    assert (codes[0] is caches[0]) == in_place
    assert (found[1] is scales[1]) == in_place
    linear = found[1]
    if scale_layout == "interleaved":
        linear = deinterleave_v_scales(linear, kv_layout=kv_layout)
    for rows, new, scale, block_scales in (
        (codes[0], k, 0.01, found[0]),
        (codes[1], v, 0.5, linear),
    ):
        expected = quantize_nvfp4(new, scale)
        assert torch.equal(by_token(rows, kv_layout), expected.codes)
        assert torch.equal(
            by_token(block_scales, kv_layout), expected.block_scales.view(torch.uint8)
        )


def test_appended_and_attended_to_is_the_quantised_whole() -> None:
    k, v = new_rows()
    kv_format = KVCacheFormat("nvfp4")
    empty = pages("NHD", 32, torch.uint8), pages("NHD", 32, torch.uint8)
    no_scales = pages("NHD", 4, torch.float8_e4m3fn), pages("NHD", 4, torch.float8_e4m3fn)
    metadata = build_metadata(NEW, NEW, TABLE, 4)
    codes, scales = append_paged_nvfp4(k, v, empty, no_scales, metadata, kv_format=kv_format)
    q = torch.randn(sum(NEW), 4, 64)
    found = paged_attention(q, *codes, metadata, kv_format=kv_format, kv_cache_sf=scales)
    wide = [
        append_paged_kv(k, v, *(torch.zeros(5, 4, 2, 64),) * 2, metadata)[which]
        for which in range(2)
    ]
    plain = paged_attention(q, wide[0], wide[1], metadata)
    error = (found.out[2:] - plain.out[2:]).abs().max()
    assert 0 < error < 0.5  # of quantising, and no more


@layouts
@pytest.mark.parametrize("in_place", [False, True])
def test_scales_of_tokens_by_hand(kv_layout: KVLayout, in_place: bool) -> None:
    """The largest of a head is 127 scales; a row of zeros has the least scale."""
    kv_format = KVCacheFormat("int8_per_token_head", kv_layout=kv_layout)
    k = torch.zeros(sum(NEW), 2, 4)
    k[0, 0] = torch.tensor([63.5, -1.2, 0.2, -63.5])
    caches = pages(kv_layout, 4, torch.int8), pages(kv_layout, 4, torch.int8)
    scales = pages(kv_layout, 4, torch.float32), pages(kv_layout, 4, torch.float32)
    codes, found = append_paged_scaled(
        k, 2 * k, caches, scales, METADATA, kv_format=kv_format, in_place=in_place
    )
    assert (codes[0] is caches[0]) == (found[1] is scales[1]) == in_place
    for cache, written, scale in zip(codes, found, (0.5, 1.0), strict=True):
        rows = by_token(cache, kv_layout).view(torch.int8)
        assert rows[0, 0].tolist() == [127, -2, 0, -127]
        assert not rows[1:].any()
        of_tokens = by_token(written, kv_layout).view(torch.float32)
        assert of_tokens[0, 0].item() == scale
        assert of_tokens[1:].unique().tolist() == pytest.approx([LEAST_TOKEN_SCALE])
        assert cache.view(torch.uint8).eq(0x2B).all(dim=-1).sum() == 5 * 4 * 2 - 2 * len(SLOTS)


def in_float32(new: torch.Tensor, largest: float = 127.0, half: float = 0.5) -> list[torch.Tensor]:
    """Quantise rows as vLLM's kernel does: codes, and scales [tokens, heads, 1]."""
    rows = new.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / largest).clamp_min(1e-6)
    numbers = rows * (1.0 / scales)
    codes = torch.where(numbers >= 0, numbers + half, numbers - half).clamp(-128, 127)
    return [codes.to(torch.int8), scales]


@layouts
def test_a_kernel_in_float32_is_inside_of_the_bound_and_faults_are_outside(
    kv_layout: KVLayout,
) -> None:
    kv_format = KVCacheFormat("int8_per_token_head", kv_layout=kv_layout)
    k, v = new_rows()
    caches = pages(kv_layout, 64, torch.int8), pages(kv_layout, 64, torch.int8)
    scales = pages(kv_layout, 4, torch.float32), pages(kv_layout, 4, torch.float32)
    expected, bound = append_error_bound(k, v, caches, scales, METADATA, kv_format=kv_format)

    def outside(which: int, rows: torch.Tensor) -> int:
        whole = (*caches, *scales)[which].double()
        by_slot = whole if kv_layout == "NHD" else whole.transpose(1, 2)
        for row, (page, slot) in zip(rows.double(), SLOTS, strict=True):
            by_slot[page, slot] = row
        return int(((whole - expected[which]).abs() > bound[which]).sum())

    for which, new in enumerate((k, v)):
        codes, of_tokens = in_float32(new)
        assert not outside(which, codes)
        assert not outside(which + 2, of_tokens)
        assert outside(which, in_float32(new, half=0.0)[0])
        assert outside(which + 2, in_float32(new, largest=128.0)[1])
        assert bound[which].count_nonzero() == new.numel()  # all other slots keep their bits


def test_only_scales_of_tokens_have_a_bound() -> None:
    k, v = new_rows()
    packed, scales = pages("NHD", 32, torch.uint8), pages("NHD", 4, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no scales of tokens and heads"):
        append_error_bound(
            k, v, (packed, packed), (scales, scales), METADATA, kv_format=KVCacheFormat("nvfp4")
        )
    scales = pages("NHD", 4, torch.float32)
    with pytest.raises(ValueError, match="codes have ends and no bounds"):
        append_error_bound(
            k,
            v,
            (packed, packed),
            (scales, scales),
            METADATA,
            kv_format=KVCacheFormat("int4_per_token_head"),
        )


def test_the_wrong_function_says_which_is_right() -> None:
    k, v = new_rows()
    packed = pages("NHD", 32, torch.uint8)
    scales = pages("NHD", 4, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="append_paged_scaled"):
        append_paged_kv(k, v, packed, packed, METADATA, kv_format=KVCacheFormat("nvfp4"))
    with pytest.raises(ValueError, match="append_paged_kv appends to such a cache"):
        append_paged_nvfp4(
            k,
            v,
            (packed, packed),
            (scales, scales),
            METADATA,
            kv_format=KVCacheFormat("float8_e5m2"),
        )
    with pytest.raises(ValueError, match="uint8, which does not say"):
        append_paged_kv(k, v, packed, packed, METADATA)
    short, three = pages("NHD", 24, torch.uint8), pages("NHD", 3, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="k has 64 channels, but k_cache has 48"):
        append_paged_nvfp4(
            k, v, (short, packed), (three, scales), METADATA, kv_format=KVCacheFormat("nvfp4")
        )
