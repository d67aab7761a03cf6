"""What a cluster's machines are sent, and what each of them can run.

It imports nothing that a machine may lack.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...fixtures import FOLDER
from ...impl.targets.unpacked import FROM, folders

PACKAGE = __package__.split(".")[0]
RELEASES = f"{PACKAGE}_releases"
"""The package that holds the folders of releases on a machine."""
PARTS = ("ci", "fixtures", "impl", "properties", "reference")


def packed(folder: Path) -> list[str]:
    """Copy what machines need into a folder, and return the packages there."""
    root, unused = FOLDER.parent, shutil.ignore_patterns("__pycache__", "test_*.py")
    package = folder / PACKAGE
    package.mkdir(parents=True)
    for file in root.glob("*.py"):
        shutil.copy2(file, package)
    for part in PARTS:
        shutil.copytree(root / part, package / part, ignore=unused)
    if not folders():
        return [str(package)]
    for number, release in enumerate(folders()):
        shutil.copytree(release, folder / RELEASES / str(number), ignore=_no_source)
    return [str(package), str(folder / RELEASES)]


def _no_source(folder: str, names: list[str]) -> list[str]:
    """Return the files that are neither Python nor name a version: gigabytes of a release."""
    kept = (".py", ".toml", "METADATA", "PKG-INFO")
    return [name for name in names if not (Path(folder, name).is_dir() or name.endswith(kept))]


def unpack() -> None:
    """Have this process and its workers find the folders that it was sent."""
    found = importlib.util.find_spec(RELEASES)
    if found is not None and found.submodule_search_locations:
        place = Path(next(iter(found.submodule_search_locations)))
        os.environ[FROM] = os.pathsep.join(map(str, sorted(place.iterdir())))


@dataclass(frozen=True)
class Facts:
    """A machine.

    Attributes:
        refusal: why it cannot be used; empty where it can.
        sm: compute capability of its GPU, such as 90; None without one.
        jobs: units that share one GPU.
        python: its version.
        identity: what results depend on of it, see ``machine_identity``.
    """

    refusal: str = ""
    sm: int | None = None
    jobs: int = 1
    python: str = ""
    identity: dict[str, Any] = field(default_factory=dict)


def look(device: str) -> Facts:
    """Return what this machine can run on a device."""
    python = platform.python_version()
    try:
        from ...impl import Target, UnsupportedError
        from ...properties.search.engine import usual_jobs  # and with it all that a unit needs
        from ..answers.identity import machine_identity
    except ImportError as error:
        return Facts(f"it has no {error.name or error}", python=python)
    try:
        sm, jobs = Target.here(device).sm, usual_jobs(device)
        return Facts("", sm, jobs, python, machine_identity(device))
    except UnsupportedError as error:
        return Facts(str(error), python=python)
