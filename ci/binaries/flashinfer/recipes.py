"""What FlashInfer's launchers of precompiled kernels are built of, for attention and for MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...compile.generating import Release
from .gemms import HEADER as GEMM_HEADER
from .kernels import HEADER, PLACE, KernelList
from .questions import GEMM, MOE

SOURCES = ("trtllm_fmha_kernel_launcher.cu", "fmhaReduction.cu")
"""The sources of FlashInfer's module of trtllm-gen attention."""
PARAMETERS = Path(__file__).with_name("parameter_struct.cu")
"""Our own source beside them."""
UNUSED_HEADERS = ("nvrtc.h", "cublasLt.h", "cublas_v2.h")
"""Headers that a launcher includes without a use: empty ones serve where CUDA is not whole."""
MOE_SOURCES = (
    *("trtllm_batched_gemm_runner.cu", "trtllm_fused_moe_kernel_launcher.cu"),
    "trtllm_fused_moe_runner.cu",
    *(
        f"nv_internal/cpp/common/{name}.cpp"
        for name in ("envUtils", "logger", "stringUtils", "tllmException")
    ),
)
"""The sources of FlashInfer's module of MoE that check a call, and select and launch its GEMMs."""
MOE_LEFT_OUT = ("_ZN3moe3dev", "_ZN12tensorrt_llm7kernels32invokeNvfp4QuantAndPerTokenScale")
"""Begins of symbols of its other sources: kernels that route tokens, activate and add up. They
take most of the time to compile, and functions that do nothing stand for them: limits that they
alone check are not asked."""
MOE_EXPORTS = "trtllmGen_bmm_export"
"""Folder of the headers that come with the list of MoE's kernels."""
GEMM_SOURCES = ("trtllm_gemm_runner.cu", "trtllm_low_latency_gemm_runner.cu")
"""The sources of FlashInfer's two modules of trtllm-gen GEMMs."""
GEMM_EXPORTS = "trtllmGen_gemm_export"
"""Folder of the headers that come with the list of GEMMs."""
MOE_DEFINES = (
    *("TLLM_GEN_EXPORT_INTERFACE", "TLLM_GEN_EXPORT_FLASHINFER", "TLLM_ENABLE_CUDA"),
    *("ENABLE_BF16", "ENABLE_FP8", "ENABLE_FP4", "CUTLASS_ENABLE_GDC_FOR_SM100=1"),
)
_STATUSES = (
    *("SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH"),
    *("MAPPING_ERROR", "EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_SUPPORTED", "LICENSE_ERROR"),
)
# The launcher of MoE names what a call of cuBLAS may answer, and calls none.
_CUBLAS = "#include <cmath>\nenum cublasStatus_t {{ {} }};\n".format(
    ", ".join(f"CUBLAS_STATUS_{name}" for name in _STATUSES)
)


@dataclass(frozen=True)
class Recipe:
    """What one launcher is built of.

    Attributes:
        sources: the files to compile.
        headers: the list of kernels, and the headers that sources may include.
        includes: folders of headers.
        flags: further words for the compiler.
        stubs: the text of headers that stand for parts of CUDA, by their names.
        title, takes: what is built, and how long that takes.
        links: folders that sources include by another name.
        left_out: begins of symbols that no source has: functions that do nothing stand for them.
    """

    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    includes: tuple[Path, ...]
    flags: tuple[str, ...]
    stubs: Mapping[str, str]
    title: str
    takes: str
    links: Mapping[str, Path] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def recipe_of(operation: str, release: Release, kernels: KernelList) -> Recipe:
    """Return what the launcher of a release is built of, for MoE, GEMMs or attention."""
    recipes = {MOE: _experts, GEMM: _products}
    return recipes.get(operation, _attention)(release, kernels)


def _attention(release: Release, kernels: KernelList) -> Recipe:
    data = release.folder / "flashinfer" / "data"
    return Recipe(
        sources=(*(data / "csrc" / name for name in SOURCES), PARAMETERS),
        headers=(kernels.folder / HEADER, *_headers(data)),
        includes=(*_includes(data), kernels.folder),
        flags=(
            f'-DTLLM_GEN_FMHA_CUBIN_PATH="{kernels.artifact}/{PLACE}/"',
            '-DTLLM_GEN_FMHA_METAINFO_HASH=""',
        ),
        stubs=dict.fromkeys(UNUSED_HEADERS, ""),
        title=f"the launcher of attention of flashinfer {release.version}",
        takes="about a minute",
    )


def _experts(release: Release, kernels: KernelList) -> Recipe:
    data = release.folder / "flashinfer" / "data"
    own = data / "csrc" / "nv_internal"
    exported = kernels.folder / MOE_EXPORTS
    place = f"{kernels.artifact}/{kernels.folder.parent.name}"
    return Recipe(
        sources=tuple(data / "csrc" / name for name in MOE_SOURCES),
        headers=(
            kernels.folder / GEMM_HEADER,
            *sorted([*_headers(data), *exported.rglob("*.h"), *own.rglob("*.*h")]),
        ),
        includes=(*_includes(data), own, own / "include", kernels.folder),
        flags=(
            *(f"-D{name}" for name in MOE_DEFINES),
            f'-DTLLM_GEN_GEMM_CUBIN_PATH="{place}"',
        ),
        stubs={**dict.fromkeys((*UNUSED_HEADERS, "curand_kernel.h"), ""), "cublas_v2.h": _CUBLAS},
        title=f"the launcher of MoE of flashinfer {release.version}",
        takes="some minutes",
        links={f"flashinfer/trtllm/batched_gemm/{MOE_EXPORTS}": exported},
        left_out=MOE_LEFT_OUT,
    )


def _products(release: Release, kernels: KernelList) -> Recipe:
    data = release.folder / "flashinfer" / "data"
    exported = kernels.folder / GEMM_EXPORTS
    place = f"{kernels.artifact}/{kernels.folder.parent.name}"
    return Recipe(
        sources=tuple(data / "csrc" / name for name in GEMM_SOURCES),
        headers=(
            kernels.folder / GEMM_HEADER,
            *sorted([*_headers(data), *exported.rglob("*.h")]),
        ),
        includes=(*_includes(data), kernels.folder),
        flags=(
            *(f"-D{name}" for name in MOE_DEFINES[:3]),
            f'-DTLLM_GEN_GEMM_CUBIN_PATH="{place}"',
        ),
        stubs=dict.fromkeys(UNUSED_HEADERS, ""),
        title=f"the launchers of GEMMs of flashinfer {release.version}",
        takes="about a minute",
        links={f"flashinfer/trtllm/gemm/{GEMM_EXPORTS}": exported},
    )


def _headers(data: Path) -> list[Path]:
    return sorted([*(data / "include").rglob("*.*h"), *(data / "csrc").rglob("*.h*")])


def _includes(data: Path) -> list[Path]:
    return [
        *(data / "cccl" / part for part in ("libcudacxx/include", "cub", "thrust")),
        *(data / part for part in ("include", "csrc", "cutlass/include")),
    ]
