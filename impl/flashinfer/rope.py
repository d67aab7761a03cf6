"""FlashInfer's calls that turn queries and keys and quantise them, one of which appends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, RopeAppendProblem
from ...reference.tensors.rope_append import RopeAppendInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import CUDA, one_module
from .calls import flashinfer
from .claims import no_tokens, offered, unavailable
from .libraries import library_named

ROPE = "flashinfer.rope"
VECTOR, LOADED = 16, 8
"""Elements of 16 bits of a row that a thread turns, and those that it loads at once."""


def _takes(problem: RopeAppendProblem, _: Target) -> str | None:
    # Half of the rotary channels are whole vectors, unless pairs are neighbours.
    whole = VECTOR if problem.interleaved else 2 * VECTOR
    return first_reason(
        (not (problem.codes and problem.quantised_q), "quantises queries and the cache"),
        (problem.rope_dim % whole != 0, f"multiples of {whole} channels turn"),
        (problem.plain_dim % problem.rope_dim != 0, "others are a multiple of those that turn"),
        (problem.spare_channels % LOADED != 0, f"rows lie multiples of {LOADED} elements apart"),
    )


def _one_scale(problem: RopeAppendProblem, _: Target) -> str | None:
    unlike = not problem.latent and problem.k_scale != problem.v_scale
    return "keys and values have one scale" if unlike else None


def _latent(problem: RopeAppendProblem, _: Target) -> str | None:
    return None if problem.latent else "keys hold the values"


WRITERS = replace(
    CUDA,
    # Products in float32 with the reciprocal of the scale, which the caller takes
    # (``quant_scale_q``): pos_enc.cuh.
    arithmetic=Arithmetic(quotients="reciprocal"),
    compile_key=one_module("rope"),
    library=library_named("rope"),
    build_ahead=True,
)


def _given(inputs: RopeAppendInputs, out: torch.Tensor) -> dict[str, Any]:
    """Return the arguments that both calls have; queries go into a view of ``out``."""
    latent = inputs.latent
    found: dict[str, torch.Tensor | None] = {}
    for name, rows in (("q", inputs.q), ("k", inputs.k), ("out", out)):
        flat = rows[:, 0] if latent and name == "k" else rows
        key = ("q_rope_out", "q_nope_out") if name == "out" else (f"{name}_rope", f"{name}_nope")
        found[key[0]] = flat[..., inputs.rotary]
        # No channel is asked for by None.
        found[key[1]] = flat[..., inputs.plain] if flat.shape[-1] > inputs.rope_dim else None
    return {
        **found,
        "cos_sin_cache": inputs.cos_sin,
        "pos_ids": inputs.positions,
        "is_neox": not inputs.interleaved,
        "quantize_dtype": inputs.q_dtype,
        "quant_scale_q": 1.0 / inputs.q_scale,
        "quant_scale_kv": 1.0 / inputs.k_scale,
    }


@WRITERS.adapter(
    "rope_and_append",
    "flashinfer-rope-append",
    unavailable,
    no_tokens,
    _takes,
    _one_scale,
    offered(ROPE, "rope_quantize_fp8_append_paged_kv_cache"),
)
def append(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn, quantise and append by ``rope_quantize_fp8_append_paged_kv_cache``."""
    out = torch.empty(inputs.q.shape, dtype=inputs.q_dtype, device=inputs.q.device)
    caches = inputs.k_cache, inputs.v_cache
    if inputs.latent:
        rows = inputs.k_cache[:, :, 0]
        caches = rows[..., inputs.plain], rows[..., inputs.rotary]
    flashinfer(ROPE).rope_quantize_fp8_append_paged_kv_cache(
        **_given(inputs, out),
        v=inputs.v,
        paged_kv_cache=caches,
        kv_indices=inputs.page_indices,
        kv_indptr=inputs.page_indptr,
        batch_indices=inputs.requests,
        positions=inputs.places,
        page_size=inputs.page_size,
        kv_layout=inputs.kv_layout,
    )
    return out


@WRITERS.adapter(
    "rope_and_append",
    "flashinfer-mla-rope-quantize",
    unavailable,
    no_tokens,
    _takes,
    _latent,
    offered(ROPE, "mla_rope_quantize_fp8"),
)
def mla(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn and quantise by ``mla_rope_quantize_fp8``; torch writes the keys into their slots."""
    q, keys = (
        torch.empty(rows.shape, dtype=inputs.q_dtype, device=rows.device)
        for rows in (inputs.q, inputs.k[:, 0])
    )
    flashinfer(ROPE).mla_rope_quantize_fp8(
        **_given(inputs, q),
        k_rope_out=keys[..., inputs.rotary],
        k_nope_out=keys[..., inputs.plain],
    )
    kept = inputs.slots >= 0
    slots = inputs.slots[kept]
    cache = inputs.k_cache.view(torch.uint8)[:, :, 0]
    cache[slots // inputs.page_size, slots % inputs.page_size] = keys.view(torch.uint8)[kept]
    return q
