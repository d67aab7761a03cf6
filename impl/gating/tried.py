"""What was tried on a device: reading the results that ``kernelproof check --gating`` wrote.

That a cell was right says that a small call of it ran on that chip with that release and gave what
the oracle gives. Of a refusal, the record says what FlashInfer did when it was called anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ..targets.data_files import read_json
from ..targets.schemas import converted, one_of
from ..targets.target import Target
from .feature import Feature
from .rules import CALLED

SCHEMA = "kernelproof/gating/1"
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


class _Machine(msgspec.Struct):
    """Of the machine of a run, what rules speak of."""

    sm: int | None
    flashinfer: str | None
    cuda: str | None
    triton: str | None


class _Trial(msgspec.Struct):
    """A trial as it stands in the file, beside what only people read."""

    implementation: str
    cell: str
    feature: dict[str, Any]
    side: Literal["supported", "refused"]
    rules: tuple[str, ...]
    outcome: Annotated[str, one_of((*CALLED, NOT_RUN))]
    entry: str | None

    def __post_init__(self) -> None:
        """Check the question, which holds only what rules know."""
        try:
            Feature(**self.feature)
        except (TypeError, ValueError) as error:
            message = f"feature: {error}"
            raise ValueError(message) from error


class _Run(msgspec.Struct):
    schema: Annotated[str, one_of((SCHEMA,))]
    target: _Machine
    trials: tuple[_Trial, ...]
    date: str = ""


def read_gating(path: Path) -> list[Record]:
    """Read the records of one run.

    Raises:
        GatingEvidenceError: the file cannot be read, or is no result of ``check --gating``.
    """
    data = read_json(path, GatingEvidenceError)
    if isinstance(data, dict) and "gating" in data:  # of `kernelproof gate --gating`
        data = data["gating"]
    run = converted(data, _Run, path, GatingEvidenceError)
    target = Target(**msgspec.structs.asdict(run.target))
    return [
        Record(
            target,
            trial.implementation,
            trial.cell,
            Feature(**trial.feature),
            trial.side,
            trial.rules,
            trial.outcome,
            explained=bool(trial.entry),
            date=run.date,
        )
        for trial in run.trials
    ]


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
