"""The packages whose releases can be compared, and what a comparison of each has.

Another package is one row of `PACKAGES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...impl.targets.backends import CUTLASS_DSL, FLASHINFER, SGLANG, TORCH, TRITON, VLLM

SURFACE, DECLARED, BEHAVIOUR, SPEED = "surface", "declarations", "behaviour", "speed"
BINARIES = "binaries"
PARTS = (SURFACE, DECLARED, BINARIES, BEHAVIOUR, SPEED)
"""Names of the parts of a comparison."""
PROVIDED, COMPILED, EVERYTHING = "provided", "compiled", "everything"
"""Implementations that a release may change: those that come from the package, those whose kernels
it compiles, or all."""


@dataclass(frozen=True)
class Package:
    """A package whose releases are compared.

    Attributes:
        name: the name that ``--package`` takes.
        distribution: the distribution that pip installs.
        module: the module that is imported.
        judged: which implementations a release may change: ``PROVIDED``, ``COMPILED`` or
            ``EVERYTHING``.
        parts: the parts of ``PARTS``, those that a comparison has.
        on_request: those of them that are compared only if they are named.
        whole: whether a side that is an interpreter makes all implementations judged, whatever
            package they come from.
        sources: whether a release is its Python files only, which nothing is to import as a whole.
        kept: ends of the names of a wheel's files that are kept of a package of ``sources``.
        sampled: pattern of names of files of which a few are kept too: of those for which its group
            is the same, the first; none if empty.
        unfetched: why a version or a wheel cannot be a side; empty where it can.
        stands_alone: whether a release can be imported beside other releases of what it depends on.
    """

    name: str
    distribution: str
    module: str
    judged: str
    parts: tuple[str, ...] = (SURFACE, BEHAVIOUR, SPEED)
    on_request: tuple[str, ...] = ()
    whole: bool = False
    sources: bool = False
    kept: tuple[str, ...] = (".py", ".dist-info/METADATA", ".dist-info/RECORD")
    sampled: str = ""
    unfetched: str = ""
    stands_alone: bool = True

    def keeps(self, names: Sequence[str]) -> list[str]:
        """Return which of a wheel's files are kept of a package of ``sources``."""
        samples: dict[str, str] = {}
        for name in names if self.sampled else ():
            if found := re.search(self.sampled, name):
                samples.setdefault(found[1], name)
        return [*(name for name in names if name.endswith(self.kept)), *samples.values()]

    @property
    def usual_parts(self) -> tuple[str, ...]:
        """The parts that are compared if none is named."""
        return tuple(part for part in self.parts if part not in self.on_request)

    @property
    def libraries_only(self) -> bool:
        """Whether all that is compared of it is the device code of its libraries."""
        return self.parts == (BINARIES,)

    @property
    def marker(self) -> Path:
        """The file that a folder with the package holds."""
        return Path(self.module, "__init__.py")

    @property
    def metadata(self) -> str:
        """The pattern of the folder that pip makes for its metadata."""
        return f"{self.distribution.replace('-', '_')}-*.dist-info"


FLASHINFER_PACKAGE = Package(
    "flashinfer",
    FLASHINFER,
    "flashinfer",
    PROVIDED,
    parts=(SURFACE, DECLARED, BINARIES, BEHAVIOUR, SPEED),
    on_request=(BINARIES,),  # some 800 MB to download, and minutes of questions
    whole=True,
)
"""The package that is compared if no other is named."""
KERNELS_PACKAGE = Package(
    "flashinfer-cubin",
    "flashinfer-cubin",
    "flashinfer_cubin",
    PROVIDED,
    sources=True,
    # 20 MB of 460: the lists of kernels. RECORD has the sha256 of each kernel that is left out.
    kept=(".h", "flashinfer_cubin/__init__.py", ".dist-info/METADATA", ".dist-info/RECORD"),
    # One attention kernel of each build, which says what parameters all of them take.
    sampled=r"([0-9a-f]{40}/fmha/trtllm-gen/fmhaSm\d+[af]?Kernel)_[^/]*\.cubin$",
)
"""The package of FlashInfer's precompiled kernels, which is read and not compared."""
PACKAGES: Mapping[str, Package] = {
    each.name: each
    for each in (
        FLASHINFER_PACKAGE,
        Package("triton", TRITON, "triton", COMPILED),
        # Kernelproof calls torch everywhere: there is no list of callables to compare.
        Package("torch", TORCH, "torch", EVERYTHING, parts=(BEHAVIOUR, SPEED), stands_alone=False),
        Package(
            "vllm",
            VLLM,
            "vllm",
            PROVIDED,
            parts=(SURFACE, BINARIES, BEHAVIOUR, SPEED),
            sources=True,
        ),
        Package("sglang", SGLANG, "sglang", PROVIDED, sources=True),
        Package(
            "sglang-kernel",
            "sglang-kernel",
            "sgl_kernel",
            PROVIDED,
            parts=(BINARIES,),
            sources=True,
        ),
        Package("lmdeploy", "lmdeploy", "lmdeploy", PROVIDED, parts=(BINARIES,), sources=True),
        Package(
            CUTLASS_DSL,
            CUTLASS_DSL,
            "cutlass",
            COMPILED,
            parts=(BEHAVIOUR, SPEED),
            unfetched="its wheel holds no code, which lies in distributions that differ by "
            "release: give a Python interpreter that has it, or the folder that holds cutlass",
        ),
    )
}
"""Packages by the name that ``--package`` takes."""
