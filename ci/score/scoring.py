"""The score: runs of the laws on seeded bugs and honest controls, and their results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from ...impl.targets.optional import missing
from ...properties.findings.cases import versions
from ...properties.findings.report import Finding, ImplementationReport, RunReport
from ...properties.laws import LAWS
from ...properties.search.engine import Run
from ...properties.search.plan import Plan
from ...properties.search.progress import Progress
from ...properties.seeded import BUGS, HONEST, PROCESS_CONTROLS, SeededBug, triton_bugs
from ...properties.space.operations import OPERATIONS as SPACES
from ...properties.space.profiles import Profile
from ...properties.verdicts.operations import OPERATIONS
from ...reference import Problem
from .comparing import Comparison, Tell, comparable, compare

LEAST_KILLED = 0.95
MOST_SECONDS = 10.0
"""Median seconds from the start of a bug's check to its first confirmed failure."""
FIRST_LAWS = tuple(dict.fromkeys(each.law for each in OPERATIONS.values()))
"""Laws that judge hangs and crashes, whose every call costs a process; any law sees them."""


SHRINK_SHARE = 0.2
"""Share of the profile's seconds of shrinking for hangs and crashes, which get several times it."""
PROBLEMS_OF_HONEST = 1.5
"""Times the profile's problems, so that a gate judges honest controls on 10,000 on a busy machine
too, where they count as slower ones and get fewer."""
PROBLEMS_UNDER_ONE_LAW = 4.0
"""Times the profile's problems, where one law stands for all that a check would look under."""


@dataclass(frozen=True)
class Stage:
    """A run over part of the catalogue.

    Attributes:
        title: the title for display.
        bugs: the bugs that are run.
        laws: the laws that they are run under; all if empty.
        shrink_share: share of the profile's seconds of shrinking.
        problem_share: share of the profile's problems.
        first_only: whether a bug is done with its first finding.
    """

    title: str
    bugs: tuple[SeededBug, ...]
    laws: tuple[str, ...] = ()
    shrink_share: float = 1.0
    problem_share: float = 1.0
    first_only: bool = False

    def profile(self, profile: Profile) -> Profile:
        """Return the profile of this stage."""
        return replace(
            profile,
            problems=round(self.problem_share * profile.problems),
            shrink_seconds=self.shrink_share * profile.shrink_seconds,
        )


def stages(names: Sequence[str] = ()) -> list[Stage]:
    """Return the runs of a score, over the whole catalogue or over these names.

    Faults of Triton kernels are run where triton is, interpreted: under the laws that they
    were written for, and not made smaller.
    """
    of_triton = () if missing("triton", "triton") else tuple(triton_bugs.BUGS)
    at_once = tuple(bug for bug in PROCESS_CONTROLS if bug.law != "soak")
    at_length = tuple(bug for bug in PROCESS_CONTROLS if bug.law == "soak")
    every = (
        Stage("seeded bugs", BUGS),
        Stage("hangs and crashes", at_once, FIRST_LAWS, SHRINK_SHARE, PROBLEMS_UNDER_ONE_LAW),
        Stage("hangs of long runs", at_length, ("soak",), SHRINK_SHARE, PROBLEMS_UNDER_ONE_LAW),
        Stage("faults of Triton kernels", of_triton, triton_bugs.LAWS, 0.0, first_only=True),
        Stage("honest controls", HONEST, problem_share=PROBLEMS_OF_HONEST),
    )
    chosen = [
        replace(stage, bugs=tuple(bug for bug in stage.bugs if not names or bug.name in names))
        for stage in every
    ]
    return [stage for stage in chosen if stage.bugs]


