"""The comparisons of vLLM's own tests, see ``comparing``.

Parameters and tolerances are those of ``tests/kernels`` at 0.33; of their products, rows that have
each value of each parameter once at least, and many pairs. Less than there: 4 parts of a request's
keys in place of 16 or 8, as the adapters choose; caches of as many pages as requests have and a few
more, or 64, in place of 512 to 32768; 1 request of decoding in place of 3; 256 and 133 tokens of
merging in place of up to 4096, and at most 8 heads in place of 64; experts of 256 channels in place
of 2048, and 222 tokens in place of 40000; 64 queries by tensor descriptors in place of 256. Not
there: caches in NVFP4, which need CUDA, and int4 and int8 experts, which other adapters call.
"""

from __future__ import annotations

import functools

import pytest
import torch

from kernelproof.tests.yardsticks.comparing import (
    FP8,
    Close,
    Comparison,
    appends,
    attends,
    between_layers,
    cases,
    codes_as_numbers,
    merges,
    multiplies,
    pages_as_tokens,
    rows,
)

# attention/test_triton_unified_attention.py: NUM_HEADS, HEAD_SIZES, BLOCK_SIZES, sliding windows of
# 64, 128 and 256 keys, a soft cap of 50, atol 1.5e-2 and rtol 1e-2; in FP8, scales of 0.75, 0.5 and
# 0.25 and 1.5e-1 for both; 2e-1 where the output is FP8 with a scale of 0.5. The 3D kernel runs
# where all requests have one query.
MIXED = ((1, 1328), (5, 18), (129, 463))
DECODED = ((1, 523), (1, 37), (1, 2011))
ATTENTION = {"causal": True, "dtype": "bfloat16", "page_size": 16}
IN_FP8 = {"kv_cache": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.25}
ALL_IN_FP8 = {**IN_FP8, "q_dtype": "float8_e4m3fn", "q_scale": 0.75}
TWO, THREE = "vllm-unified-attention", "vllm-unified-attention-3d"
NUMBERS, CODES = Close(rtol=1e-2, atol=1.5e-2), Close(rtol=1.5e-1, atol=1.5e-1)
UNIFIED = [
    *rows(TWO, attends, NUMBERS,
        {"lens": DECODED, "heads": (4, 4), "head_dim": 128},
        {"lens": MIXED, "heads": (8, 2), "head_dim": 128},
        {"lens": MIXED, "heads": (5, 1), "head_dim": 256, "window": 128},
        {"lens": MIXED, "heads": (4, 4), "head_dim": 128, "window": 64, "logits_soft_cap": 50.0},
        {"lens": DECODED, "heads": (8, 2), "head_dim": 256, "window": 256},
        {"lens": DECODED, "heads": (5, 1), "head_dim": 128, "window": 64, "logits_soft_cap": 50.0},
        **ATTENTION),
    *rows(TWO, attends, CODES,
        {"lens": MIXED, "heads": (5, 1), "head_dim": 128, "window": 256, **ALL_IN_FP8},
        {"lens": DECODED, "heads": (8, 2), "head_dim": 256, "logits_soft_cap": 50.0, **ALL_IN_FP8},
        {"lens": DECODED, "heads": (4, 4), "head_dim": 128, **IN_FP8},
        **ATTENTION),
    *rows(TWO, attends, Close(rtol=2e-1, atol=2e-1),
        {"lens": DECODED, "heads": (8, 2), "head_dim": 128},
        {"lens": MIXED, "heads": (5, 1), "head_dim": 128, "window": 64, "logits_soft_cap": 50.0},
        **{**ATTENTION, "dtype": "float16", "output_scale": 0.5}),
    *rows(THREE, attends, NUMBERS,
        {"lens": DECODED, "heads": (5, 1), "head_dim": 128},
        {"lens": DECODED, "heads": (8, 2), "head_dim": 256, "window": 64},
        {"lens": DECODED, "heads": (4, 4), "head_dim": 128, "window": 128, "logits_soft_cap": 50.0},
        {"lens": DECODED, "heads": (5, 1), "head_dim": 256, "window": 256, "logits_soft_cap": 50.0},
        **ATTENTION),
    *rows(THREE, attends, CODES,
        {"lens": DECODED, "heads": (8, 2), "head_dim": 128, "window": 128, **ALL_IN_FP8},
        {"lens": DECODED, "heads": (5, 1), "head_dim": 256, "logits_soft_cap": 50.0, **ALL_IN_FP8},
        {"lens": DECODED, "heads": (8, 2), "head_dim": 128, **IN_FP8},
        **ATTENTION),
    *rows(THREE, attends, Close(rtol=2e-1, atol=2e-1),
        {"lens": DECODED, "heads": (8, 2), "head_dim": 128, "window": 64},
        **{**ATTENTION, "dtype": "float16", "output_scale": 0.5}),
    *rows("vllm-unified-attention-td", attends, NUMBERS,
        {"lens": ((64, 64), (32, 32)), "heads": (4, 4), "head_dim": 128},
        {"lens": DECODED, "heads": (8, 2), "head_dim": 256},
        {"lens": MIXED, "heads": (5, 1), "head_dim": 96, "window": 128, "logits_soft_cap": 50.0},
        **ATTENTION),
    *rows("vllm-unified-attention-3d-td", attends, NUMBERS,
        {"lens": DECODED, "heads": (8, 2), "head_dim": 128},
        {"lens": DECODED, "heads": (5, 1), "head_dim": 96, "window": 128, "logits_soft_cap": 50.0},
        **ATTENTION),
]  # fmt: skip

