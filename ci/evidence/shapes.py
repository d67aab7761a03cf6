"""The shapes of runs that are kept, and of the files that keep them: the fields that are read."""

from __future__ import annotations

from typing import Any

import msgspec


class KeptBug(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of a seeded bug or control.

    Attributes:
        rejected_by: positions of the comparisons that rejected it.
        date: date of the run that scored it; empty in rows of before rows had one.
    """

    name: str
    control: str
    killed: bool
    judged: int
    seconds: float | None
    laws: tuple[str, ...]
    rejected_by: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    date: str = ""


class KeptScore(msgspec.Struct):
    """The scores of an operation, as they are kept."""

    operation: str
    profile: str
    comparisons: tuple[str, ...] = ()
    bugs: tuple[KeptBug, ...] = ()


class Bug(KeptBug, kw_only=True):
    """A bug of a run of ``score``."""

    operation: str


class Yardstick(msgspec.Struct):
    """The bugs and the honest controls that a comparison of outputs rejected."""

    caught: tuple[str, ...]
    accused: tuple[str, ...]


class Comparison(msgspec.Struct):
    """The bugs that were compared, and what each comparison rejected of them."""

    compared: tuple[str, ...] = ()
    yardsticks: dict[str, Yardstick] = {}


class Score(msgspec.Struct):
    """A run of ``score``."""

    profile: str
    shortfalls: tuple[str, ...]
    comparison: Comparison | None
    bugs: tuple[Bug, ...]
    date: str = ""


class Device(msgspec.Struct):
    """The machine of a run of ``check`` or ``gate``."""

    device: str = ""
    sm: int | None = None
    flashinfer: str | None = None
    triton: str | None = None
    torch: str | None = None


class Finding(msgspec.Struct):
    """A finding of such a run; of a hang or a crash, its problem is not kept."""

    implementation: str
    law: str
    status: str
    kind: str
    problem: dict[str, Any] | None


class Report(msgspec.Struct):
    """A run of ``check`` or ``gate``."""

    target: Device
    findings: tuple[Finding, ...]


class Change(msgspec.Struct):
    """A finding of a run of ``bump``."""

    entry: str
    laws: tuple[str, ...]


class Bump(msgspec.Struct):
    """A run of ``bump``."""

    findings: tuple[Change, ...]
