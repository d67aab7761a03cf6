"""What a comparison of behaviour judges, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....impl.registry import built_in_compiler
from ....impl.targets.backends import TRITON
from ....properties.findings.corpus import Case
from ....properties.findings.ledger import Ledger
from ....properties.isolation.workers import Deadlines
from ....properties.laws import Law
from ....properties.space.profiles import GATE_SHARE, Profile
from ....properties.space.restrictions import WHOLE_SPACE, Only
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


@dataclass(frozen=True)
class Plan:
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
