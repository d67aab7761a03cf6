"""The deck: few problems that have killed many faults, asked before a law draws its own.

It is data, ``fixtures/deck/OPERATION.json``, written by ``make deck``. It changes the order in
which problems come, and nothing else: what a law draws, and how many, stays as it is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ...fixtures import DECK
from ...impl.targets.refusal import Refusal
from ...reference import Problem, problem_from_json
from ..findings.report import Finding, LawReport
from ..isolation.workers import Worker
from ..laws import Law
from ..space.neighbours import neighbours
from ..verdicts.verdict import Verdict
from ..worker.requests import DeviceLostError, refusals_of
from .candidate import Candidate
from .case_runner import CaseRunner

SCHEMA = "kernelproof/deck/1"
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
    """

    reports: dict[str, LawReport] = field(default_factory=dict)
    suspect: tuple[str, Problem, Verdict] | None = None


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

    Raises:
        HarnessError: the suite itself failed.
    """
    dealt = Dealt()
    runners: dict[str, CaseRunner] = {}
    for entry, problem in fitted(worker, candidate, laws, entries):
        if stopped():
            break
        runner = runners.get(entry.law)
        if runner is None:
            runner = CaseRunner(worker, candidate, laws[entry.law], judged, confirms=confirms)
            if not runners:
                runner.warm_up()
            runners[entry.law], dealt.reports[entry.law] = runner, runner.report
        if problem.id in runner.verdicts:
            continue
        try:
            verdict = runner.judge(problem)
        except DeviceLostError as error:
            runner.report.lost = str(error)
            if runner.in_hand is not None:
                took = runner.in_hand[1]
                runner.report.finding = Finding(candidate.name, entry.law, took, problem)
            break
        finally:
            runner.report.of_deck = runner.report.judged
        if verdict.bad:
            dealt.suspect = entry.law, problem, verdict
            break
    return dealt


def fitted(
    worker: Worker,
    candidate: Candidate,
    laws: Mapping[str, Law],
    entries: Sequence[DeckEntry],
) -> Iterator[tuple[DeckEntry, Problem]]:
    """Yield entries, each with the nearest problem that an implementation takes.

    Entries without such a problem are left out.
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
        taken = _first_taken(worker, candidate, nearest)
        # Most implementations take the nearest problem: others are looked for where they do not.
        more = [
            [] if found else [*itertools.islice(near, MOST_TRIES - 1)]
            for found, (_, near) in zip(taken, hand, strict=True)
        ]
        others = _first_taken(worker, candidate, more)
        for (entry, _), first, other in zip(hand, taken, others, strict=True):
            problem = first or other
            if problem is not None:
                yield entry, problem


def _first_taken(
    worker: Worker, candidate: Candidate, choices: Sequence[Sequence[Problem]]
) -> list[Problem | None]:
    """Return the first problem of each choice that an implementation supports, if it does any.

    None of all where its process dies of the question: a law finds that it does.
    """
    asked = [problem.to_json() for choice in choices for problem in choice]
    refusals: Iterator[Refusal | None] = iter(())
    if asked:
        address = candidate.address
        request = address.request("probe", problems=asked)
        outcome = worker.run(request, address.first_deadlines)
        if outcome.status != "done" or "refusals" not in (outcome.result or {}):
            return [None for _ in choices]
        refusals = iter(refusals_of(outcome.result or {}))
    answers = [[(problem, next(refusals)) for problem in choice] for choice in choices]
    return [
        next((problem for problem, refusal in choice if refusal is None), None)
        for choice in answers
    ]
