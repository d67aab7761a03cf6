"""Reading a comparison's report back: its file must hold what the other outputs are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....impl.targets.data_files import read_json
from ....impl.targets.schemas import converted
from ...console.errors import UsageRefusedError
from .contents import SCHEMA
from .shape import Report


class ReportError(UsageRefusedError):
    """A report that cannot be read; the message names the file and the field."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ReportError: the file cannot be read, or is something else.
    """
    data = read_json(path, ReportError)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        message = f"{path}: its schema is {schema!r}; this Kernelproof reads {SCHEMA!r}"
        raise ReportError(message)
    converted(data, Report, path, ReportError)
    report: dict[str, Any] = data
    return report
