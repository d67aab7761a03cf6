"""What calls of FlashInfer's CUDA kernels share: wrappers, plans, caches, scales, masks, LSE.

Everything is passed by keyword: from release to release a positional argument has changed its
meaning (docs/gating.md). LSE is base 2 in FlashInfer and natural here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.formats.kv_format import KVCacheFormat, checked_cache
from ...reference.problems.base import is_power_of_two
from ...reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..gating.rules import version_matches
from ..targets.backends import FLASHINFER
from ..targets.optional import require
from ..targets.refusal import first_reason
from ..targets.target import Target, installed_version
from .claims import unavailable

WORKSPACE_BYTES = 394 << 20
"""vLLM's float workspace. FlashInfer recommends 128 MiB; FA2 of 0.6.13 plans 234 MiB of parts for
prefills of 300 and 17 tokens with 32 query heads, measured on an H200."""

BYTE, WORD, ALIGNED = 8, 16, 32
"""Bits of what masks are packed into, and bits of which a row of XQA's takes a multiple."""


def flashinfer(module: str = "flashinfer") -> Any:  # noqa: ANN401  untyped third-party code
    """Import FlashInfer, or one of its modules."""
    return require(module, "flashinfer")


@functools.cache
def version() -> str:
    """Return the release that is installed."""
    return installed_version(FLASHINFER) or "0"


@functools.cache
def shared_workspace(device: torch.device) -> torch.Tensor:
    """Return the float workspace that all wrappers of a process share, as vLLM's do.

    It holds partial results of one run. When each wrapper had its own, twelve workers that judged
    sixty implementations filled an H200.
    """
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def new_wrapper(name: str, device: torch.device, **options: Any) -> Any:  # noqa: ANN401  untyped
    """Make a wrapper on the shared workspace; what it plans is its own."""
    workspace = shared_workspace(device)
    return getattr(flashinfer(), name)(float_workspace_buffer=workspace, **options)


@functools.cache
def wrapper(name: str, device: torch.device, *, apart: str = "", **options: Any) -> Any:  # noqa: ANN401  untyped
    """Return the same wrapper for the same options: planned anew and run again, as engines do.

    Args:
        name: the name of the wrapper.
        device: the device of its workspace.
        apart: keeps calls apart that are not to share one.
        **options: further options of the wrapper.
    """
    del apart
    return new_wrapper(name, device, **options)


def attention_refusal(problem: AttentionProblem, target: Target) -> str | None:
    """Return the reason why no wrapper takes a problem, whatever its backend."""
    return unavailable(problem, target) or first_reason(
        (problem.dtype == "float32", "FlashInfer's attention writes 16-bit outputs"),
        (
            problem.kv_storage,
            "FlashInfer is given a view of FP8 bytes that says what they are, never the bytes",
        ),
        (problem.empty_batch, "engines plan no batch without a token"),
        (
            problem.custom_mask and (problem.causal or problem.window_left >= 0),
            "FlashInfer's custom mask takes the place of causal and window",
        ),
        (
            problem.tree and problem.window_left >= 0,
            "FlashInfer's masks of draft trees take the place of a window, or go without one",
        ),
        (
            not is_power_of_two(problem.v_scale),
            f"FlashInfer rounds its output, then multiplies by v_scale {problem.v_scale}",
        ),
    )


