"""The keyword arguments of an attention call, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..formats.kv_format import KVCacheFormat, Scales
from ..scratch import Scratch
from ..validation import check_heads, check_values, flag_of
from .alibi import ALIBI_FUNCTIONS, Span

OUTPUT_DTYPE = torch.float8_e4m3fn
"""Dtype of outputs with an ``output_scale``."""
LARGEST_OUTPUT = torch.finfo(OUTPUT_DTYPE).max
"""Largest number of that dtype, 448, at which outputs saturate."""

SPAN_AXES = 3
"""Axes of a tensor of spans: requests, spans of each, start and stop."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments that paged and ragged attention share, see ``paged_attention``."""

    causal: bool | torch.Tensor = True
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    q_scale: float | torch.Tensor = 1.0
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    compute_dtype: torch.dtype = torch.float64
    kv_format: KVCacheFormat | None = None
    kv_cache_sf: Scales | None = None
    window_right: int = -1
    alibi_slopes: torch.Tensor | None = None
    output_scale: float | None = None
    spans: torch.Tensor | None = None
    spans_in_window: bool = False
    attention_chunk_size: int = 0
    window_dilation: int = 1
    sink_tokens: int = 0
    logits_bias: torch.Tensor | None = None
    alibi_function: str = "linear"
    output_divisor: float = 1.0
    scratch: Scratch = field(default_factory=Scratch, compare=False, repr=False)


def check_options(q: torch.Tensor, num_kv_heads: int, mask_size: int, options: Options) -> None:
    """Check the options against the tensors, and a custom mask's size."""
    check_heads(q.shape[1], num_kv_heads)
    for name in ("window_left", "window_right"):
        window = getattr(options, name)
        if not isinstance(window, int) or isinstance(window, bool) or window < -1:
            message = f"{name} is {window!r}; it must be an integer, -1 (none) or at least 0"
            raise ValueError(message)
    cap = options.logits_soft_cap
    if not (_is_finite(cap) and cap >= 0):
        message = f"logits_soft_cap is {cap!r}; it must be 0 (off) or positive"
        raise ValueError(message)
    if options.sm_scale is not None and not _is_finite(options.sm_scale):
        message = f"sm_scale is {options.sm_scale!r}; it must be a finite number or None"
        raise ValueError(message)
    check_output_scale("output_scale", options.output_scale)
    check_output_scale("output_divisor", options.output_divisor)
    if options.sinks is not None:
        _check_shape("sinks", options.sinks, (q.shape[1],), "floating [qo_heads]")
    if options.alibi_slopes is not None:
        _check_shape("alibi_slopes", options.alibi_slopes, (q.shape[1],), "floating [qo_heads]")
    check_scale("q_scale", options.q_scale, "qo_heads", q.shape[1])
    for name in ("k_scale", "v_scale"):
        check_scale(name, getattr(options, name), "kv_heads", num_kv_heads)
    _check_masks(num_kv_heads, q.shape[1], mask_size, options)
    _check_structure(options)
    if options.compute_dtype not in (torch.float64, torch.float32):
        message = f"compute_dtype is {options.compute_dtype}; it must be float64 or float32"
        raise ValueError(message)


def _check_masks(kv_heads: int, qo_heads: int, size: int, options: Options) -> None:
    """Check the tensors that have a number for each query row and key."""
    mask = options.custom_mask
    if mask is not None and isinstance(mask, torch.Tensor) and mask.dim() > 1:
        wanted = "bool [kv_heads, sum of query_len * seq_len]"
        _check_shape("custom_mask", mask, (kv_heads, size), wanted)
    elif mask is not None:
        _check_shape("custom_mask", mask, (size,), "bool [sum of query_len * seq_len]")
    if options.logits_bias is not None:
        wanted = "floating [qo_heads, sum of query_len * seq_len]"
        _check_shape("logits_bias", options.logits_bias, (qo_heads, size), wanted)


