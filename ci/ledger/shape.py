"""The shapes of the reports that the ledger learns from, as far as it reads them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...impl.targets.schemas import one_of
from ...properties.findings.ledger import PREDICATES, LawName


class Cause(msgspec.Struct):
    """What tells the problems that fail from those that pass."""

    values: dict[Annotated[str, one_of(sorted(PREDICATES))], Any]
    failing: int
    passing: int


class Finding(msgspec.Struct):
    """A finding of a check or a gate."""

    implementation: str
    law: LawName
    status: str
    declared_name: str = ""
    kind: str = ""
    problem: dict[str, Any] | None = None
    entry: str | None = ""
    contradicts: str | None = ""
    laws: list[LawName] = []
    kinds: list[str] = []
    cause: Cause | msgspec.UnsetType = msgspec.UNSET


class Target(msgspec.Struct):
    """The machine of a run."""

    device: str
    sm: int | None = None
    flashinfer: str | None = None


class Implementation(msgspec.Struct):
    """An implementation that was judged."""

    name: str
    declared_name: str = ""
    reference: str = ""
    provider: str | None = None
    provider_version: str | None = None


class Check(msgspec.Struct):
    """A report of a check or a gate."""

    findings: list[Finding]
    target: Target
    implementations: list[Implementation] = []


class Verdict(msgspec.Struct):
    """The verdict on a problem with one release."""

    status: str = ""
    kind: str = ""


class Change(msgspec.Struct):
    """A finding of a comparison."""

    subject: str
    change: str = ""
    entry: str | None = ""
    problem: dict[str, Any] | None = None
    laws: list[LawName] = []
    candidate: Verdict = msgspec.field(default_factory=Verdict)


class Machine(msgspec.Struct):
    """One machine of a comparison."""

    device: str
    chip: int | str


class Side(msgspec.Struct):
    """The release to bump to."""

    flashinfer: str | None


class Comparison(msgspec.Struct):
    """A report of a comparison."""

    findings: list[Change]
    machines: Annotated[list[Machine], msgspec.Meta(min_length=1)]
    candidate: Side


SHAPES: dict[str, Any] = {"kernelproof/report/1": Check, "kernelproof/bump/1": Comparison}
"""Shape of a report by its schema."""
