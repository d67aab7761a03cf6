"""The list of precompiled attention kernels that a FlashInfer release launches from.

A release names its list by a hash (``ArtifactPath.TRTLLM_GEN_FMHA``). The list is a C++ header of
the package flashinfer-cubin, which several releases may share.
"""

from __future__ import annotations

import base64
import csv
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ....impl.gating import load_rules
from ....impl.gating.rules import parse_version
from ....impl.targets.cache import cache_folder
from ....impl.targets.capability import parse_capability
from ...compile.bodies import parameter_bytes
from ...compile.fatbins import CodeError
from ...console.errors import MachineError
from ...releases.packages import KERNELS_PACKAGE
from ...releases.sandboxes import (
    SandboxError,
    installed_folder,
    installed_version,
    quietly,
    sandbox,
)

ATTENTION = "TRTLLM_GEN_FMHA"
"""FlashInfer's name for the artifact with the attention kernels."""
PLACE = "fmha/trtllm-gen"
"""Folder of the attention kernels below their hash."""
HEADER = "flashInferMetaInfo.h"
KERNELS = Path(KERNELS_PACKAGE.module, "cubins")
"""Folder of the hashes in a release of flashinfer-cubin."""
VARIABLE = "FLASHINFER_CUBIN_DIR"
_ARTIFACT = r'^\s*{}: str = \(?\s*"([0-9a-f]{{40}}/[^"]*?)/?"'
_STRUCT = re.compile(r"struct TllmGenFmhaKernelMetaInfo\s*\{(.*?)\};", re.DOTALL)
_TABLE = "sTllmGenFmhaKernelMetaInfos[]"
_ROW = re.compile(r"^\{\s*(.*?)\s*\},?\s*$", re.MULTILINE)
_BUILD = re.compile(r"kSM_(\d+)([af]?)")


class KernelListError(MachineError):
    """A list of kernels that is not there or cannot be read; the message says which."""


