"""The functions of FlashInfer that launch precompiled kernels, and what else leads to these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...binaries.flashinfer.questions import GEMM, GEMM_FUNCTIONS, MOE, MOE_FUNCTIONS
from .engine_files import EngineFile

DECODE = "decode.trtllm_batch_decode_with_kv_cache"
CONTEXT = "prefill.trtllm_batch_context_with_kv_cache"
RAGGED = "prefill.trtllm_ragged_attention_deepseek"
LATENT = "mla.trtllm_batch_decode_with_kv_cache_mla"
LAUNCHERS: Mapping[tuple[str, str], str] = {
    ("paged_attention", "decode"): DECODE,
    ("paged_attention", "prefill"): CONTEXT,
    ("ragged_attention", "prefill"): RAGGED,
    ("mla", "decode"): LATENT,
    **{(MOE, form): f"fused_moe.{name}" for form, name in MOE_FUNCTIONS.items()},
    **{(GEMM, form): f"gemm.{name}" for form, name in GEMM_FUNCTIONS.items()},
}
"""Functions by the operation and phase of the kinds of call that they take, or quantisation."""
ROUTED = {
    f"fused_moe.{name}": f"fused_moe.{name.removesuffix('moe')}routed_moe"
    for name in MOE_FUNCTIONS.values()
}
"""Functions for experts that the caller has chosen, which launch the same GEMMs, by the function
that chooses them."""
WRAPPERS: Mapping[str, str] = {
    DECODE: "decode.BatchDecodeWithPagedKVCacheWrapper",
    CONTEXT: "prefill.BatchPrefillWithPagedKVCacheWrapper",
}
"""Classes whose backend ``trtllm-gen`` launches the same kernels, by the function that does."""


def names_of(function: str) -> tuple[str, ...]:
    """Return the last parts of the names by which an engine may launch a function's kernels."""
    leading = filter(None, (function, WRAPPERS.get(function), ROUTED.get(function)))
    return tuple(each.rpartition(".")[2] for each in leading)


def functions_named(files: Iterable[EngineFile]) -> tuple[str, ...]:
    """Return the functions that some file may call; all of them if there is no file."""
    texts = [each.data or b"" for each in files]

    def named(function: str) -> bool:
        pattern = re.compile(rf"\b(?:{'|'.join(names_of(function))})\b".encode())
        return any(map(pattern.search, texts))

    functions = dict.fromkeys(LAUNCHERS.values())
    return tuple(each for each in functions if not texts or named(each))
