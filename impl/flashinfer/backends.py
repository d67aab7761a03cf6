"""FlashInfer's backends: what the adapters to one of them declare alike, said once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...reference import Arithmetic, AttentionProblem
from ..protocol import CompileKey, Implementation, Library, Operation, implementation
from ..targets.backends import FLASHINFER
from ..targets.target import Target
from .claims import Refuses, either
from .libraries import attention_library

FLOAT32 = Arithmetic()
"""Rounds nothing below float32."""


@dataclass(frozen=True)
class Backend:
    """What the adapters to a backend declare.

    The fields are options of ``implementation``. A backend for other calls is
    ``dataclasses.replace`` of this one, an adapter that differs in an option names it.
    """

    backend: str
    arithmetic: Arithmetic = FLOAT32
    wide_arithmetic: tuple[tuple[int, Arithmetic], ...] = ()
    features: tuple[str, ...] = ()
    compile_key: CompileKey | None = None
    build_ahead: bool = False
    build_minutes: float = 1.0
    library: Library | None = None
    tile: int = 0
    split: int = 0
    decodes: bool = False
    writes_out: bool = False
    hidden_keys: Literal["any", "finite"] = "any"

    def adapter(
        self,
        operation: Operation,
        name: str,
        *refusals: Refuses,
        **differences: Any,  # noqa: ANN401  options of ``implementation``
    ) -> Callable[[Callable[[Any], Any]], Implementation]:
        """Make an adapter of a function, for use as a decorator.

        Args:
            operation: the operation of the adapter.
            name: how reports call it.
            *refusals: asked in turn; the first reason counts.
            **differences: options of ``implementation`` in which it differs from its backend.
        """
        options = {**vars(self), "provider": FLASHINFER, **differences}
        if operation != "paged_attention":  # only a cache has pages that an engine frees
            options["hidden_keys"] = "any"
        refuses = either(*refusals)

        def supports(problem: Any, target: Target) -> bool | str:  # noqa: ANN401  its operation's
            return refuses(problem, target) or True

        return implementation(operation, name=name, supports=supports, **options)


def one_module(name: str) -> CompileKey:
    """Return the compile key of a module that serves all problems."""
    return lambda _: name


def module_key(problem: AttentionProblem) -> Hashable:
    """Return what FlashInfer builds an attention module for, whatever the backend."""
    return (
        problem.dtype,
        problem.q_dtype,
        problem.kv_element,
        problem.head_dim_qk,
        problem.head_dim_vo,
        problem.window_left >= 0,
        problem.logits_soft_cap > 0,
        problem.custom_mask or problem.tree > 0,  # packing its bits is a module of its own
    )


def xqa_module_key(problem: AttentionProblem) -> Hashable:
    """Return what XQA builds a module for: pages, group sizes and query tokens, too."""
    # Its kernels read a mask wherever there are several query tokens, of a tree or causal.
    key = module_key(replace(problem, tree=0))
    return key, problem.page_size, problem.group_size, problem.most_queries


MERGED_ABOVE = 4 * 65
"""Keys: a part has 65 of them or more (whole pages, about 128 keys), and the kernel that merges
parts has at least 4 rows of threads, each of which stores what it merged in the output's dtype."""
SPLIT = 128
"""Keys of the shortest part of a request that ``scheduler.cuh`` plans, in whole pages."""
# ``large_caches`` is of decode without tensor cores and of FA2: ``paged_kv_t`` of ``page.cuh`` has
# offsets of ``size_t``. Rows of queries are multiplied in 32 bits (``q_stride_n``), and so are the
# pages of MLA with FA2 (``indices[q] * ckv_stride_page`` of ``mla.cuh``).
_PREFILL = Arithmetic(
    probabilities="inputs",
    row_sum="probabilities",
    partial_outputs=True,
    merged_outputs=MERGED_ABOVE,
    tanh="approximate",
)
# build_minutes are of one core, for a module of 0.7.2.post1 for SM90, measured with nvcc 13.0 on
# 16 cores.
CUDA_CORE = Backend(
    "cuda-core",
    Arithmetic(partial_outputs=True, merged_outputs=MERGED_ABOVE, tanh="approximate"),
    features=("fp8_kv", "large_caches"),
    compile_key=module_key,
    build_ahead=True,
    library=attention_library("batch_decode"),
    build_minutes=1.5,
    split=SPLIT,
    hidden_keys="finite",
)
"""Decode without tensor cores (``decode.cuh``). On an H100 its outputs are NaN where a page behind
the window holds NaN (0.7.2.post1), and so are those of FA3 and XQA; FA2's are not."""
FA2 = Backend(
    "fa2",
    _PREFILL,
    ((512, replace(_PREFILL, row_sum="accumulate", exponent="fused")),),
    ("fp8_kv", "nvfp4_kv", "large_caches"),
    module_key,
    build_ahead=True,
    library=attention_library("batch_prefill", "fa2"),
    build_minutes=5.5,
    split=SPLIT,
)
"""``prefill.cuh``: row sums by m16k16_rowsum_f16f16f32, ``tmp_v`` of the output's dtype. Where
values have 512 channels, ``vosplit_softmax_store_p`` sums probabilities before they are rounded, so
that the exponent's rounding (s c - round(m c), fused) shows."""
FA3 = Backend(
    "fa3",
    Arithmetic(
        probabilities="inputs", exponent="fused", tanh="approximate", fp8_products="fixed_point"
    ),
    features=("fp8_kv", "fp8_q", "per_head_scales"),
    compile_key=module_key,
    build_ahead=True,
    library=attention_library("batch_prefill", "fa3"),
    build_minutes=15.0,
    tile=192,  # with 128 channels and no causal mask; 128 or 64 elsewhere
    hidden_keys="finite",
)
"""``hopper/attention_updater.cuh``: row sums before the rounding, no split."""
TRTLLM_GEN = Backend(
    "trtllm-gen",
    Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused"),
    features=("fp8_kv", "fp8_q", "nvfp4_kv", "interleaved_v_scales", "host_bounds"),
    compile_key=one_module("trtllm-gen"),
)
"""Binaries: at least what FlashInfer's CUTLASS-like sources round elsewhere."""
XQA = Backend(
    "xqa",
    Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused"),
    features=("tree", "fp8_kv", "nvfp4_kv", "host_bounds"),
    compile_key=xqa_module_key,
    build_ahead=True,
    library=attention_library("xqa"),
    build_minutes=6.0,
    hidden_keys="finite",
)
"""``xqa/mha.cu``: exp2(s c - m c); probabilities rounded as they are stored, and once more where a
later tile has a larger maximum, after the row sum; outputs of warps and blocks in the output's
dtype. ``xqa/mha_sm90.cu``: probabilities times 448 in FP8, row sums before that rounding."""
CUDA = Backend("cuda")
"""Kernels of an operation that has no choice of backends."""
TRITON = Backend("flashinfer-triton")
"""FlashInfer's Triton kernels."""
TRACE = Backend("flashinfer-trace")
"""FlashInfer's published references, in PyTorch."""
