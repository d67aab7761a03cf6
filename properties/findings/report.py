"""What a run found, as data."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...impl.gpu.interpreted import CAVEATS
from ...impl.targets.refusal import Refusal
from ...impl.targets.registrations import Registration
from ...reference import Problem
from ..isolation.leftovers import Left
from ..verdicts.verdict import Verdict
from .claimed_space import ClaimedSpace
from .coverage import Coverage
from .kernels import Kernel, KernelRuns, share_of
from .launched import Launched, together

TIME, FOUND, INTERRUPTED, TERMINATED = ENDINGS = ("time", "found", "interrupted", "terminated")
"""What may end a run early: its own deadline, its first finding, SIGINT, SIGTERM."""
EARLY = ("time", "stopped", "room")
"""Reasons for which a law ends before it has judged its problems though there are more."""
MOST_REMEMBERED = 500
"""Failing problems, and passing ones, that the report of a law keeps once the law has ended."""
RATIO_EDGES = tuple(10 ** (half / 2) for half in range(-10, 7))
"""Edges of the bins of error over bound, two a decade, each the largest ratio of its bin; 1 is the
bound itself. The last bin, behind the last edge, is open."""
SUITE_FAILED = "the suite failed"
"""Beginning of the error of an implementation that is not at fault itself."""


@dataclass
class Finding:
    """A failure with its smallest problem.

    Attributes:
        implementation, law: who broke what.
        verdict: the verdict on ``problem``.
        problem: the smallest that was found.
        entry: id of the ledger entry that explains it, if one does.
        contradicts: id of the ledger entry that says that this case fails, where it passes.
        seconds: the seconds that laws took of this implementation until the first confirmed
            failure.
        attempts: problems judged while it was shrunk.
        deaths: number of them that cost a process; it is limited.
        replay: the command that reproduces it.
        place: the function of the code under test that a HANG is stuck in, where that is known.
        first: the problem that failed first, before it was shrunk, and the verdict on it.
    """

    implementation: str
    law: str
    verdict: Verdict
    problem: Problem
    entry: str | None = None
    contradicts: str | None = None
    seconds: float = 0.0
    attempts: int = 0
    deaths: int = 0
    replay: str = ""
    place: str = ""
    first: tuple[Problem, Verdict] | None = None

    @property
    def ratio(self) -> float | None:
        """The error over its bound: infinite for a NaN, and where every bit counts."""
        verdict = self.verdict
        return math.inf if verdict.ratio is None and verdict.element else verdict.ratio

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "implementation": self.implementation,
            "law": self.law,
            "status": "KNOWN" if self.entry else self.verdict.status,
            "kind": self.verdict.kind,
            "message": self.verdict.message,
            "element": self.verdict.element,
            "ratio": self.ratio,
            "worst": list(self.verdict.worst),
            "problem": self.problem.to_json(),
            "entry": self.entry,
            "contradicts": self.contradicts,
            "seconds": round(self.seconds, 3),
            "attempts": self.attempts,
            "deaths": self.deaths,
            "replay": self.replay,
            "trace": self.verdict.trace,
            "error_map": None if self.entry else self.verdict.error_map,
            "first": self._first_to_json(),
            "printed": self.verdict.printed,
        }

    def _first_to_json(self) -> dict[str, Any] | None:
        """Return where the answer to the first problem is wrong, which has a pattern to show."""
        if self.entry or self.first is None or self.first[1].error_map is None:
            return None
        problem, verdict = self.first
        return {"problem": problem.to_json(), "error_map": verdict.error_map}


@dataclass
class Separated:
    """One cause, found by taking away what its smallest problem has.

    Attributes:
        values: what a problem needs to fail for this cause, as a predicate of the ledger.
        findings: the findings on this cause, the most telling one first.
        failing: problems that fail for this cause and for no other one.
        passing: problems that pass though they have the values.
        others: problems without the values that pass, or fail for other causes.
    """

    values: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    failing: int = 0
    passing: int = 0
    others: int = 0


@dataclass
class Separation:
    """What experiments have made of an implementation's findings.

    Attributes:
        causes: the causes in the order of their findings; other findings are grouped by shared
            values.
        further: findings that the experiments themselves have made.
        unexplained: problems that fail for none of the causes, since the time was over.
    """

    causes: list[Separated] = field(default_factory=list)
    further: list[Finding] = field(default_factory=list)
    unexplained: int = 0


class ProblemVerdict(NamedTuple):
    """The latest verdict of a law on one problem.

    Attributes:
        problem: the problem that was judged.
        status, kind: status and kind of the verdict; KNOWN where a ledger entry explains it.
        vacuous: whether the problem held nothing that the law compares.
    """

    problem: Problem
    status: str
    kind: str
    vacuous: bool


@dataclass
class LawReport:
    """One law on one implementation.

    Attributes:
        passing_ratio: the worst error over its bound of the problems that passed.
        ratios: problems, tries of shrinking included, by the bin of their worst error over its
            bound, see ``RATIO_EDGES``.
        problems: the latest verdict on each problem, by problem id, tries of shrinking included;
            once the law has ended, see ``forget``.
        floor: fewest problems that it must judge to count.
        ended: why it did not judge all the problems that it was to judge; empty where it did, or
            found a failure. ``time``: its time was over; ``stopped``: the run's was; ``idle``: it
            found nothing to judge; ``rare``: too little; ``room``: memory had no room.
        without_room: problems for which memory had no room, on a GPU beside what else ran, by
            problem id; they are tried again at the end of the run.
        too_large: ids of those of them that a worker's limit refuses then too.
        kernels: what ran of its Triton kernels.
        launched: names of the kernels that its calls launched.
        without_long: why its one very long problem was not judged; empty where it was, or the
            profile has none.
        without_full: which kinds of batches that fill a GPU were not judged, and why; empty where
            each was, or the run asks for none.
        interpreted: Triton's interpreter ran kernels of it.
        of_deck: number of the judged problems that came from the deck, not from the law's draws.
        reused: date of the run that judged it where this one did not ask again.
    """

    law: str
    judged: int = 0
    vacuous: int = 0
    unsupported: int = 0
    unsupported_reason: str = ""
    rejected: int = 0
    known: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None
    flaky: int = 0
    passing_ratio: float = 0.0
    ratios: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    floor: int = 0
    ended: Literal["", "time", "stopped", "idle", "rare", "room"] = ""
    error: str = ""
    lost: str = ""
    problems: dict[str, ProblemVerdict] = field(default_factory=dict)
    without_long: str = ""
    without_full: str = ""
    interpreted: bool = False
    without_room: dict[str, Problem] = field(default_factory=dict)
    too_large: set[str] = field(default_factory=set)
    of_deck: int = 0
    reused: str = ""
    kernels: KernelRuns = field(default_factory=KernelRuns)
    launched: Launched = field(default_factory=Launched)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "law": self.law,
            "judged": self.judged,
            "vacuous": self.vacuous,
            "unsupported": self.unsupported,
            "rejected": self.rejected,
            "known": dict(self.known),
            "flaky": self.flaky,
            "worst_ratio": round(self.worst_ratio, 4),
            "passing_ratio": round(self.passing_ratio, 4),
            "seconds": round(self.seconds, 3),
            "floor": self.floor,
            "ended": self.ended,
            "error": self.error or self.lost,
            "verdict": self.verdict,
            "reused": self.reused,
            "specialisations": sorted(self.launched.called),
        }

    @property
    def drawn(self) -> int:
        """Number of judged problems that are not the deck's: its floor counts only these."""
        return self.judged - self.of_deck

    @property
    def with_room_later(self) -> list[Problem]:
        """Problems that may have room once nothing else runs."""
        return [each for id_, each in self.without_room.items() if id_ not in self.too_large]

    def count_without_room(self, problem: Problem, *, too_large: bool) -> None:
        """Count a problem for which memory had no room, the first time only."""
        self.count_answered((problem.id,))
        self.unsupported += 1
        self.without_room[problem.id] = problem
        if too_large:
            self.too_large.add(problem.id)

    def count_answered(self, problem_ids: Iterable[str]) -> None:
        """Take back that memory had no room for these problems, where it was so."""
        for each in problem_ids:
            self.unsupported -= self.without_room.pop(each, None) is not None
            self.too_large.discard(each)

    def include(self, first: LawReport) -> None:
        """Add what an earlier search under the same law judged and found."""
        for id_, problem in first.without_room.items():
            self.unsupported -= 1  # which comes with all of the first's
            if id_ in self.without_room or id_ not in self.problems:
                self.count_without_room(
                    problem, too_large=id_ in self.too_large or id_ in first.too_large
                )
        self.judged += first.judged
        self.of_deck += first.of_deck
        self.vacuous += first.vacuous
        self.unsupported += first.unsupported
        self.rejected += first.rejected
        self.flaky += first.flaky
        self.seconds += first.seconds
        self.interpreted = self.interpreted or first.interpreted
        self.kernels.include(first.kernels)
        self.launched.include(first.launched)
        self.known = first.known + self.known
        self.passing_ratio = max(self.passing_ratio, first.passing_ratio)
        self.ratios = first.ratios + self.ratios
        self.problems = {**first.problems, **self.problems}
        if self.finding is None or (self.finding.entry and first.finding):
            self.finding = first.finding

    def include_later(self, later: LawReport) -> None:
        """Add what the problems without room gave at the end of the run, when they were alone."""
        answered = self.without_room.keys() & later.problems.keys()
        self.count_answered(answered)
        self.problems = {k: v for k, v in self.problems.items() if k not in answered}
        self.include(later)
        self.error, self.lost = self.error or later.error, self.lost or later.lost
        if self.ended == "room":
            self.ended = later.ended or ("room" if self.without_room else "")

    def count_ratio(self, verdict: Verdict) -> None:
        """Count a judged problem in its bin of error over bound, where a law measured it."""
        if verdict.ratio is not None:
            self.ratios[bisect_left(RATIO_EDGES, verdict.ratio)] += 1

    def forget(self, *, all_of_them: bool) -> None:
        """Drop verdicts on problems, so that memory does not grow with the length of a run.

        Of those that fail and of those that pass, the last ones stay: shrinking has come closest
        to what tells them apart.
        """
        seen = list(self.problems.items()) if not all_of_them else []
        passing = [each for each in seen if each[1].status == "PASS" and not each[1].vacuous]
        failing = [each for each in seen if each[1].status not in ("PASS", "UNSUPPORTED")]
        kept = dict(passing[-MOST_REMEMBERED:] + failing[-MOST_REMEMBERED:])
        self.problems = {name: each for name, each in seen if name in kept}

    @property
    def worst_ratio(self) -> float:
        """The worst error over its bound, that of a finding included where it has one."""
        new = self.finding and not self.finding.entry
        found = self.finding.ratio if self.finding and new else None
        return max(self.passing_ratio, found or 0.0)

    @property
    def verdict(self) -> str:
        """One word of the vocabulary for a table."""
        if self.finding:
            return "KNOWN" if self.finding.entry else self.finding.verdict.status
        if self.known:
            return "KNOWN"
        if self.incomplete:
            return "INCOMPLETE"
        return "PASS" if self.judged else "UNSUPPORTED"

    @property
    def incomplete(self) -> bool:
        """Whether it found nothing and is below its floor: it ended early, or judged nothing.

        A law that had nothing to compare in any problem does not apply.
        """
        if self.finding is not None or self.drawn >= self.floor:
            return False
        return self.ended in EARLY or not (self.judged or self.vacuous)


