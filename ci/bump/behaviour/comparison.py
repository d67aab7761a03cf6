"""The same problems through both releases: each against the oracle, and against each other."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ....impl.protocol import COMPILERS_A_BUILD
from ....properties.findings.corpus import Case, cases_of, load_case
from ....properties.findings.ledger import Entry
from ....properties.isolation.outcome import ABORTED_FOR_MEMORY, KILLED, KILLED_FOR_MEMORY, Outcome
from ....properties.laws import Law, laws_of
from ....properties.space.axes import Axes
from ....properties.space.drawers import Drawers
from ....properties.space.operations import simplify
from ....properties.space.profiles import on_device
from ....properties.verdicts.contained import OUT_OF_MEMORY
from ....properties.verdicts.verdict import Verdict
from ....properties.worker.requests import Address, HarnessError, verdict_of
from ....reference import Problem
from ..sides.ending import EndedError
from ..sides.plan import DEADLINES, Plan
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from .asking import Side
from .surveying import axes_from_json, surveyed

Sides = dict[str, Side]
DRAWN, CORPUS = "drawn", "corpus"
MOST_TRIES, MOST_DEATHS = 40, 4
"""Most tries of shrinking a problem, and most of them that may cost a process."""
CONFIRMED = "confirmed"
SEVERE = ("HANG", "CRASH")
LOOKS = 3
"""At a baseline that is wrong where the candidate hangs or dies, for all such failures of a law."""
LOST: Final = "LOST"


@dataclass(frozen=True)
class Tried:
    """One problem under one law, with both releases.

    Attributes:
        law: its name.
        problem: what was asked.
        verdicts: by side; a side that was not asked has none.
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
    verdicts: dict[str, Verdict]
    found_by: str = DRAWN
    same_inputs: bool | None = None
    same_bits: bool | None = None
    difference: dict[str, Any] | None = None
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

    def judged(self, side: str) -> bool:
        """Whether a side was judged at all."""
        verdict = self.verdicts.get(side)
        unjudged = ("UNSUPPORTED", LOST)
        return verdict is not None and verdict.status not in unjudged and not verdict.vacuous


