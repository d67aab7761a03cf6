"""What FlashInfer compiles for an attention problem, by its name, and whether that exists."""

from __future__ import annotations

from typing import Any

import torch

from ...reference import AttentionProblem
from ..protocol import Library
from ..targets.target import UnsupportedError
from .calls import flashinfer


def attention_library(backend: str) -> Library:
    """Return what names the library of a wrapper's module.

    Args:
        backend: ``"fa2"`` or ``"fa3"`` of the prefill modules; empty for decode without tensor
            cores.
    """

    def library(problem: AttentionProblem) -> tuple[str, bool]:
        try:
            name = _name(backend, problem)
            return name, exists(name)
        except (UnsupportedError, AttributeError, KeyError, TypeError):  # of another release
            return f"{backend or 'decode'} {_values(problem)}", False

    return library


def library_named(name: str) -> Library:
    """Return what names the only library of a backend; ``{sm}`` in the name stands for the chip."""

    def library(_: object) -> tuple[str, bool]:
        chip = "".join(map(str, torch.cuda.get_device_capability())) if "{sm}" in name else ""
        full = name.format(sm=chip)
        try:
            return full, exists(full)
        except (UnsupportedError, AttributeError):  # of another release
            return full, False

    return library


def exists(name: str) -> bool:
    """Whether a library was compiled before, here or in flashinfer-jit-cache."""
    env = flashinfer("flashinfer.jit.env")
    if (env.FLASHINFER_JIT_DIR / name / f"{name}.so").exists():
        return True
    if hasattr(env, "get_aot_path"):  # asks the packages of each chip
        return bool(env.get_aot_path(name).exists())
    return bool((env.FLASHINFER_AOT_DIR / name / f"{name}.so").exists())


def _name(backend: str, problem: AttentionProblem) -> str:
    modules, values = flashinfer("flashinfer.jit.attention.modules"), _values(problem)
    if not backend:
        return str(modules.get_batch_decode_uri(**values))
    return str(
        modules.get_batch_prefill_uri(backend=backend, use_fp16_qk_reduction=False, **values)
    )


def _values(problem: AttentionProblem) -> dict[str, Any]:
    out = getattr(torch, problem.dtype)
    return {
        "dtype_q": getattr(torch, problem.q_dtype or problem.dtype),
        "dtype_kv": _element(problem.kv_element) or out,
        "dtype_o": out,
        "dtype_idx": torch.int32,
        "head_dim_qk": problem.head_dim_qk,
        "head_dim_vo": problem.head_dim_vo,
        "pos_encoding_mode": 0,
        "use_sliding_window": problem.window_left >= 0,
        "use_logits_soft_cap": problem.logits_soft_cap > 0,
    }


def _element(name: str) -> torch.dtype | None:
    if not name:
        return None
    found: torch.dtype = torch.uint8 if name == "nvfp4" else getattr(torch, name)
    return found
