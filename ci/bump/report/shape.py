"""Reading a comparison's report back: its shape as far as other commands read it (docs/bump.md).

Fields that are not named here are let through, except in a finding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ....impl.targets.backends import FLASHINFER
from ....impl.targets.data_files import read_json
from ....impl.targets.schemas import Table, converted, one_of
from ...console.errors import UsageRefusedError
from ...releases.packages import PACKAGES
from ..verdicts.findings import ACTIONS, AREAS, CHANGES, USES, Chip
from ..verdicts.verdict import EVIDENCE
from .contents import SCHEMA

Number = float | Literal["inf", "-inf", "nan"]
"""Number of a report, in which infinities and NaN are text."""
DISTRIBUTIONS = [each.distribution for each in PACKAGES.values()]
Action = Annotated[str, one_of(ACTIONS)]


class Sides(msgspec.Struct):
    """A number for each side."""

    baseline: float
    candidate: float


class Side(msgspec.Struct):
    """A release, or an environment."""

    given: str
    flashinfer: str | None
    torch: str | None
    triton: str | None
    cuda: str | None
    own_environment: bool
    artifacts: dict[str, str]
    not_imported: dict[str, str]
    version: str | None = None


class Condition(msgspec.Struct):
    """What must hold for a bump, and the findings that ask for it."""

    rule: str
    findings: list[str]


class ChipVerdict(msgspec.Struct):
    """The verdict on a chip."""

    chip: Chip
    name: str
    verdict: str
    evidence: Annotated[str, one_of(EVIDENCE)]
    blocked_by: list[str]
    conditions: list[Condition]


class Problem(msgspec.Struct):
    """A problem: its id, and in words."""

    id: str
    told: str


class Place(msgspec.Struct):
    """A place in an engine's source."""

    file: str
    line: int
    how: str


class Uses(msgspec.Struct):
    """What an engine's source says of a change."""

    status: Annotated[str, one_of(USES)]
    count: int
    places: list[Place]
    unknown_count: int = 0
    unknown: list[Place] = msgspec.field(default_factory=list)


class Unread(msgspec.Struct):
    """A file of an engine's source that could not be read, or not parsed."""

    file: str
    why: str


class EngineSource(msgspec.Struct):
    """An engine's source that was read."""

    path: str
    files: int
    naming: int
    unread: list[Unread]


class FindingTable(Table, frozen=True):
    """A finding, see ``Finding``."""

    id: str
    area: Annotated[str, one_of(AREAS)]
    change: Annotated[str, one_of(CHANGES)]
    subject: str
    message: str
    chips: tuple[Chip, ...]
    rule: str
    baseline: dict[str, Any]
    candidate: dict[str, Any]
    laws: tuple[str, ...]
    problem: Problem | None
    replay: dict[str, str]
    entry: str
    issue: str
    reason: str
    found_by: tuple[str, ...]
    count: int
    action: Action
    accepted: str
    uses: Uses | None = None


class Cell(msgspec.Struct):
    """What a side supports."""

    status: str
    evidence: str
    rule: str


class Cells(msgspec.Struct):
    """What both sides support on a chip."""

    chip: Chip
    change: str
    baseline: Cell
    candidate: Cell


class Row(msgspec.Struct):
    """A feature on all chips."""

    title: str
    operation: str
    backend: str
    cells: list[Cells]


class Features(msgspec.Struct):
    """The matrix of features."""

    chips: list[Chip]
    rules: dict[str, str]
    rows: list[Row]


class LawNumbers(msgspec.Struct):
    """What a law judged of an implementation."""

    law: str
    judged: int
    changes: dict[str, int]
    worst_ratio: dict[str, Number]
    passed: int = msgspec.field(name="pass")


class Bits(msgspec.Struct):
    """Results that were compared bit by bit."""

    compared: int
    changed: int
    other_inputs: int


class ImplementationNumbers(msgspec.Struct):
    """What was judged of an implementation."""

    name: str
    reference: str
    operation: str
    backend: str
    runs: list[str]
    reasons: dict[str, str]
    judged: int
    laws: list[LawNumbers]
    ratios: dict[str, list[Number]]
    bits: Bits
    modules: int
    claims: list[str] = []


