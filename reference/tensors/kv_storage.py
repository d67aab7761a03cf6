"""How a problem's K and V are stored: their codes and format, and views of one allocation."""

from __future__ import annotations

import torch

from ..formats.cache_elements import Codes
from ..formats.kv_format import KVCacheFormat
from ..formats.quantization import quantize_fp8
from ..problems import AttentionProblem
from ..problems.cache_names import layout_of
from .allocation import Allocator

OTHER_LAYERS = 3
"""Layers whose pages lie in one allocation; the problem's is the second."""
ODD_STRIDE = 3
"""Stride of an axis of size 1: it is never multiplied by anything but 0 (vllm#40737)."""


def format_of(problem: AttentionProblem) -> KVCacheFormat | None:
    """Return the format of a problem's cache; None where its dtype is the problem's."""
    if not problem.kv_cache:
        return None
    layout = layout_of(problem.kv_cache)
    return KVCacheFormat(problem.kv_element, problem.kv_storage, problem.kv_layout, layout)


def queries(problem: AttentionProblem, q: torch.Tensor) -> torch.Tensor:
    """Return q [tokens, qo_heads, head_dim] in the dtype of the problem's queries."""
    return quantize_fp8(q, getattr(torch, problem.q_dtype)) if problem.q_dtype else q


def quantised(problem: AttentionProblem, rows: torch.Tensor) -> Codes:
    """Quantise rows [keys, kv_heads, head_dim], row by row, so that no row depends on another."""
    # By regime, not by whether the batch has few enough keys to be exact: a request has the same
    # codes in every batch.
    entry = problem.cache_entry
    codes = entry.encode(rows, 1.0, exactly=problem.regime == "exact_grid")
    if not entry.zero_point or codes.scales is None:
        return codes
    return Codes(codes.codes, codes.scales.to(getattr(torch, problem.dtype)))


def kv_views(
    problem: AttentionProblem,
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: torch.dtype,
    home: Allocator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for [a, b, c, D] and [a, b, c, E] (or without b) as ``kv_views`` says."""
    width, split = max(k_shape[-1], v_shape[-1]), k_shape[-1]
    outer = k_shape[:-1]
    if problem.kv_views == "row":
        both = home.empty("k", (*outer, split + v_shape[-1]), dtype)
        k, v = both[..., :split], both[..., split:]
    elif problem.kv_views == "channels":
        apart = [home.empty(name, (*outer, 2 * shape[-1]), dtype)
                 for name, shape in (("k", k_shape), ("v", v_shape))]  # fmt: skip
        k, v = (each[..., ::2] for each in apart)
    elif problem.kv_views == "layers":
        both = home.empty("k", (outer[0], OTHER_LAYERS, 2, *outer[1:], width), dtype)[:, 1]
        k, v = both[:, 0, ..., :split], both[:, 1, ..., : v_shape[-1]]
    else:
        axis = _axis(problem, len(outer))
        both = home.empty("k", (*outer[:axis], 2, *outer[axis:], width), dtype)
        k, v = both.select(axis, 0)[..., :split], both.select(axis, 1)[..., : v_shape[-1]]
    return _degenerate(k), _degenerate(v)


def _axis(problem: AttentionProblem, outer: int) -> int:
    """Return the axis before which K and V alternate, of 3 outer ones, or of 2 without pages."""
    if problem.kv_views == "page":
        return 1
    by_slot = problem.kv_views == "slot"
    if outer == 2:  # noqa: PLR2004  keys and heads
        return 1 if by_slot else 2
    return 2 if by_slot == (problem.kv_layout == "NHD") else 3


def _degenerate(view: torch.Tensor) -> torch.Tensor:
    """Return the view with another stride of each axis of size 1, channels left out."""
    strides = [
        ODD_STRIDE if size == 1 else stride
        for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True)
    ]
    return view.as_strided(view.shape, (*strides, view.stride(-1)))
