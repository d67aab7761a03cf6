"""FlashInfer's own modules, generated for a chip that need not be here; nothing is compiled.

FlashInfer reads the chips that it builds for as it is imported, and a process can hold one release
of it. So this runs as a process of its own, ``python -m kernelproof.impl.flashinfer.modules SM
FILE``, with the release first on PYTHONPATH. It writes to FILE what each unit came to: the commands
that FlashInfer itself would give to nvcc, or the error with which it refuses the chip.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REFUSALS = (RuntimeError, ValueError, NotImplementedError, AssertionError)
"""Exceptions by which FlashInfer refuses to make a module for a chip."""
ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"
PAGED_PREFILL = r"_ZN10flashinfer\d+BatchPrefillWithPagedKVCacheKernel"
XQA = r"_Z\d+kernel_mha"
GENERATED, REFUSED, ABSENT, BROKEN = "generated", "refused", "absent", "broken"


@dataclass(frozen=True)
class Unit:
    """A module, or a part of one, that is compiled as evidence for a cell of the support table.

    Attributes:
        name: what it is found by.
        feature: the cell, by fields of ``gating.Feature``; empty where it has no cell of its own.
        generate: FlashInfer's JIT specification for a chip.
        kernel: a regular expression for the mangled name of the kernel that the cell needs. Where
            a template has no instance for a feature, FlashInfer compiles a throw in its place:
            such objects compile without the kernel, and are no evidence.
        sources: names of the sources to compile; all that nvcc compiles, if empty.
        seconds: roughly what the longest of its objects takes, so that those come first.
    """

    name: str
    feature: Mapping[str, str | int]
    generate: Callable[[int], Any]
    kernel: str
    sources: tuple[str, ...] = ()
    seconds: int = 10


def architecture(sm: int) -> str:
    """Return a chip as FlashInfer's list of architectures has it, without the suffix.

    FlashInfer then picks the suffix as it does for a GPU that is there: 0.6.7 builds sm_120f for
    SM121, 0.7.2.post1 sm_121a.
    """
    return f"{sm // 10}.{sm % 10}"


def _find(module: str, function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"flashinfer.jit.{module}"), function
    )
    return found


def _simple(module: str, function: str) -> Callable[[int], Any]:
    return lambda _: _find(module, function)()


def _attention(function: str, **options: Any) -> Callable[[int], Any]:  # noqa: ANN401  theirs
    bf16, head_dim = torch.bfloat16, options.pop("head_dim", 128)
    common = {
        "dtype_q": bf16,
        "dtype_kv": bf16,
        "dtype_o": bf16,
        "dtype_idx": torch.int32,
        "head_dim_qk": head_dim,
        "head_dim_vo": head_dim,
        "pos_encoding_mode": 0,
        "use_sliding_window": False,
        "use_logits_soft_cap": False,
    }
    return lambda _: _find("attention.modules", function)(**{**common, **options})


def _prefill(backend: str, **options: Any) -> Callable[[int], Any]:  # noqa: ANN401  theirs
    name = "gen_batch_prefill_module"
    return _attention(name, backend=backend, use_fp16_qk_reduction=False, **options)


def _mla(_: int) -> Any:  # noqa: ANN401  a JitSpec
    return _find("attention.modules", "gen_batch_mla_module")(
        backend="fa2",
        dtype_q=torch.bfloat16,
        dtype_kv=torch.bfloat16,
        dtype_o=torch.bfloat16,
        dtype_idx=torch.int32,
        head_dim_ckv=512,
        head_dim_kpe=64,
        use_profiler=False,
    )


def _xqa(kv_dtype: torch.dtype) -> Callable[[int], Any]:
    return lambda _: _find("xqa", "gen_xqa_module")(
        input_dtype=torch.bfloat16,
        kv_cache_dtype=kv_dtype,
        page_size=16,
        head_dim=128,
        head_group_ratio=8,
        use_sliding_window=False,
        output_dtype=torch.bfloat16,
    )


def _cutlass_moe(sm: int) -> Any:  # noqa: ANN401  a JitSpec
    """Choose the module as ``cutlass_fused_moe`` does, by the chip."""
    modules = {89: 89, 90: 90, 100: 100, 107: 100, 110: 100, 103: 103, 120: 120, 121: 120}
    if sm not in modules:
        message = f"cutlass_fused_moe has no module for SM{sm}"
        raise ValueError(message)
    return _find("fused_moe", f"gen_cutlass_fused_moe_sm{modules[sm]}_module")()


def _paged(**fields: str | int) -> dict[str, str | int]:
    return {"operation": "paged_attention", "q_dtype": "bfloat16", "head_dim_qk": 128, **fields}


UNITS: tuple[Unit, ...] = (
    Unit(
        "moe-cutlass-bf16-relu2",
        {
            "operation": "moe",
            "backend": "cutlass",
            "q_dtype": "bfloat16",
            "activation": "relu2",
            "quantisation": "none",
        },
        _cutlass_moe,
        r"_ZN7cutlass6Kernel.*5Relu2",
        ("moe_gemm_kernels_bf16_bf16.cu",),
        seconds=75,
    ),
    Unit(
        "prefill-fa3-bf16-hd128",
        _paged(backend="fa3", phase="prefill"),
        _prefill("fa3"),
        r"_ZN10flashinfer\d+PrefillWithKVCacheKernel",
        seconds=60,
    ),
    Unit(
        "prefill-fa2-bf16-hd512",
        _paged(backend="fa2", phase="prefill", head_dim_qk=512),
        _prefill("fa2", head_dim=512),
        PAGED_PREFILL,
        ("batch_prefill_paged_kernel_mask_1.cu",),
        seconds=60,
    ),
    Unit(
        "prefill-fa2-bf16-kv-nvfp4-hd128",
        _paged(backend="fa2", phase="prefill", kv_dtype="nvfp4"),
        _prefill("fa2", dtype_kv=torch.uint8),
        rf"{PAGED_PREFILL}.*__nv_fp4x2_e2m1",
        ("batch_prefill_paged_kernel_mask_1.cu",),
        seconds=50,
    ),
    Unit(
        "mla-fa2-bf16",
        {"operation": "mla", "backend": "fa2", "head_dim_qk": 576, "q_dtype": "bfloat16"},
        _mla,
        r"_ZN10flashinfer3mla\d+BatchMLAPagedAttentionKernel",
        seconds=50,
    ),
    Unit(
        "xqa-bf16-hd128",
        _paged(backend="xqa", phase="decode"),
        _xqa(torch.bfloat16),
        XQA,
        seconds=40,
    ),
    Unit(
        "xqa-bf16-kv-nvfp4-hd128",
        _paged(backend="xqa", phase="decode", kv_dtype="nvfp4"),
        _xqa(torch.uint8),
        XQA,
        seconds=40,
    ),
    Unit(
        "prefill-fa2-bf16-hd128",
        _paged(backend="fa2", phase="prefill"),
        _prefill("fa2"),
        PAGED_PREFILL,
        seconds=20,
    ),
    Unit(
        "decode-bf16-hd128",
        _paged(backend="cuda-core", phase="decode"),
        _attention("gen_batch_decode_module"),
        r"_ZN10flashinfer\d+BatchDecodeWithPagedKVCacheKernel",
    ),
    Unit(
        "append-paged-kv",
        {"operation": "append_paged_kv", "backend": "cuda", "q_dtype": "bfloat16"},
        _simple("page", "gen_page_module"),
        r"_ZN10flashinfer\d+AppendPagedKVCacheKernel.*__nv_bfloat16",
    ),
    Unit(
        "merge-state",
        {"operation": "merge_state", "backend": "cuda", "q_dtype": "bfloat16"},
        _simple("cascade", "gen_cascade_module"),
        r"_ZN10flashinfer\d+MergeStateKernel.*__nv_bfloat16",
    ),
    Unit(
        "nvfp4-kv-quantise",
        {},
        _simple("fp4_kv_quantization", "gen_fp4_kv_quantization_module"),
        r"_Z\d+nvfp4_quant_kernel.*__nv_bfloat16",
    ),
    Unit(
        "nvfp4-kv-dequantise",
        {},
        _simple("fp4_kv_dequantization", "gen_fp4_kv_dequantization_module"),
        r"_Z\d+nvfp4_dequant\w*_kernel.*__nv_bfloat16",
    ),
)


def generate(unit: Unit, sm: int) -> dict[str, Any]:
    """Return what FlashInfer would compile for a unit and a chip, or why it does not."""
    try:
        specification = unit.generate(sm)
        commands = specification.get_compile_commands()
    except REFUSALS as error:
        return {"state": REFUSED, "message": _told(error)}
    except (ModuleNotFoundError, AttributeError) as error:
        # A module that is missing has a name; an attribute is missing in a module, which has one.
        has_it_not = getattr(error, "obj", None)
        owner = getattr(has_it_not, "__name__", "") if has_it_not else error.name
        absent = str(owner).partition(".")[0] == "flashinfer"
        return {"state": ABSENT if absent else BROKEN, "message": _told(error)}
    except Exception as error:  # noqa: BLE001  one unit must not cost the others
        return {"state": BROKEN, "message": _told(error)}
    objects = [
        {"source": each["file"], "command": shlex.split(each["command"])}
        for each in commands
        if _wanted(unit, Path(each["file"]))
    ]
    if not objects:
        wanted = " or ".join(unit.sources) or "source for nvcc"
        return {"state": ABSENT, "message": f"the module {specification.name} has no {wanted}"}
    return {"state": GENERATED, "module": specification.name, "objects": objects}


def _wanted(unit: Unit, source: Path) -> bool:
    # The host compiler's own files say nothing of a chip.
    return source.name in unit.sources if unit.sources else source.suffix == ".cu"


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main(arguments: Sequence[str]) -> None:
    """Generate the named units, or all, for one chip: SM FILE [UNIT ...]."""
    sm, file, names = int(arguments[0]), Path(arguments[1]), arguments[2:]
    os.environ[ARCHITECTURES] = architecture(sm)
    version = importlib.import_module("flashinfer").__version__
    units = {unit.name: generate(unit, sm) for unit in UNITS if not names or unit.name in names}
    file.write_text(json.dumps({"flashinfer": version, "units": units}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
