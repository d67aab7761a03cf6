"""Kernelproof's own Triton attention: mixed batches in one launch, over pages or ragged keys.

Nothing here waits for the GPU: grids and blocks follow from shapes, lengths are read by the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import torch

from ..reference import Arithmetic, AttentionOutput, AttentionProblem, Problem
from ..reference.inputs import AttentionInputs, PagedAttentionInputs, RaggedAttentionInputs
from .optional import require
from .protocol import implementation
from .target import Target, UnsupportedError
from .triton_blocks import TUNED_ELEMENTS, Blocks, attention_blocks, tuned
from .triton_merge import merge
from .triton_support import ceil_div, finish, require_triton, stored, unavailable

KERNEL = "kernelproof.impl.triton_attention_kernel"
ARITHMETIC = Arithmetic(accumulate="float32", probabilities="inputs")
"""Probabilities are rounded to V's dtype for the second product (not in the interpreter)."""
FEATURES = ("custom_mask", "per_head_scales")
LARGEST_HEAD_DIM = 512
EVERYWHERE = 2**30
"""A window this wide sees all keys; twice as much is still an int32."""
INTERPRETED_SPLITS = 2
"""In the interpreter splits save nothing: as many as show what splitting may do wrong."""
KEYS_A_SPLIT = 256
EXACT_DIVISION = 2**32
"""Keys times page size below which the kernel divides exactly by any page size."""
PROGRAMS_A_MULTIPROCESSOR = 2


