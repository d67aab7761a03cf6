"""What compiled for chips that were not there: the records that are kept, and reading them back.

That a unit compiled says that nvcc took FlashInfer's own source, with FlashInfer's own flags, for
that chip, and that the kernel is among what it made. It does not say that a call runs, nor that
its result is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..targets.data_files import read_json
from ..targets.shape_checks import checked

FORMAT = "kernelproof/compile-evidence/1"
COMPILED, FAILED, INCOMPLETE = "compiled", "failed", "incomplete"
REFUSED, OTHER_CHIP, ABSENT, UNJUDGED = "refused", "other-chip", "absent", "unjudged"
STATUSES: Mapping[str, str] = {
    COMPILED: "every object compiled for this chip, and they hold the kernel",
    FAILED: "nvcc refused a source",
    INCOMPLETE: "it compiled without the kernel: calls that need it throw",
    REFUSED: "FlashInfer generates no such module for this chip",
    OTHER_CHIP: "FlashInfer generates it for other chips, whatever the chip",
    ABSENT: "this release has no such module",
    UNJUDGED: "the machine could not tell: a deadline, memory, a missing header of CUDA",
}
"""What can come of a unit on a chip. Only ``compiled`` speaks for support."""


class EvidenceError(ValueError):
    """A file of evidence that cannot be read; the message names the file and the field."""


@dataclass(frozen=True)
class Record:
    """The result of compiling one unit of one release for one chip.

    Attributes:
        flashinfer: release.
        sm: chip.
        unit: name, see ``flashinfer_modules.UNITS``.
        status: one of ``STATUSES``.
        feature: the cell of the support table, by fields of ``gating.Feature``.
        architectures: what nvcc was asked for, such as ``sm_90a``.
        objects: how many were compiled.
        kernels: how many kernels in them are the one that the cell needs.
        seconds: of nvcc, all objects together.
        message: the first error, or why there is nothing to compile.
    """

    flashinfer: str
    sm: int
    unit: str
    status: str
    feature: Mapping[str, str | int]
    architectures: tuple[str, ...] = ()
    objects: int = 0
    kernels: int = 0
    seconds: float = 0.0
    message: str = ""

    @property
    def order(self) -> tuple[Version, int, str]:
        """Where it stands in a file."""
        return Version(self.flashinfer), self.sm, self.unit


@dataclass(frozen=True)
class Evidence:
    """All records of one run.

    Attributes:
        nvcc: its version.
        date: of the run, such as ``2026-11-21``.
        command: what the run was started with.
        records: in the order of releases, chips and units.
        interrupted: whether it ended early; what it did not reach is left out.
    """

    nvcc: str
    date: str
    command: str
    records: tuple[Record, ...]
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, sorted, so that two runs compare line by line."""
        records = sorted(self.records, key=lambda record: record.order)
        return {
            "format": FORMAT,
            "nvcc": self.nvcc,
            "date": self.date,
            "command": self.command,
            "interrupted": self.interrupted,
            "records": [
                {**asdict(record), "feature": dict(sorted(record.feature.items()))}
                for record in records
            ],
        }


def read_evidence(path: Path) -> Evidence:
    """Read records back.

    Raises:
        EvidenceError: the file cannot be read, or a field of it holds what it cannot.
    """
    data = read_json(path, EvidenceError)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        message = f"{path}: format is {found!r}; it must be {FORMAT!r}"
        raise EvidenceError(message)
    checked(data, _schema, path, EvidenceError)
    seen: dict[tuple[Version, int, str], int] = {}
    records = []
    for number, entry in enumerate(data["records"]):
        if entry["status"] not in STATUSES:
            known = ", ".join(STATUSES)
            message = f"{path}: records[{number}].status is {entry['status']!r}; known: {known}"
            raise EvidenceError(message)
        record = Record(**{**entry, "architectures": tuple(entry["architectures"])})
        if record.order in seen:
            message = f"{path}: records[{number}] repeats records[{seen[record.order]}]"
            raise EvidenceError(message)
        seen[record.order] = number
        records.append(record)
    return Evidence(
        nvcc=data["nvcc"],
        date=data["date"],
        command=data["command"],
        records=tuple(records),
        interrupted=data["interrupted"],
    )


def _schema() -> Any:  # noqa: ANN401  a type
    from .schema import CompileEvidence

    return CompileEvidence
