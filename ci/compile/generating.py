"""What FlashInfer would have nvcc compile for a chip: asked of each release in its own process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from ...impl.flashinfer.modules import BROKEN, GENERATED, UNITS, Unit
from ...impl.gating.rules import OTHER_CHIP
from ..console.errors import UsageRefusedError
from ..releases.sandboxes import DISTRIBUTION
from ..releases.subprocess_runner import run_to_end
from .nvcc import Nvcc, shortened, without_paths

GENERATING_SECONDS = 180.0
"""Most seconds of importing one release and generating its sources for one chip."""
MODULE = "impl.flashinfer.modules"
_CODE = re.compile(r"\bcode=(?:\[?)(?:sm|compute)_(\d+)([af]?)")


@dataclass(frozen=True)
class Release:
    """A FlashInfer release in a folder that can be put first on PYTHONPATH."""

    version: str
    folder: Path


@dataclass(frozen=True)
class Job:
    """One object to compile.

    Attributes:
        command: what FlashInfer would start.
        key: the key of the cache; equal where nothing that is compiled, and nothing that compiles,
            differs.
    """

    release: str
    sm: int
    unit: Unit
    source: str
    command: tuple[str, ...]
    key: str

    @property
    def title(self) -> str:
        """As progress shows it."""
        return f"{self.release} SM{self.sm} {self.unit.name}"


@dataclass(frozen=True)
class Plan:
    """What one unit of one release is on one chip: jobs, or why there are none.

    Attributes:
        state: ``generated``, ``refused``, ``absent``, ``broken``: see ``impl.flashinfer.modules``;
            or ``other-chip``.
    """

    release: str
    sm: int
    unit: Unit
    state: str
    message: str = ""
    architectures: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()


def release_in(folder: Path) -> Release:
    """Find the release in a folder: an unpacked wheel, or a folder that pip installed into.

    Raises:
        UsageRefusedError: there is none.
    """
    found = next(iter(metadata.distributions(name=DISTRIBUTION, path=[str(folder)])), None)
    if found is None or not (folder / "flashinfer" / "__init__.py").is_file():
        message = f"{folder}: there is no {DISTRIBUTION} in this folder"
        raise UsageRefusedError(message)
    return Release(str(Version(found.version)), folder.resolve())


def plan_units(
    release: Release,
    sm: int,
    units: Sequence[Unit],
    *,
    nvcc: Nvcc,
    workspace: Path,
    stop: threading.Event | None = None,
) -> list[Plan]:
    """Have a release generate its sources for a chip, into a workspace of its own."""
    workspace.mkdir(parents=True)
    answer = workspace / "units.json"
    words = [sys.executable, "-m", f"{__package__.partition('.')[0]}.{MODULE}"]
    with tempfile.TemporaryDirectory(prefix="kernelproof-generate-") as scratch:
        ended = run_to_end(
            [*words, str(sm), str(answer), *(unit.name for unit in units)],
            folder=Path(scratch),  # which is on its path, and empty
            deadline=GENERATING_SECONDS,
            environment=_environment(release, nvcc, workspace),
            stop=stop,
        )
    if ended.cut_short or ended.status != 0 or not answer.is_file():
        lines = ended.told.strip().splitlines()
        reason = ended.cut_short or (lines[-1] if lines else f"exit status {ended.status}")
        message = shortened(f"FlashInfer {release.version} cannot be asked: {reason}")
        return [Plan(release.version, sm, unit, BROKEN, message) for unit in units]
    told = json.loads(answer.read_text(encoding="utf-8"))
    if Version(told["flashinfer"]) != Version(release.version):
        message = f"another release is in the way: {told['flashinfer']}"
        return [Plan(release.version, sm, unit, BROKEN, message) for unit in units]
    roots = {str(workspace): "workspace", str(release.folder): "release"}
    return [_plan(release, sm, unit, told["units"][unit.name], nvcc, roots) for unit in units]


def _environment(release: Release, nvcc: Nvcc, workspace: Path) -> dict[str, str]:
    # Its own variables may change flags, and so what this is evidence for.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    path = [str(release.folder), *(entry for entry in sys.path if entry)]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_HOME": str(nvcc.home),
        "CUDA_VISIBLE_DEVICES": "",
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }


def _plan(
    release: Release,
    sm: int,
    unit: Unit,
    told: Mapping[str, Any],
    nvcc: Nvcc,
    roots: Mapping[str, str],
) -> Plan:
    if told["state"] != GENERATED:
        return Plan(release.version, sm, unit, told["state"], shortened(told["message"]))
    commands = [tuple(each["command"]) for each in told["objects"]]
    named = {found for words in commands for found in _CODE.findall(" ".join(words))}
    names = tuple(sorted(f"sm_{number}{suffix}" for number, suffix in named))
    if not any(runs_on(int(number), suffix, sm) for number, suffix in named):
        message = f"it is built for {', '.join(names) or 'no chip'} whatever the chip"
        return Plan(release.version, sm, unit, OTHER_CHIP, message, names)
    jobs = tuple(
        Job(
            release.version,
            sm,
            unit,
            Path(each["source"]).name,
            words,
            _key(release, unit, Path(each["source"]), words, nvcc, roots),
        )
        for each, words in zip(told["objects"], commands, strict=True)
    )
    return Plan(release.version, sm, unit, GENERATED, architectures=names, jobs=jobs)


def runs_on(number: int, suffix: str, sm: int) -> bool:
    """Whether code for an architecture runs on a chip, by CUDA's rules for suffixes."""
    if suffix == "a":  # that chip only
        return number == sm
    # With "f" as without it: that chip, and those of its major version that came after.
    return number // 10 == sm // 10 and number <= sm


def _key(
    release: Release,
    unit: Unit,
    source: Path,
    words: Sequence[str],
    nvcc: Nvcc,
    roots: Mapping[str, str],
) -> str:
    text = "\n".join(words)
    for root, name in roots.items():
        text = text.replace(root, f"<{name}>")
    # What was remembered when kernels were counted by name only is no answer.
    parts = ["bodies", release.version, unit.kernel, nvcc.version, without_paths(text)]
    digest = hashlib.sha256("\0".join(parts).encode())
    digest.update(source.read_bytes())
    return digest.hexdigest()


def choose_units(names: Sequence[str]) -> tuple[Unit, ...]:
    """Find units by name; all of them, if none is named.

    Raises:
        UsageRefusedError: there is no such unit.
    """
    known = {unit.name: unit for unit in UNITS}
    for name in names:
        if name not in known:
            message = f"--unit {name!r} is none of {', '.join(known)}"
            raise UsageRefusedError(message)
    return tuple(known[name] for name in dict.fromkeys(names)) or UNITS
