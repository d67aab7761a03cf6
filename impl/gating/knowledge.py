"""What is known of a call on a chip: by a rule, a compiler, a selection or a run, with its source.

``known`` is the one reader: it asks the rule that decides, and the table of what was compiled for
chips and tried on them, which is read once. What a release declares becomes the same record in
``kernelproof.ci.support.claims``.

That a unit compiled says that nvcc took FlashInfer's own source, with FlashInfer's own flags, for
that chip, and that the kernel is among what it made. It does not say that a call runs, nor that
its result is right. That a cell was right says that a small call of it ran on that chip with that
release and gave what the oracle gives. Of a refusal, the record says what FlashInfer did when it
was called anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from ...fixtures import EVIDENCE, files_of
from ..targets.data_files import read_json
from ..targets.shape_checks import checked
from ..targets.target import Target
from .feature import Feature
from .rules import CALLED, COMPILED, DECLARED, NOT_RUN, RIGHT, RUN, SELECTED, STATUSES, Rule
from .selections import RUNS, Selections, part_of, read_selections

MADE_AT_RUN_TIME = ("group_size", "page_size", "kv_layout")
"""Fields that a kernel takes as they come; the others make another kernel of it."""
OF_A_MODULE = (
    "operation",
    "backend",
    "phase",
    "head_dim_qk",
    "q_dtype",
    "kv_dtype",
    "query_len",
    "activation",
    "quantisation",
)
"""Fields that select a compiled module."""
SCHEMA = "kernelproof/gating/1"
MACHINE = ("sm", "flashinfer", "cuda", "triton")
"""What of a target decides which rules hold."""
FORMAT = "kernelproof/compile-evidence/1"


class EvidenceError(ValueError):
    """A file of evidence that cannot be read; the message names the file and the field."""


@dataclass(frozen=True)
class Knowledge:
    """What one source says of a call on a chip.

    Attributes:
        level: one of ``rules.LEVELS``.
        source: public URL, place in a release, ``nvcc``, or implementation and date of a run.
        topic: id of the rule, name of the unit, title of the cell, or topic of the comparison.
        feature: the call.
        sm: the chip; None for a CPU.
        flashinfer: the release; None where there is none.
        supported: whether it speaks for the call.
        says: why, in a clause or a sentence.
        firm: whether the call should be allowed if all that is known of this level speaks for it.
    """

    level: str
    source: str
    topic: str
    feature: Feature
    sm: int | None
    flashinfer: str | None
    supported: bool
    says: str
    firm: bool = True


def known(rule: Rule, feature: Feature, target: Target) -> list[Knowledge]:
    """Return what is known of a call that a rule decides: what it says, and what bears it out.

    Raises:
        EvidenceError: a file of evidence cannot be read.
    """
    level, allows = rule.evidence, rule.effect == "allow"
    if (
        level == SELECTED
        and allows
        and not table().asked(feature.operation, target.sm, target.flashinfer)
    ):
        level = DECLARED  # it says what other releases select
    said = Knowledge(
        level,
        rule.source,
        rule.id,
        feature,
        target.sm,
        target.flashinfer,
        allows,
        rule.reason,
    )
    return [said, *table().agreeing(said, raises=CALLED[0] in rule.called)]


Key = tuple[object, ...]


@dataclass(frozen=True)
class Table:
    """What was compiled for chips, is selected on them and ran there, by releases of FlashInfer.

    Attributes:
        modules: units that compiled, by the fields that select a module.
        kernels: calls that were right, by the fields that are not made at run time.
        values: the values of the fields that are, each in some call that was right.
        refusals: calls that were made though one rule refuses them, and were not right, by rule.
        machines: chips and releases on which something was tried.
        selections: what releases select on chips.
    """

    modules: dict[Key, Knowledge] = field(default_factory=dict)
    kernels: dict[Key, Knowledge] = field(default_factory=dict)
    values: set[Key] = field(default_factory=set)
    refusals: dict[Key, Knowledge] = field(default_factory=dict)
    machines: set[Key] = field(default_factory=set)
    selections: dict[Key, Selections] = field(default_factory=dict)

    def asked(self, operation: str, sm: int | None, flashinfer: str | None) -> bool:
        """Whether it is kept what a release selects on a chip, of its attention or its MoE."""
        return (part_of(operation), sm, flashinfer) in self.selections

    def agreeing(self, said: Knowledge, *, raises: bool = True) -> Iterator[Knowledge]:
        """Return what was seen of a call that a rule allows, or of what a rule refuses.

        Args:
            said: what the rule says.
            raises: whether a refusal says that the release raises, which its own launcher bears
                out; of wrong values and hangs it says nothing.
        """
        where = said.sm, said.flashinfer
        selections = self.selections.get((part_of(said.feature.operation), *where))
        outcome = "" if selections is None else selections.outcome(said.feature)
        if outcome and (outcome == RUNS if said.supported else raises and outcome != RUNS):
            yield replace(
                said, level=SELECTED, source=f"flashinfer {said.flashinfer}, its launcher"
            )
        if not said.supported:
            called = self.refusals.get(_refusal(said.topic, *where))
            if called is not None:
                yield called
            return
        module = self.modules.get(_module(said.feature, *where))
        if module is not None:
            yield module
        if where not in self.machines:
            return
        kernel = self.kernels.get(_kernel(said.feature, *where))
        if kernel is not None and self.values.issuperset(_values(said.feature, *where)):
            yield kernel


def _refusal(rule: str, sm: int | None, flashinfer: str | None) -> Key:
    return rule, sm, flashinfer


def _module(feature: Feature, sm: int | None, flashinfer: str | None) -> Key:
    return (sm, flashinfer, *(getattr(feature, name) for name in OF_A_MODULE))


def _kernel(feature: Feature, sm: int | None, flashinfer: str | None) -> Key:
    fields = {k: v for k, v in vars(feature).items() if k not in MADE_AT_RUN_TIME}
    return (sm, flashinfer, *sorted(fields.items()))


def _values(feature: Feature, sm: int | None, flashinfer: str | None) -> list[Key]:
    where = (sm, flashinfer, feature.operation, feature.backend, feature.phase)
    return [(*where, name, getattr(feature, name)) for name in MADE_AT_RUN_TIME]


@cache
def table() -> Table:
    """Read what was compiled and what was tried, once.

    Raises:
        EvidenceError: a file of it cannot be read.
    """
    compiled = (
        unit
        for path in files_of(EVIDENCE, "compile-*.json")
        for unit in read_compilation(path).records
    )
    tried = (trial for path in files_of(EVIDENCE, "gating-*.json") for trial in read_trials(path))
    selected = [
        read_selections(path, EvidenceError) for path in files_of(EVIDENCE, "selected-*.json")
    ]
    found = table_of(compiled, last_seen(tried))
    found.selections.update({(each.part, each.sm, each.flashinfer): each for each in selected})
    return found


def table_of(compiled: Iterable[CompiledUnit], tried: Iterable[Trial]) -> Table:
    """Sum up what compiled and what was tried."""
    made = Table()
    for unit in compiled:
        if unit.status == COMPILED and unit.feature:
            found = unit.knowledge
            made.modules[_module(found.feature, unit.sm, unit.flashinfer)] = found
    for trial in tried:
        where = trial.target.sm, trial.target.flashinfer
        made.machines.add(where)
        failed = trial.outcome not in (RIGHT, NOT_RUN)
        if trial.side == "supported" and trial.outcome == RIGHT:
            made.kernels[_kernel(trial.feature, *where)] = trial.knowledge
            made.values.update(_values(trial.feature, *where))
        elif trial.side == "refused" and failed and len(trial.rules) == 1:
            # Of several rules, it is not known whose doing it was.
            made.refusals[_refusal(trial.rules[0], *where)] = trial.knowledge
    return made


@dataclass(frozen=True)
class CompiledUnit:
    """The result of compiling one unit of one release for one chip.

    Attributes:
        flashinfer: release.
        sm: chip.
        unit: name, see ``kernelproof.impl.flashinfer.modules.UNITS``.
        status: one of ``STATUSES``.
        feature: the cell of the support table, by fields of ``gating.Feature``.
        architectures: what nvcc was asked for, such as ``sm_90a``.
        objects: how many were compiled.
        kernels: how many kernels in them are the one that the cell needs.
        seconds: the seconds of nvcc, all objects together.
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

    @property
    def knowledge(self) -> Knowledge:
        """What it says of its cell."""
        return Knowledge(
            COMPILED,
            "nvcc",
            self.unit,
            Feature(**self.feature),  # type: ignore[arg-type]  # fields by name
            self.sm,
            self.flashinfer,
            self.status == COMPILED,
            self.message or STATUSES[self.status],
        )


