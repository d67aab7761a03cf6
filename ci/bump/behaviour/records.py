"""The records of a comparison, one a step: each has what the one before has, and what came since.

Of an implementation ``Surveyed``, ``Planned`` and ``Compared`` follow one another, and ``Tried`` is
one of its problems. ``Comparison`` is the whole, of which the report is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ....impl.protocol import COMPILERS_A_BUILD
from ....impl.targets.target import Target
from ....properties.findings.corpus import Case
from ....properties.findings.ledger import Entry
from ....properties.space.axes import Axes
from ....properties.verdicts.verdict import Verdict
from ....properties.worker.requests import Address
from ....reference import Problem
from ...console.errors import MACHINE
from ...releases.packages import FLASHINFER_PACKAGE, Package
from ..sides.releases import SIDES, Release
from ..verdicts.findings import Chip, Finding

if TYPE_CHECKING:
    from typing_extensions import Self

DRAWN, CORPUS = "drawn", "corpus"
LOST: Final = "LOST"
TIME, SIGNAL, DEVICE_LOST = "time", "signal", "lost"
"""Why a comparison ended: its time, a signal, or a device or a suite that failed."""
DEAR, UNREACHED = "dear", "unreached"
"""Why all of an implementation was left out, besides ``TIME``, where the modules of others took
all of it: one of its modules takes longer than compilers may run, or the end came before it was
asked what it supports."""


@dataclass(frozen=True)
class Tried:
    """One problem under one law, with both releases.

    Attributes:
        law: its name.
        problem: what was asked.
        verdicts: the verdicts by side; a side that was not asked has none.
        found_by: ``DRAWN`` or ``CORPUS``.
        same_inputs: whether both were given the same bits; None where they were not compared.
        same_bits: whether both gave the same bits.
        difference: how far they are apart, see ``recording.difference``.
        case: the stored case that it is, if it is one.
        entry: the ledger entry whose case it is, if it is one.
        severe_before: whether the baseline hung or died too when it was run again.
        known_before: whether the ledger explains the candidate's failure, speaks of the baseline
            too, and says that it goes by chance, or both failed.
    """

    law: str
    problem: Problem
    verdicts: Mapping[str, Verdict]
    found_by: str = DRAWN
    same_inputs: bool | None = None
    same_bits: bool | None = None
    difference: Mapping[str, Any] | None = None
    case: Case | None = None
    entry: Entry | None = None
    severe_before: bool = False
    known_before: bool = False

    def request(self, address: Address) -> dict[str, Any]:
        """Return what a worker needs to judge it as it was judged."""
        if self.case is not None:
            return self.case.request(address)
        return address.case(self.law, self.problem)

    def bad(self, side: str) -> bool:
        """Whether a side failed."""
        verdict = self.verdicts.get(side)
        return verdict is not None and verdict.bad

    @property
    def verdict(self) -> Verdict:
        """The verdict of the side that failed; that of the candidate where both did."""
        return next(self.verdicts[side] for side in reversed(SIDES) if self.bad(side))

    def judged(self, side: str) -> bool:
        """Whether a side was judged at all."""
        verdict = self.verdicts.get(side)
        unjudged = ("UNSUPPORTED", LOST)
        return verdict is not None and verdict.status not in unjudged and not verdict.vacuous

    def passes(self, side: str) -> bool:
        """Whether a side was judged, and is right."""
        return self.judged(side) and not self.verdicts[side].bad

    @property
    def both_pass(self) -> bool:
        """Whether both sides were judged, and are right."""
        return all(map(self.passes, SIDES))


@dataclass(frozen=True)
class Surveyed:
    """What an implementation supports with each release.

    Attributes:
        name: registered, or MODULE:NAME.
        reference: MODULE:NAME.
        operation, backend: operation and backend as the implementation declares them.
        declares: what laws may need of it, on either side, see ``Implementation.declares``.
        claims: what it needs of its callers, on either side, see ``Implementation.claims``.
        reasons: reasons by side why it cannot run; empty where it can.
        errors: errors by side for which it could not be asked.
        unimported: sides on which that is because it cannot be imported.
        axes: what problems are drawn from.
        refused: axis values by side that are refused there and not on the other side.
        addresses: the addresses by side.
        build_minutes: minutes that compiling one of its modules takes; 0 where it takes none.
        build_compilers: number of compilers that one of them keeps busy.
    """

    name: str
    reference: str
    operation: str = ""
    backend: str = ""
    declares: frozenset[str] = frozenset()
    claims: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    unimported: frozenset[str] = frozenset()
    axes: Axes | None = None
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    addresses: Mapping[str, Address] = field(default_factory=dict)
    build_minutes: float = 0.0
    build_compilers: int = COMPILERS_A_BUILD

    @classmethod
    def after(cls, before: Surveyed, **learned: Any) -> Self:  # noqa: ANN401  fields of any type
        """Return the record of this step, from that of the step before and what was learned."""
        return cls(**{**vars(before), **learned})

    @property
    def runs(self) -> tuple[str, ...]:
        """The sides on which it runs."""
        return tuple(side for side in SIDES if side in self.addresses)


@dataclass(frozen=True)
class Planned(Surveyed):
    """What is to be judged of an implementation, in which modules.

    Attributes:
        modules: how many are to be built for each side.
        keys: the keys of the modules that the problems of its stored cases need, by the problem's
            id.
        planned: problems that each law is to judge, and stored cases under no name.
        left_out: the code of why all of it is left out, as of ``Cut``; empty otherwise.
    """

    modules: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    planned: Mapping[str, int] = field(default_factory=dict)
    left_out: str = ""


@dataclass(frozen=True)
class Compared(Planned):
    """What both releases made of an implementation's problems.

    Attributes:
        tried: every problem.
        builds: seconds of each module that was built, by side.
        speeds: rounds of timing, see ``speed``.
    """

    tried: Sequence[Tried] = ()
    builds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    speeds: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Cut:
    """What the end of a comparison left out of an implementation.

    Attributes:
        name: the name of the implementation.
        code: ``TIME``, ``SIGNAL``, ``DEVICE_LOST``, ``DEAR`` or ``UNREACHED``.
        problems: the problems that were to be judged, about.
        judged: number of the problems that were judged.
        modules: the modules that were to be built for each side.
        built: number of them that were built, for all sides.
        laws: the laws that judged none of their problems.
        minutes: the minutes of one core that compiling one of its modules takes, roughly; 0 if it
            has none.
        compilers: the compilers that one of them keeps busy.
    """

    name: str
    code: str
    problems: int
    judged: int
    modules: int
    built: int
    laws: tuple[str, ...]
    minutes: float = 0.0
    compilers: int = 1


@dataclass(frozen=True)
class Comparison:
    """What a comparison has learned after one of its steps, and what it could not.

    Attributes:
        given: the sides as they were asked for.
        chips: the chips that are asked about.
        package: the package whose releases are compared.
        releases, declared, targets: those that could be had, by side.
        findings: the findings in the order of the parts.
        features: the matrix of the report; None where it could not be made.
        engines: what was read of engines' sources, for the report.
        kernels: what became of precompiled kernels, by chip, see ``precompiled``.
        compiled: records of modules that were compiled, see ``compiled.compile_both``.
        published: what became of published calls, by side, see ``published.compare_published``.
        compared: the comparisons by implementation.
        cuts: what the end of the comparison left out, by implementation.
        failures: sentences; a verdict needs what they are about.
        code: exit code of the worst failure; 0 without any.
        skipped: parts that were not asked for, or could not be done, and why.
        unwritten: sentences about cases that could not be written.
        seconds: the seconds by part.
    """

    given: Mapping[str, str]
    chips: tuple[Chip, ...]
    package: Package = FLASHINFER_PACKAGE
    releases: Mapping[str, Release] = field(default_factory=dict)
    declared: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    features: Mapping[str, Any] | None = None
    engines: Sequence[Mapping[str, Any]] = ()
    kernels: Sequence[Mapping[str, Any]] = ()
    compiled: Sequence[Mapping[str, Any]] = ()
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    compared: Sequence[Compared] = ()
    cuts: Sequence[Cut] = ()
    failures: tuple[str, ...] = ()
    code: int = 0
    skipped: Mapping[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def failing(self, sentence: str, code: int = MACHINE) -> Comparison:
        """Return it with something that could not be learned."""
        return replace(self, failures=(*self.failures, sentence), code=max(self.code, code))

    def with_findings(self, *found: Iterable[Finding]) -> Comparison:
        """Return it with further findings."""
        more = (each for part in found for each in part)
        return replace(self, findings=(*self.findings, *more))

    def skipping(self, parts: Mapping[str, str]) -> Comparison:
        """Return it with parts that are left out, and why."""
        return replace(self, skipped={**self.skipped, **parts})

    def timed(self, part: str, started: float) -> Comparison:
        """Return it with the seconds of a part that began at a monotonic time."""
        seconds = round(time.monotonic() - started, 3)
        return replace(self, seconds={**self.seconds, part: seconds})

    def version(self, side: str) -> str | None:
        """Return the version of the package on a side, None where it is not known."""
        declared: str | None = self.declared.get(side, {}).get(self.package.module)
        target = self.targets.get(side)
        return declared or (target.version_of(self.package.distribution) if target else None)

    def name(self, side: str) -> str:
        """Return the version of a side, or what it was asked for as."""
        return self.version(side) or self.given[side]