@dataclass(frozen=True)
class Kernel:
    """One precompiled kernel, a row of the list.

    Attributes:
        name: the name of its entry point.
        build: the chip or family that it is built for: ``100``, ``100f``, ``103``.
        shared_memory: dynamic shared memory in bytes.
        sha256: the hash of its file.
        fields: all columns of its row.
    """

    name: str
    build: str
    shared_memory: int
    sha256: str
    fields: Mapping[str, str]

    def runs_on(self, sm: int) -> bool:
        """Whether the launcher considers it on a chip: its own builds and those of its family."""
        chip, suffix = _BUILD.fullmatch(f"kSM_{self.build}").groups()  # type: ignore[union-attr]
        number = parse_capability(chip)
        return number == sm or (suffix == "f" and number // 10 == sm // 10 and number <= sm)


@dataclass(frozen=True)
class KernelList:
    """The attention kernels of one artifact.

    Attributes:
        artifact: the hash that names it.
        folder: the folder with the header.
        root: the folder of the hashes.
        kernels: the rows of the list.
    """

    artifact: str
    folder: Path
    root: Path
    kernels: tuple[Kernel, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Kernel]:
        """The kernels by the name of their entry point."""
        return {kernel.name: kernel for kernel in self.kernels}

    @cached_property
    def parameter_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters that kernels take, by build: of the first whose file is there.

        A folder that was kept before such files were has none.
        """
        place, found = self.root / self.artifact / PLACE, dict[str, int]()
        for name in sorted(file.stem for file in place.glob("*.cubin")):
            kernel = self.by_name.get(name)
            if kernel is not None and kernel.build not in found:
                cubin = (place / f"{name}.cubin").read_bytes()
                with suppress(CodeError):
                    found[kernel.build] = parameter_bytes(cubin, name)
        return found

    @cached_property
    def shipped(self) -> Mapping[str, str]:
        """Hashes of the kernels' files by entry point; an empty one where it was not computed."""
        place = f"{self.folder.parent.relative_to(self.root).as_posix()}/"
        record = next(self.root.parent.parent.glob(KERNELS_PACKAGE.metadata + "/RECORD"), None)
        if record is None:
            return {file.stem: "" for file in (self.root / place).glob("*.cubin")}
        begins = f"{KERNELS.as_posix()}/{place}"
        with record.open(encoding="utf-8", newline="") as lines:
            return {
                Path(name).stem: _hexadecimal(digest)
                for name, digest, _ in csv.reader(lines)
                if name.startswith(begins) and name.endswith(".cubin")
            }


def _hexadecimal(digest: str) -> str:
    """Return the hash of a line of RECORD, which is in base 64 without its padding."""
    _, _, encoded = digest.partition("=")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()


def read_kernels(root: Path, artifact: str) -> KernelList:
    """Read the list of an artifact.

    Raises:
        KernelListError: it cannot be read.
    """
    header = _header(root, artifact)
    try:
        text = header.read_text(encoding="utf-8")
        columns = re.findall(r"(\w+);", _STRUCT.search(text)[1])  # type: ignore[index]
        # What follows the table in 0.6.6 to 0.6.8 is a second one, which the launcher never reads.
        table = text[text.index(_TABLE) :]
        rows = [
            [value.strip().strip('"') for value in row[1].split(",")]
            for row in _ROW.finditer(table[: table.index("\n};")])
        ]
        kernels = tuple(_kernel(dict(zip(columns, row, strict=True))) for row in rows)
    except (OSError, TypeError, ValueError, KeyError) as error:
        message = f"{header}: no list of kernels can be read ({error})"
        raise KernelListError(message) from error
    return KernelList(artifact, header.parent, root, kernels)


def _kernel(fields: Mapping[str, str]) -> Kernel:
    build = _BUILD.fullmatch(fields["mSM"])
    if build is None:
        message = f"mSM is {fields['mSM']!r}"
        raise ValueError(message)
    return Kernel(
        fields["mFuncName"],
        fields["mSM"].removeprefix("kSM_"),
        int(fields["mSharedMemBytes"]),
        fields["sha256"],
        fields,
    )


def artifact_of(release: Path) -> str:
    """Return the hash by which the release in a folder names its attention kernels.

    Raises:
        KernelListError: it names none.
    """
    return artifact_path(release, ATTENTION).split("/")[0]


def artifact_path(release: Path, artifact: str) -> str:
    """Return the hash of an artifact of the release in a folder, with the folder below it.

    Raises:
        KernelListError: the release has none of that name.
    """
    source = release / "flashinfer" / "artifacts.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    found = re.search(_ARTIFACT.format(artifact), text, re.MULTILINE)
    if found is None:
        message = f"{source}: names no {artifact}"
        raise KernelListError(message)
    return found[1]


def find_kernels(
    release: Path, version: str, *, tell: Callable[[str], None] = quietly
) -> KernelList:
    """Find the list of a release: in what the machine has, else in a wheel of flashinfer-cubin.

    Args:
        release: the folder of the release, which may hold flashinfer_cubin too.
        version: its version.
        tell: function that is called with a line of progress now and then.

    Raises:
        KernelListError: it is nowhere, or cannot be read.
        SandboxMachineError: the package index cannot be reached.
    """
    return kernels_of(artifact_of(release), version, folders=(release,), tell=tell)


def kernels_of(
    artifact: str,
    version: str,
    *,
    folders: Sequence[Path] = (),
    tell: Callable[[str], None] = quietly,
) -> KernelList:
    """Find the list of an artifact, which a version names; see ``find_kernels``."""
    header = Path(artifact, PLACE, "include", HEADER)
    root = root_with(header, ATTENTION, version, folders=folders, tell=tell)
    return read_kernels(root, artifact)


def root_with(
    header: Path,
    artifact: str,
    version: str,
    *,
    folders: Sequence[Path] = (),
    tell: Callable[[str], None] = quietly,
) -> Path:
    """Find the folder of hashes that holds a list: on the machine, else in a wheel.

    Args:
        header: the list, below the folder; it begins with the hash of its artifact.
        artifact: FlashInfer's name for the artifact.
        version: a release that names that hash.
        folders: folders of releases, which may hold flashinfer_cubin too.
        tell: function that is called with a line of progress now and then.

    Raises:
        KernelListError: it is nowhere.
        SandboxMachineError: the package index cannot be reached.
    """
    for root in _roots_here(folders):
        if (root / header).is_file():
            return root
    digest = header.parts[0]
    candidates, refused = _releases_with(digest, version, artifact), ""
    for candidate in candidates:
        try:
            root = sandbox(candidate, KERNELS_PACKAGE, tell=tell) / KERNELS
        except SandboxError as error:
            # Not every release has a wheel of its kernels: 0.6.13 is the last with one.
            if error.exit_code != SandboxError.exit_code:
                raise
            refused = error.message
            continue
        if (root / header).is_file():
            return root
    message = (
        f"flashinfer {version}: no release of flashinfer-cubin with its {artifact} "
        f"({digest[:8]}) can be had; tried {', '.join(candidates)}; {VARIABLE} may name a folder "
        f"that holds {digest[:8]}..." + (f" ({refused})" if refused else "")
    )
    raise KernelListError(message)


def _header(root: Path, artifact: str) -> Path:
    return root / artifact / PLACE / "include" / HEADER


def _roots_here(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of hashes that this machine has."""
    if chosen := os.environ.get(VARIABLE):
        yield Path(chosen).expanduser()
    for folder in folders:
        yield folder / KERNELS
    if installed_version(KERNELS_PACKAGE) is not None:
        yield installed_folder(KERNELS_PACKAGE) / KERNELS
    for kept in sorted((cache_folder() / KERNELS_PACKAGE.name).glob("[!.]*")):
        yield kept / KERNELS


def _releases_with(digest: str, version: str, artifact: str) -> Sequence[str]:
    """Return the releases that ship an artifact: the given one, then others, the oldest first."""
    known = load_rules().versions
    others = [each for each in known if known[each].get(artifact) == digest and each != version]
    return [version, *sorted(others, key=parse_version)]
