"""What was tried on a device: reading the results that ``kernelproof check --gating`` wrote.

That a cell was right says that a small call of it ran on that chip with that release and gave what
the oracle gives. Of a refusal, the record says what FlashInfer did when it was called anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..targets.data_files import read_json
from ..targets.shape_checks import checked
from ..targets.target import Target
from .feature import Feature
from .rules import CALLED

SCHEMA = "kernelproof/gating/1"
MACHINE = ("sm", "flashinfer", "cuda", "triton")
"""What of a target decides which rules hold."""
RIGHT, NOT_RUN = "right", "not run"


class GatingEvidenceError(ValueError):
    """A file of evidence that cannot be read; the message names the file and the field."""


@dataclass(frozen=True)
class Record:
    """What became of one cell of the support table.

    Attributes:
        target: chip and release.
        implementation, cell: who was called, and with what that is special.
        feature: the question that the call asks.
        side: ``"supported"`` or ``"refused"``, by the rules of that day.
        rules: that were on that side.
        outcome: of ``rules.CALLED``, or ``"not run"``.
        explained: whether the ledger explains a failure.
        date: of the run, in ISO form.
    """

    target: Target
    implementation: str
    cell: str
    feature: Feature
    side: str
    rules: tuple[str, ...]
    outcome: str
    explained: bool = False
    date: str = ""


def read_gating(path: Path) -> list[Record]:
    """Read the records of one run.

    Raises:
        GatingEvidenceError: the file cannot be read, or is no result of ``check --gating``.
    """
    data = read_json(path, GatingEvidenceError)
    if isinstance(data, dict) and "gating" in data:  # of `kernelproof gate --gating`
        data = data["gating"]
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        message = f"{path}: schema is not {SCHEMA!r}"
        raise GatingEvidenceError(message)
    checked(data, _schema, path, GatingEvidenceError)
    for number, trial in enumerate(data["trials"]):
        if trial["outcome"] not in (*CALLED, NOT_RUN):
            known = ", ".join((*CALLED, NOT_RUN))
            message = f"{path}: trials[{number}].outcome is {trial['outcome']!r}; known: {known}"
            raise GatingEvidenceError(message)
    target = Target(**{name: data["target"][name] for name in MACHINE})
    return [_record(target, trial, data.get("date", "")) for trial in data["trials"]]


def _schema() -> Any:  # noqa: ANN401  a type
    from .schema import GatingEvidence

    return GatingEvidence


def last_seen(records: Iterable[Record]) -> list[Record]:
    """Keep of each question what the last run that asked it saw: a fault may be mended since."""
    tried = [record for record in records if record.outcome != NOT_RUN]
    last: dict[tuple[object, ...], str] = {}
    for record in tried:
        last[_question(record)] = max(last.get(_question(record), ""), record.date)
    return [record for record in tried if record.date == last[_question(record)]]


def _question(record: Record) -> tuple[object, ...]:
    target = record.target
    return target.sm, target.flashinfer, record.implementation, record.feature


def _record(target: Target, trial: Mapping[str, Any], date: str) -> Record:
    return Record(
        target,
        trial["implementation"],
        trial["cell"],
        Feature(**trial["feature"]),
        trial["side"],
        tuple(trial["rules"]),
        trial["outcome"],
        explained=bool(trial["entry"]),
        date=date,
    )
