"""The comparisons of FlashInfer's own tests, of vLLM's and SGLang's kernels; see ``comparing``.

Parameters and tolerances are those of FlashInfer's ``tests``; of their products, rows that have
most values of each parameter. FlashInfer compares with kernels of its own for one request, or with
plain torch. Less than there: 2 or 3 requests in place of 12 to 128, requests of at most 2048 keys
in place of 33001, 4 parts of a request's keys, 64 tokens of merging in place of 2048. Not there:
RoPE within attention, which no kernel here has, and ranks that are masked.
"""

from __future__ import annotations

import functools

import pytest
import torch

from kernelproof.tests.yardsticks.comparing import (
    Close,
    Comparison,
    appends,
    attends,
    cases,
    merges,
    merges_nothing,
    multiplies,
    rows,
)

CLOSE = Close(rtol=1e-3, atol=1e-3)
NUMBERS = {"dtype": "float16", "of_codes": True}
CODES = {**NUMBERS, "kv_cache": "float8_e4m3fn"}
UNIFIED, UNIFIED_3D = "vllm-unified-attention", "vllm-unified-attention-3d"
DECODERS = (UNIFIED_3D, "vllm-decode-grouped", "sglang-decode-grouped")
FP8_DECODERS = (UNIFIED_3D, "vllm-decode-grouped")


def _of(requests: int, queries: int, keys: int) -> dict[str, object]:
    return {"lens": ((queries, keys),) * requests}


# attention/test_batch_decode_kernels.py: 54 to 16384 keys, pages of 1, 8 and 16, 4 key-value heads
# and 4 or 32 query heads of 128, 256 and 512 channels, float16, and FP8 without a scale; rtol and
# atol 1e-3.
# attention/test_sliding_window.py and test_logits_cap.py have the windows and the caps.
DECODE = [
    *rows(DECODERS, attends, CLOSE,
        {**_of(3, 1, 54), "page_size": 1, "head_dim": 128},
        {**_of(3, 1, 97), "page_size": 8, "head_dim": 256},
        {**_of(2, 1, 512), "page_size": 16, "head_dim": 128},
        {**_of(1, 1, 2048), "page_size": 16, "head_dim": 128},
        heads=(32, 4), **NUMBERS),
    *rows(FP8_DECODERS, attends, CLOSE,
        {**_of(3, 1, 54), "page_size": 16, "head_dim": 128},
        {**_of(3, 1, 97), "page_size": 1, "head_dim": 256}, heads=(32, 4), **CODES),
    *rows(DECODERS, attends, CLOSE,
        {**_of(1, 1, 81), "logits_soft_cap": 1.0, "heads": (8, 1)},
        {**_of(1, 1, 729), "logits_soft_cap": 30.0, "heads": (8, 1)},
        {**_of(1, 1, 9), "logits_soft_cap": 50.0, "heads": (4, 1)},
        head_dim=128, page_size=1, **NUMBERS),
    *rows(UNIFIED_3D, attends, CLOSE,
        {**_of(3, 1, 99), "window": 34, "heads": (4, 1), "page_size": 1},
        {**_of(3, 1, 3), "window": 34, "heads": (8, 4), "page_size": 16},
        {**_of(1, 1, 1999), "window": 534, "heads": (8, 1), "page_size": 16},
        head_dim=64, causal=True, **NUMBERS),
]  # fmt: skip

# attention/test_deepseek_mla.py, decoding: 16 heads, 512 and 64 channels, a scale of 192 ** -0.5;
# out and LSE with rtol and atol 1e-3.
MLA = rows(DECODERS[1:], attends, CLOSE,
    {**_of(3, 1, 33), "page_size": 1}, {**_of(3, 1, 97), "page_size": 16},
    {**_of(1, 1, 1024), "page_size": 16},
    heads=(16, 1), head_dim_qk=576, head_dim_vo=512, values_in_keys=True, sm_scale=192**-0.5,
    lse=True, **NUMBERS)  # fmt: skip

