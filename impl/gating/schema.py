"""The shapes of the files of support rules and of evidence."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

import msgspec

from ..targets.backends import BACKENDS
from ..targets.schemas import Provider, Table, Text, one_of, parse_chips
from .feature import CHOICES, INTEGERS, OPERATIONS, SWITCHES, Feature
from .rules import CALLED, LEVELS, NOT_RUN, PACKAGES, STATUSES, check_specifier, parse_version

SOME = msgspec.Meta(min_length=1)


def _condition(kind: Any) -> Any:  # noqa: ANN401  a type
    """Return the type of a condition on a field: a value, some values, or a table of limits."""
    several = Annotated[tuple[kind, ...], SOME]
    limits = [(name, kind, None) for name in ("min", "max", "multiple_of")]
    limits += [("not", kind | several, None)]
    return kind | several | msgspec.defstruct("Limits", limits, bases=(Table,), frozen=True)


When = msgspec.defstruct(
    "When",
    [
        *(
            (name, _condition(Literal[choices]), None)
            for name, choices in CHOICES.items()
            if name not in ("operation", "backend")
        ),
        *((name, _condition(bool), None) for name in SWITCHES),
        *((name, _condition(int), None) for name in (*INTEGERS, "query_rows")),
    ],
    bases=(Table,),
    frozen=True,
)
"""Conditions on the fields of a feature."""


class RuleTable(Table, frozen=True, kw_only=True):
    """A rule as it is written, see ``Rule``."""

    id: Text
    effect: Annotated[str, one_of(("allow", "refuse"))]
    operation: Annotated[tuple[Annotated[str, one_of(OPERATIONS)], ...], SOME]
    backend: Annotated[tuple[Annotated[str, one_of(BACKENDS)], ...], SOME]
    chips: tuple[Any, ...] = ()
    when: When = When()  # type: ignore[valid-type]
    flashinfer: str = ""
    cuda: str = ""
    triton: str = ""
    versions: dict[Provider, str] = msgspec.field(default_factory=dict)
    artifacts: dict[str, Text] = msgspec.field(default_factory=dict)
    reason: Text
    source: Text
    evidence: Annotated[str, one_of(LEVELS)] = LEVELS[0]
    advice: str = ""
    issues: tuple[str, ...] = ()
    called: Annotated[tuple[Annotated[str, one_of(CALLED)], ...], SOME] | None = None
    fixed: dt.date | None = None

    def __post_init__(self) -> None:
        """Refuse what types cannot say: chips, versions, and what goes with which effect."""
        parse_chips("chips", self.chips)
        for package in PACKAGES:
            check_specifier(package, getattr(self, package))
        for provider, specifier in self.versions.items():
            check_specifier(f"versions.{provider}", specifier)
        if self.effect == "allow" and not self.chips:
            message = "chips is missing: a permission lists its exact chips"
            raise ValueError(message)
        if self.effect == "allow" and self.called is not None:
            message = "called speaks of a call that is refused: it does not go with a permission"
            raise ValueError(message)
        if self.effect == "allow" and self.fixed is not None:
            message = "fixed speaks of what is refused: it does not go with a permission"
            raise ValueError(message)


class RulesFile(Table, frozen=True):
    """A file of rules: ``[[rule]]`` tables."""

    rule: tuple[RuleTable, ...] = ()


Versions = dict[str, dict[str, str]]
"""The file of releases: hashes of artifacts, by release and name."""


Fields = dict[str, str | int | bool]
"""Fields of a feature."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class CompiledUnit(Table, frozen=True):
    """The result of one unit, see ``knowledge.CompiledUnit``."""

    flashinfer: str
    sm: Count
    unit: str
    status: Annotated[str, one_of(STATUSES)]
    feature: Fields
    architectures: tuple[str, ...]
    objects: Count
    kernels: Count
    seconds: float
    message: str

    def __post_init__(self) -> None:
        """Refuse a release that is none."""
        try:
            parse_version(self.flashinfer)
        except ValueError as error:
            message = f"flashinfer: {error}"
            raise ValueError(message) from None


class Compilation(Table, frozen=True):
    """What compiled, see ``knowledge.Compilation``."""

    format: str
    nvcc: str
    date: str
    command: str
    interrupted: bool
    records: tuple[CompiledUnit, ...]


class Machine(msgspec.Struct, frozen=True):
    """The machine that cells were tried on."""

    sm: int | None
    flashinfer: str | None
    cuda: str | None
    triton: str | None


class TrialTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cell that was tried, see ``knowledge.Trial``; a run says more of it.

    Its date stands with it where it is not that of the file.
    """

    implementation: str
    cell: str
    feature: Fields
    side: Annotated[str, one_of(("supported", "refused"))]
    rules: tuple[str, ...]
    outcome: Annotated[str, one_of((*CALLED, NOT_RUN))]
    entry: str | None
    date: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no feature."""
        try:
            Feature(**self.feature)  # type: ignore[arg-type]  # fields by name
        except (TypeError, ValueError) as error:
            message = f"feature: {error}"
            raise ValueError(message) from None


class GatingEvidence(msgspec.Struct, frozen=True):
    """Cells that were tried."""

    target: Machine
    trials: tuple[TrialTable, ...]
    date: str = ""


class KeptKind(Table, frozen=True):
    """Kinds of call that share some fields, see ``selections.Group``."""

    fields: Fields
    axes: dict[str, tuple[str | int | bool, ...]]
    outcomes: Text


class KeptSelections(Table, frozen=True):
    """What a release selects on a chip, see ``selections.Selections``."""

    schema: str
    sm: Count
    flashinfer: str
    artifact: str
    kinds: tuple[KeptKind, ...]