@dataclass
class Compared:
    """What became of one implementation.

    Attributes:
        name: registered, or MODULE:NAME.
        reference: MODULE:NAME.
        operation, backend: as it declares.
        declares: what laws may need of it, on either side, see ``Implementation.declares``.
        claims: what it needs of its callers, on either side, see ``Implementation.claims``.
        reasons: by side, why it cannot run; empty where it can.
        errors: by side, why it could not be asked.
        unimported: sides on which that is because it cannot be imported.
        axes: what problems are drawn from.
        refused: by side, the axis values that are refused there and not on the other side.
        addresses: by side.
        tried: every problem.
        build_minutes: that compiling one of its modules takes; 0 where it takes none.
        build_compilers: that one of them keeps busy.
        modules: how many are to be built for each side.
        builds: by side, seconds of each module that was built.
        keys: of the modules that the problems of its stored cases need, by the problem's id.
        planned: problems that each law is to judge, and stored cases under no name.
        left_out: the code of why all of it was left out, see ``unjudged``; empty otherwise.
        speeds: rounds of timing, see ``speed``.
    """

    name: str
    reference: str
    operation: str = ""
    backend: str = ""
    declares: frozenset[str] = frozenset()
    claims: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    unimported: set[str] = field(default_factory=set)
    axes: Axes | None = None
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    build_minutes: float = 0.0
    build_compilers: int = COMPILERS_A_BUILD
    modules: int = 0
    builds: dict[str, list[float]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    left_out: str = ""
    speeds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> tuple[str, ...]:
        """The sides on which it runs."""
        return tuple(side for side in SIDES if side in self.addresses)


def survey_both(name: str, reference: str, sides: Sides, plan: Plan) -> Compared:
    """Learn what an implementation supports with each release."""
    found = Compared(name, reference)
    axes: dict[str, Axes] = {}
    max_work = plan.max_work(name, reference, on_device(plan.profile, plan.device).max_work)
    for side in SIDES:
        address = Address(reference, None, plan.device, soak=plan.soak)
        known = surveyed(sides[side], address, name, max_work, plan)
        found.operation = known["operation"] or found.operation
        found.backend = known["backend"] or found.backend
        found.declares |= set(known["declares"])
        found.claims = tuple(dict.fromkeys((*found.claims, *known.get("claims", ()))))
        found.build_minutes = max(found.build_minutes, known["build_minutes"])
        found.build_compilers = known["build_compilers"]
        if known["error"]:
            found.errors[side] = known["error"]
            if not known["operation"]:
                found.unimported.add(side)
        elif known["axes"] is None:
            found.reasons[side] = known["reason"]
        else:
            axes[side], found.addresses[side] = axes_from_json(known["axes"]), address
    if axes:
        found.axes = axes.get(CANDIDATE) or axes[BASELINE]
    if len(axes) == len(SIDES):
        for side, other in ((BASELINE, CANDIDATE), (CANDIDATE, BASELINE)):
            theirs = axes[other].refused
            found.refused[side] = {k: v for k, v in axes[side].refused.items() if k not in theirs}
    return found


def cases_to_judge(found: Compared, plan: Plan) -> list[tuple[Case, Entry | None]]:
    """Return the stored cases of an implementation, each with the entry of the ledger it is of."""
    entries = [(entry, load_case(entry.case)) for entry in entries_of(found, plan) if entry.case]
    return [
        *((case, entry) for entry, case in entries if not entry.quarantine),
        *((case, None) for case in further_cases(found, plan)),
        # Whether a hang or a death was fixed is what a bump is about; they come last all the same.
        *((case, entry) for entry, case in entries if entry.quarantine),
    ]


def laws_to_judge(found: Compared, plan: Plan) -> dict[Law, int]:
    """Return the laws that judge an implementation, and the number of problems that each draws."""
    every = laws_of(found.operation)
    return {
        law: plan.count(law, first=law is every[0], sides=len(found.runs))
        for law in every
        if (not plan.laws or law.name in plan.laws)
        and law.concerns(found.declares)
        and (found.axes is None or _axes_for(law, found) is not None)
    }


def draw(law: Law, count: int, found: Compared, plan: Plan, drawers: Drawers) -> list[Problem]:
    """Draw the problems of a law."""
    axes = _axes_for(law, found)
    if axes is None:
        return []
    return drawers.problems(axes, plan.profile, _seed(law, found, plan), count)


def _axes_for(law: Law, found: Compared) -> Axes | None:
    """Return what holds something for a law; None if nothing does."""
    return found.axes and found.axes.within(law.looks_at)


def judge(law: Law, problem: Problem, found: Compared, sides: Sides, plan: Plan) -> Tried:
    """Judge a drawn problem with both releases; under the first law, compare the results too."""
    if law is laws_of(found.operation)[0]:
        return _answered(law, problem, found, sides, plan)
    return _judged(law, problem, found, sides)


def entries_of(found: Compared, plan: Plan) -> list[Entry]:
    """Return the ledger's entries of an implementation, whatever versions they speak of."""
    return [
        entry
        for entry in plan.ledger.entries
        if entry.implementation == found.name
        and entry.device in ("", plan.device)
        and (not plan.laws or any(map(entry.of_law, plan.laws)))
    ]


def further_cases(found: Compared, plan: Plan) -> list[Case]:
    """Return the stored cases of an implementation that no entry of the ledger speaks of."""
    cases = cases_of(found.reference, plan.corpus, entries_of(found, plan))
    return [case for case in cases if not plan.laws or case.law in plan.laws]


def judge_case(case: Case, entry: Entry | None, found: Compared, sides: Sides) -> Tried:
    """Judge a stored case with both releases."""
    verdicts = {
        side: _verdict(sides[side], case.request(found.addresses[side])) for side in found.runs
    }
    return Tried(case.law, case.problem, verdicts, CORPUS, case=case, entry=entry)


def _answered(law: Law, problem: Problem, found: Compared, sides: Sides, plan: Plan) -> Tried:
    """Judge a problem, and compare the bits of both sides' inputs and results."""
    kept = plan.tensors / f"{_word(found.name)}-{problem.id}.pt"
    answers: dict[str, dict[str, Any]] = {}
    verdicts: dict[str, Verdict] = {}

    def request(side: str) -> dict[str, Any]:
        files = {"keep" if side == BASELINE else "compare": str(kept)}
        return found.addresses[side].request("answer", problem=problem.to_json(), **files)

    def again() -> None:
        """Make the baseline's result anew: a run that was killed may have taken it along."""
        if found.runs == SIDES and not kept.exists():
            sides[BASELINE].run(request(BASELINE), DEADLINES)

    for side in found.runs:
        before = again if side == CANDIDATE else None
        outcome = sides[side].ask(request(side), DEADLINES, before=before)
        if outcome.status == "done":
            answers[side] = outcome.result or {}
            verdicts[side] = Verdict.from_json(answers[side]["verdict"])
        else:
            verdicts[side] = answer_of(outcome)
    kept.unlink(missing_ok=True)
    both = [answers[side] for side in SIDES if answers.get(side, {}).get("given")]
    tried = Tried(law.name, problem, verdicts)
    if len(both) == len(SIDES):
        one, other = both
        tried = replace(
            tried,
            same_inputs=one["given"] == other["given"],
            same_bits=one["gave"] == other["gave"],
            difference=other.get("difference"),
        )
    return tried


def _judged(law: Law, problem: Problem, found: Compared, sides: Sides) -> Tried:
    cases = {side: found.addresses[side].case(law.name, problem) for side in found.runs}
    return Tried(law.name, problem, {s: _verdict(sides[s], cases[s]) for s in found.runs})


def confirmed(tried: Tried, found: Compared, sides: Sides) -> bool:
    """Look again, in a fresh process, at a failure that the other side does not have.

    One that both have needs no second look: two processes have shown it.
    """
    bad = [side for side in found.runs if tried.bad(side)]
    return len(bad) != 1 or _look(tried, found, sides, bad[0], CONFIRMED).bad


def as_severe_before(ordered: Sequence[Tried], found: Compared, sides: Sides) -> bool:
    """Whether the baseline hangs or dies too, where it was wrong and the candidate did so.

    A race shows itself as a wrong answer here and as a hang there: one run of each says nothing of
    the releases. Each of ``LOOKS`` looks is in a fresh process, at the next of the failures.
    """
    looks = (
        _look(tried, found, sides, BASELINE, f"{CONFIRMED} {number}")
        for number, tried in zip(range(LOOKS), itertools.cycle(ordered), strict=False)
    )
    # That a machine was too full says nothing of the release.
    outside = (OUT_OF_MEMORY, ABORTED_FOR_MEMORY, KILLED, KILLED_FOR_MEMORY)
    return any(seen.status in SEVERE and seen.kind not in outside for seen in looks)


def _look(tried: Tried, found: Compared, sides: Sides, side: str, note: str) -> Verdict:
    request = tried.request(found.addresses[side])
    return answer_of(sides[side].renewed(request, DEADLINES, note=note))


def answer_of(outcome: Outcome) -> Verdict:
    """Turn an answer into a verdict; one that the suite itself spoiled is lost, no more."""
    try:
        return verdict_of(outcome)
    except HarnessError as error:
        return Verdict(LOST, "suite", str(error))


def _verdict(side: Side, case: dict[str, Any]) -> Verdict:
    return answer_of(side.ask(case, DEADLINES))


def shrink(tried: Tried, found: Compared, sides: Sides) -> Tried:
    """Make the problem of a failure small: the smaller one fails on the same sides, and alike."""
    if found.axes is None:
        return tried
    best, tries, deaths = [tried], 0, 0

    def fails(problem: Problem) -> bool:
        nonlocal tries, deaths
        if tries >= MOST_TRIES or deaths >= MOST_DEATHS:
            return False
        tries += 1
        verdicts = {}
        for side in found.runs:
            outcome = sides[side].ask(found.addresses[side].case(tried.law, problem), DEADLINES)
            deaths += outcome.died
            verdicts[side] = answer_of(outcome)
        if not all(_alike(verdicts[side], tried.verdicts[side]) for side in found.runs):
            return False
        best.append(replace(tried, problem=problem, verdicts=verdicts, found_by=DRAWN, case=None))
        return True

    with suppress(EndedError):  # the smallest so far fails too
        simplify(tried.problem, found.axes, fails, lambda: True)
    return best[-1]


def _alike(one: Verdict, other: Verdict) -> bool:
    if one.bad or other.bad:
        return (one.status, one.kind) == (other.status, other.kind)
    return one.status == other.status


def _seed(law: Law, found: Compared, plan: Plan) -> int:
    text = f"bump|{law.name}|{found.name}|{plan.seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _word(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name)
