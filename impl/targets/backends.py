"""Names of the backends that the support rules speak of."""

from __future__ import annotations

BACKENDS = (
    "trtllm-gen",
    "xqa",
    "fa3",
    "fa2",
    "cuda-core",
    "cutlass",
    "cudnn",
    "cute-dsl",
    "b12x",
    "group-gemm",
    "cuda",
    "triton",
    "flashinfer-triton",
    "flashinfer-trace",
    "torch-sdpa",
    "reference",
)
"""``cuda-core``: decode without tensor cores. ``group-gemm``: experts whose products alone are
FlashInfer's (``SegmentGEMMWrapper``), with torch around them. ``cuda``: FlashInfer's kernels of an
operation that has no choice of backends. ``triton``: Kernelproof's own. ``flashinfer-triton`` and
``flashinfer-trace``: the Triton kernels and the pure PyTorch references in FlashInfer's wheel."""