class Soaked(msgspec.Struct):
    """Problems that were launched many times."""

    name: str
    problems: int
    failed: int


class Liveness(msgspec.Struct):
    """Whether calls end."""

    launches: int
    soaked: list[Soaked]
    hangs: list[str]
    known: list[str]


class Compiled(msgspec.Struct):
    """What a compiler said of a module for a chip."""

    side: str
    unit: str
    sm: Chip
    status: str


class Untested(msgspec.Struct):
    """What was not tested, and why."""

    what: str
    why: str
    chips: list[Chip] = []
    implementations: list[str] = []


class Build(msgspec.Struct):
    """Seconds of each build of a module, by side."""

    name: str
    seconds: dict[str, list[float]]


class Measurement(msgspec.Struct):
    """Times of one problem."""

    ratio: float
    low: float
    high: float
    seconds: Sides
    problem: str
    work: float
    peak_bytes: dict[str, float | None] | None = None
    workspace_bytes: dict[str, float | None] | None = None


class Speed(msgspec.Struct):
    """Times of an implementation."""

    name: str
    measurements: list[Measurement]


class Timings(msgspec.Struct):
    """What depends on the clock."""

    seconds: float
    builds: list[Build]
    speed: list[Speed]
    parts: dict[str, float] = {}


class Corpus(msgspec.Struct):
    """Stored cases that were replayed."""

    replayed: int
    of_ledger: int


class Machine(msgspec.Struct):
    """What one machine judged."""

    chip: Chip
    device: str
    device_name: str
    profile: str
    command: str
    versions: dict[str, dict[str, str | None]]
    seed: int
    judged: int
    implementations: list[ImplementationNumbers]
    liveness: Liveness
    compiled: list[Compiled]
    not_tested: list[Untested]
    timings: Timings
    problems: int | msgspec.UnsetType = msgspec.UNSET
    corpus: Corpus | msgspec.UnsetType = msgspec.UNSET
    published: dict[str, dict[str, Any]] = {}


class Accepted(msgspec.Struct):
    """Findings that the policy accepts."""

    finding: str
    reason: str
    chips: list[Chip]


class PolicyPart(msgspec.Struct):
    """The policy, defaults included."""

    source: str
    actions: dict[str, Action]
    slower: float
    required: list[Chip]
    accepted: list[Accepted]
    rules: list[str]
    unused: list[str]


class BuildKernels(msgspec.Struct):
    """What became of the precompiled kernels of one build."""

    build: str
    kept: int
    rebuilt: int
    gone: int
    new: int
    resized: int
    too_large: tuple[int, int]


class ListedKernels(msgspec.Struct):
    """What became of another list of precompiled kernels for a chip, and of its calls."""

    title: str
    builds: list[BuildKernels]
    level: str = "listed"
    calls: list[dict[str, str | int]] = []


class ChipKernels(msgspec.Struct):
    """What became of the precompiled kernels for a chip, and of calls by function and state."""

    chip: Chip
    level: str
    artifacts: dict[str, str]
    builds: list[BuildKernels]
    calls: list[dict[str, str | int]]
    parameter_bytes: dict[str, dict[str, int]] = {}
    gemms: list[ListedKernels] = []


class Report(msgspec.Struct):
    """A report."""

    verdict: str
    message: str
    baseline: Side
    candidate: Side
    chips: list[ChipVerdict]
    conditions: list[Condition]
    findings: list[FindingTable]
    features: Features | None
    machines: list[Machine]
    not_tested: list[Untested]
    failures: list[str]
    policy: PolicyPart
    kernelproof: str
    date: str
    command: str
    engines: list[EngineSource] = []
    kernels: list[ChipKernels] = []
    package: Annotated[str, one_of(DISTRIBUTIONS)] = FLASHINFER


class ReportError(UsageRefusedError):
    """A report that cannot be read; the message names the file and the field."""


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ReportError: the file cannot be read, or is something else.
    """
    data = read_json(path, ReportError)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        message = f"{path}: its schema is {schema!r}; this Kernelproof reads {SCHEMA!r}"
        raise ReportError(message)
    converted(data, Report, path, ReportError)
    report: dict[str, Any] = data
    return report
