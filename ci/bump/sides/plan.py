"""What a comparison of behaviour judges, how much of it, and until when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....impl.registry import built_in_compiler
from ....impl.targets.backends import TRITON
from ....properties.findings.corpus import Case
from ....properties.findings.ledger import Ledger
from ....properties.findings.report import TIME
from ....properties.isolation.workers import Deadlines
from ....properties.laws import Law
from ....properties.search.ending import Ending
from ....properties.space.profiles import GATE_SHARE, Profile
from ....properties.space.restrictions import WHOLE_SPACE, Only
from ...console.errors import MACHINE
from ...console.signals import SIGNALLED, signal_of
from .releases import SIDES

DEADLINES = Deadlines(run=20.0)
"""The same for every call: what was measured of one run must not decide about another."""
LEAST_PROBLEMS = 2
FIRST_OF_SLOW = 16
"""Problems of the first law, whose results are compared bit by bit, that a slow one gets."""
SLOW_SHARE, INTERPRETED_WORK, SLOW_WORK = 0.1, 256, 16
"""CPU only: share of problems; divisors of their work for interpreted Triton, which takes 10 to
1,500 ms a problem, and plain Python."""
GPU_SHARE = 0.7
"""Share of a gate's problems on a GPU, for each runs with both releases."""
SOAK_ON_CPU = 20
"""Launches where there is nothing to race."""
JUDGED, EXAMINED = 0.8, 0.9
"""Shares of the time after which nothing more is built or judged, and no failure is examined any
more; the rest is for speed."""


@dataclass(frozen=True)
class BumpPlan:
    """What a comparison of behaviour does. Nothing in it depends on how fast a machine is.

    Attributes:
        implementations: names or MODULE:NAME.
        device: ``"cpu"`` or ``"cuda"``.
        profile: how hard to look.
        seed: the seed of what is drawn.
        laws: names; all if empty.
        only: the part of the space of problems that is searched.
        ledger: known failures.
        cases: folder where the smallest problem of each finding is written.
        tensors: folder for results that wait to be compared.
        soak: launches under the law of that name.
        jobs: workers of each side at a time.
        corpus: stored cases, see ``open_corpus``; those of the implementations are judged first.
        named: whether the implementations were asked for by name.
        cases_as: the folder of cases as commands name it, where that is another.
        sources: folders of ``--from``, as commands name them.
    """

    implementations: Sequence[str]
    device: str
    profile: Profile
    seed: int
    ledger: Ledger
    cases: Path
    tensors: Path
    laws: Sequence[str] = ()
    only: Only = WHOLE_SPACE
    soak: int = 0
    jobs: int = 1
    corpus: Sequence[Case] = ()
    named: bool = False
    cases_as: Path | None = None
    sources: Sequence[Path] = ()

    @property
    def threads(self) -> int:
        """Threads that ask, each one side at a time: on a GPU two keep the workers of both busy."""
        return self.jobs * (len(SIDES) if self.device == "cuda" else 1)

    def count(self, law: Law, *, first: bool, sides: int) -> int:
        """Return the number of problems that a law judges of an implementation.

        Args:
            law: the law that judges.
            first: whether it is the first of its operation, whose results are compared.
            sides: the sides that the implementation runs on; with one there is nothing to compare.
        """
        share = GATE_SHARE * (SLOW_SHARE if self.device == "cpu" else GPU_SHARE)
        wanted = self.profile.problems * share * law.weight
        if first and self.device == "cpu":
            wanted = max(wanted, FIRST_OF_SLOW)
        return max(LEAST_PROBLEMS, round(wanted * sides / 2))

    def max_work(self, name: str, reference: str, max_work: int) -> int:
        """Return the most work of a problem, from the profile's on the device."""
        if self.device != "cpu":
            return max_work
        interpreted = built_in_compiler(name) == TRITON or TRITON in reference
        return max_work // (INTERPRETED_WORK if interpreted else SLOW_WORK)


def end_of(ending: Ending) -> tuple[str, int]:
    """Return the sentence and the exit code of what ended a comparison.

    Of the end of its time the code is 0; without an end the sentence is empty, too.
    """
    if ending.lost:
        return f"the comparison of behaviour ended early: {ending.lost}", MACHINE
    # Not ``stopped``, which follows later: from this on every question is refused already.
    if not ending.asked:
        return "", 0
    return (over(ending), 0) if ending.asked == TIME else signalled(ending.asked)


def over(ending: Ending) -> str:
    """Return the sentence of a time that is over."""
    return f"the time for it was over ({minutes_of(ending)})"


def minutes_of(ending: Ending) -> str:
    """Return the time of a comparison as an option; 0 where it has no limit."""
    return f"--minutes {ending.seconds / 60 if ending.seconds < math.inf else 0:g}"


def signalled(why: str) -> tuple[str, int]:
    """Return the sentence and the exit code of a comparison that a signal of ``ENDINGS`` ended."""
    number = signal_of(why)
    return f"ended by {number.name}: --resume goes on from here", SIGNALLED + number
