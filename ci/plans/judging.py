"""Searches one release's plan functions for problems whose plan breaks a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck

from ...properties.space.hypothesis_settings import without_local_constants
from .answers import Answer, Planner
from .drawing import plan_problems
from .known import Known, explanation
from .laws import CHIPS_LAW, NAMES, Case, judge, why_it_died
from .problems import PlanProblem


@dataclass(frozen=True)
class Finding:
    """A law that a plan breaks.

    Attributes:
        law: its name.
        why: how, in a sentence.
        problem: the smallest problem that was found; None where the process of the release ended,
            whose problem is not kept.
    """

    law: str
    why: str
    problem: PlanProblem | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        found: dict[str, Any] = {"law": self.law, "why": self.why}
        return found if self.problem is None else {**found, "problem": self.problem.to_json()}


@dataclass
class Judged:
    """What a search found of one release and kind.

    Attributes:
        problems, refused: problems that were planned, and those of them that the release rightly
            has no plan for.
        findings: laws that are broken, each once.
        known: problems by the id of the known finding that explains what they break.
    """

    version: str
    kind: str
    problems: int = 0
    refused: int = 0
    findings: list[Finding] = field(default_factory=list)
    known: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "flashinfer": self.version,
            "kind": self.kind,
            "problems": self.problems,
            "refused": self.refused,
            "findings": [each.to_json() for each in self.findings],
            "known": dict(sorted(self.known.items())),
        }


class BrokenError(Exception):
    """A problem whose plan breaks a law that nothing explains."""


class ProcessEnded(BaseException):
    """The release's process ended. No search goes on, so that no trigger is made smaller."""


class Living:
    """A planner whose process does not end.

    Raises:
        ProcessEnded: by ``plan``, where it ended or gave no answer in time.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        """Plan a problem as the planner does."""
        answer = self._planner.plan(problem, after=after)
        if answer.died:
            raise ProcessEnded(why_it_died(answer))
        return answer


def search(
    planner: Planner,
    version: str,
    kind: str,
    problems: int,
    seed: int = 0,
    known: Sequence[Known] = (),
) -> Judged:
    """Plan drawn problems of a kind, and shrink what breaks a law."""
    judged = Judged(version, kind)
    for _ in NAMES:
        found = _search_once(planner, judged, problems, seed, known)
        if found is None:
            break
        judged.findings.append(found)
        if found.problem is None:
            break
    return judged


def _search_once(
    planner: Planner, judged: Judged, problems: int, seed: int, known: Sequence[Known]
) -> Finding | None:
    """Return a finding of a law that has none yet; what is counted is that of the last search."""
    judged.problems, judged.refused, judged.known = 0, 0, Counter()
    found: list[Finding] = []

    def examine(problem: PlanProblem) -> None:
        case = Case(Living(planner), problem)
        judged.problems += 1
        judged.refused += case.refused
        law, why = first_unknown(case, judged, known)
        # Shrinking keeps to one law.
        if law and (not found or found[-1].law == law):
            found.append(Finding(law, why, problem))
            raise BrokenError(law)

    settings = hypothesis.settings(
        max_examples=problems,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    run = hypothesis.given(plan_problems(judged.kind))(examine)
    try:
        with without_local_constants():
            settings(hypothesis.seed(seed)(run))()
    except BrokenError:
        return found[-1]
    except ProcessEnded as ended:
        return Finding("answers", str(ended), None)
    return None


def first_unknown(case: Case, judged: Judged, known: Sequence[Known]) -> tuple[str, str]:
    """Return the first broken law that is neither found already nor explained, and why.

    The effect of a known finding is taken out of the plan, which is judged again: what else is
    wrong with it is still seen.
    """
    found, excused, left = [each.law for each in judged.findings], set[str](), list(known)
    seen: set[str] = set()
    while True:
        law, why = judge(case, found, excused)
        entry = explanation(left, judged.version, case, law) if law else None
        if entry is None:
            return law, why
        judged.known[entry.id] += entry.id not in seen
        seen.add(entry.id)
        if entry.mends or entry.leaves_out:
            left.remove(entry)
            case = case.mended(entry.mends, entry.leaves_out)
        else:
            # Of a larger chip's plan the larger chip's is the one that must have the effect.
            excused |= {law} if law == CHIPS_LAW else {*entry.laws} - {CHIPS_LAW}
