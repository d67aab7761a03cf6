"""Quantised caches on their way to FlashInfer: refused when an engine is configured, or viewed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl import UnsupportedError
from kernelproof.impl.flashinfer.calls import flashinfer_arguments
from kernelproof.impl.gating import Feature, Target, require
from kernelproof.reference import KVCacheFormat

CALL = Feature("paged_attention", head_dim_qk=128, group_size=8, page_size=16)
HALF = Feature("paged_attention", head_dim_qk=128, group_size=8, page_size=16, q_dtype="float16")
SHAPE = (4, 16, 2, 128)
IN_BYTES = KVCacheFormat("float8_e4m3fn", "uint8")
"""What vLLM's ``--kv-cache-dtype fp8`` stores."""


def scales() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.ones(*SHAPE[:-1], 8).to(torch.float8_e4m3fn)
    return made, made.clone()


class TestNvfp4OnSm120:
    """vllm#43669: the engine started, and died at the first request."""

    def test_it_is_refused_when_the_engine_is_configured(self) -> None:
        asked = replace(CALL, kv_dtype="nvfp4", backend="trtllm-gen")
        with pytest.raises(UnsupportedError) as caught:
            require(asked, Target(sm=120, flashinfer="0.6.13"))
        text = str(caught.value)
        assert "dies at the first request" in text
        assert "SM120 with flashinfer-python 0.6.13" in text
        assert "Use backend='xqa'" in text

    def test_what_it_names_instead_works(self) -> None:
        chosen = require(replace(CALL, kv_dtype="nvfp4"), Target(sm=120, flashinfer="0.6.13"))
        assert chosen.feature.backend == "xqa"

    def test_another_format_is_named_where_no_backend_reads_it(self) -> None:
        with pytest.raises(UnsupportedError, match="kv_dtype='float8_e4m3fn'"):
            require(replace(HALF, kv_dtype="nvfp4"), Target(sm=75, flashinfer="0.6.7"))


class TestFp8InBytesOnSm100:
    """vllm#38822: a uint8 cache that holds FP8 was read as NVFP4."""

    def test_flashinfer_is_given_a_view_that_says_what_it_is(self) -> None:
        cache = torch.zeros(SHAPE, dtype=torch.uint8)
        made = flashinfer_arguments(
            cache, cache, IN_BYTES, backend="trtllm-gen", flashinfer="0.6.13"
        )
        k, _ = made["paged_kv_cache"]
        assert k.dtype == torch.float8_e4m3fn
        assert k.data_ptr() == cache.data_ptr()
        assert set(made) == {"paged_kv_cache"}

    def test_bytes_alone_are_refused_with_both_readings_named(self) -> None:
        with pytest.raises(ValueError, match=r"vLLM stores FP8 caches as uint8.*reads.*NVFP4"):
            KVCacheFormat("uint8")

    def test_the_engine_may_be_configured_with_it(self) -> None:
        target = Target(sm=100, flashinfer="0.6.13")
        asked = replace(CALL, kv_dtype=IN_BYTES.element, kv_layout="HND")
        assert require(asked, target).feature.backend == "trtllm-gen"


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.6.7.post3", "kv_block_scales"), ("0.6.8", "kv_cache_sf"), ("0.7.2.post1", "kv_cache_sf")],
)
def test_block_scales_have_the_name_that_the_release_gives_them(version: str, name: str) -> None:
    cache = torch.zeros((*SHAPE[:-1], 64), dtype=torch.uint8)
    made = flashinfer_arguments(
        cache,
        cache,
        KVCacheFormat("nvfp4"),
        kv_cache_sf=scales(),
        backend="fa2",
        flashinfer=version,
    )
    assert set(made) == {"paged_kv_cache", name}


def test_scales_in_the_layout_of_another_backend_are_refused() -> None:
    cache = torch.zeros((*SHAPE[:-1], 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="trtllm-gen reads V's block scales interleaved"):
        flashinfer_arguments(
            cache,
            cache,
            KVCacheFormat("nvfp4"),
            kv_cache_sf=scales(),
            backend="trtllm-gen",
            flashinfer="0.6.13",
        )
