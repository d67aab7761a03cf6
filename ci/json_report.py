"""The results of a run as JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .. import __version__
from .summary import Summary, known_findings, rejected, state, versions

SCHEMA = "kernelproof/report/1"


def to_json(summary: Summary) -> dict[str, Any]:
    """Give everything that a run learned."""
    report = summary.report
    known = [
        each
        for implementation in report.implementations
        for each in known_findings(implementation, summary.ledger)
    ]
    reasons = {each.entry: {"reason": each.reason, "issue": each.issue} for each in known}
    return {
        "schema": SCHEMA,
        "verdict": summary.verdict,
        "message": summary.sentence,
        "exit_code": summary.code,
        "judged": report.judged,
        "unsupported": sum(each.unsupported for each in report.implementations),
        "rejected": sum(rejected(each) for each in report.implementations),
        "seconds": round(report.seconds, 3),
        "findings": [
            {
                **finding.to_json(),
                "problem_id": finding.problem.id,
                **reasons.get(finding.entry or "", {}),
            }
            for finding in report.findings
        ],
        "known": [vars(each) for each in known],
        "implementations": [
            {**each.to_json(), "status": state(each), "rejected": rejected(each)}
            for each in report.implementations
        ],
        "profile": report.profile,
        "seed": report.seed,
        "device": report.target.get("device"),
        "target": {**report.target, **versions(report.target)},
        "respawns": report.respawns,
        "interrupted": report.interrupted,
        "lost": report.lost,
        "error": summary.failure,
        "kernelproof": __version__,
        "date": summary.date,
        "command": summary.command,
    }


def dumps(data: object) -> str:
    """Give JSON that every reader takes: infinities and NaN become strings."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text of unknown origin may hold lone surrogates.
    data = text.encode(errors="backslashreplace")
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_bytes(data)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
