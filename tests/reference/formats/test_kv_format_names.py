"""A name in place of a format is refused with what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelproof.reference import (
    append_error_bound,
    append_paged_kv,
    append_paged_nvfp4,
    append_paged_scaled,
    attention_error_bound,
    build_metadata,
    paged_attention,
)

METADATA = build_metadata([1], [1], [[0]], 1)
ROWS, CACHE = torch.ones(1, 1, 16), torch.ones(1, 1, 1, 16)
SCALES = torch.ones(1, 1, 1, 1)


@pytest.mark.parametrize("given", ["fp8", "float8_e4m3fn", "nvfp4", torch.float8_e4m3fn, 8])
def test_a_name_is_no_format(given: Any) -> None:  # noqa: ANN401  what is no format
    attention = (ROWS, CACHE, CACHE, METADATA)
    scaled = (ROWS, ROWS, (CACHE, CACHE), (SCALES, SCALES), METADATA)
    for call in (
        lambda: paged_attention(*attention, kv_format=given),
        lambda: attention_error_bound(*attention, kv_format=given),
        lambda: append_paged_kv(ROWS, ROWS, CACHE, CACHE, METADATA, kv_format=given),
        lambda: append_paged_scaled(*scaled, kv_format=given),
        lambda: append_paged_nvfp4(*scaled, kv_format=given),
        lambda: append_error_bound(*scaled, kv_format=given),
    ):
        with pytest.raises(ValueError, match=r"kv_format is .*; it must be a KVCacheFormat, such"):
            call()
