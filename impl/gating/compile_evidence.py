"""What compiled for chips that were not there: the records that are kept, and reading them back.

That a unit compiled says that nvcc took FlashInfer's own source, with FlashInfer's own flags, for
that chip, and that the kernel is among what it made. It does not say that a call runs, nor that
its result is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from packaging.version import Version

from ..targets.data_files import read_json
from ..targets.schemas import Table, converted, one_of
from .rules import parse_version

FORMAT = "kernelproof/compile-evidence/1"
COMPILED, FAILED, INCOMPLETE = "compiled", "failed", "incomplete"
REFUSED, OTHER_CHIP, ABSENT, UNJUDGED = "refused", "other-chip", "absent", "unjudged"
STATUSES = {
    COMPILED: "every object compiled for this chip, and they hold the kernel",
    FAILED: "nvcc refused a source",
    INCOMPLETE: "it compiled without the kernel: calls that need it throw",
    REFUSED: "FlashInfer generates no such module for this chip",
    OTHER_CHIP: "FlashInfer generates it for other chips, whatever the chip",
    ABSENT: "this release has no such module",
    # Kept files say "unjudged": nvcc could not be asked, or not to its end.
    UNJUDGED: "the machine could not tell: a deadline, memory, a missing header of CUDA",
}
"""What can come of a unit on a chip. Only ``compiled`` speaks for support."""


class EvidenceError(ValueError):
    """A file of evidence that cannot be read; the message names the file and the field."""


Count = Annotated[int, msgspec.Meta(ge=0, extra={"wanted": "a whole number, not below 0"})]


class Record(Table, frozen=True):
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
    sm: Count
    unit: str
    status: Annotated[str, one_of(STATUSES)]
    feature: Mapping[str, str | int]
    architectures: tuple[str, ...] = ()
    objects: Count = 0
    kernels: Count = 0
    seconds: float = 0.0
    message: str = ""

    def __post_init__(self) -> None:
        """Check the release, which records are sorted by."""
        try:
            parse_version(self.flashinfer)
        except ValueError as error:
            message = f"flashinfer: {error}"
            raise ValueError(message) from error

    @property
    def order(self) -> tuple[Version, int, str]:
        """Where it stands in a file."""
        return Version(self.flashinfer), self.sm, self.unit


class Evidence(Table, frozen=True):
    """All records of one run.

    Attributes:
        nvcc: its version.
        date: of the run, such as ``2026-11-21``.
        command: what the run was started with.
        records: in the order of releases, chips and units.
        interrupted: whether it ended early; what it did not reach is left out.
        format: of the file.
    """

    nvcc: str
    date: str
    command: str
    records: tuple[Record, ...]
    interrupted: bool = False
    format: Annotated[str, one_of((FORMAT,))] = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, sorted, so that two runs compare line by line."""
        by_order = tuple(sorted(self.records, key=lambda record: record.order))
        found = msgspec.structs.replace(self, records=by_order)
        return {"format": self.format, **msgspec.to_builtins(found, order="deterministic")}


def read_evidence(path: Path) -> Evidence:
    """Read records back.

    Raises:
        EvidenceError: the file cannot be read, or a field of it holds what it cannot.
    """
    evidence = converted(read_json(path, EvidenceError), Evidence, path, EvidenceError)
    seen: dict[tuple[Version, int, str], int] = {}
    for number, record in enumerate(evidence.records):
        if seen.setdefault(record.order, number) != number:
            message = f"{path}: records[{number}] repeats records[{seen[record.order]}]"
            raise EvidenceError(message)
    return evidence
