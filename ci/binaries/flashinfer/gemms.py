"""The lists of precompiled GEMMs of a FlashInfer release, of its MoE and its FP4 and FP8 calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...releases.sandboxes import quietly
from .kernels import Kernel, KernelList, KernelListError, artifact_path, root_with

HEADER = "flashinferMetaInfo.h"
_ROW = re.compile(r'^\{nullptr, \d+, (\d+), "(\w+)", \d+, "([0-9a-f]{64})"', re.MULTILINE)
_BUILD = re.compile(r"_sm(\d+[af]?)$")
_BEGIN = "\n{nullptr,"
_LENGTH = re.compile(r"ListLen = (\d+);")


class Gemms(NamedTuple):
    """A family of precompiled GEMMs.

    Attributes:
        artifact: FlashInfer's name for the artifact that they are.
        title: what their list is called.
        callers: pattern of the names of FlashInfer's functions that may launch them.
    """

    artifact: str
    title: str
    callers: str

    def may_be_called(self, texts: Sequence[bytes]) -> bool:
        """Whether some source of an engine names such a function; also where there is no source."""
        pattern = re.compile(self.callers.encode())
        return not texts or any(map(pattern.search, texts))


FAMILIES = (
    Gemms("TRTLLM_GEN_BMM", "trtllm-gen GEMMs of MoE", r"\btrtllm_\w*moe\b"),
    Gemms("TRTLLM_GEN_GEMM", "trtllm-gen GEMMs", r"\b(mm_(fp4|fp8|mxfp8)|gemm_fp8_nt_groupwise)\b"),
)


def find_gemms(
    release: Path, version: str, family: Gemms, *, tell: Callable[[str], None] = quietly
) -> KernelList:
    """Find the list of a family of a release, as ``find_kernels`` does that of attention.

    Raises:
        KernelListError: it is nowhere, or cannot be read.
        SandboxMachineError: the package index cannot be reached.
    """
    path = artifact_path(release, family.artifact)
    header = Path(path, "include", HEADER)
    root = root_with(header, family.artifact, version, folders=(release,), tell=tell)
    return read_gemms(root, path)


def read_gemms(root: Path, path: str) -> KernelList:
    """Read the list of a family, of an artifact with its folder.

    Raises:
        KernelListError: it cannot be read.
    """
    header = root / path / "include" / HEADER
    try:
        text = header.read_text(encoding="utf-8")
        kernels = tuple(_kernel(*row.groups()) for row in _ROW.finditer(text))
    except (OSError, ValueError) as error:
        message = f"{header}: no list of kernels can be read ({error})"
        raise KernelListError(message) from error
    # The list of 0.6.6 does not state its length.
    stated = _LENGTH.search(text)
    length = int(stated[1]) if stated else text.count(_BEGIN)
    if not length or len(kernels) != length:
        message = f"{header}: no list of kernels can be read ({len(kernels)} of {length} rows)"
        raise KernelListError(message)
    return KernelList(path.split("/", maxsplit=1)[0], header.parent, root, kernels)


def _kernel(shared: str, name: str, digest: str) -> Kernel:
    build = _BUILD.search(name)
    if build is None:
        message = f"{name} names no build"
        raise ValueError(message)
    return Kernel(name, build[1], int(shared), digest, {})