def paged_cache(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Return the keyword arguments that name a paged cache, in the view that the release reads."""
    if inputs.kv_format is None:
        return {"paged_kv_cache": (inputs.k_cache, inputs.v_cache)}
    return flashinfer_arguments(
        inputs.k_cache,
        inputs.v_cache,
        inputs.kv_format,
        kv_cache_sf=inputs.kv_cache_sf,
        backend=backend,
        flashinfer=version(),
    )


def plan_options(inputs: AttentionInputs, kv_dtype: torch.dtype) -> dict[str, Any]:
    """Return the options that every plan takes."""
    return {
        "sm_scale": inputs.sm_scale,
        "window_left": inputs.window_left,
        "logits_soft_cap": inputs.logits_soft_cap,
        "q_data_type": inputs.q.dtype,
        "kv_data_type": kv_dtype,
        "o_data_type": inputs.out_dtype,
    }


def scales(inputs: AttentionInputs) -> tuple[tuple[torch.Tensor, ...], dict[str, float]]:
    """Return the scales of a run: tensors in its order for FP8 queries, else keywords.

    FA3 takes the scales of FP8 queries, keys and values as float32, one a head, and only so.
    """
    if inputs.q.dtype.itemsize > 1:
        return (), {"k_scale": float(inputs.k_scale), "v_scale": float(inputs.v_scale)}
    heads = inputs.q.shape[1], kv_heads_of(inputs), kv_heads_of(inputs)
    given = inputs.q_scale, inputs.k_scale, inputs.v_scale
    tensors = (
        torch.as_tensor(scale, dtype=torch.float32, device=inputs.q.device).expand(count)
        for scale, count in zip(given, heads, strict=True)
    )
    return tuple(tensor.contiguous() for tensor in tensors), {}


def kv_heads_of(inputs: AttentionInputs) -> int:
    """Count the key-value heads of a call."""
    if isinstance(inputs, RaggedAttentionInputs):
        return inputs.k.shape[1]
    return inputs.k_cache.shape[2 if inputs.kv_layout == "NHD" else 1]


def packed_bytes(mask: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
    """Return flat bool masks as ``packed_custom_mask``: each request's bits from a byte on.

    Args:
        mask: bool [sum of bits], True keeps.
        bits: the bits of each request, query_len times seq_len.

    Returns:
        uint8; the first element of a byte is its least significant bit.
    """
    parts = [_packed(part, BYTE) for part in mask.split(list(bits))]
    return torch.cat([mask.new_empty(0, dtype=torch.int32), *parts]).to(torch.uint8)


def draft_words(
    qo_indptr: Sequence[int], tree_mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return which of its request's query tokens each one sees, as XQA's ``mask`` says it.

    Args:
        qo_indptr: where each request's query tokens begin and end.
        tree_mask: the same as in ``inputs``; None for a causal mask.
        device: the device of the result.

    Returns:
        uint16 [tokens, 2 ceil(most query tokens / 32)]; a word's first column is its least
        significant bit (``applyMaskFromInput`` of ``xqa/mha.cu``).
    """
    lengths = [stop - start for start, stop in pairwise(qo_indptr)]
    width = ALIGNED * -(-max(lengths, default=0) // ALIGNED)
    rows, start = torch.zeros((sum(lengths), width), dtype=torch.bool, device=device), 0
    for first, t in zip(qo_indptr, lengths, strict=False):
        if tree_mask is None:
            seen = torch.ones((t, t), dtype=torch.bool, device=device).tril()
        else:
            seen = tree_mask[start : start + t * t].view(t, t)
        rows[first : first + t, :t] = seen
        start += t * t
    words = _packed(rows.flatten(), WORD).to(torch.int16)
    return words.view(torch.uint16).view(len(rows), width // WORD)


def _packed(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Return int32 numbers of this many bits each, the first one the least significant."""
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % size)).view(-1, size)
    weights = 2 ** torch.arange(size, dtype=torch.int32, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.int32)


RENAMED = ">=0.6.8.dev0"
"""``kv_block_scales`` became ``kv_cache_sf`` (flashinfer-ai/flashinfer#2954)."""
INTERLEAVING = ("trtllm-gen",)
"""Backends that read V's block scales in groups of four tokens; FA2 and XQA read them linear."""


def flashinfer_arguments(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_format: KVCacheFormat,
    *,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str,
    flashinfer: str,
) -> dict[str, Any]:
    """Return the keyword arguments with which a FlashInfer release reads a cache as what it is.

    Args:
        k_cache, v_cache: the caches in their stored form.
        kv_format: what they hold.
        kv_cache_sf: block scales, where the format has them, in ``kv_format.v_scale_layout``.
        backend: the backend that will read them.
        flashinfer: the release; it decides what the scales are called.

    Returns:
        ``paged_kv_cache``, the pair of caches, FP8 viewed as FP8; with block scales also
        ``kv_cache_sf``, or ``kv_block_scales`` before 0.6.8. Nothing is copied.

    Raises:
        ValueError: cache, format and scales disagree, or V's scales are not in the layout that the
            backend reads.
    """
    cache = checked_cache(k_cache, v_cache, kv_format.kv_layout, kv_format, kv_cache_sf)
    arguments: dict[str, Any] = {"paged_kv_cache": (cache.k, cache.v)}
    if not kv_format.entry.block:
        return arguments
    wanted = "interleaved" if backend in INTERLEAVING else "linear"
    if kv_format.v_scale_layout != wanted:
        message = (
            f"v_scale_layout is {kv_format.v_scale_layout!r}; {backend} reads V's block scales "
            f"{wanted} (interleave_v_scales and deinterleave_v_scales convert)"
        )
        raise ValueError(message)
    renamed = version_matches(flashinfer, RENAMED)
    arguments["kv_cache_sf" if renamed else "kv_block_scales"] = kv_cache_sf
    return arguments
