"""What compiled for chips that were not there: the records that are kept, and reading them back.

That a unit compiled says that nvcc took FlashInfer's own source, with FlashInfer's own flags, for
that chip, and that the kernel is among what it made. It does not say that a call runs, nor that
its result is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

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
    """What one unit of one release came to on one chip.

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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"no JSON: {error}"
        message = f"{path}: it cannot be read ({reason})"
        raise EvidenceError(message) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        message = f"{path}: format is {found!r}; it must be {FORMAT!r}"
        raise EvidenceError(message)
    known = {"format", *(each.name for each in fields(Evidence))}
    _check(str(path), data, {name: _EVIDENCE[name] for name in known - {"format"}}, known)
    seen: dict[tuple[Version, int, str], int] = {}
    records = []
    for number, entry in enumerate(data["records"]):
        record = _record(f"{path}: records[{number}]", entry)
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


def _record(place: str, entry: object) -> Record:
    if not isinstance(entry, dict):
        message = f"{place} is {entry!r}; it must be an object"
        raise EvidenceError(message)
    _check(place, entry, _RECORD, set(_RECORD))
    return Record(**{**entry, "architectures": tuple(entry["architectures"])})


def _check(
    place: str,
    entry: Mapping[str, Any],
    checks: Mapping[str, tuple[Callable[[Any], bool], str]],
    known: set[str],
) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        message = f"{place}: {unknown[0]} is no field of it; there are {', '.join(sorted(known))}"
        raise EvidenceError(message)
    for name, (is_right, wanted) in sorted(checks.items()):
        if name not in entry:
            message = f"{place}: {name} is missing"
            raise EvidenceError(message)
        if not is_right(entry[name]):
            message = f"{place}: {name} is {entry[name]!r}; it must be {wanted}"
            raise EvidenceError(message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_version(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(Version(value))
    except InvalidVersion:
        return False


def _is_feature(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, (str, int)) for each in value.values())


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_TEXT = (lambda value: isinstance(value, str), "a string")
_VERSION = (_is_version, "a version such as '0.7.2.post1'")
_COUNT = (_is_count, "a whole number")
_EVIDENCE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "nvcc": _TEXT,
    "date": _TEXT,
    "command": _TEXT,
    "interrupted": (lambda value: isinstance(value, bool), "true or false"),
    "records": (lambda value: isinstance(value, list), "a list"),
}
_RECORD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "flashinfer": _VERSION,
    "sm": _COUNT,
    "unit": _TEXT,
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "feature": (_is_feature, "an object of strings and numbers"),
    "architectures": (_is_names, "a list of strings"),
    "objects": _COUNT,
    "kernels": _COUNT,
    "seconds": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        "a number",
    ),
    "message": _TEXT,
}
