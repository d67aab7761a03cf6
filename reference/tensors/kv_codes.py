"""The codes of a problem's quantised cache: what is made of its values, and their format."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.kv_format import NVFP4, KVCacheFormat
from ..formats.quantization import (
    NVFP4_BLOCK,
    pack_e2m1,
    quantize_e2m1,
    quantize_fp8,
    quantize_nvfp4,
)
from ..problems import AttentionProblem
from ..problems.cache_names import INTERLEAVED


class Codes(NamedTuple):
    """Rows as a cache stores them.

    Attributes:
        codes: [keys, kv_heads, head_dim] in the problem's dtype or FP8, or half as many bytes.
        scales: [keys, kv_heads, head_dim / 16] float8_e4m3fn of NVFP4, else None.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None


def format_of(problem: AttentionProblem) -> KVCacheFormat | None:
    """Give the format of a problem's cache; None where its dtype is the problem's."""
    if not problem.kv_cache:
        return None
    layout = "interleaved" if problem.kv_cache == INTERLEAVED else "linear"
    return KVCacheFormat(problem.kv_element, problem.kv_storage, problem.kv_layout, layout)


def queries(problem: AttentionProblem, q: torch.Tensor) -> torch.Tensor:
    """Give q [tokens, qo_heads, head_dim] in the dtype of the problem's queries."""
    return quantize_fp8(q, getattr(torch, problem.q_dtype)) if problem.q_dtype else q


def quantised(problem: AttentionProblem, rows: torch.Tensor) -> Codes:
    """Quantise rows [keys, kv_heads, head_dim], row by row, so that no row depends on another."""
    kv_format = format_of(problem)
    if kv_format is None:
        return Codes(rows, None)
    if kv_format.element != NVFP4:
        return Codes(quantize_fp8(rows, getattr(torch, kv_format.element)), None)
    if problem.regime != "exact_grid":
        made = quantize_nvfp4(rows, 1.0)
        return Codes(made.codes, made.block_scales)
    # A scale that is a power of two keeps the exact grid's digits what they are. It is one also
    # where the batch has too many keys to be exact: a request has the same codes in every batch.
    blocks = rows.double().unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(2.0**-5) / 6.0)))
    codes = pack_e2m1(quantize_e2m1(blocks / scales).flatten(-2))
    return Codes(codes, scales.squeeze(-1).to(torch.float8_e4m3fn))