@dataclass
class CorpusReport:
    """The stored cases of one implementation, or of several, that were replayed.

    Attributes:
        replayed: how many.
        of_ledger: number of the cases that belong to ledger entries, which must still fail.
        known: number of the other cases whose failure the ledger explains.
        unjudged: number of cases that were refused here, or had nothing to judge.
        left_out: cases that were not replayed: under a tool that makes all slow they have a tenth
            of the run.
        seconds: the seconds that they took.
    """

    replayed: int = 0
    of_ledger: int = 0
    known: int = 0
    unjudged: int = 0
    seconds: float = 0.0
    left_out: int = 0

    def __add__(self, other: CorpusReport) -> CorpusReport:
        """Return the sum."""
        return CorpusReport(
            self.replayed + other.replayed,
            self.of_ledger + other.of_ledger,
            self.known + other.known,
            self.unjudged + other.unjudged,
            self.seconds + other.seconds,
            self.left_out + other.left_out,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {**vars(self), "seconds": round(self.seconds, 3)}


@dataclass
class ImplementationReport:
    """All laws on one implementation."""

    name: str
    reference: str
    operation: str = ""
    cost: str = ""
    call_seconds: float = 0.0
    laws: list[LawReport] = field(default_factory=list)
    replayed: list[Finding] = field(default_factory=list)
    separation: Separation = field(default_factory=Separation)
    """What experiments have made of the findings, once all laws have ended."""
    corpus: CorpusReport = field(default_factory=CorpusReport)
    refusal: Refusal | None = None
    """Why nothing of it can be judged here, where it refuses everything."""
    error: str = ""
    suite_failed: bool = False
    """Whether ``error`` is a failure of the suite itself, not of the implementation."""
    coverage: Coverage = field(default_factory=Coverage)
    refused: dict[str, str] = field(default_factory=dict)
    claimed_space: ClaimedSpace | None = None
    """Values claimed and refused by axis; None where it was not asked, or refuses everything."""
    declared: dict[str, Any] = field(default_factory=dict)
    """What the worker's ``describe`` says of it."""
    left: list[Left] = field(default_factory=list)
    """Processes and shared memory that it left behind."""
    modules: int = 0
    build_seconds: float = 0.0
    seconds: float = 0.0

    def fail(self, error: object) -> None:
        """Record a failure of the suite itself; the first error stays."""
        if not self.error:
            self.error, self.suite_failed = f"{SUITE_FAILED}: {error}", True

    @property
    def declared_name(self) -> str:
        """The name that it was declared with, as far as it is known: others may have it too."""
        return str(self.declared.get("name", self.name))

    @property
    def judged(self) -> int:
        """Problems on which some law had something to say."""
        return sum(law.judged for law in self.laws)

    @property
    def of_deck(self) -> int:
        """Judged problems that came from the deck."""
        return sum(law.of_deck for law in self.laws)

    @property
    def unsupported(self) -> int:
        """Problems that the implementation does not claim."""
        return sum(law.unsupported for law in self.laws)

    @property
    def claims(self) -> list[str]:
        """What it needs of its callers beyond the contract, a sentence each; none unless judged."""
        return list(self.declared.get("claims", ())) if self.judged else []

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter ran kernels of it, on a CPU."""
        return any(law.interpreted for law in self.laws)

    @property
    def kernel_runs(self) -> KernelRuns:
        """What ran of the files with its Triton kernels."""
        runs = KernelRuns()
        for law in self.laws:
            runs.include(law.kernels)
        return runs

    @property
    def kernels(self) -> list[Kernel]:
        """The functions of the files whose Triton kernels ran, and which lines of them did."""
        return self.kernel_runs.functions()

    @property
    def launched(self) -> Launched:
        """Names of the kernels that its calls launched."""
        return together(law.launched for law in self.laws)

    @property
    def unset_flags(self) -> dict[str, str]:
        """Constexprs that no caller sets, with the engine's line that shows it."""
        return dict(self.declared.get("unset_flags", {}))

    @property
    def ratios(self) -> list[int]:
        """Problems by the bin of their worst error over its bound, see ``RATIO_EDGES``."""
        counts = sum((law.ratios for law in self.laws), Counter[int]())
        return [counts[each] for each in range(len(RATIO_EDGES) + 1)] if counts else []

    @property
    def findings(self) -> list[Finding]:
        """Failures of stored cases, of laws and of experiments, known ones included."""
        of_laws = (law.finding for law in self.laws if law.finding)
        return [*self.replayed, *of_laws, *self.separation.further]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "name": self.name,
            "declared_name": self.declared_name,
            "reference": self.reference,
            "operation": self.operation,
            "provider": self.declared.get("provider", ""),
            "provider_version": self.declared.get("provider_version"),
            "claims": self.claims,
            "interpreted": self.interpreted,
            "caveats": list(CAVEATS) if self.interpreted else [],
            "cost": self.cost,
            "call_seconds": round(self.call_seconds, 6),
            "judged": self.judged,
            "of_deck": self.of_deck,
            "unsupported": self.unsupported,
            "unsupported_reason": self.refusal or "",
            "unsupported_code": self.refusal.code if self.refusal else "",
            "error": self.error,
            "refused": self.refused,
            "claimed_space": self.claimed_space
            and {axis: each.to_json() for axis, each in self.claimed_space.items()},
            "modules": self.modules,
            "build_seconds": round(self.build_seconds, 3),
            "seconds": round(self.seconds, 3),
            "ratios": self.ratios,
            "corpus": self.corpus.to_json(),
            "coverage": self.coverage.to_json(),
            **self._kernels_to_json(),
            "unexplained": self.separation.unexplained,
            "left": [vars(each) for each in self.left],
            "laws": [law.to_json() for law in self.laws],
        }

    def _kernels_to_json(self) -> dict[str, Any]:
        kernels, unset = self.kernels, self.unset_flags
        shares = {"all": share_of(kernels), "without_unset": share_of(kernels, list(unset))}
        return {
            "kernels": [each.to_json() for each in kernels],
            "kernel_lines": {name: vars(each) for name, each in shares.items()},
            "unset_flags": unset,
            "launched": self.launched.to_json(),
        }


