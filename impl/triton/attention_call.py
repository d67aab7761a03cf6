"""One call of the Triton attention kernel: its tensors, blocks and grid.

Nothing here waits for the GPU: grids and blocks follow from shapes, lengths are read by the kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...reference import AttentionOutput
from ...reference.formats.arithmetic import dtype_name
from ...reference.formats.cache_elements import FP8, NVFP4
from ...reference.formats.kv_format import checked_cache
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.optional import require
from ..targets.target import UnsupportedError
from .blocks import (
    Blocks,
    attention_blocks,
    available_memory,
    converts_e4m3,
    most_splits,
    multiprocessors,
    splits_that_fill,
)
from .merge import merge
from .support import ceil_div, finish, require_triton, stored
from .units import in_units, strides, unit_of

KERNEL = "kernelproof.impl.triton.kernels.attention"
EVERYWHERE = 2**30
"""A window this wide sees all keys; twice as much is still an int32."""
INTERPRETED_SPLITS = 2
"""Most splits in the interpreter, where they save no time: enough to show wrong splitting."""
EXACT_DIVISION = 2**30
"""Number times divisor below which the kernel divides exactly by any divisor. Its part by one is an
int32 still: by more, a kernel would be compiled for the int64 of small divisors, too."""


class Call:
    """One call: its tensors as the kernel takes them, and its blocks."""

    def __init__(self, inputs: AttentionInputs) -> None:
        require_triton()
        self.inputs = inputs
        q = inputs.q
        self.upcast = not q.is_cuda
        self.kv_format = ""
        self.block_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if isinstance(inputs, PagedAttentionInputs):
            cache = checked_cache(
                inputs.k_cache,
                inputs.v_cache,
                inputs.kv_layout,
                inputs.kv_format,
                inputs.kv_cache_sf,
            )
            self.k, self.v = (_slots(each, inputs.kv_layout) for each in (cache.k, cache.v))
            if cache.kv_format.quantised:
                self.kv_format = cache.kv_format.element
            if self.kv_format not in ("", *FP8, NVFP4):
                message = (
                    f"triton widens caches of {', '.join((*FP8, NVFP4))}, not {self.kv_format}"
                )
                raise UnsupportedError(message)
            if cache.k_scales is not None and cache.v_scales is not None:
                self.block_scales = (
                    _slots(cache.k_scales, inputs.kv_layout),
                    _slots(cache.v_scales, inputs.kv_layout),
                )
            self.head_dim_vo = cache.head_dim_vo
            self.qo_indptr = inputs.metadata.qo_indptr
            self.page_size = inputs.metadata.page_size
            self.most_keys = inputs.metadata.paged_kv_indices.shape[0] * self.page_size
            check_divisor("page_size", self.page_size, "keys", self.most_keys)
        else:
            if inputs.k.dtype.itemsize == 1:
                self.kv_format = dtype_name(inputs.k.dtype)
            self.k, self.v = (_slots(each.unsqueeze(0), "NHD") for each in (inputs.k, inputs.v))
            self.qo_indptr = inputs.qo_indptr
            self.head_dim_vo = self.v.shape[3]
            self.page_size = 1
            self.most_keys = inputs.k.shape[0]
        self.requests = self.qo_indptr.shape[0] - 1
        self.kv_heads = self.k.shape[2]
        self.group_size = q.shape[1] // self.kv_heads
        rows = q.shape[0] * self.group_size
        check_divisor("group_size", self.group_size, "rows", rows)
        self.blocks = attention_blocks(
            (q.shape[2], self.head_dim_vo),
            q.element_size(),
            rows_a_request(q.shape[0], self.requests, self.group_size),
            interpreted=not q.is_cuda,
            packed=self.k.shape[3] < q.shape[2],  # several channels an entry
            keys=self.most_keys // max(self.requests, 1),
            available=available_memory(q.device),
        )

    def attend(self) -> AttentionOutput:
        """Attend in one launch."""
        result = _buffers(self.inputs, self.head_dim_vo)
        written = stored(result.out)
        self._launch(written.unsqueeze(0), result.lse.unsqueeze(0), math.log(2.0))
        finish(result.out, written)
        return result

    def attend_split(self, splits: int) -> AttentionOutput:
        """Attend to this number of ranges of the keys and merge them, both in float32."""
        if splits == 1:
            return self.attend()
        result = _buffers(self.inputs, self.head_dim_vo)
        outs = result.out.new_empty((splits, *result.out.shape), dtype=torch.float32)
        lses = result.lse.new_empty((splits, *result.lse.shape))
        self._launch(outs, lses, 1.0)
        merge(outs, lses, result, base_2=True)
        return result

    def num_splits(self) -> int:
        """Choose how many programs share the keys of a tile: enough to fill the GPU, if there are.

        The mean request counts: how long the longest is, the host does not know.
        """
        if not self.inputs.q.is_cuda:
            return INTERPRETED_SPLITS
        requests = max(self.requests, 1)
        rows = ceil_div(self.inputs.q.shape[0] * self.group_size, requests)
        return splits_that_fill(
            requests * max(ceil_div(rows, self.blocks.m), 1) * self.kv_heads,
            self.blocks.resident * multiprocessors(self.inputs.q.device),
            most_splits(self.most_keys // requests),
        )

    def _tiles(self) -> int:
        return self.inputs.q.shape[0] * self.group_size // self.blocks.m + self.requests

    def _launch(self, out: torch.Tensor, lse: torch.Tensor, lse_factor: float) -> None:
        """Launch on out [splits, tokens, qo_heads, head_dim_vo], lse [splits, tokens, qo_heads]."""
        inputs, q = self.inputs, self.inputs.q
        if not (q.shape[0] and self.kv_heads):
            return
        paged = isinstance(inputs, PagedAttentionInputs)
        k_sf, v_sf = self.block_scales
        cap = inputs.logits_soft_cap
        k_scale, k_scales = _scale(inputs.k_scale, self.kv_heads)
        v_scale, v_scales = _scale(inputs.v_scale, self.kv_heads)
        steps = {
            **strides("q", q, "token head"),
            **strides("k", self.k, "page slot head"),
            **strides("v", self.v, "page slot head"),
            **strides("out", out[0], "token head"),
        }
        scale_steps = {
            **strides("k_sf", k_sf, "page slot head"),
            **strides("v_sf", v_sf, "page slot head"),
        }
        unit, scale_unit = unit_of(*steps.values()), unit_of(*scale_steps.values())
        arguments: dict[str, Any] = {
            "q": q, "k": self.k, "v": self.v, "out": out, "lse": lse,
            # None is compiled away: without block scales the kernel does not have these arguments.
            "k_sf": k_sf, "v_sf": v_sf,
            # What is absent is never read: any float32 tensor stands for it.
            "sinks": lse if inputs.sinks is None else inputs.sinks.to(torch.float32),
            "k_scales": lse if k_scales is None else k_scales,
            "v_scales": lse if v_scales is None else v_scales,
            "custom_mask": lse if inputs.custom_mask is None
            else inputs.custom_mask.view(torch.uint8),
            "qo_indptr": self.qo_indptr,
            **(_paged_indices(inputs) if isinstance(inputs, PagedAttentionInputs)
               else {"kv_indptr": inputs.kv_indptr, "seq_lens": inputs.kv_indptr,
                     "page_ids": inputs.kv_indptr}),
            "num_requests": self.requests, "group_size": self.group_size,
            "page_size": self.page_size, "page_shift": self.page_size.bit_length() - 1,
            "page_inverse": ceil_div(EXACT_DIVISION, self.page_size),
            "group_inverse": ceil_div(EXACT_DIVISION, self.group_size),
            "left": EVERYWHERE if inputs.window_left < 0 else min(inputs.window_left, EVERYWHERE),
            "right": 0 if inputs.causal else EVERYWHERE,
            "scale": inputs.sm_scale * k_scale * (1.0 / cap if cap else math.log2(math.e)),
            "v_scale": v_scale, "soft_cap": cap * math.log2(math.e), "lse_factor": lse_factor,
            "has_sinks": int(inputs.sinks is not None),
            "has_k_scales": int(k_scales is not None), "has_v_scales": int(v_scales is not None),
            "q_dim": q.stride(2), "k_dim": self.k.stride(3), "v_dim": self.v.stride(3),
            "k_sf_block": None if k_sf is None else k_sf.stride(3),
            "v_sf_block": None if v_sf is None else v_sf.stride(3),
            "out_split": out.stride(0), "out_dim": out.stride(3),
            **strides("lse", lse, "split token head"),
            **in_units(steps, unit), **in_units(scale_steps, scale_unit),
            "UNIT": unit, "SF_UNIT": scale_unit,
            "PAGED": paged, "SHIFTS": _is_power_of_two(self.page_size),
            "KV_FORMAT": self.kv_format, "SOFT_CAP": cap > 0,
            "CONVERTS": bool(self.kv_format) and converts_e4m3(q.device),
            "CUSTOM_MASK": inputs.custom_mask is not None, "UPCAST": self.upcast,
            "HEAD_DIM_QK": q.shape[2], "HEAD_DIM_VO": self.head_dim_vo,
            "BLOCK_QK": self.blocks.qk, "BLOCK_VO": self.blocks.vo, "BLOCK_M": self.blocks.m,
        }  # fmt: skip
        _run((self._tiles(), self.kv_heads, out.shape[0]), self.blocks, arguments)


def rows_a_request(tokens: int, requests: int, group_size: int) -> int:
    """Return the mean number of rows a request, rounded up to a power of two."""
    return 1 << (ceil_div(tokens, max(requests, 1)) * group_size - 1).bit_length()


def check_divisor(name: str, divisor: int, what: str, most: int) -> None:
    """Refuse where the kernel's division, a multiplication, would be off by one.

    Raises:
        UnsupportedError: the divisor is no power of two, and what it divides too large for it.
    """
    if not _is_power_of_two(divisor) and most * divisor >= EXACT_DIVISION:
        message = (
            f"{name} {divisor} is no power of two: a batch may then have "
            f"{EXACT_DIVISION // divisor} {what}, not {most}"
        )
        raise UnsupportedError(message)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _run(grid: tuple[int, int, int], blocks: Blocks, arguments: dict[str, Any]) -> None:
    kernel = require(KERNEL, "triton").attention
    on_gpu = arguments["q"].is_cuda
    options: dict[str, Any] = {
        "num_warps": blocks.num_warps, "num_stages": blocks.num_stages,
        # Fused, scale * logit - base would not be 0 at the largest logit: base is rounded.
        "enable_fp_fusion": False,
    }  # fmt: skip
    with scalars_as_bounds(arguments["q"]):
        kernel[grid](**arguments, BLOCK_N=blocks.n, **(options if on_gpu else {}))


def _slots(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """View a cache, or its block scales, as [pages, slots, kv_heads, dim]; codes as bytes.

    The kernel takes any strides.
    """
    as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return as_bytes if kv_layout == "NHD" else as_bytes.transpose(1, 2)


def _buffers(inputs: AttentionInputs, head_dim_vo: int) -> AttentionOutput:
    """Return the buffers for the result: those of the call, or new ones."""
    shape = (*inputs.q.shape[:2], head_dim_vo)
    out, lse = inputs.out, inputs.lse
    if out is None:
        out = inputs.q.new_empty(shape, dtype=inputs.out_dtype)
    if lse is None:
        lse = inputs.q.new_empty(shape[:2], dtype=torch.float32)
    return AttentionOutput(out, lse)


def _paged_indices(inputs: PagedAttentionInputs) -> dict[str, torch.Tensor]:
    metadata = inputs.metadata
    return {
        "kv_indptr": metadata.paged_kv_indptr,
        "seq_lens": metadata.seq_lens,
        "page_ids": metadata.paged_kv_indices,
    }


def _scale(scale: float | torch.Tensor, kv_heads: int) -> tuple[float, torch.Tensor | None]:
    """Return a scale as one number and as one of each key-value head, of which one is neutral."""
    if isinstance(scale, torch.Tensor):
        return 1.0, scale.to(torch.float32).reshape(-1).expand(kv_heads).contiguous()
    return scale, None
