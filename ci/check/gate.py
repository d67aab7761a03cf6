"""The command gate with --gating: the laws first, then both sides of the support table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..console.errors import (
    CONFORMING,
    INCOMPLETE,
    INTERRUPTED,
    MACHINE,
    NONCONFORMING,
    TERMINATED,
    USAGE,
)
from ..console.evidence_file import as_evidence
from ..reports.summary import VERDICTS
from .checking import Request, examine
from .gating_command import Ended, GatingRequest, print_ended, to_json, tried

WORST_FIRST = (TERMINATED, INTERRUPTED, USAGE, MACHINE, NONCONFORMING, INCOMPLETE, CONFORMING)


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
    if code in (INTERRUPTED, TERMINATED):
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
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # An incomplete run that is allowed has the code of a conforming one.
    verdict = VERDICTS.get(code, "error") if ended.code else data["verdict"]
    data |= {"gating": second, "exit_code": code, "verdict": verdict}
    return {**data, "message": f"{data['message']}. Support table: {ended.sentence}"}
