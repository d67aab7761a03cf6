"""What FlashInfer's C++ sources, which its wheels carry, admit at run time.

Macros that turn a number into a template argument have a branch for each value that there is; a
kernel launcher checks the chip and the data types that it is called with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .sources import read, where

INCLUDE = Path("data/include/flashinfer")
CSRC = Path("data/csrc")
FMHA_RUNNER = INCLUDE / "trtllm/fmha/fmhaRunner.cuh"
FMHA_KERNELS = INCLUDE / "trtllm/fmha/fmhaKernels.cuh"
MATH = INCLUDE / "math.cuh"
ACTIVATION_SWITCHES = {
    "cutlass": CSRC
    / "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h",
    "trtllm-gen": CSRC / "trtllm_fused_moe_runner.cu",
}
"""Files in which the fused MoE of each backend chooses a kernel by its activation."""
INVALID = "InvalidType"

MACRO = re.compile(r"^#define (DISPATCH_\w+)\((\w+),((?:[^\n]*\\\n)+[^\n]*)", re.MULTILINE)
MACRO_VALUE = re.compile(r"(?:case |== )([\w:]+)\s*[:)]")
RUNNER_CHIPS = re.compile(r"FLASHINFER_CHECK\(\s*(mSM == kSM_\d+f?(?:\s*\|\|\s*mSM == kSM_\d+f?)*)")
RUNNER_DTYPES = re.compile(
    r"FLASHINFER_CHECK\(\s*((m\w+) == DATA_TYPE_\w+(?:\s*\|\|\s*\2 == DATA_TYPE_\w+)*)"
)
COMPATIBLE = re.compile(r"bool isSMCompatible\(.*?\n}", re.DOTALL)
COMPATIBLE_BRANCH = re.compile(r"gpuSM == kSM_(\d+)\)\s*{\s*return ([^;]*);")
LAUNCHER_MAJORS = re.compile(r"TVM_FFI_ICHECK\((major == \d+(?:\s*\|\|\s*major == \d+)*)\)")
ACTIVATION = re.compile(r"case ActivationType::(\w+):")
INFINITY = re.compile(r"constexpr float inf = ([^;]+);")


def dispatch(root: Path) -> dict[str, dict[str, Any]]:
    """Return the values that each dispatch macro of the public headers has a branch for."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((root / INCLUDE).rglob("*.cuh")):
        for match, place in _matches(root, path, MACRO):
            values = [_value(each) for each in MACRO_VALUE.findall(match[3])]
            if values:
                found.setdefault(match[1], {"values": values, "source": place})
    return found


def runner_checks(root: Path) -> dict[str, dict[str, Any]]:
    """Return what trtllm-gen's attention runner accepts: chips, and data types by member."""
    path = root / FMHA_RUNNER
    found: dict[str, dict[str, Any]] = {}
    for match, place in _matches(root, path, RUNNER_CHIPS):
        chips = [int(chip) for chip in re.findall(r"kSM_(\d+)\b", match[1])]
        found["chips"] = {"values": chips, "source": place}
    for match, place in _matches(root, path, RUNNER_DTYPES):
        values = re.findall(r"DATA_TYPE_(\w+)", match[1])
        found.setdefault(match[2], {"values": values, "source": place})
    return found


def compatible_cubins(root: Path) -> dict[str, Any]:
    """Return the architectures of precompiled kernels that each chip may run."""
    for match, place in _matches(root, root / FMHA_KERNELS, COMPATIBLE):
        chips = {
            chip: re.findall(r"kSM_(\d+f?)", kernels)
            for chip, kernels in COMPATIBLE_BRANCH.findall(match[0])
        }
        return {"chips": chips, "source": place}
    return {"chips": {}, "source": ""}


def launcher_majors(root: Path) -> list[dict[str, Any]]:
    """List the majors that trtllm-gen's launchers check for."""
    return [
        {
            "launcher": path.stem,
            "majors": [int(major) for major in re.findall(r"== (\d+)", match[1])],
            "source": place,
        }
        for path in sorted((root / CSRC).glob("trtllm_*.cu"))
        for match, place in _matches(root, path, LAUNCHER_MAJORS)
    ]


def activations(root: Path) -> dict[str, dict[str, Any]]:
    """Return the activations that each backend's fused MoE has a kernel for."""
    found = {}
    for backend, name in ACTIVATION_SWITCHES.items():
        matches = _matches(root, root / name, ACTIVATION)
        cases = [(match[1], place) for match, place in matches if match[1] != INVALID]
        if cases:
            values = list(dict.fromkeys(case for case, _ in cases))
            found[backend] = {"values": values, "source": cases[0][1]}
    return found


def header_constants(root: Path) -> dict[str, dict[str, Any]]:
    """Return the constants whose value is a decision: the number that stands for infinity."""
    for match, place in _matches(root, root / MATH, INFINITY):
        value = match[1].strip()
        return {"inf": {"text": value, "infinite": "infinity" in value, "source": place}}
    return {}


def _matches(
    root: Path, path: Path, pattern: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], str]]:
    """Find a pattern in a C++ file, each time with its place."""
    text = read(path)
    for match in pattern.finditer(text):
        yield match, where(root, path, text.count("\n", 0, match.start()) + 1)


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text.rpartition("::")[2]
