"""What a run is to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis.database import ExampleDatabase

from ...reference import Problem
from ..findings.corpus import Case
from ..findings.ledger import Ledger
from ..laws import Law, laws_of
from ..space.operations import OPERATIONS, Light
from ..space.profiles import LIGHT_SHARE, Cost, Profile
from ..space.restrictions import WHOLE_SPACE, Only
from .candidate import Deadly
from .drawing import SearchOptions

REFERENCES = ("flashinfer-trace",)
"""Backends of references that are published in torch."""
LEAST_PROBLEMS, LEAST_SECONDS = 3, 3.0
"""Fewest problems and seconds of a law, whatever its weight."""
SECONDS_ON_A_GPU = 0.4
"""Share of the profile's seconds that the laws of a gate over many have on a GPU: what takes longer
there is code on the host, such as references of plain torch, which a CPU judges as well."""
LEAST_SECONDS_OF_A_PART = 1.0
"""Fewest seconds of one of several equal parts of a law's search."""
FIRST_SHARE = 0.2
"""Share of the total weight of an implementation's laws that its first part has."""


@dataclass(frozen=True)
class Learned:
    """What laws leave to those after them: what breaks one law often breaks another.

    Attributes:
        smallest, deadly: see ``Candidate``.
    """

    smallest: tuple[Problem, ...] = ()
    deadly: tuple[Deadly, ...] = ()


NOTHING = Learned()


@dataclass(frozen=True)
class Part:
    """One part of the laws on one implementation; the other parts are runs of their own.

    Attributes:
        laws: their names; None for the first ones, see ``FIRST_SHARE``.
        replays: whether the stored cases are replayed in this part.
        learned: what the laws before these have found.
        jobs: workers that the laws would share in a whole run: a law's seconds depend on it.
    """

    laws: tuple[str, ...] | None
    replays: bool
    learned: Learned = NOTHING
    jobs: int = 1


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        implementations: names or MODULE:NAME.
        profile: how hard to look.
        operation: the operation of plain functions.
        device: ``"cpu"`` or ``"cuda"``.
        seed: the seed of the search; two runs with the same draw the same problems.
        ledger: known failures.
        corpus: stored cases, see ``open_corpus``; those of the implementations are replayed first.
        jobs: workers at a time; if 0, by the number of cores, on a GPU by the memory too.
        laws: names of the laws to run; all if empty.
        shrink_all: search and shrink in full under every law; otherwise only until the first
            finding of an implementation: laws after it judge ``LATER_PROBLEMS``, unshrunk.
        first_only: no law is run on an implementation after one has failed on it.
        exit_first: the run ends at the first finding that no ledger entry explains.
        confirm: replay each finding in a fresh process.
        share: the share of the profile's problems: a gate over many implementations takes fewer of
            each.
        deck: whether the deck is asked before laws draw.
        examples: what runs keep for one another, where the profile explores.
        without_rules: ids of support rules that are not asked: what they refuse is called.
        only: the part of the space of problems that is searched.
        costs: cost classes by implementation; those of others are measured.
        environment: further variables for workers beside the run's own.
        sanitizer: tool of compute-sanitizer that the workers run under; none if empty.
        distrust: whether processes in which no implementation is loaded judge.
        mps: whether processes share a GPU through NVIDIA's MPS, where that is installed.
        seconds: the seconds of the whole run, after which no law begins and those under way end.
        builds: minutes of one core that libraries took to build in earlier runs, by their names.
        part: the part of the laws that this run has; all if None.
        failed: cases of laws that are to begin, each with the problem of its case.
        preload: further modules that workers have at their start.
    """

    implementations: Sequence[str]
    profile: Profile
    operation: str | None = None
    device: str = "cpu"
    seed: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    corpus: Sequence[Case] = ()
    jobs: int = 0
    laws: Sequence[str] = ()
    shrink_all: bool = True
    first_only: bool = False
    exit_first: bool = False
    confirm: bool = True
    share: float = 1.0
    deck: bool = False
    examples: ExampleDatabase | None = None
    without_rules: Sequence[str] = ()
    only: Only = WHOLE_SPACE
    costs: Mapping[str, Cost] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    sanitizer: str = ""
    distrust: bool = False
    mps: bool = False
    seconds: float = math.inf
    builds: Mapping[str, float] = field(default_factory=dict)
    part: Part | None = None
    failed: Sequence[Case] = ()
    preload: Sequence[str] = ()


def is_thorough(plan: Plan) -> bool:
    """Whether a plan asks for lines of kernels and features, see ``Profile.thorough``.

    A part of the laws, or of the space, need not reach them.
    """
    return plan.profile.thorough and not plan.laws and plan.only == WHOLE_SPACE


def light_of(plan: Plan, operation: str) -> Light | None:
    """Return the limits of a gate's problems, see ``Space.light``; None where there are none."""
    return OPERATIONS[operation].light if plan.share < 1 else None