# attention/test_batch_prefill_kernels.py: 17 to 577 queries, pages of 1, 5 and 16, causal and not,
# rtol and atol 1e-3; windows as above; caps with 1e-2 where there are several queries.
PREFILL = [
    *rows(UNIFIED, attends, CLOSE,
        {**_of(2, 37, 54), "page_size": 5, "heads": (4, 4), "causal": False},
        {**_of(2, 17, 97), "page_size": 1, "heads": (32, 4), "causal": True},
        {**_of(1, 127, 512), "page_size": 16, "heads": (4, 4), "causal": True},
        {**_of(2, 17, 54), "page_size": 16, "heads": (32, 4), "causal": False},
        {**_of(3, 1, 97), "page_size": 8, "heads": (32, 4), "causal": True},
        head_dim=128, **NUMBERS),
    *rows(UNIFIED, attends, CLOSE, {**_of(2, 37, 97), "page_size": 16}, heads=(4, 4), head_dim=256,
        causal=True, **NUMBERS),
    *rows(UNIFIED, attends, CLOSE, {**_of(2, 37, 54), "page_size": 16}, heads=(4, 4), head_dim=128,
        causal=True, **CODES),
    *rows(UNIFIED, attends, CLOSE,
        {**_of(2, 37, 54), "window": 14, "heads": (4, 1), "page_size": 1, "head_dim": 64},
        {**_of(1, 47, 397), "window": 34, "heads": (8, 4), "page_size": 16, "head_dim": 128},
        {**_of(1, 1, 1177), "window": 112, "heads": (8, 8), "page_size": 16, "head_dim": 64},
        causal=True, **NUMBERS),
    *rows(UNIFIED, attends, Close(rtol=1e-2, atol=1e-2),
        {**_of(1, 17, 81), "logits_soft_cap": 1.0}, {**_of(1, 81, 987), "logits_soft_cap": 30.0},
        {**_of(1, 17, 17), "logits_soft_cap": 50.0}, heads=(4, 4), head_dim=128, page_size=16,
        causal=False, **NUMBERS),
]  # fmt: skip

# utils/test_triton_cascade.py: 32 heads of 128 channels in float16, by torch.allclose with atol
# 1e-2 (rtol 1e-5); two empty states, by torch's own tolerances.
MERGE = [
    *rows("vllm-merge-attn-states", merges, Close(rtol=1e-5, atol=1e-2),
        {"tokens": 64}, heads=32, dim=128, dtype=torch.float16),
    *rows("vllm-merge-attn-states", merges_nothing, Close(), {"dtype": torch.float16}),
]  # fmt: skip

# attention/test_page.py, append_paged_kv_cache, looks at no result. That of ROCm's kernel does, bit
# by bit: normal values over 10, requests in pages one after another, dense keys and values.
LENGTHS = ((1, 1, 1, 1), (37, 100, 5, 64, 23), (128, 256))


def _slots(lengths: tuple[int, ...], page_size: int) -> torch.Tensor:
    """Return the slots of requests' tokens in pages that follow each other."""
    pages = [-(-length // page_size) for length in lengths]
    firsts = torch.tensor([0, *pages]).cumsum(0) * page_size
    parts = zip(firsts.tolist(), lengths, strict=False)
    return torch.cat([first + torch.arange(length) for first, length in parts])


def _appended(lengths: tuple[int, ...], page_size: int, heads: int, dim: int) -> dict[str, object]:
    pages = sum(-(-length // page_size) for length in lengths)
    slots = functools.partial(_slots, lengths, page_size)
    return {"slots": slots, "pages": pages, "page_size": page_size, "heads": heads, "dim": dim}


APPEND = [
    *rows("vllm-reshape-and-cache-flash", appends, Close(0, 0),
        {**_appended(LENGTHS[0], 16, 4, 64), "dtype": torch.float16},
        {**_appended(LENGTHS[1], 32, 8, 128), "dtype": torch.bfloat16},
        {**_appended(LENGTHS[2], 16, 16, 128), "dtype": torch.float16}, packed=0, factor=0.1),
]  # fmt: skip

# moe/test_trtllm_cutlass_fused_moe.py: one token, 128 channels, 2 experts of 2 in float16, normal
# values over 5 and rtol and atol 1e-2; 8 experts on 4 ranks, weights over 10, and 1e-1.
ONE_TOKEN = {"tokens": 1, "hidden": 128, "inter": 128, "top_k": 2, "renormalised": True}
EXPERTS = [
    *rows("vllm-fused-moe", multiplies, Close(rtol=1e-2, atol=1e-2),
        {"experts": 2, "factor": 0.2}, dtype=torch.float16, **ONE_TOKEN),
    *rows("vllm-fused-moe", multiplies, Close(rtol=1e-1, atol=1e-1),
        {"experts": 8, "factor": 0.1, "factor_hidden": 1.0, "ranks": 4},
        dtype=torch.float16, **ONE_TOKEN),
]  # fmt: skip

TABLE = [*DECODE, *MLA, *PREFILL, *MERGE, *APPEND, *EXPERTS]


@pytest.mark.filterwarnings("ignore")  # NumPy warns of inf - inf in an interpreted kernel
@pytest.mark.parametrize("comparison", cases(TABLE))
def test_comparison(comparison: Comparison) -> None:
    comparison.run()
