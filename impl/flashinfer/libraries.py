"""What FlashInfer compiles for an attention problem, by its name, and whether that exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...reference import AttentionProblem
from ..protocol import Library
from ..targets.target import UnsupportedError
from .calls import flashinfer

# Since 0.7.1, a library of FA2 fixes how the strides of pages of keys and values differ.
STRIDES = ("", "_kv_stride_equal", "_kv_stride_independent", "_paged_kv_stride_independent")


def attention_library(kind: str, backend: str = "") -> Library:
    """Return what names the library of an attention module.

    Args:
        kind: the kind of FlashInfer's ``get_<kind>_uri``, or ``"xqa"``.
        backend: ``"fa2"`` or ``"fa3"``, where there is a choice; ``"auto"``: FlashInfer's choice.
    """

    def library(problem: AttentionProblem) -> tuple[str, bool]:
        try:
            name = _xqa_name(problem) if kind == "xqa" else _name(kind, backend, problem)
            return name, exists(name)
        except (UnsupportedError, AttributeError, KeyError, TypeError, ValueError):
            return f"{kind} {backend} {_values(problem)}", False  # of another release

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
    return any(_exists(name + strides) for strides in STRIDES)


def _exists(name: str) -> bool:
    env = flashinfer("flashinfer.jit.env")
    if (env.FLASHINFER_JIT_DIR / name / f"{name}.so").exists():
        return True
    if hasattr(env, "get_aot_path"):  # asks the packages of each chip
        return bool(env.get_aot_path(name).exists())
    return bool((env.FLASHINFER_AOT_DIR / name / f"{name}.so").exists())


def _name(kind: str, backend: str, problem: AttentionProblem) -> str:
    uri = getattr(flashinfer("flashinfer.jit.attention.modules"), f"get_{kind}_uri")
    values = {
        **_values(problem),
        "backend": backend,
        "use_fp16_qk_reduction": False,
        "use_profiler": False,
        "head_dim_ckv": problem.head_dim_vo,
        "head_dim_kpe": problem.head_dim_qk - problem.head_dim_vo,
    }
    if backend == "auto":
        more = {"device": torch.device("cuda"), "use_fp16_qk_reductions": False}
        masked = problem.custom_mask or problem.tree > 0
        choose = flashinfer("flashinfer.utils").determine_attention_backend
        values["backend"] = _asked(choose, {**values, **more, "use_custom_mask": masked})
    return _asked(uri, values)


def _asked(function: Callable[..., str], values: Mapping[str, Any]) -> str:
    return str(function(**{name: values[name] for name in inspect.signature(function).parameters}))


def _xqa_name(problem: AttentionProblem) -> str:
    values = _values(problem)
    spec = flashinfer("flashinfer.jit.xqa").gen_xqa_module(
        input_dtype=values["dtype_o"],
        kv_cache_dtype=values["dtype_kv"],
        page_size=problem.page_size,
        head_dim=problem.head_dim_qk,
        head_group_ratio=problem.group_size,
        use_sliding_window=problem.window_left >= 0,
        output_dtype=values["dtype_o"],
        q_seq_len=problem.most_queries,
    )
    return str(spec.name)


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
