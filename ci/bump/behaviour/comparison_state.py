"""What a comparison has learned so far, from which its report is made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ....impl.targets.target import Target
from ...console.errors import MACHINE
from ...releases.packages import FLASHINFER_PACKAGE, Package
from ..sides.releases import Release
from ..verdicts.findings import Chip, Finding
from .comparison import Compared
from .unjudged import Cut


@dataclass
class Learned:
    """What a comparison has learned, and what it could not.

    Attributes:
        given: by side, as it was asked for.
        chips: that are asked about.
        releases, declared, targets: by side, those that could be had.
        findings: in the order of the parts.
        features: the matrix of the report; None where it could not be made.
        compared: by implementation.
        failures: sentences; a verdict needs what they are about.
        code: exit code of the worst failure; 0 without any.
        skipped: parts that were not asked for, or could not be done, and why.
        seconds: by part.
        compiled: records of modules that were compiled, see ``compiled``.
        unwritten: sentences about cases that could not be written.
        cuts: what the end of the comparison left out, by implementation.
        engines: what was read of engines' sources, for the report.
        package: whose releases are compared.
    """

    given: Mapping[str, str]
    chips: tuple[Chip, ...]
    releases: dict[str, Release] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    features: dict[str, Any] | None = None
    compared: list[Compared] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    code: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    package: Package = FLASHINFER_PACKAGE

    def fail(self, sentence: str, code: int = MACHINE) -> None:
        """Add something that could not be learned."""
        self.failures.append(sentence)
        self.code = max(self.code, code)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure the seconds of a part."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = round(time.monotonic() - start, 3)

    def version(self, side: str) -> str | None:
        """Return the version of the package on a side, None where it is not known."""
        declared = self.declared.get(side, {}).get(self.package.module)
        target = self.targets.get(side)
        return declared or (target.version_of(self.package.distribution) if target else None)

    def name(self, side: str) -> str:
        """Return the version of a side, or what it was asked for as."""
        return self.version(side) or self.given[side]
