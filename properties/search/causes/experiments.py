"""Telling the causes of an implementation's findings apart, by experiment.

Each law ends with its first failure, and tries the smallest problems of the others first: a second
fault may hide behind the first one. So problems that fail without what the first one needs are
looked for, made smaller and taken apart in turn, until each failing problem has its cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ....reference import Problem, problem_from_json
from ...findings.ledger import holds
from ...findings.report import Finding, ImplementationReport, Separated, Separation
from ...isolation.workers import Worker
from ...laws import Law
from ...space.operations import simplify
from ...space.profiles import Profile
from ...space.rounds import draw_problems, seed_of_round
from ...verdicts.operations import OPERATIONS
from ...verdicts.verdict import Verdict
from ...worker.requests import DeviceLostError, HarnessError
from ..candidate import Candidate
from ..case_runner import CaseRunner
from ..confirmation import Confirmation, Failure
from ..plan import Plan, laws_planned
from .ablation import Fails, Needs, needs_of
from .faults import (
    Fault,
    alike,
    further_conditions,
    imposed,
    is_certain,
    merge,
    needs_all,
    share_option,
    symptom,
)

MOST_CAUSES = 6
"""Largest number of causes that experiments separate."""
SMALL = 20_000
"""Most work of a problem that is drawn for experiments: many small ones tell more."""
CALLS = 1500
"""Largest number of problems that experiments judge, on a fast implementation."""
SHARE, PATIENCE = 3.0, 4.0
"""Seconds of all experiments as a multiple of those for shrinking one finding, and a factor on
them for a fast implementation: there CALLS ends them, unless the machine is very busy."""
DRAWN, IMPOSED = 120, 30
"""Problems that are drawn in search of more causes, and how many of them are given the values of
each cause, on a fast implementation."""
MOST_DEATHS = 2
"""Number of process deaths after which experiments end."""
DECIDES = 1 / 3
"""Least share of the problems with a cause's values that fail, where there are several causes."""
STANDS = 2 / 3
"""Least share with which a cause stands beside others in the same option."""
MOST_OF_LAW = 40
"""Most further failing problems of the law that are examined, the smallest first."""