def of_operation(plan: Plan, operation: str, backend: str = "") -> Plan:
    """Return the plan with the share of problems that an operation's laws have.

    Args:
        plan: plan of the run.
        operation: the operation.
        backend: the backend of the implementation, where that matters.
    """
    # A published reference is wrong on a GPU where it is wrong on a CPU, and is no kernel: at
    # 0.07 to 1.3 s a problem, 16 of them took 23 % of the laws' time of a gate on an H200.
    a_reference = backend in REFERENCES and plan.device == "cuda" and plan.share < 1
    if light_of(plan, operation) or a_reference:
        return replace(plan, share=LIGHT_SHARE * plan.share)
    return plan


def laws_planned(plan: Plan, operation: str) -> list[Law]:
    """Return the laws that a plan has for an operation, in their order."""
    part = plan.part
    laws = [law for law in laws_of(operation) if not plan.laws or law.name in plan.laws]
    if part is None:
        return laws
    if part.laws is None:
        return first_laws(laws)
    return [law for law in laws if law.name in part.laws]


def first_laws(laws: Sequence[Law]) -> list[Law]:
    """Return the laws of the first part of an implementation's, one at least."""
    most, passed = FIRST_SHARE * sum(law.weight for law in laws), 0.0
    first: list[Law] = []
    for law in laws:
        passed += law.weight
        if first and passed > most:
            break
        first.append(law)
    return first


def problems_of(plan: Plan, law: Law, cost: Cost, parts: int = 1) -> int:
    """Return the number of problems that a law judges in each equal part of its search."""
    problems = plan.profile.problems * law.weight * cost.problems * plan.share
    return max(LEAST_PROBLEMS // parts, round(problems / parts), 1)


def seconds_of(plan: Plan, law: Law, laws: Sequence[Law], jobs: int, parts: int = 1) -> float:
    """Return the seconds after which a law ends early: its share of what all workers have."""
    total = sum(each.weight for each in laws) or 1.0
    least = LEAST_SECONDS if parts == 1 else LEAST_SECONDS_OF_A_PART
    # The profile's seconds are those of one worker; laws run on several at a time, so that each law
    # may take its share of what all of them have.
    each = SECONDS_ON_A_GPU if plan.device == "cuda" and plan.share < 1 else 1.0
    seconds = each * plan.share * plan.profile.seconds * jobs
    return max(least, seconds * law.weight / total / parts)


def options_of(
    plan: Plan,
    law: Law,
    laws: Sequence[Law],
    cost: Cost,
    *,
    seed: int,
    jobs: int,
    parts: int = 1,
    alike: bool = False,
) -> SearchOptions:
    """Return how the search under a law goes about it.

    Args:
        plan: plan of the run.
        law: law that is searched.
        laws: all laws on the implementation, among which its time is shared out.
        cost: cost class of the implementation.
        seed: seed of the search.
        jobs: workers that the laws share.
        parts: number of equal parts of the law's search, of which this is one.
        alike: whether all laws of the implementation draw the same problems.
    """
    problems = problems_of(plan, law, cost, parts)
    return SearchOptions(
        plan.profile,
        seed,
        problems,
        seconds_of(plan, law, laws, jobs, parts),
        min(law.floor, problems),
        confirm=plan.confirm,
        alike=alike,
    )
