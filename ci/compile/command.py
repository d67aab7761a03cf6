"""The run of `kernelproof support --compile`: releases found, modules compiled, a file written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...impl.gating.compile_evidence import UNJUDGED, Evidence
from ...impl.targets.capability import parse_capability
from ..console.errors import MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..releases.sandboxes import sandbox
from .compiling import DEADLINE_SECONDS, compile_modules
from .generating import Release, choose_units, release_in
from .nvcc import find_nvcc


def compile_support(
    releases: Sequence[str],
    chips: Sequence[str],
    *,
    units: Sequence[str] = (),
    outputs: Outputs | None = None,
    jobs: int = 0,
    deadline: float = DEADLINE_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """Find what is asked for, compile it, and write the records.

    Args:
        releases: as ``sandbox`` takes them: versions, wheels, folders.
        chips: as ``parse_capability`` reads them.
        units: names of ``flashinfer_modules.UNITS``; all of them if empty.
        outputs: file of the records, named by ``--json``.
        jobs: compilers at a time; one a core, if 0.
        deadline: seconds that one object may take.
        tell: called with a line of progress every few seconds.

    Raises:
        UsageRefusedError: what is asked for does not exist, or the file cannot be written.
        SandboxError: a release cannot be had.
        MachineError: there is no nvcc, or nothing at all could be compiled.
    """
    chosen = choose_units(units)
    targets = list(dict.fromkeys(_chip(text) for text in chips))
    nvcc = find_nvcc()
    found = {release.version: release for release in (_release(text, tell) for text in releases)}
    command = ["kernelproof support --compile", ",".join(map(str, targets))]
    command += [f"--flashinfer {version}" for version in found]
    command += [f"--unit {unit.name}" for unit in chosen] if units else []
    evidence = compile_modules(
        list(found.values()),
        targets,
        chosen,
        nvcc=nvcc,
        jobs=jobs,
        deadline=deadline,
        tell=tell,
        command=" ".join(command),
    )
    (outputs or Outputs()).write({"--json": evidence.to_json})
    if evidence.records and all(record.status == UNJUDGED for record in evidence.records):
        message = f"nothing could be compiled: {evidence.records[0].message}"
        raise MachineError(message)
    return evidence


def _chip(text: str) -> int:
    try:
        return parse_capability(text)
    except ValueError as error:
        message = f"--compile: {error}"
        raise UsageRefusedError(message) from error


def _release(text: str, tell: Callable[[str], None]) -> Release:
    return release_in(sandbox(text, tell=tell))
