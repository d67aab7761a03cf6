"""The implementation that is searched, and what the searches of all its laws share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...impl import Target
from ...reference import Problem
from ..findings.ledger import Entry, Ledger, holds
from ..isolation.stages import Deadlines
from ..isolation.workers import Worker
from ..laws.law import Law
from ..space.axes import Axes, example
from ..space.profiles import Cost
from ..verdicts.operations import OPERATIONS as ANSWERS
from ..verdicts.verdict import Verdict
from ..worker.requests import Address, probe_device
from .deadlines import DeadlineModel

UNKNOWN = Cost("unknown", 1.0, 1)


@dataclass
class Deadly:
    """A HANG or a CRASH that some law has found; each time that it is seen costs a process.

    Attributes:
        problem: the smallest so far.
        verdict: the verdict on the problem.
        values: what its problems share and no passing one has, as a predicate of the ledger; empty
            where that is not known.
        place: the innermost function of the code under test that a HANG was stuck in; empty where
            that is not known, and on a GPU, where all wait in the same place.
        shrunk: whether the law that found it is done with it.
    """

    problem: Problem
    verdict: Verdict
    values: dict[str, Any] = field(default_factory=dict)
    place: str = ""
    shrunk: bool = False

    def is_seen_in(self, problem: Problem, verdict: Verdict, place: str = "") -> bool:
        """Whether a failure is taken for this one: it is alike, and nothing tells them apart.

        Args:
            problem: the problem of the law; it may call the implementation with another one.
            verdict: the verdict of the law.
            place: its place, as in the attribute.
        """
        same = bool(place) and place == self.place
        return self.verdict.is_like(verdict) and (
            same or not self.values or holds(problem, self.values)
        )


class Rounds:
    """Problems that were drawn for all laws of an implementation."""

    def __init__(self) -> None:
        self._drawn: dict[str, list[Problem]] = {}
        self._lock = threading.Lock()

    def get(self, key: str, draw: Callable[[], list[Problem]]) -> list[Problem]:
        """Return the problems of a round, which the first law that asks draws."""
        with self._lock:
            if key not in self._drawn:
                self._drawn[key] = draw()
            return self._drawn[key]


@dataclass
class Candidate:
    """The implementation that is searched, and what the searches of all its laws share."""

    name: str
    """The name in this run: no other implementation of the run has it."""
    address: Address
    axes: Axes
    declares: frozenset[str] | None = None
    """What laws may need of it; None where that is not known."""
    ledger: Ledger = field(default_factory=Ledger)
    target: Target = field(default_factory=Target)
    """The machine that the worker runs on."""
    long: Axes | None = None
    """Axes of the long problems that come before the others, where it needs some."""
    find_kinds: Callable[[Worker], Sequence[Problem]] = lambda _: ()
    """Finds the few problems that cover each of its features."""
    find_pairs: Callable[[Worker], Sequence[Problem]] = lambda _: ()
    """Finds the problems that cover pairs of its features, see ``pairs``."""
    found_pairs: Sequence[Problem] | None = None
    """What was found; None before a law has asked."""
    cost: Cost = UNKNOWN
    deadlines: DeadlineModel = field(default_factory=DeadlineModel)
    started: float | None = None
    """When the first law began: before that, other implementations may hold the workers."""
    searched_seconds: float = 0.0
    """Seconds that the searches which have ended took: laws take turns with those of others."""
    warm_up: Problem | None = None
    """The problem that each process runs first, with time for lazy imports and caches; None where
    it does not end: processes import the implementation only."""
    smallest: list[Problem] = field(default_factory=list)
    """Counterexamples to other laws: tried first, for they often break this one too."""
    deadly: list[Deadly] = field(default_factory=list)
    """What costs a process: laws try it once, and neither confirm nor shrink it anew."""
    announced: bool = False
    """Whether a failure was shown before it was made small: the first of an implementation is."""
    alone: bool = False
    """Whether its processes share nothing: in a shared one it failed, but not by itself, or it has
    ended the work of all that share the GPU."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Places in which HANGs were found to be stuck, by problem id: finding out takes seconds."""
    named: set[str] = field(default_factory=set)
    """Specialisations whose kernels are known, and are as claimed: workers name them once."""
    rounds: Rounds = field(default_factory=Rounds)
    """What its laws draw together, see ``SearchOptions.alike``."""
    declared_name: str = ""
    """Name that it was declared with, where that is another: ledgers and seeds go by it."""

    def pairs(self, worker: Worker) -> Sequence[Problem]:
        """Return the problems that cover pairs of its features, see ``space.pairs``.

        The first law that asks waits for thousands of questions to the implementation.
        """
        if self.found_pairs is None:
            self.found_pairs = self.find_pairs(worker)
        return self.found_pairs

    @property
    def own_name(self) -> str:
        """The name that it was declared with, whatever else the run judges."""
        return self.declared_name or self.name

    def restricted_to(self, fixed: Mapping[str, Any]) -> Candidate:
        """Return the part of it with these values of axes; the part's laws share what they find."""
        values = {**self.axes.values, **{axis: (value,) for axis, value in fixed.items()}}
        axes = replace(self.axes, values=values, simplest={**self.axes.simplest, **fixed})
        first = example(axes.operation, axes.simplest) if self.warm_up else None
        return replace(self, axes=axes, warm_up=first, smallest=[])

    def explanation(self, law: str, verdict: Verdict, problem: Problem) -> Entry | None:
        """Return the ledger entry that explains a verdict under a law, if one does."""
        return self.ledger.explanation(self.own_name, law, verdict, problem, self.target)

    def is_deadly(self, law: str) -> bool:
        """Whether it is known to hang or fault under a law."""
        return self.ledger.is_deadly(self.own_name, law, self.target)

    def is_known(self, problem: Problem) -> bool:
        """Whether a ledger entry explains what the operation's main law says of a problem."""
        law = ANSWERS[problem.operation].law
        return self.ledger.knows(self.own_name, law, problem, self.target)

    def deadlines_of(self, law: Law, problem: Problem, *, hurried: bool = False) -> Deadlines:
        """Return the deadlines of the next case of a law, see ``DeadlineModel.of``."""
        found = self.deadlines.of(problem, hurried=hurried)
        least = law.cpu_seconds if self.address.device == "cpu" else 0.0
        return replace(found, run=max(found.run, least))


def warm_up(worker: Worker, candidate: Candidate) -> None:
    """Let a process that is new to an implementation do what only its first call does.

    One that has done it for another law does nothing.

    Whatever goes wrong is left for the law to find: the next call finds it again.

    Raises:
        DeviceLostError: it took the device with it.
    """
    address, first = candidate.address, candidate.warm_up
    if first is None:  # its import is no part of a law's time either
        request = address.request("describe")
    else:
        request = address.request("cost", problem=first.to_json(), calls=1)
    outcome = worker.run_once(request, address.first_deadlines)
    if outcome is not None and outcome.died:
        probe_device(worker, address.device)