# attention/test_triton_decode_attention.py compares the kernel with itself: pages of 16 with pages
# of one key by torch.allclose (rtol 1e-5, atol 1e-8), FP8 with bfloat16 (rtol 1e-2, atol 5e-1; the
# scale is a 448th of the largest number, about 0.01), and pages between those of other layers bit
# by bit. v1/attention/test_mla_backends.py compares MLA of DeepSeek with torch's attention by the
# same tolerances of 1e-2 and 5e-1.
DECODING = {"dtype": "bfloat16", "page_size": 16}
GROUPED = {"heads": (32, 8), "head_dim": 128}
LATENT = {"heads": (16, 1), "head_dim_qk": 576, "head_dim_vo": 512, "values_in_keys": True}
OTHER_DIMS = {"heads": (32, 8), "head_dim_qk": 192, "head_dim_vo": 128}
ITSELF, BACKENDS = Close(rtol=1e-5, atol=1e-8), Close(rtol=1e-2, atol=5e-1)
FEWEST = {"kv_cache": "float8_e4m3fn", "k_scale": 0.01, "v_scale": 0.01}
GROUPED_KERNELS = ("vllm-decode-grouped", "sglang-decode-grouped")
DECODE = [
    *rows(GROUPED_KERNELS, pages_as_tokens, ITSELF,
        {"lens": ((1, 1027),), **LATENT}, {"lens": ((1, 1025),), **GROUPED},
        {"lens": ((1, 1027),), **OTHER_DIMS}, **DECODING),
    *rows("vllm-decode-grouped", between_layers, Close(0, 0),
        {"lens": ((1, 1027),), **GROUPED}, {"lens": ((1, 1027),), **LATENT}, **DECODING),
    *rows("vllm-decode-grouped", codes_as_numbers, BACKENDS,
        {"lens": ((1, 1025),), **GROUPED, "page_size": 1}, {"lens": ((1, 1025),), **LATENT},
        **{**DECODING, **FEWEST}),
    *rows(GROUPED_KERNELS, attends, BACKENDS,
        {"lens": ((1, 32), (1, 40)), **LATENT}, {"lens": ((1, 1024),), **LATENT}, **DECODING),
]  # fmt: skip

