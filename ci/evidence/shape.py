"""The shapes of the files that the page of evidence sums up, as far as it reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...impl.gating.tried import SCHEMA as GATING
from ..bump.report.contents import SCHEMA as BUMP
from ..bump.report.shape import Number
from ..bump.report.shape import Report as Comparison
from ..reports.json_report import SCHEMA as REPORT


class Target(msgspec.Struct):
    """The machine and its packages."""

    device_name: str
    sm: int | None = None
    flashinfer: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None


class Law(msgspec.Struct):
    """What a law judged."""

    worst_ratio: Number
    passing_ratio: Number = 0.0
    seconds: float = 0.0


class Implementation(msgspec.Struct):
    """What was judged of an implementation."""

    name: str
    judged: int
    laws: list[Law] | dict[str, Law]
    error: str | None = None
    unsupported_reason: str | None = None
    modules: int | None = None
    build_seconds: float = 0.0


class Finding(msgspec.Struct):
    """A finding of a run."""

    status: str
    kind: str = ""
    implementation: str = ""


class Run(msgspec.Struct):
    """A run over the laws."""

    target: Target
    date: str
    message: str
    command: str
    implementations: list[Implementation]
    findings: list[Finding] = []
    gating: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Trial(msgspec.Struct):
    """A cell of the support table that was tried."""

    implementation: str
    side: str
    rules: list[str]
    outcome: str
    status: str
    entry: str | None


class Sides(msgspec.Struct):
    """A run over both sides of the support table."""

    target: Target
    date: str
    message: str
    command: str
    trials: list[Trial]


class RunOfSeveral(msgspec.Struct):
    """One of several runs in a file."""

    result: dict[str, Any]
    command: str


class Runs(msgspec.Struct):
    """A file of several runs."""

    runs: list[RunOfSeveral]


SHAPES: dict[str, Any] = {REPORT: Run, GATING: Sides, BUMP: Comparison}
"""The shape of each schema."""
