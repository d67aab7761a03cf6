"""The shape of a run's JSON report, from which its JSON Schema is made."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ...properties.findings.kernels import Kernel, Share
from ...properties.findings.ledger import ProblemJson
from ...properties.findings.report import CorpusReport, Milestones
from ...properties.isolation.leftovers import Left
from .claims import LostClaim
from .summary import Known

SCHEMA = "kernelproof/report/1"
Number = float | Literal["inf", "-inf", "nan"]
"""Number of a report, in which infinities and NaN are text."""


class Element(TypedDict):
    """A wrong element: where it stands, and three numbers as text."""

    where: str
    got: str
    expected: str
    bound: str


class PlacedElement(Element):
    """A wrong element with its place by axis."""

    at: dict[str, int]


class ErrorMap(TypedDict):
    """The largest ratio of error to bound of each token (row) and head (column) of a tensor."""

    tensor: str
    shape: list[int]
    step: list[int]
    worst: list[list[Number]]


class First(TypedDict):
    """The problem that failed first, before it was made smaller."""

    problem: ProblemJson
    error_map: ErrorMap


class Cause(TypedDict):
    """What failing problems share, and the numbers of problems with and without it."""

    values: dict[str, Any]
    failing: int
    passing: int
    others: int


class _Finding(TypedDict):
    implementation: str
    declared_name: str
    law: str
    laws: list[str]
    status: Literal["FAIL", "HANG", "CRASH", "REJECTED", "KNOWN"]
    kind: str
    kinds: list[str]
    message: str
    element: Element | None
    ratio: Number | None
    worst: list[PlacedElement]
    problem: ProblemJson
    problem_id: str
    kernels: list[str]
    entry: str | None
    contradicts: str | None
    cause: Cause
    ignored: str
    seconds: float
    attempts: int
    deaths: int
    replay: str
    trace: str
    printed: str
    error_map: ErrorMap | None
    first: First | None


class Finding(_Finding, total=False):
    """Findings with one cause, by the smallest problem; a known one has a reason and an issue."""

    reason: str
    issue: str


class Law(TypedDict):
    """What one law judged of an implementation."""

    law: str
    judged: int
    vacuous: int
    unsupported: int
    rejected: int
    known: dict[str, int]
    flaky: int
    worst_ratio: Number
    passing_ratio: Number
    seconds: float
    floor: int
    ended: Literal["", "time", "stopped", "idle", "rare", "room"]
    error: str
    verdict: str
    reused: str
    specialisations: list[str]


class LawTime(TypedDict):
    """A law's time over all implementations, what it found, and the seeded bugs that it kills.

    Attributes:
        share: its share of the seconds of all laws, 0 to 1.
        new: number of new findings that it shows.
        known: number of ledger entries that explain its failures, by implementation.
        kills: number of seeded bugs that it kills, of operations of which it judged a problem.
        kills_first: number of those that it killed before other laws.
        kills_only: number of those that no other law kills.
        seeded_bugs: number of seeded bugs of these operations.
    """

    law: str
    seconds: float
    share: float
    judged: int
    new: int
    known: int
    kills: int
    kills_first: int
    kills_only: int
    seeded_bugs: int


class LaunchedCall(TypedDict):
    """A call of one specialisation: whole names of the kernels that it launched, and short ones."""

    id: str
    step: str
    module: str
    features: list[str]
    size: int
    kernels: list[str]
    names: list[str]


class Named(TypedDict):
    """How many specialisations were called, and of how many the kernels are known."""

    specialisations: int
    named: int
    distinct: int
    seconds: float
    not_recorded: str


class Launched(Named):
    """Kernels by specialisation."""

    calls: list[LaunchedCall]


class Reused(TypedDict):
    """Laws whose results are those of an earlier check, of how many, and the oldest date."""

    laws: int
    of: int
    since: str


class Axis(TypedDict):
    """Values of an axis that are claimed, refused with a reason, or were not drawn."""

    claimed: list[str]
    refused: dict[str, str]
    not_drawn: list[str]


class Lengths(TypedDict):
    """Quantiles of a length."""

    least: int
    median: int
    p90: int
    most: int


class Pairs(TypedDict):
    """Pairs of values of two axes that were seen together, and how many there are."""

    seen: int
    of: int


class Gap(TypedDict):
    """A floor that was not reached."""

    code: Literal["law", "edge", "axis", "real", "feature", "kernel"]
    name: str
    value: str
    judged: int
    floor: int
    seconds: float | None
    text: str


class Coverage(TypedDict):
    """What was reached of an implementation."""

    asked: int
    judged: dict[str, int]
    early: dict[str, str]
    idle: list[str]
    lengths: dict[str, Lengths]
    edges: dict[str, int]
    pairs: Pairs
    unseen: dict[str, list[str]]
    gaps: list[Gap]
    real: dict[str, list[str]]
    real_unseen: dict[str, list[str]]
    without_long: str
    without_full: str


class Implementation(TypedDict):
    """What was learned of one implementation."""

    name: str
    declared_name: str
    reference: str
    operation: str
    provider: str
    provider_version: str | None
    status: str
    claims: list[str]
    interpreted: bool
    caveats: list[str]
    cost: str
    call_seconds: float
    judged: int
    of_deck: int
    unsupported: int
    unsupported_reason: str
    unsupported_code: str
    rejected: int
    error: str
    refused: dict[str, str]
    claimed_space: dict[str, Axis] | None
    modules: int
    build_seconds: float
    run_seconds: float
    share: float
    new: int
    known: int
    kills: int
    seeded_bugs: int
    seconds: float
    ratios: list[int]
    corpus: CorpusReport
    coverage: Coverage
    kernels: list[Kernel]
    kernel_lines: dict[str, Share]
    unset_flags: dict[str, str]
    launched: Launched
    unexplained: int
    left: list[Left]
    laws: list[Law]


class Broken(TypedDict):
    """What a distribution registers and cannot be used."""

    distribution: str
    version: str
    name: str
    reference: str
    reason: str


class _Report(TypedDict):
    schema: str
    verdict: Literal["conforming", "nonconforming", "incomplete", "error"]
    message: str
    exit_code: int
    judged: int
    unsupported: int
    rejected: int
    corpus: CorpusReport
    seconds: float
    build_seconds: float
    run_seconds: float
    time_by_law: list[LawTime]
    launched: Named
    reused: Reused
    findings: list[Finding]
    known: list[Known]
    implementations: list[Implementation]
    lost_claims: list[LostClaim]
    broken: list[Broken]
    ratio_edges: list[float]
    profile: str
    seed: int
    device: str | None
    target: dict[str, Any]
    respawns: int
    left: list[Left]
    interrupted: bool
    ended: Literal["", "time", "found", "interrupted", "terminated"]
    milestones: Milestones
    lost: str
    error: str
    kernelproof: str
    date: str
    command: str


class Report(_Report, total=False):
    """The report of ``check`` or ``gate``.

    ``fleet`` and ``chips`` come from a cluster, the latter a report for each chip; ``gating`` from
    a run that tried the support table too, ``published`` from ``gate``: FlashInfer's published
    calls, or why they are no part of it.
    """

    fleet: dict[str, Any]
    chips: dict[str, Any]
    gating: dict[str, Any]
    published: dict[str, Any]
