"""The deck: few problems that have killed many faults, asked before a law draws its own.

It is data, ``fixtures/deck/OPERATION.json``, written by ``make deck``. It changes the order in
which problems come, and nothing else: what a law draws, and how many, stays as it is.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ...fixtures import DECK
from ...impl.targets.refusal import Refusal
from ...reference import Problem, problem_from_json
from ..findings.report import Finding, LawReport
from ..isolation.workers import Worker
from ..laws import Law
from ..space.neighbours import neighbours
from ..verdicts.verdict import Verdict
from ..worker.requests import DeviceLostError, HarnessError, refusals_of
from .candidate import Candidate
from .case_runner import CaseRunner

SCHEMA = "kernelproof/deck/1"
NOT_DEALT = ("sensitivity", "moe_sensitivity")
"""Laws without entries: of the problems that they draw, simple ones name the options that a kernel
ignores, where one of a deck may only show that the numbers are wrong."""
MOST_ENTRIES = 60
"""Most entries of an operation's deck."""
HAND = 6
"""Entries whose neighbours an implementation is asked about at a time."""
MOST_TRIES = 12
"""Neighbours of an entry that an implementation is asked about before the entry is left out."""


@dataclass(frozen=True)
class DeckEntry:
    """A problem that is asked early.

    Attributes:
        law: name of the law that it is judged by.
        problem: problem as it was drawn for kernels that claim everything.
        kills: names of the faults that it has shown, or a neighbour of it.
    """

    law: str
    problem: Problem
    kills: tuple[str, ...] = ()


@cache
def load_deck(operation: str) -> tuple[DeckEntry, ...]:
    """Return the deck of an operation, the most telling and cheapest first; empty without a file.

    Raises:
        ValueError: it has another schema.
    """
    path = DECK / f"{operation}.json"
    if not path.is_file():
        return ()
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        message = f"{path}: its schema is {data['schema']!r}, not {SCHEMA!r}"
        raise ValueError(message)
    return tuple(
        DeckEntry(each["law"], problem_from_json(each["problem"]), tuple(each["kills"]))
        for each in data["entries"]
    )


def entries_for(laws: Iterable[Law], candidate: Candidate) -> list[DeckEntry]:
    """Return the entries of these laws that may hold something for them, in the deck's order."""
    declared = candidate.declares
    named = {law.name for law in laws if declared is None or law.concerns(declared)}
    return [each for each in load_deck(candidate.axes.operation) if each.law in named]


@dataclass
class Dealt:
    """What entries of the deck have given.

    Attributes:
        reports: what their laws have judged, by law.
        suspect: the law and the problem of the first failure, at which the rest is left to the
            laws, with its verdict; None where nothing failed.
        error: a failure of the suite, which ended it; empty where there was none.
        lost: why the device is gone; empty where it is there.
    """

    reports: dict[str, LawReport] = field(default_factory=dict)
    suspect: tuple[str, Problem, Verdict] | None = None
    error: str = ""
    lost: str = ""