@dataclass(frozen=True)
class Compilation:
    """All records of one run.

    Attributes:
        nvcc: its version.
        date: the date of the run, such as ``2026-11-21``.
        command: what the run was started with.
        records: the records in the order of releases, chips and units.
        interrupted: whether it ended early; what it did not reach is left out.
    """

    nvcc: str
    date: str
    command: str
    records: tuple[CompiledUnit, ...]
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


def read_compilation(path: Path) -> Compilation:
    """Read records back.

    Raises:
        EvidenceError: the file cannot be read, or a field of it holds what it cannot.
    """
    data = read_json(path, EvidenceError)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        message = f"{path}: format is {found!r}; it must be {FORMAT!r}"
        raise EvidenceError(message)
    _check(data, "Compilation", path)
    records = tuple(
        CompiledUnit(**{**each, "architectures": tuple(each["architectures"])})
        for each in data["records"]
    )
    first: dict[tuple[Version, int, str], int] = {}
    for number, record in enumerate(records):
        before = first.setdefault(record.order, number)
        if before != number:
            message = f"{path}: records[{number}] repeats records[{before}]"
            raise EvidenceError(message)
    return Compilation(data["nvcc"], data["date"], data["command"], records, data["interrupted"])


@dataclass(frozen=True)
class Trial:
    """What became of one cell of the support table, as ``kernelproof check --gating`` wrote it.

    Attributes:
        target: chip and release.
        implementation, cell: who was called, and with what that is special.
        feature: the question that the call asks.
        side: ``"supported"`` or ``"refused"``, by the rules of that day.
        rules: the rules that were on that side.
        outcome: the outcome of ``rules.CALLED``, or ``"not run"``.
        explained: whether the ledger explains a failure.
        date: the date of the run, in ISO form.
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

    @property
    def knowledge(self) -> Knowledge:
        """What it says of its cell."""
        return Knowledge(
            RUN,
            f"{self.implementation}, {self.date}",
            self.cell,
            self.feature,
            self.target.sm,
            self.target.flashinfer,
            self.outcome == RIGHT,
            self.outcome,
        )


def read_trials(path: Path) -> list[Trial]:
    """Read the records of one run.

    Raises:
        EvidenceError: the file cannot be read, or is no result of ``check --gating``.
    """
    data = read_json(path, EvidenceError)
    if isinstance(data, dict) and "gating" in data:  # of `kernelproof gate --gating`
        data = data["gating"]
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        message = f"{path}: schema is not {SCHEMA!r}"
        raise EvidenceError(message)
    _check(data, "GatingEvidence", path)
    target = Target(**{name: data["target"][name] for name in MACHINE})
    return [
        Trial(
            target,
            trial["implementation"],
            trial["cell"],
            Feature(**trial["feature"]),
            trial["side"],
            tuple(trial["rules"]),
            trial["outcome"],
            explained=bool(trial["entry"]),
            date=trial.get("date") or data.get("date", ""),
        )
        for trial in data["trials"]
    ]


def last_seen(trials: Iterable[Trial]) -> list[Trial]:
    """Keep of each question what the last run that asked it saw: a fault may be mended since."""
    tried = [trial for trial in trials if trial.outcome != NOT_RUN]
    last: dict[Key, str] = {}
    for trial in tried:
        last[_question(trial)] = max(last.get(_question(trial), ""), trial.date)
    return [trial for trial in tried if trial.date == last[_question(trial)]]


def _question(trial: Trial) -> Key:
    target = trial.target
    return target.sm, target.flashinfer, trial.implementation, trial.feature


def _check(data: Any, kind: str, path: Path) -> None:  # noqa: ANN401  JSON
    """Refuse what has not the shape of a file of this kind."""

    def schema() -> Any:  # noqa: ANN401  a type
        from . import schema

        return getattr(schema, kind)

    checked(data, schema, path, EvidenceError)