def _supports(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(problem, name)
            if dim % 8 or dim > LARGEST_HEAD_DIM:
                return f"{name} must be a multiple of 8 up to {LARGEST_HEAD_DIM}, not {dim}"
    return unavailable(target) or True


def _supports_native_dot(problem: Problem, target: Target) -> bool | str:
    if target.device != "cpu":
        return "this variant is about Triton's interpreter: on a GPU it would be triton-attention"
    if isinstance(problem, AttentionProblem) and problem.dtype != "bfloat16":
        return f"the interpreter's tl.dot is at fault with bfloat16 alone, not {problem.dtype}"
    return _supports(problem, target)


def _compile_key(problem: Problem) -> Hashable:
    """Name the compiled kernel: compile-time constants, and what alignments are guessed from."""
    if not isinstance(problem, AttentionProblem):
        return None
    return (
        problem.dtype, problem.head_dim_qk, problem.head_dim_vo, problem.logits_soft_cap > 0,
        problem.custom_mask, _rows_a_request(problem.num_tokens, len(problem.seq_lens),
                                             problem.group_size),
        problem.num_kv_heads, problem.group_size, problem.page_size, problem.kv_layout,
        problem.strided_q, problem.strided_kv,
    )  # fmt: skip


def _rows_a_request(tokens: int, requests: int, group_size: int) -> int:
    return 1 << (ceil_div(tokens, max(requests, 1)) * group_size - 1).bit_length()


@implementation(
    "paged_attention",
    name="triton-attention",
    backend="triton",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=_compile_key,
)
def paged(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend a mixed batch of prefills and decodes in one launch.

    Args:
        inputs: q [tokens, qo_heads, head_dim_qk] and both caches, NHD or HND, strided or not, in
            float32, float16 or bfloat16; ``out`` and ``lse`` are written where they are given.

    Returns:
        out [tokens, qo_heads, head_dim_vo] in ``out_dtype`` and the natural-log lse
        [tokens, qo_heads] in float32.
    """
    return _Call(inputs).attend()


@implementation(
    "paged_attention",
    name="triton-attention-native-dot",
    backend="triton",
    supports=_supports_native_dot,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
)
def native_dot(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend as ``paged`` does on a GPU, with ``tl.dot`` of bfloat16: wrong in the interpreter."""
    return _Call(inputs, upcast=False).attend()


@implementation(
    "paged_attention",
    name="triton-attention-split-kv",
    backend="triton",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=_compile_key,
)
def split_kv(inputs: PagedAttentionInputs) -> AttentionOutput:
    """Attend in two launches: to ranges of each request's keys, then merge the partial states.

    Decodes of long sequences fill a GPU this way. Shapes and dtypes are those of ``paged``.
    """
    call = _Call(inputs)
    return call.attend_split(call.num_splits())


@implementation(
    "ragged_attention",
    name="triton-ragged-attention",
    backend="triton",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=_compile_key,
)
def ragged(inputs: RaggedAttentionInputs) -> AttentionOutput:
    """Attend requests whose keys lie one after another: the same kernel, without pages.

    Args:
        inputs: q [tokens, qo_heads, head_dim_qk], k [keys, kv_heads, head_dim_qk] and v [keys,
            kv_heads, head_dim_vo] in float32, float16 or bfloat16.

    Returns:
        As ``paged``.
    """
    return _Call(inputs).attend()


class _Call:
    """One call: its tensors as the kernel takes them, and its blocks."""

    def __init__(self, inputs: AttentionInputs, *, upcast: bool = True) -> None:
        require_triton()
        self.inputs = inputs
        q = inputs.q
        self.upcast = upcast and not q.is_cuda
        if isinstance(inputs, PagedAttentionInputs):
            # [pages, slots, kv_heads, dim] whatever the layout: the kernel takes any strides.
            to_slots = (0, 1, 2, 3) if inputs.kv_layout == "NHD" else (0, 2, 1, 3)
            self.k = inputs.k_cache.permute(to_slots)
            self.v = inputs.v_cache.permute(to_slots)
            self.qo_indptr = inputs.metadata.qo_indptr
            self.page_size = inputs.metadata.page_size
            self.most_keys = inputs.metadata.paged_kv_indices.shape[0] * self.page_size
            _check_page_size(self.page_size, self.most_keys)
        else:
            self.k, self.v = inputs.k.unsqueeze(0), inputs.v.unsqueeze(0)
            self.qo_indptr = inputs.qo_indptr
            self.page_size = 1
            self.most_keys = inputs.k.shape[0]
        self.requests = self.qo_indptr.shape[0] - 1
        self.kv_heads = self.k.shape[2]
        self.group_size = q.shape[1] // self.kv_heads
        self.blocks = attention_blocks(
            (q.shape[2], self.v.shape[3]),
            q.element_size(),
            _rows_a_request(q.shape[0], self.requests, self.group_size),
            interpreted=not q.is_cuda,
        )

    def attend(self) -> AttentionOutput:
        """Attend in one launch."""
        result = _buffers(self.inputs, self.v.shape[3])
        written = stored(result.out)
        self._launch(written.unsqueeze(0), result.lse.unsqueeze(0), math.log(2.0))
        finish(result.out, written)
        return result

    def attend_split(self, splits: int) -> AttentionOutput:
        """Attend to so many ranges of the keys and merge them, both in float32."""
        if splits == 1:
            return self.attend()
        result = _buffers(self.inputs, self.v.shape[3])
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
        programs = max(self._tiles() * self.kv_heads, 1)
        wanted = ceil_div(
            PROGRAMS_A_MULTIPROCESSOR * _multiprocessors(self.inputs.q.device), programs
        )
        possible = ceil_div(self.most_keys, KEYS_A_SPLIT * max(self.requests, 1))
        return max(1, min(wanted, possible))

    def _tiles(self) -> int:
        return self.inputs.q.shape[0] * self.group_size // self.blocks.m + self.requests

    def _launch(self, out: torch.Tensor, lse: torch.Tensor, lse_factor: float) -> None:
        """Launch on out [splits, tokens, qo_heads, head_dim_vo], lse [splits, tokens, qo_heads]."""
        inputs, q = self.inputs, self.inputs.q
        if not (q.shape[0] and self.kv_heads):
            return
        paged = isinstance(inputs, PagedAttentionInputs)
        cap = inputs.logits_soft_cap
        k_scale, k_scales = _scale(inputs.k_scale, self.kv_heads)
        v_scale, v_scales = _scale(inputs.v_scale, self.kv_heads)
        arguments: dict[str, Any] = {
            "q": q, "k": self.k, "v": self.v, "out": out, "lse": lse,
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
            "page_size": self.page_size, "page_inverse": ceil_div(EXACT_DIVISION, self.page_size),
            "left": EVERYWHERE if inputs.window_left < 0 else min(inputs.window_left, EVERYWHERE),
            "right": 0 if inputs.causal else EVERYWHERE,
            "scale": inputs.sm_scale * k_scale * (1.0 / cap if cap else math.log2(math.e)),
            "v_scale": v_scale, "soft_cap": cap * math.log2(math.e), "lse_factor": lse_factor,
            "has_sinks": int(inputs.sinks is not None),
            "has_k_scales": int(k_scales is not None), "has_v_scales": int(v_scales is not None),
            **_strides("q", q, "token head dim"),
            **_strides("k", self.k, "page slot head dim"),
            **_strides("v", self.v, "page slot head dim"),
            **_strides("out", out, "split token head dim"),
            **_strides("lse", lse, "split token head"),
            "PAGED": paged, "SOFT_CAP": cap > 0, "CUSTOM_MASK": inputs.custom_mask is not None,
            "UPCAST": self.upcast, "HEAD_DIM_QK": q.shape[2], "HEAD_DIM_VO": self.v.shape[3],
            "BLOCK_QK": self.blocks.qk, "BLOCK_VO": self.blocks.vo, "BLOCK_M": self.blocks.m,
        }  # fmt: skip
        _run((self._tiles(), self.kv_heads, out.shape[0]), self.blocks, arguments)


def _check_page_size(page_size: int, most_keys: int) -> None:
    """Refuse where the kernel's division by the page size, a multiplication, would be off by one.

    Raises:
        UnsupportedError: the page size is no power of two, and the batch too long for it.
    """
    if page_size & (page_size - 1) and most_keys * page_size >= EXACT_DIVISION:
        message = (
            f"page_size {page_size} is no power of two: a batch may then have "
            f"{EXACT_DIVISION // page_size} keys, not {most_keys}"
        )
        raise UnsupportedError(message)


def _run(grid: tuple[int, int, int], blocks: Blocks, arguments: dict[str, Any]) -> None:
    kernel = require(KERNEL, "triton").attention
    q, k = arguments["q"], arguments["k"]
    if q.is_cuda and q.numel() + k.numel() >= TUNED_ELEMENTS:
        tuned(kernel)[grid](**arguments)
        return
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages} if q.is_cuda else {}
    kernel[grid](**arguments, BLOCK_N=blocks.n, **options)


def _buffers(inputs: AttentionInputs, head_dim_vo: int) -> AttentionOutput:
    """Give the buffers for the result: those of the call, or new ones."""
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
    """Give a scale as one number and as one of each key-value head, of which one is neutral."""
    if isinstance(scale, torch.Tensor):
        return 1.0, scale.to(torch.float32).reshape(-1).expand(kv_heads).contiguous()
    return scale, None


def _strides(name: str, tensor: torch.Tensor, axes: str) -> dict[str, int]:
    return {
        f"{name}_{axis}": stride for axis, stride in zip(axes.split(), tensor.stride(), strict=True)
    }


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
