"""What the answers of a journal depend on beside what was asked for: the code that gave them.

A folder, a wheel or an environment has the same name after it was built again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from .... import __version__
from ....impl.registry import resolve_name
from .releases import Release

PACKAGES = ("torch", "triton")
ANSWERING = ("reference", "impl", "properties", "fixtures/support")
"""Folders of Kernelproof whose code the workers run."""
DIGITS = 12
COMPILED = "__pycache__"


def identity_of(releases: Mapping[str, Release], implementations: Iterable[str]) -> dict[str, str]:
    """Return words that are others where code is another.

    Args:
        releases: by side.
        implementations: names or MODULE:NAME.
    """
    found = {f"{side} release": release_identity(each) for side, each in releases.items()}
    for name in implementations:
        path = Path(resolve_name(name).rpartition(":")[0])
        if path.is_file():
            found[f"implementation {path}"] = _digest([path.read_bytes()])
    return {"code of kernelproof": f"{__version__} ({_own_code()})", **found}


def release_identity(release: Release) -> str:
    """Return the version of a release, and what differs in another build of it.

    That is the list of its files with their hashes, as it was installed, or, where somebody may
    have changed them since, each file's size and time.
    """
    named = [each.name for each in sorted(release.folder.glob(release.package.metadata))]
    versions = [name.removesuffix(".dist-info").rpartition("-")[2] for name in named]
    fixed = not (Path(release.given).expanduser().is_dir() or release.own_environment)
    content = _recorded(release) if fixed else _listed(release.folder / release.package.module)
    return ", ".join([*versions, f"files {_digest(content)}", *_packages(release.path)])


def _recorded(release: Release) -> list[bytes]:
    lines: list[bytes] = []
    for metadata in release.folder.glob(release.package.metadata):
        with suppress(OSError):
            lines += (metadata / "RECORD").read_bytes().splitlines()
    return sorted(line for line in lines if line.startswith(f"{release.package.module}/".encode()))


def _listed(package: Path) -> Iterator[bytes]:
    for folder, inner, names in os.walk(package):
        inner[:] = sorted(name for name in inner if name != COMPILED)
        for name in sorted(names):
            with suppress(OSError):  # a link to nowhere
                known = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118  thousands
                yield f"{folder}/{name} {known.st_size} {known.st_mtime_ns}\n".encode()


def _packages(path: Iterable[str]) -> Iterator[str]:
    """Name the packages that decide with a release, as they are installed: ``torch-2.9.1``."""
    for package in PACKAGES:
        for entry in path:
            with suppress(OSError):
                found = sorted(Path(entry).glob(f"{package}-*.dist-info"))
                if found:
                    yield found[0].name.removesuffix(".dist-info")
                    break


def _own_code() -> str:
    root = Path(__file__).resolve().parents[3]
    files = (path for name in ANSWERING for path in sorted((root / name).rglob("*.*")))
    suffixes = (".py", ".toml")
    return _digest(path.read_bytes() for path in files if path.suffix in suffixes)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGITS]
