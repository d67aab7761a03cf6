"""The codes of a problem's quantised cache: what is made of its values, and their format."""

from __future__ import annotations

import torch

from ..formats.cache_elements import Codes
from ..formats.kv_format import KVCacheFormat
from ..formats.quantization import quantize_fp8
from ..problems import AttentionProblem
from ..problems.cache_names import layout_of


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
