"""The command gate with --gating: the laws first, then both sides of the support table."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...impl.targets.data_files import read_json
from ...properties.findings.files import is_special
from ...properties.space.profiles import MINUTES
from ..console.errors import (
    INTERRUPTED,
    NONCONFORMING,
    TERMINATED,
    WORST_FIRST,
    UsageRefusedError,
)
from ..console.evidence_file import as_evidence
from ..reports.summary import VERDICTS
from .checking import Request, examine
from .gating_command import Ended, GatingRequest, print_ended, to_json, tried

LAWS_SHARE = 0.6
"""Share of the time that the laws have; the support table has what they leave."""


def gate_both(request: Request, gating: GatingRequest) -> int:
    """Judge everything registered by the laws, then try the support table with it, in one time.

    The results of the second run become the field ``gating`` of those of the first, in the files
    that were asked for. After a signal, or a finding that ends the first run, there is no second.

    Returns:
        The worse exit code of the two.

    Raises:
        UsageRefusedError, MachineError: see ``examine``.
    """
    for flag in ("--json", "--evidence"):
        path = request.outputs.paths.get(flag)
        if path is not None and is_special(path):
            message = f"{flag} {path}: must be a file with --gating, whose results join it"
            raise UsageRefusedError(message)
    started = time.monotonic()
    minutes = request.minutes or MINUTES.get((request.profile, request.device))
    laws = request if minutes is None else replace(request, minutes=LAWS_SHARE * minutes)
    code = examine(laws)
    if minutes is not None:
        gating = replace(gating, minutes=minutes - (time.monotonic() - started) / 60)
    first_only = request.exit_first and code == NONCONFORMING
    if first_only or code in (INTERRUPTED, TERMINATED):
        return code
    ended = tried(gating)
    print_ended(ended)
    code = min(code, ended.code, key=WORST_FIRST.index)
    paths, second = request.outputs.paths, to_json(ended)
    request.outputs.write(
        {
            "--json": lambda: _joined(paths["--json"], second, ended, code),
            "--evidence": lambda: _joined(paths["--evidence"], as_evidence(second), ended, code),
        }
    )
    return code


def _joined(path: Path, second: Any, ended: Ended, code: int) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Return the results of the first run, read back, with those of the second."""
    data: dict[str, Any] = read_json(path, UsageRefusedError)
    # An incomplete run that is allowed has the code of a conforming one.
    verdict = VERDICTS.get(code, "error") if ended.code else data["verdict"]
    data |= {"gating": second, "exit_code": code, "verdict": verdict}
    return {**data, "message": f"{data['message']}. Support table: {ended.sentence}"}