@dataclass(frozen=True)
class Scored:
    """What became of one seeded bug or control."""

    bug: SeededBug
    report: ImplementationReport

    @property
    def findings(self) -> list[Finding]:
        """Confirmed findings, the earliest first."""
        confirmed = [finding for finding in self.report.findings if finding.verdict.bad]
        return sorted(confirmed, key=lambda finding: finding.seconds)

    @property
    def killed(self) -> bool:
        """Whether some law failed; for a hang or a crash, with just that verdict."""
        wanted = {"hang": "HANG", "crash": "CRASH"}.get(self.bug.control)
        return any(wanted in (None, finding.verdict.status) for finding in self.findings)

    @property
    def laws(self) -> list[str]:
        """The laws that killed it, the earliest first."""
        return [finding.law for finding in self.findings]

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of its check to the first confirmed failure."""
        return self.findings[0].seconds if self.findings else None

    @property
    def smallest(self) -> Problem | None:
        """The problem that its first finding, which is shrunk, ended at."""
        return self.findings[0].problem if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "name": self.bug.name,
            "reference": self.bug.reference,
            "operation": self.bug.operation,
            "control": self.bug.control,
            "description": self.bug.description,
            "model": self.bug.model,
            "meant_for": self.bug.law,
            "killed": self.killed,
            "seconds": self.seconds,
            "laws": self.laws,
            "judged": self.report.judged,
            "error": self.report.error,
            "problem": self.smallest.to_json() if self.smallest else None,
            "messages": [finding.verdict.message for finding in self.findings],
            "law_seconds": {law.law: round(law.seconds, 2) for law in self.report.laws},
        }


@dataclass(frozen=True)
class Score:
    """The result of a score."""

    profile: str
    seed: int
    scored: tuple[Scored, ...]
    stage_seconds: Mapping[str, float]
    interrupted: bool = False
    comparison: Comparison | None = None
    target: Mapping[str, Any] = field(default_factory=dict)

    def of(self, *controls: str) -> list[Scored]:
        """Return the bugs of these kinds of control."""
        return [each for each in self.scored if each.bug.control in controls]

    @property
    def share_killed(self) -> float:
        """Share of the bugs with wrong answers that some law killed."""
        bugs = self.of("bug")
        return sum(each.killed for each in bugs) / len(bugs) if bugs else 1.0

    @property
    def median_seconds(self) -> float:
        """Median seconds to kill a bug, of those killed, hangs and crashes included."""
        found = [each.seconds for each in self.of("bug", "hang", "crash") if each.killed]
        return statistics.median(s for s in found if s is not None) if found else 0.0

    @property
    def accused(self) -> list[Finding]:
        """Findings against honest controls, those too that were not confirmed."""
        return [finding for each in self.of("honest") for finding in each.report.findings]

    @property
    def honest_judged(self) -> int:
        """Problems on which honest controls were judged."""
        return sum(each.report.judged for each in self.of("honest"))

    @property
    def kills_by_law(self) -> dict[str, list[Scored]]:
        """Return the bugs that each law of these operations killed.

        Hangs and crashes are left out: they are not run under every law.
        """
        killed = [each for each in self.of("bug") if each.killed]
        scored = {each.bug.operation for each in self.scored}
        laws = [law.name for law in LAWS if scored.intersection(law.operations)]
        return {name: [each for each in killed if name in each.laws] for name in laws}

    @property
    def share_small(self) -> float | None:
        """Share of the killed attention bugs with a smallest problem of one request and two pages.

        None where no such bug was killed.
        """
        ends = [each.smallest for each in self.of("bug")]
        small = [
            is_small(problem)
            for problem in ends
            if problem is not None and (is_small := SPACES[problem.operation].is_small) is not None
        ]
        return sum(small) / len(small) if small else None

    @property
    def idle_laws(self) -> list[str]:
        """Return the laws that are the only killer of no bug and declare no overlap.

        Of a law of which not all bugs were scored, nothing is known.
        """
        names, kills = {each.bug.name for each in self.of("bug")}, self.kills_by_law
        unseen = {bug.operation for bug in BUGS if bug.name not in names}
        judged = [law for law in LAWS if not (law.overlap or unseen.intersection(law.operations))]
        return [law.name for law in judged if not only_killer(kills.get(law.name, ()))]

    @property
    def shortfalls(self) -> list[str]:
        """Return what keeps the score from passing; nothing if it passes."""
        found = []
        if self.share_killed < LEAST_KILLED:
            found.append(f"{self.share_killed:.1%} of the seeded bugs killed, not 95 %")
        found.extend(
            f"{each.bug.name} did not become a {each.bug.control.upper()}"
            for each in self.of("hang", "crash")
            if not each.killed
        )
        found.extend(
            f"{finding.implementation} is honest, but {finding.law} accuses it"
            for finding in self.accused
        )
        # A control of which nothing was judged proves nothing.
        found.extend(
            f"{each.bug.name}: no problem was judged {each.report.error}".strip()
            for each in self.of("honest")
            if not each.report.judged
        )
        if self.median_seconds > MOST_SECONDS:
            found.append(f"a median of {self.median_seconds:.1f} s to kill, not 10 s")
        if self.profile == "gate":  # others look too briefly to tell
            found.extend(f"{each.bug.name} survived" for each in self.of("tile") if not each.killed)
            found.extend(
                f"the law {name} kills no bug alone, and its `overlap` does not say why it is kept"
                for name in self.idle_laws
            )
        if self.interrupted:
            found.append("interrupted")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(dict(self.target)),
            "profile": self.profile,
            "seed": self.seed,
            "passed": not self.shortfalls,
            "shortfalls": self.shortfalls,
            "share_killed": self.share_killed,
            "median_seconds": self.median_seconds,
            "share_small": self.share_small,
            "honest_judged": self.honest_judged,
            "accusations": [finding.to_json() for finding in self.accused],
            "stage_seconds": dict(self.stage_seconds),
            "laws": {
                name: {
                    "kills": [each.bug.name for each in kills],
                    "alone": [each.bug.name for each in only_killer(kills)],
                }
                for name, kills in self.kills_by_law.items()
            },
            "comparison": self.comparison.to_json() if self.comparison else None,
            "bugs": [each.to_json() for each in self.scored],
        }


def only_killer(kills: Iterable[Scored]) -> list[Scored]:
    """Return those of a law's kills that no other law killed."""
    return [each for each in kills if len(each.laws) == 1]


