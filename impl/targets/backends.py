"""Names of the backends that the support rules speak of, and the distributions they come in."""

from __future__ import annotations

from collections.abc import Mapping

FLASHINFER, KERNELPROOF, TORCH = "flashinfer-python", "kernelproof", "torch"
VLLM, SGLANG = "vllm", "sglang"
"""Distributions that built-in implementations come from."""
TRITON, CUTLASS_DSL = "triton", "nvidia-cutlass-dsl"
"""Distributions that compile kernels when they are called."""
PROVIDERS: Mapping[str, str] = {
    "trtllm-gen": FLASHINFER,
    "xqa": FLASHINFER,
    "fa3": FLASHINFER,
    "fa2": FLASHINFER,
    "fa2-sinks": FLASHINFER,
    "cuda-core": FLASHINFER,
    "cutlass": FLASHINFER,
    "cudnn": FLASHINFER,
    "cute-dsl": FLASHINFER,
    "b12x": FLASHINFER,
    "group-gemm": FLASHINFER,
    "cuda": FLASHINFER,
    "triton": KERNELPROOF,
    "flashinfer-triton": FLASHINFER,
    "flashinfer-trace": FLASHINFER,
    "engine-triton": VLLM,
    "deep-gemm": VLLM,
    "marlin": VLLM,
    "torch-sdpa": TORCH,
    "reference": KERNELPROOF,
}
"""The distribution whose version decides what a backend can do, by backend. A backend of another
library is one line here.

``fa2-sinks``: FA2 built for sinks, by a wrapper of its own. ``cuda-core``: decode without tensor
cores. ``group-gemm``: experts whose products are FlashInfer's
(``SegmentGEMMWrapper``), with torch around them. ``cuda``: FlashInfer's kernels of an operation
that has no choice of backends. ``triton``: Kernelproof's own. ``flashinfer-triton`` and
``flashinfer-trace``: the Triton kernels and the pure PyTorch references in FlashInfer's wheel.
``engine-triton``: the serving stack's own Triton kernels, vLLM's for one. ``deep-gemm`` and
``marlin``: DeepGEMM and the Marlin kernels, as serving stacks ship them."""
OWN_BACKENDS = frozenset(name for name, of in PROVIDERS.items() if of == KERNELPROOF)
"""Names of Kernelproof's own kernels and references, which an engine does not have."""
COMPILERS: Mapping[str, str] = {
    "triton": TRITON,
    "flashinfer-triton": TRITON,
    "engine-triton": TRITON,
    "cute-dsl": CUTLASS_DSL,
    "b12x": CUTLASS_DSL,
    VLLM: TRITON,
    SGLANG: TRITON,
}
"""The distribution that compiles kernels when they are called, by their backend; by their provider
where they have no backend."""
BACKENDS = tuple(PROVIDERS)
"""Names of all backends."""
FLASHINFER_BACKENDS = frozenset(name for name, of in PROVIDERS.items() if of == FLASHINFER)
"""Names of FlashInfer's backends."""