@dataclass
class Milestones:
    """When a run came how far.

    Attributes:
        started: the time when it began, in seconds since the epoch.
        judged: seconds from there to its first judged problem; None before that.
        failing: seconds from there to its first confirmed failure, which is printed at once.
        problems: problems that were judged until then, or in all.
    """

    started: float = field(default_factory=time.time)
    judged: float | None = None
    failing: float | None = None
    problems: int = 0

    def reach(self, name: Literal["judged", "failing"]) -> None:
        """Note that a milestone is reached, from any thread; only the first time counts."""
        if getattr(self, name) is None:
            setattr(self, name, time.time() - self.started)


@dataclass
class RunReport:
    """A whole run."""

    profile: str
    seed: int
    target: dict[str, Any]
    implementations: list[ImplementationReport] = field(default_factory=list)
    seconds: float = 0.0
    respawns: int = 0
    soak: int = 0
    sanitizer: str = ""
    distrust: bool = False
    lost: str = ""
    left: list[Left] = field(default_factory=list)
    """What was left behind while several implementations ran."""
    ended: str = ""
    """What ended it early, one of ``ENDINGS``; empty if nothing did."""
    failure: str = ""
    """What failed in Kernelproof itself; empty if nothing did."""
    milestones: Milestones = field(default_factory=Milestones)
    """When it began to judge, and when something failed first."""
    broken: Sequence[Registration] = ()
    """What distributions register and cannot be used; the run goes on without it."""

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self.ended in (INTERRUPTED, TERMINATED)

    @property
    def judged(self) -> int:
        """Problems judged in all."""
        return sum(each.judged for each in self.implementations)

    @property
    def corpus(self) -> CorpusReport:
        """Stored cases replayed in all."""
        return sum((each.corpus for each in self.implementations), CorpusReport())

    @property
    def findings(self) -> list[Finding]:
        """All findings."""
        return [finding for each in self.implementations for finding in each.findings]

    @property
    def unknown(self) -> list[Finding]:
        """Findings that no ledger entry explains."""
        return [finding for finding in self.findings if not finding.entry]