# attention/test_merge_attn_states.py: a tenth of each state's LSEs is inf; rtol and atol 1e-3,
# rtol 1e-2 in bfloat16, 1e-1 where the output is FP8 with a scale of 0.05. It compares Triton's
# kernel with CUDA's.
MERGING = {"empty": 0.1, "inf_marks_empty": True}
IN_16_BITS, MERGED_FP8 = Close(rtol=1e-2, atol=1e-3), Close(rtol=1e-1, atol=1e-1)
MERGE = [
    *rows("vllm-merge-attn-states", merges, Close(rtol=1e-3, atol=1e-3),
        {"tokens": 256, "heads": 4, "dim": 32, "dtype": torch.float32},
        {"tokens": 133, "heads": 8, "dim": 48, "dtype": torch.float16, "context_tokens": 128},
        {"tokens": 133, "heads": 8, "dim": 256, "dtype": torch.float32, "context_tokens": 128},
        **MERGING),
    *rows("vllm-merge-attn-states", merges, IN_16_BITS,
        {"tokens": 133, "heads": 4, "dim": 96, "dtype": torch.bfloat16},
        {"tokens": 133, "heads": 8, "dim": 128, "dtype": torch.bfloat16, "context_tokens": 128},
        **MERGING),
    *rows("vllm-merge-attn-states", merges, MERGED_FP8,
        {"tokens": 133, "heads": 4, "dim": 64, "dtype": torch.bfloat16},
        {"tokens": 133, "heads": 4, "dim": 128, "dtype": torch.float16, "context_tokens": 128},
        **MERGING, out_dtype=FP8, output_scale=0.05),
]  # fmt: skip

# attention/test_cache.py, test_reshape_and_cache_flash: 21 tokens, 8 heads, slots at random, keys
# and values out of a QKV tensor; torch's own tolerances, in FP8 rtol 0.1 and atol 1e-3.
PAGES, TOKENS = 64, 21


def _slots(page_size: int) -> torch.Tensor:
    """Return different slots of a cache at random."""
    return torch.randperm(PAGES * page_size)[:TOKENS]


def _written(page_size: int, dim: int, dtype: torch.dtype) -> dict[str, object]:
    slots = functools.partial(_slots, page_size)
    return {"slots": slots, "page_size": page_size, "dim": dim, "dtype": dtype}


APPEND = [
    *rows("vllm-reshape-and-cache-flash", appends, Close(),
        _written(8, 64, torch.bfloat16), _written(16, 80, torch.float32),
        _written(32, 256, torch.bfloat16), _written(16, 64, torch.float32),
        heads=8, pages=PAGES, packed=3),
    *rows("vllm-reshape-and-cache-flash", appends, Close(rtol=0.1, atol=1e-3),
        _written(16, 64, torch.bfloat16), _written(8, 80, torch.float32),
        _written(32, 256, torch.bfloat16), heads=8, pages=PAGES, packed=3, fp8=True),
]  # fmt: skip

# moe/test_moe.py, test_fused_moe: values and weights are normal over 10, weights of 2 n x k; with
# or without 128 columns of padding, experts on one rank or of one of 4; atol 2e-2, rtol 0. All
# ranks are added up here, where a rank has experts at random there.
EXPERTS = [
    *rows("vllm-fused-moe", multiplies, Close(rtol=0, atol=2e-2),
        {"tokens": 1, "inter": 128, "hidden": 128, "experts": 8, "top_k": 2},
        {"tokens": 33, "inter": 256, "hidden": 128, "experts": 8, "top_k": 2, "padding": 128},
        {"tokens": 1, "inter": 256, "hidden": 128, "experts": 64, "top_k": 6, "padding": 128},
        {"tokens": 33, "inter": 128, "hidden": 128, "experts": 64, "top_k": 6},
        {"tokens": 33, "inter": 128, "hidden": 128, "experts": 8, "top_k": 2, "ranks": 4},
        {"tokens": 222, "inter": 128, "hidden": 511, "experts": 8, "top_k": 2},
        dtype=torch.bfloat16, factor=0.1),
]  # fmt: skip

TABLE = [*UNIFIED, *DECODE, *MERGE, *APPEND, *EXPERTS]


@pytest.mark.filterwarnings("ignore")  # NumPy warns of inf - inf in an interpreted kernel
@pytest.mark.parametrize("comparison", cases(TABLE))
def test_comparison(comparison: Comparison) -> None:
    comparison.run()
