"""The command gate with --gating: the laws first, then both sides of the support table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...properties.findings.files import dumps, write_text
from ..console.errors import (
    CONFORMING,
    INTERRUPTED,
    MACHINE,
    NONCONFORMING,
    USAGE,
    UsageRefusedError,
)
from ..console.evidence_file import as_evidence
from ..reports.summary import VERDICTS
from .checking import Request, examine
from .gating_command import Ended, GatingRequest, print_ended, to_json, tried

WORST_FIRST = (INTERRUPTED, USAGE, MACHINE, NONCONFORMING, CONFORMING)


def gate_both(request: Request, gating: GatingRequest) -> int:
    """Judge everything registered by the laws, then try the support table with it.

    The results of the second run become the field ``gating`` of those of the first, in the files
    that were asked for.

    Returns:
        The worse exit code of the two.

    Raises:
        UsageRefusedError, MachineError: see ``examine``.
    """
    code = examine(request)
    if code == INTERRUPTED:
        return code
    ended = tried(gating)
    print_ended(ended)
    code = min(code, ended.code, key=WORST_FIRST.index)
    for option, path in (("--json", request.json_path), ("--evidence", request.evidence_path)):
        if path is not None:
            _add(option, path, ended, code)
    return code


def _add(option: str, path: Path, ended: Ended, code: int) -> None:
    """Add the second run to the results of the first."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        second = to_json(ended)
        data["gating"] = as_evidence(second) if option == "--evidence" else second
        data |= {"exit_code": code, "verdict": VERDICTS.get(code, "error")}
        data["message"] = f"{data['message']}. Support table: {ended.sentence}"
        write_text(path, dumps(data))
    except OSError as error:
        message = f"{option} {path}: cannot be written ({error.strerror})"
        raise UsageRefusedError(message) from error
