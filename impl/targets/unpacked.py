"""Packages of serving engines that lie unpacked in folders: where they are, which version it is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

FROM = "KERNELPROOF_FROM"
"""The environment variable whose folders are searched first, separated as in ``PATH``."""
INSIDE = ("", "python", "src")
"""Places of the package within a folder: directly, as wheels have it, or as source archives do."""
VERSION = re.compile(r"^(?:__version__|version)\b[^'\"\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A package of Python files.

    Attributes:
        name: the name that it is imported by.
        folder: its own, with its ``__init__.py``.
        version: None where nothing in the folder says it.
    """

    name: str
    folder: Path
    version: str | None

    @property
    def title(self) -> str:
        """Its name and version."""
        return f"{self.name} {self.version or '(of unknown version)'}"


def package_in(folder: Path, name: str) -> Package | None:
    """Return the package of this name in an unpacked wheel or source archive; None without one."""
    for inside in INSIDE:
        found = folder / inside / name
        if (found / "__init__.py").is_file():
            return Package(name, found, _version(folder, found))
    return None


def packages_in(folder: Path) -> list[Package]:
    """Return all packages in an unpacked wheel or source archive, by their names."""
    inits = (each for inside in INSIDE for each in (folder / inside).glob("*/__init__.py"))
    found = (package_in(folder, name) for name in sorted({each.parent.name for each in inits}))
    return list(filter(None, found))


def unpacked(name: str) -> Package | None:
    """Return the package of this name in the first folder of ``FROM`` that has it."""
    found = (package_in(folder, name) for folder in folders())
    return next(filter(None, found), None)


def folders() -> list[Path]:
    """Return the folders that the environment variable names."""
    return [Path(part) for part in os.environ.get(FROM, "").split(os.pathsep) if part]


@cache  # support is asked thousands of times, and the file is long
def _version(folder: Path, package: Path) -> str | None:
    """Return the version that files beside or in a package say; no code of its runs."""
    beside = metadata.distributions(name=package.name, path=[str(package.parent)])
    # A source archive has PKG-INFO in its own folder.
    for found in (*beside, metadata.Distribution.at(folder)):
        said: str | None = found.metadata["Version"] if found.metadata else None
        if said:
            return said
    try:
        text = (package / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return next(iter(VERSION.findall(text)), None)