def deal(
    worker: Worker,
    candidate: Candidate,
    laws: Mapping[str, Law],
    entries: Sequence[DeckEntry],
    *,
    confirms: bool = True,
    judged: Callable[[int], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Dealt:
    """Judge entries of the deck until one fails; the failure itself is left to its law.

    Args:
        worker: the worker that judges.
        candidate: what is known of the implementation.
        laws: laws of the entries, by name.
        entries: entries that are judged, in this order.
        confirms: whether the law confirms what fails, see ``CaseRunner``.
        judged: receives the number of problems that were judged.
        stopped: whether the run ends.
    """
    dealt = Dealt()
    runners: dict[str, CaseRunner] = {}
    runner: CaseRunner | None = None
    is_new = True

    def died() -> None:
        nonlocal is_new
        is_new = True

    try:
        for entry, problem in fitted(worker, candidate, laws, entries, died):
            if stopped():
                break
            runner = runners.get(entry.law)
            if runner is None:
                runner = CaseRunner(worker, candidate, laws[entry.law], judged, confirms=confirms)
                runners[entry.law], dealt.reports[entry.law] = runner, runner.report
            if is_new:
                runner.warm_up()
                is_new = False
            if problem.id not in runner.verdicts and _fails(runner, problem):
                dealt.suspect = entry.law, problem, runner.verdicts[problem.id]
                break
    except DeviceLostError as error:
        dealt.lost = str(error)
        if runner is not None and runner.in_hand is not None:
            law, report = runner.law.name, runner.report
            report.finding = finding_of(candidate, law, *runner.in_hand, dealt.lost)
    except (HarnessError, RuntimeError) as error:
        # RuntimeError: the pool was closed. What was learned until then is kept.
        dealt.error = str(error)
    return dealt


def _fails(runner: CaseRunner, problem: Problem) -> bool:
    """Judge a problem; whether it fails."""
    report, candidate, started = runner.report, runner.candidate, time.monotonic()
    if candidate.started is None:
        candidate.started = started
    try:
        return runner.judge(problem).bad
    finally:
        report.of_deck = report.judged
        report.seconds += time.monotonic() - started


def finding_of(
    candidate: Candidate, law: str, problem: Problem, verdict: Verdict, why: str
) -> Finding:
    """Return what could not be judged again, with the ledger's entry if one explains it."""
    entry = candidate.explanation(law, verdict, problem)
    verdict = replace(verdict, message=f"{verdict.message}; then {why}")
    found = Finding(candidate.name, law, verdict, problem)
    return found if entry is None else replace(found, entry=entry.id)


def fitted(
    worker: Worker,
    candidate: Candidate,
    laws: Mapping[str, Law],
    entries: Sequence[DeckEntry],
    died: Callable[[], None] = lambda: None,
) -> Iterator[tuple[DeckEntry, Problem]]:
    """Yield entries, each with the nearest problem that an implementation takes.

    Entries without such a problem are left out. A law finds what kills a process that is asked.

    Args:
        worker: the worker that is asked.
        candidate: what is known of the implementation.
        laws: laws of the entries, by name.
        entries: entries that are fitted.
        died: called where the question has killed the worker's process, and its successor is new.
    """
    axes = {name: candidate.axes.within(law.looks_at) for name, law in laws.items()}
    # A few at a time: the first is judged before the neighbours of the last are known.
    for start in range(0, len(entries), HAND):
        hand = [
            (entry, neighbours(entry.problem, allowed))
            for entry in entries[start : start + HAND]
            if (allowed := axes[entry.law]) is not None
        ]
        nearest = [[*itertools.islice(near, 1)] for _, near in hand]
        taken = _first_taken(worker, candidate, nearest, died)
        # Most implementations take the nearest problem: others are looked for where they do not.
        more = [
            [] if found else [*itertools.islice(near, MOST_TRIES - 1)]
            for found, (_, near) in zip(taken, hand, strict=True)
        ]
        others = _first_taken(worker, candidate, more, died)
        for (entry, _), first, other in zip(hand, taken, others, strict=True):
            problem = first or other
            if problem is not None:
                yield entry, problem


def _first_taken(
    worker: Worker,
    candidate: Candidate,
    choices: Sequence[Sequence[Problem]],
    died: Callable[[], None],
) -> list[Problem | None]:
    """Return the first problem of each choice that an implementation supports, if it does any."""
    asked = [problem.to_json() for choice in choices for problem in choice]
    refusals: Iterator[Refusal | None] = iter(())
    if asked:
        address = candidate.address
        request = address.request("probe", problems=asked)
        outcome = worker.run(request, address.first_deadlines)
        if outcome.status != "done" or "refusals" not in (outcome.result or {}):
            died()
            return [None for _ in choices]
        refusals = iter(refusals_of(outcome.result or {}))
    answers = [[(problem, next(refusals)) for problem in choice] for choice in choices]
    return [
        next((problem for problem, refusal in choice if refusal is None), None)
        for choice in answers
    ]
