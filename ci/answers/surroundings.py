"""What results depend on beside code and options, and whether it is as it was; without torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...impl.targets.unpacked import folders
from ...properties.isolation.reads import PROGRAM, Read
from .identity import digest_of, files_of_module, own_code

LARGEST_READ = 4 << 20
"""Bytes of a file above which its size and time stand for its content."""
NO_PART = (
    "_", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "OLDPWD", "PYTEST_CURRENT_TEST", "PWD",
    "SHLVL", "BUILDKITE", "GITHUB_", "RUNNER_", "SSH_", "TERM", "TMUX", "WINDOWID", "XDG_",
)  # fmt: skip
"""Environment variables, or beginnings of them, that change between two equal checks; the first
stands for itself."""


def surroundings(*limits: object) -> dict[str, Any]:
    """Return what results depend on beside the identity that a resumed run has.

    Args:
        limits: the number of workers and the time that were asked for.
    """
    return {
        "all of kernelproof": own_code(("reference", "impl", "properties", "fixtures", "ci")),
        "folder": str(Path.cwd()),
        "limits": [repr(each) for each in limits],
        "interpreter": [sys.version, sys.prefix, repr(sys.flags)],
        "packages": digest_of(name.encode() for name in _distributions()),
        "environment": digest_of(f"{k}={v}\0".encode() for k, v in sorted(_environment().items())),
        "processor": _first_line(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "driver": _first_line(Path("/proc/driver/nvidia/version")),
        "engines": {str(each): _stamps(each) for each in folders()},
    }


def gpus() -> str | None:
    """Return a fingerprint of this machine's GPUs and their parts; None where none is named."""
    root = Path("/proc/driver/nvidia")
    chips = sorted(root.glob("gpus/*/information"))
    parts = sorted(map(str, root.glob("capabilities/gpu*/mig/**/access")))
    told = [content_of(str(file)) for file in chips]
    return digest_of(each.encode() for each in (*told, *parts)) if all(told) and told else None


def _distributions() -> list[str]:
    """Return the names of what is installed, with the versions."""
    folders = sorted({Path(each or ".") for each in sys.path})
    return [
        each.name
        for folder in folders
        if folder.is_dir()
        for each in sorted(folder.iterdir())
        if each.suffix in (".dist-info", ".egg-info")
    ]


def _environment() -> dict[str, str]:
    own, *others = NO_PART
    return {k: v for k, v in os.environ.items() if k != own and not k.startswith((*others,))}


def _first_line(file: Path, begin: str = "") -> str:
    with suppress(OSError, UnicodeDecodeError):
        lines = file.read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(begin)), "")
    return ""


def _stamps(folder: Path) -> str:
    """Return a fingerprint of a folder's files by their sizes and times: engines are large."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                state = Path(place, name).stat()
                found.append(f"{place} {name} {state.st_size} {state.st_mtime_ns}")
    return digest_of(each.encode() for each in sorted(found))


def fingerprints(read: Iterable[Read], since: float = 0.0) -> dict[str, str] | None:
    """Return what was read as it is now; None where that is not known.

    Args:
        read: what processes have read.
        since: time in seconds since the epoch; what was changed after it, but not by these
            processes, is not what they read.
    """
    seen = set(read)
    written = {each.name for each in seen if each.kind == "written"}
    found: dict[str, str] = {}
    for kind, name in seen:
        if kind == PROGRAM:
            return None
        if kind == "module":
            found[f"module {name}"] = _place_of(name)
        elif kind == "file":
            file = _source_of(name)
            if since and name not in written and _changed(file, since):
                return None
            found[f"file {file}"] = content_of(file)
    return found


def as_before(known: Mapping[str, str]) -> bool:
    """Whether what was read is as it was, by its fingerprints then."""
    read = (Read(*each.split(" ", 1)) for each in known)
    return fingerprints(read) == known


def _source_of(name: str) -> str:
    """Return the source of a compiled file of Python, any other file itself."""
    with suppress(ValueError):
        source = importlib.util.source_from_cache(name)
        if Path(source).is_file():
            return source
    return name


def _place_of(module: str) -> str:
    """Return where a module is found by its name: another file of that name may come first."""
    return next((str(each) for each in files_of_module(module)), "")


def _changed(file: str, since: float) -> bool:
    with suppress(OSError):
        state = Path(file).stat()
        return max(state.st_mtime, state.st_ctime) >= since and not Path(file).is_dir()
    return False


def content_of(file: str) -> str:
    """Return a fingerprint of a file; empty where there is none."""
    with suppress(OSError):
        state = Path(file).stat()
        if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            return os.urandom(8).hex()  # a pipe or a device: it is never known to be as it was
        if state.st_size > LARGEST_READ:
            return f"{state.st_size} bytes of {state.st_mtime_ns}"
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return ""