class Experiments:
    """The experiments on one implementation with findings, in one worker.

    Args:
        worker: judges.
        candidate: the implementation.
        laws: the laws of the run, by name.
        telling: the law that compares with the oracle.
        profile: the profile of the run; its seconds for shrinking are those of all experiments.
        seed: the seed of the run.
        stopped: whether the run is to end.
    """

    def __init__(
        self,
        worker: Worker,
        candidate: Candidate,
        laws: Mapping[str, Law],
        telling: Law,
        profile: Profile,
        seed: int,
        stopped: Callable[[], bool],
    ) -> None:
        self._worker, self._candidate, self._laws, self._law = worker, candidate, laws, telling
        self._profile, self._seed, self._stopped = profile, seed, stopped
        self._runners: dict[str, CaseRunner] = {}
        share = SHARE * max(1.0, PATIENCE * candidate.cost.problems)
        # Two limits: the number of calls makes runs on a quiet machine reproducible, the clock
        # protects a busy one.
        self._deadline = time.monotonic() + share * profile.shrink_seconds
        self._calls = round(CALLS * candidate.cost.problems)
        self._deaths = 0
        self._faults: list[Fault] = []
        self._seen: dict[str, tuple[Problem, str]] = {}

    def run(self, report: ImplementationReport) -> Separation:
        """Return the causes of an implementation's findings."""
        found = [each for each in report.findings if _may_be_examined(each)]
        self._runner(self._law).warm_up()
        self._look_at_findings(report, found)
        # Three rounds, each with what the one before could not see: the laws' own problems, others
        # drawn at random, and random ones on which the known needs are imposed, so that a second
        # condition beside them shows.
        self._discover()
        drawn = self._draw()
        self._look_at(drawn)
        self._discover()
        for fault in [*self._faults]:
            self._look_at(imposed(drawn[: max(1, len(drawn) * IMPOSED // DRAWN)], fault))
        self._discover()
        self._drop_what_others_explain()
        self._unite_undecided()
        self._drop_what_others_explain()
        self._specify()
        if not self._is_decided() or self._deaths >= MOST_DEATHS:
            return Separation()
        return self._separation(found)

    def _is_decided(self) -> bool:
        """Whether each cause decides; those of which none does are taken for one, if they may be.

        Where the time is over before that is known, nothing is decided.
        """
        deciding = [self._decides(fault) for fault in self._faults]
        if len(deciding) < 2 or all(deciding):  # noqa: PLR2004  several
            return True
        # Some decide and some do not: a report would name causes of unequal worth. None is named
        # then.
        if any(deciding) or self._over():
            return False
        return self._take_for_one()

    # What is seen

    def _look_at_findings(self, report: ImplementationReport, found: Sequence[Finding]) -> None:
        own = next((each for each in report.laws if each.law == self._law.name), None)
        failing = [p for each in found for p in _problems_of(each)]
        if own is not None:
            judged = sorted(own.problems.values(), key=lambda each: each.problem.work)
            # The smallest first: they have the fewest values beside those that they need.
            failing += [each.problem for each in judged if each.status == "FAIL"][:MOST_OF_LAW]
            for each in judged:
                if each.status == "PASS" and not each.vacuous:
                    self._seen[each.problem.id] = (each.problem, "")
        self._look_at(failing)

    def _draw(self) -> list[Problem]:
        candidate = self._candidate
        count = max(1, round(DRAWN * candidate.cost.problems))
        seed = seed_of_round(0, "causes", candidate.own_name, self._seed)
        # What is learned here is a share of passing problems, for which number counts and size does
        # not.
        axes = replace(candidate.axes, max_work=min(candidate.axes.max_work, SMALL))
        return draw_problems(axes, self._profile, seed, count)

    def _look_at(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if self._over():
                return
            answer = self._answer(problem)
            if answer is not None:
                self._seen[problem.id] = (problem, answer)

    def _runner(self, law: Law) -> CaseRunner:
        if law.name not in self._runners:
            self._runners[law.name] = CaseRunner(self._worker, self._candidate, law)
        return self._runners[law.name]

    def _over(self) -> bool:
        late = self._calls <= 0 or time.monotonic() > self._deadline
        return late or self._stopped() or self._deaths >= MOST_DEATHS

    def _verdict(self, problem: Problem, law: Law) -> Verdict | None:
        """Return a verdict; None where there is none, or it says nothing."""
        runner = self._runner(law)
        if problem.id not in runner.verdicts:
            if self._over():
                return None
            self._calls -= 1
            runner.judge(problem)
            self._deaths += runner.died
        verdict = runner.verdicts[problem.id]
        nothing = verdict.vacuous or not (verdict.bad or verdict.status == "PASS")
        return None if nothing else verdict

    def _answer(self, problem: Problem) -> str | None:
        """Return the symptom of a problem, empty where it passes; None where it is not known."""
        verdict = self._verdict(problem, self._law)
        return None if verdict is None else symptom(verdict)

    # What explains it

    def _explained(self, problem: Problem, answer: str, but: Fault | None = None) -> bool:
        return any(
            answer in fault.symptoms and holds(problem, fault.values)
            for fault in self._faults
            if fault is not but
        )

    def _fails(self, problem: Problem) -> bool | None:
        """Whether a problem fails for another cause than those that are known."""
        answer = self._answer(problem)
        if answer is None:
            return None
        return bool(answer) and not self._explained(problem, answer)

    def _fails_as(self, base: Problem, but: Fault | None = None) -> Fails:
        """Return whether changed problems fail for what a problem fails for, beside known causes.

        Nothing is known of a problem that the change makes fail for a known cause: that would hide
        what is looked for.

        Args:
            base: the base that is changed.
            but: the cause that is looked for, where it is known.
        """
        others = [each for each in self._faults if each is not but]
        there = [each for each in others if holds(base, each.values)]

        def fails(problem: Problem) -> bool | None:
            answer = self._answer(problem)
            if not answer:
                return None if answer is None else False
            known = [
                each for each in others if answer in each.symptoms and holds(problem, each.values)
            ]
            if not known:
                return True
            return False if any(each in there for each in known) else None

        return fails

    def _discover(self) -> None:
        """Explain problems, the smallest first, until all that were seen are explained."""
        tried: set[str] = set()
        while not self._over():
            left = [
                problem
                for problem, answer in self._seen.values()
                if answer and problem.id not in tried and not self._explained(problem, answer)
            ]
            if not left:
                return
            # A small problem has few values that could be its cause; larger ones are then explained
            # by what it needs, most of them without another experiment.
            smallest = min(left, key=lambda each: each.work)
            tried.add(smallest.id)
            self._explain(smallest)

    def _explain(self, problem: Problem) -> None:
        answer = self._answer(problem)
        if not answer or self._joins(problem, answer) or len(self._faults) >= MOST_CAUSES:
            return
        smallest = [problem]

        def fails(each: Problem) -> bool:
            bad = self._fails(each) is True
            if bad:
                smallest[0] = each
            return bad

        simplify(problem, self._candidate.axes, fails, lambda: True)
        found = smallest[0]
        # Shrinking may slip into a cause that is known already.
        if found is not problem and self._joins(found, self._answer(found) or ""):
            self._joins(problem, answer)
            return
        needs = needs_of(found, self._candidate.axes, self._fails_as(found))
        verdict = self._verdict(found, self._law)
        if verdict is None or self._over():
            return
        # Both symptoms: one fault may spoil ``out`` in the large problem and ``lse`` in the small
        # one.
        new = Fault(found, verdict, needs, {symptom(verdict), answer})
        same = next((each for each in self._faults if alike(each, new)), None)
        if same is None:
            self._faults.append(new)
            self._seen[found.id] = (found, symptom(verdict))
        else:
            merge(same, new)

    def _joins(self, problem: Problem, answer: str) -> bool:
        """Whether a problem fails for a cause that is known; that is widened, then."""
        for fault in self._faults:
            if self._is_of(problem, fault):
                fault.widen(problem, answer)
                return True
        return False

    def _is_of(self, problem: Problem, fault: Fault) -> bool:
        """Whether a problem passes without any one of the conditions of a cause."""
        return needs_all(problem, fault, self._fails_as(problem, fault))

    # The report

    def _counted(self, fault: Fault) -> tuple[list[Problem], list[Problem], list[Problem]]:
        """Return which problems fail for a cause alone, pass with its values, and lack these."""
        failing, passing, others = [], [], []
        for problem, answer in self._seen.values():
            with_it = holds(problem, fault.values)
            if not with_it:
                if not answer or self._explained(problem, answer):
                    others.append(problem)
            elif not answer:
                passing.append(problem)
            elif answer in fault.symptoms and not self._explained(problem, answer, fault):
                failing.append(problem)
        return failing, passing, others

    def _specify(self) -> None:
        """Look for further conditions of each cause."""
        for fault in self._faults:
            failing, passing = self._counted(fault)[:2]
            fault.more = further_conditions(
                fault.values, failing, passing, [each for each, _ in self._seen.values()]
            )

    def _take_for_one(self) -> bool:
        """Take causes of which none decides for one, with what all of them need, if all fail alike.

        An error near its bound fails in some problems and passes in others, whatever their values:
        what looks like several causes is one.
        """
        # Only where all fail alike, as an error near its bound does.
        first, *others = self._faults
        if not first.symptoms.intersection(*(other.symptoms for other in others)):
            return False
        for other in others:
            merge(first, other)
        self._faults, first.more = [first], {}
        self._specify()
        return True

    def _decides(self, fault: Fault) -> bool:
        """Whether many problems with a cause's values fail, or its own does whatever the tensors.

        See ``is_certain``.
        """
        often = self._share_alone(fault) >= DECIDES
        return often or is_certain(fault, self._fails_as(fault.problem, fault))

    def _share_alone(self, fault: Fault) -> float:
        """Return which share of the problems with a cause's values fails for nothing else."""
        bad, good = (len(each) for each in self._counted(fault)[:2])
        return bad / max(bad + good, 1)

    def _unite_undecided(self) -> None:
        """Take causes in one option for one that each explain too few of its problems.

        Pages in a wrong order show behind a window, under a causal mask, or in a page that is not
        full: what each of these needs beside the order is how it shows. Other options beside it
        are faults of their own.
        """
        # Latest first: it was found in what the earlier ones did not explain, and rests on fewer
        # problems.
        for fault in reversed([*self._faults]):
            if self._share_alone(fault) >= STANDS:
                continue
            kin = (each for each in self._faults if each is not fault and share_option(each, fault))
            other = next((each for each in kin if self._share_alone(each) < STANDS), None)
            if other is not None:
                merge(other, fault)
                self._faults.remove(fault)

    def _drop_what_others_explain(self) -> None:
        """Leave out causes, the latest first, of which each failing problem has another one too."""
        for fault in reversed([*self._faults]):
            if len(self._faults) > 1 and not self._counted(fault)[0]:
                self._faults.remove(fault)

    def _separation(self, found: Sequence[Finding]) -> Separation:
        told: list[tuple[Fault, Separated]] = []
        for fault in self._faults:
            counts = [len(each) for each in self._counted(fault)]
            told.append((fault, Separated(fault.values, [], *counts)))
        alone: list[tuple[Needs, Separated]] = []
        for finding in found:
            own = self._fault_of(finding)
            if own is not None:
                next(each for fault, each in told if fault is own).findings.append(finding)
            else:
                self._tell_alone(finding, alone)
        further = []
        for fault, each in told:
            if not any(one.law == self._law.name for one in each.findings):
                further.append(self._found(fault))
                each.findings.insert(0, further[-1])
            each.findings.sort(key=lambda one: self._rank(one, fault))
        unexplained = sum(
            bool(answer) and not self._explained(problem, answer)
            for problem, answer in self._seen.values()
        )
        causes = [*(each for _, each in told), *(each for _, each in alone)]
        return Separation(causes, further, unexplained)

    def _rank(self, finding: Finding, fault: Fault) -> tuple[bool, bool]:
        names = any(name in finding.verdict.ignored for name in fault.values)
        return (finding.law != self._law.name, not names)

    def _found(self, fault: Fault) -> Finding:
        """Return the finding on a cause that no law has found by itself."""
        verdict = fault.verdict
        if not self._stopped():
            confirmation = Confirmation(self._runner(self._law))
            verdict = confirmation.in_fresh_process(Failure(fault.problem, verdict))
        return Finding(self._candidate.name, self._law.name, verdict, fault.problem)

    def _fault_of(self, finding: Finding) -> Fault | None:
        """Return the cause of a law's finding, if it is one of those that are known."""
        if not symptom(finding.verdict).startswith("answer"):
            return next(
                (
                    each
                    for each in self._faults
                    if symptom(finding.verdict) in each.symptoms
                    and holds(finding.problem, each.values)
                ),
                None,
            )
        # From the surest evidence to the least: the law names an option itself; its compared calls
        # differ in one; its problems fail as a known cause does; and last, experiments under the
        # law.
        if (named := self._ignored_by(finding)) is not None:
            return named
        if (changed := self._changed_by(finding)) is not None:
            return changed
        for problem in _problems_of(finding):
            answer = self._answer(problem)
            if answer:
                own = [each for each in self._faults if holds(problem, each.values)]
                exact = (each for each in own if answer in each.symptoms)
                if own:
                    return next(
                        (each for each in own if self._is_of(problem, each)), next(exact, own[0])
                    )
        return self._needed_by(finding)

    def _ignored_by(self, finding: Finding) -> Fault | None:
        """Return the cause that lies in an option which a finding says to be ignored."""
        named = set(finding.verdict.ignored)
        return next((each for each in self._faults if named & each.needs.fields.keys()), None)

    def _changed_by(self, finding: Finding) -> Fault | None:
        """Return the cause that lies in what a law changes, where its own problem shows no cause.

        Scaling keys and unscaling them shows a scale that is ignored, in a problem without one.
        """
        if self._answer(finding.problem):
            return None
        changed = {name for call in finding.verdict.compared for name in call.get("fields", ())}
        return next((each for each in self._faults if changed & each.needs.fields.keys()), None)

    def _needed_by(self, finding: Finding) -> Fault | None:
        """Return the cause without whose values a law does not fail."""
        fails = self._fails_under(finding)
        return next(
            (each for each in self._faults if needs_all(finding.problem, each, fails)), None
        )

    def _fails_under(self, finding: Finding) -> Fails:
        law = self._laws[finding.law]

        def fails(problem: Problem) -> bool | None:
            verdict = self._verdict(problem, law)
            return None if verdict is None else verdict.bad

        return fails

    def _tell_alone(self, finding: Finding, alone: list[tuple[Needs, Separated]]) -> None:
        """Add the cause of a finding that the law which compares with the oracle does not see."""
        if self._over() or not self._fails_under(finding)(finding.problem):
            return
        needs = needs_of(finding.problem, self._candidate.axes, self._fails_under(finding))
        for other, told in alone:
            same = other.fields.keys() == needs.fields.keys()
            if same and symptom(told.findings[0].verdict) == symptom(finding.verdict):
                told.findings.append(finding)
                return
        judged = self._runner(self._laws[finding.law]).report.problems.values()
        counts = [0, 0, 0]
        for each in judged:
            if each.status in ("PASS", finding.verdict.status) and not each.vacuous:
                with_it = holds(each.problem, needs.values)
                counts[0 if each.status != "PASS" else 1 if with_it else 2] += 1
        alone.append((needs, Separated(needs.values, [finding], *counts)))


def experiments_on(
    report: ImplementationReport,
    candidate: Candidate,
    plan: Plan,
    seed: int,
    stopped: Callable[[], bool],
) -> Callable[[Worker], Separation] | None:
    """Return the experiments on an implementation whose laws have ended; None if there are none.

    They need new findings, and the law that compares with the oracle.
    """
    laws = {law.name: law for law in laws_planned(plan, report.operation)}
    telling = laws.get(OPERATIONS[report.operation].law)
    whole = plan.shrink_all and not plan.first_only and plan.part is None
    if telling is None or not whole or not any(map(_may_be_examined, report.findings)):
        return None

    def made(worker: Worker) -> Separation:
        experiments = Experiments(worker, candidate, laws, telling, plan.profile, seed, stopped)
        try:
            return experiments.run(report)
        except DeviceLostError:
            raise
        except (HarnessError, RuntimeError):
            # RuntimeError: the pool was closed. Findings are then grouped by shared values.
            return Separation()

    return made


def _may_be_examined(finding: Finding) -> bool:
    """Whether a finding is new, and costs no process each time that it is seen."""
    known = finding.entry or finding.contradicts
    return not known and finding.verdict.status == "FAIL"


def _problems_of(finding: Finding) -> list[Problem]:
    """Return the problems that a law judged, those that it made of its own included."""
    verdict = finding.verdict
    made = [*([verdict.about] if verdict.about else []), *(c["problem"] for c in verdict.compared)]
    problems = [*map(problem_from_json, made), finding.problem]
    return list({each.id: each for each in problems}.values())