def run_score(
    profile: Profile,
    *,
    names: Sequence[str] = (),
    seed: int = 0,
    jobs: int = 0,
    briefly: bool = False,
    watch: Callable[[Stage], AbstractContextManager[Progress]] = lambda _: nullcontext(Progress()),
    watch_comparison: Callable[[int], AbstractContextManager[Tell]] = lambda _: nullcontext(
        lambda _bug, _count: None
    ),
) -> Score:
    """Run the laws on the catalogue, or on these names of it, and compare with other yardsticks.

    Briefly: without shrinking and comparison, and no further with a bug than the first law that
    kills it.
    """
    scored: list[Scored] = []
    seconds: dict[str, float] = {}
    target: Mapping[str, Any] = {}
    interrupted, comparison = False, None
    if briefly:
        profile = replace(profile, shrink_seconds=0.0)
    for stage in stages(names):
        plan = Plan(
            [bug.reference for bug in stage.bugs],
            stage.profile(profile),
            seed=seed,
            jobs=jobs,
            laws=stage.laws,
            shrink_all=False,
            first_only=briefly or stage.first_only,
            confirm=False,
        )
        with watch(stage) as progress:
            report = Run(plan, progress).execute()
        scored.extend(score_stage(stage, report))
        seconds[stage.title] = round(report.seconds, 1)
        target, interrupted = report.target, report.interrupted
        if interrupted:
            break
    if not (briefly or interrupted):
        started = time.monotonic()
        chosen = comparable(names)
        with watch_comparison(len(chosen)) as tell:
            comparison = compare(chosen, profile, seed=seed, jobs=jobs, judged=tell)
        seconds["comparisons"] = round(time.monotonic() - started, 1)
    return Score(profile.name, seed, tuple(scored), seconds, interrupted, comparison, target)


def score_stage(stage: Stage, report: RunReport) -> list[Scored]:
    """Bring bugs and reports together."""
    found = {each.reference: each for each in report.implementations}
    return [
        Scored(bug, found.get(bug.reference) or ImplementationReport(bug.name, bug.reference))
        for bug in stage.bugs
    ]


def size_of(problem: Problem) -> str:
    """Return a problem's size in words."""
    return SPACES[problem.operation].size(problem)