def _check_structure(options: Options) -> None:
    for name, least in (("attention_chunk_size", 0), ("window_dilation", 1), ("sink_tokens", 0)):
        number = getattr(options, name)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            message = f"{name} is {number!r}; it must be an integer of at least {least}"
            raise ValueError(message)
    if flag_of(options.spans_in_window) is None:
        message = f"spans_in_window is {options.spans_in_window!r}; it must be True or False"
        raise ValueError(message)
    if options.output_divisor is None:
        message = "output_divisor is None; it must be a positive, finite number"
        raise ValueError(message)
    if options.alibi_function not in tuple(ALIBI_FUNCTIONS):
        names = ", ".join(ALIBI_FUNCTIONS)
        message = f"alibi_function is {options.alibi_function!r}; it must be one of {names}"
        raise ValueError(message)


def spans_of(options: Options, requests: int) -> list[tuple[Span, ...]]:
    """Return the spans of each request that are not empty; check that a tensor has some of each."""
    spans = options.spans
    if spans is None:
        return [()] * requests
    if not isinstance(spans, torch.Tensor):
        message = f"spans must be int32 [requests, n, 2], not {type(spans).__name__}"
        raise ValueError(message)
    integers = (torch.int32, torch.int64)
    if spans.dim() != SPAN_AXES or spans.dtype not in integers or spans.shape[::2] != (requests, 2):
        message = (
            f"spans must be int32 [requests, n, 2] with {requests} requests, "
            f"not {spans.dtype} {list(spans.shape)}"
        )
        raise ValueError(message)
    check_values("spans", spans)
    return [
        tuple((start, stop) for start, stop in of_request if start < stop)
        for of_request in spans.tolist()
    ]


def scaled_output(out: torch.Tensor, options: Options) -> torch.Tensor:
    """Return what an output would be if it were not rounded: divided, in FP8 saturated too."""
    if options.output_divisor != 1:
        out = out / options.output_divisor
    if options.output_scale is None:
        return out
    return (out / options.output_scale).clamp_(-LARGEST_OUTPUT, LARGEST_OUTPUT)


def causal_flags(options: Options, requests: int) -> list[bool]:
    """Return whether each request is causal; check that a tensor has a flag of each."""
    if not isinstance(options.causal, torch.Tensor):
        causal = flag_of(options.causal)
        if causal is None:
            wanted = "causal must be True, False or a bool tensor [requests]"
            message = f"{wanted}, not {options.causal!r}"
            raise ValueError(message)
        return [causal] * requests
    _check_shape("causal", options.causal, (requests,), "bool [requests]")
    flags: list[bool] = options.causal.tolist()
    return flags


def check_output_scale(name: str, scale: float | None) -> None:
    """Check a number that outputs are divided by."""
    if scale is not None and not (_is_finite(scale) and scale > 0):
        message = f"{name} is {scale!r}; it must be a positive, finite number or None"
        raise ValueError(message)


def check_scale(name: str, scale: object, axis: str, heads: int) -> None:
    """Check a scale: a finite number, or a tensor with one of each head."""
    if isinstance(scale, torch.Tensor):
        check_values(name, scale)
        if scale.numel() != 1:
            _check_shape(name, scale, (heads,), f"a float or floating [{axis}]")
    elif not _is_finite(scale):
        message = f"{name} is {scale!r}; it must be a finite number or a tensor [{axis}]"
        raise ValueError(message)


def _is_finite(number: object) -> bool:
    return (
        isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    )


def _check_shape(name: str, tensor: object, shape: tuple[int, ...], wanted: str) -> None:
    """Check an option that is a tensor: its shape, and bool or floating as ``wanted`` says."""
    if not isinstance(tensor, torch.Tensor):
        message = f"{name} must be {wanted} = {list(shape)}, not {type(tensor).__name__}"
        raise ValueError(message)
    check_values(name, tensor)
    right_dtype = tensor.dtype == torch.bool if "bool" in wanted else tensor.dtype.is_floating_point
    if tuple(tensor.shape) != shape or not right_dtype:
        message = (
            f"{name} must be {wanted} = {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )
        raise ValueError(message)
