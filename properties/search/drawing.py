"""Drawing problems for one law: Hypothesis draws, and a worker judges meanwhile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import hypothesis
from hypothesis import Phase

from ...reference import Problem
from ..space.axis_values import Axes
from ..space.drawers import Drawers
from ..space.given_lengths import given
from ..space.operations import OPERATIONS
from ..space.profiles import Profile
from ..space.rounds import (
    EXAMPLES_A_ROUND,
    MOST_KEPT,
    Enough,
    draw_round,
    most_rounds,
    seed_of_round,
)
from ..verdicts.operations import OPERATIONS as ANSWERS
from ..verdicts.verdict import Verdict
from .case_runner import CaseRunner
from .examples import Examples

EXTENSION = 4.0
"""Multiplier on a law's time limit while it is still below its floor."""
MOST_IDLE, MOST_IDLE_OF_A_MODULE = 60, 16
"""Vacuous problems after which a law that has judged none gives up: MOST_IDLE,
MOST_IDLE_OF_A_MODULE per compiled module, or four times the planned count, whichever is largest."""
LONG_SHARE = 0.5
"""Share of a law's problems and seconds that go to long problems, of a slow implementation."""
MOST_LONGER = 800
"""Work limit of the one very long problem, as a multiple of the cost class's ``max_work``."""
MOST_WITHOUT_ROOM = 8
"""Problems without room on the GPU after which a law stops, if it has judged none; they are tried
again at the end of the run."""
MOST_MASKED = 3
"""Problems that end in known findings come on top of a law's plan, up to this multiple of it: where
a kernel is known to be wrong, they show nothing else."""
Look = Callable[[Problem], None]
"""Called with each drawn problem; raises ``Counterexample`` or ``Enough``, see ``draw_round``."""
Suspect = tuple[Problem, Verdict]
"""A problem that has failed, and the verdict on it, to be confirmed before anything is drawn."""


@dataclass(frozen=True)
class SearchOptions:
    """How the search for a counterexample to one law goes about it.

    Attributes:
        profile: the profile of the run.
        seed: the same one draws the same problems.
        problems: problems that are judged.
        seconds: seconds after which no more are drawn, ``EXTENSION`` times as many where fewer than
            ``floor`` were judged. Starting processes is no part of it.
        floor: fewest problems that it must judge.
        shrink: make a failure smaller.
        confirm: judge a FAIL once more, in a fresh process.
        examples: what other runs have kept, tried first.
        drawers: processes that draw, where there are any.
        longest: whether the law's very long problem is judged too, see ``Profile.long``.
        suspect: what has failed in the deck, tried first.
        kinds: whether only the problems that cover each feature are judged.
        alike: whether all laws of the implementation draw the same problems, each from another one
            of a round on.
    """

    profile: Profile
    seed: int
    problems: int
    seconds: float
    floor: int = 0
    shrink: bool = True
    confirm: bool = True
    examples: Examples | None = None
    drawers: Drawers | None = None
    longest: bool = True
    suspect: Suspect | None = None
    kinds: bool = False
    alike: bool = False


class Search:
    """Draws problems and has them judged, until there were enough."""

    def __init__(
        self, runner: CaseRunner, options: SearchOptions, stopped: Callable[[], bool]
    ) -> None:
        self._runner, self._options, self._stopped = runner, options, stopped
        self._started: float | None = None
        self._round = 0
        self._long = False
        self._suspect: Problem | None = None
        self._judged_before = self._known_before = self._idle_before = 0
        self._drawn: tuple[int, list[Problem]] | None = None
        looks_at, candidate = runner.law.looks_at, runner.candidate
        self._axes = candidate.axes.within(looks_at)
        self._long_axes = candidate.long and candidate.long.within(looks_at)

    @property
    def has_something(self) -> bool:
        """Whether there are problems that may hold something for the law."""
        return self._axes is not None

    def longest(self) -> tuple[Sequence[Problem], str]:
        """Return the very long problems of the law, and why it has none where it should."""
        candidate, law, which = self._runner.candidate, self._runner.law, self._options.profile.long
        compares = ANSWERS[candidate.axes.operation].law == law.name
        longest = OPERATIONS[candidate.axes.operation].longest
        if not self._options.longest or self._axes is None or longest is None:
            return (), ""
        if which == "none" or (which == "oracle" and not compares) or given(self._axes.values):
            return (), ""
        problems = longest(self._axes, candidate.address.device)
        if not problems:
            return (), OPERATIONS[candidate.axes.operation].no_longest
        most = MOST_LONGER * candidate.cost.max_work
        if candidate.cost.name != "fast" and candidate.address.device == "cpu":
            problems = problems[-1:]  # of seconds each: the last shows more
        short = [problem for problem in problems if problem.work <= most]
        return short, "" if short else "its calls take too long"

    def pairs(self) -> Sequence[Problem]:
        """Return problems that cover pairs of features, if the law judges such.

        They are at most half as many as are drawn; the first ones cover most.
        """
        if self._axes is None or not self._options.longest or not self._runner.law.pairs:
            return ()
        return self._runner.pairs()[: self._options.problems // 2]

    def wide(self) -> list[Problem]:
        """Return the law's requests of many keys with windows and masks, if it is the oracle's."""
        if not self._has_more:
            return []
        assert self._axes is not None  # noqa: S101  it has more
        found = OPERATIONS[self._axes.operation].wide(self._axes)
        return [problem for problem in found if problem.work <= self._most_work]

    def full(self) -> dict[str, list[Problem]]:
        """Return batches that fill a GPU, by what they are; of each kind one is to be judged."""
        if not self._has_more or self._runner.candidate.address.device != "cuda":
            return {}
        assert self._axes is not None  # noqa: S101  it has more
        return {
            name: [problem for problem in choices if problem.work <= self._most_work]
            for name, choices in OPERATIONS[self._axes.operation].full(self._axes).items()
        }

    @property
    def _has_more(self) -> bool:
        """Whether the law is the oracle's, and judges more than what is drawn."""
        law, axes = self._runner.law, self._axes
        if axes is None or not self._options.longest or self._options.profile.long == "none":
            return False
        return ANSWERS[axes.operation].law == law.name and not given(axes.values)

    @property
    def _most_work(self) -> float:
        return MOST_LONGER * self._runner.candidate.cost.max_work

    def suspects(self) -> Iterator[Problem]:
        """Yield each problem that fails when it is first judged, until there were enough.

        Long problems come first: what small ones show is found by the last of them, too.

        If the caller goes on, the suspect was none: its round is drawn again for the problems
        behind it. To Hypothesis none fails here, for it draws on before the verdict is known.
        """
        # Smallest problems of other laws, and what other runs kept, are judged on top.
        self._judged_before, self._idle_before = self._runner.report.judged, self._idle
        self._known_before = self._known
        if self._long_axes is not None:
            self._long = True
            yield from self._rounds()
            self._long, self._idle_before = False, self._idle
        yield from self._rounds()

    def _rounds(self) -> Iterator[Problem]:
        # A round is drawn again from its start after each suspect: Hypothesis's state cannot be
        # resumed. Verdicts are remembered, so that walking through it costs only the draws.
        for number in range(most_rounds(self._options.problems)):
            self._round = number
            while True:
                self._suspect = None
                ended = self._draw_and_ask()
                self._take_all()
                if self._suspect is None:
                    break
                yield self._suspect
            if ended:
                return
        if not (self._long or self._spent()):
            self._runner.report.ended = "rare"

    def show_again(self, look: Look) -> bool:
        """Draw the round of the last suspect again, for Hypothesis to shrink what ``look`` raises.

        Hypothesis shrinks only what fails while it is drawn, and then from its own random state.

        Returns:
            Whether ``look`` has ended the round. A long problem is not drawn again: it is shrunk to
            what is no long one, and by few tries.
        """
        return not self._long and self._show(look, Phase.generate, EXAMPLES_A_ROUND)

    def show_kept(self, look: Look) -> bool:
        """Show what other runs have kept, as ``show_again`` does.

        It is not mixed with what is drawn: Hypothesis would try little of it.
        """
        return self._show(look, Phase.reuse, MOST_KEPT)

    def enough(self) -> bool:
        """Whether the law has had its problems or its time; may take verdicts."""
        # Problems that wait may all count. If they would fill the plan, their verdicts are taken
        # first: else the number judged would depend on how many happened to wait.
        if self._runner.waiting and self._spent(self._runner.waiting):
            self._take_all()
        if self._spent():
            return True
        report, options = self._runner.report, self._options
        enough_judged = self._long or report.judged - self._masked >= options.floor
        seconds = self._share * options.seconds * (1.0 if enough_judged else EXTENSION)
        if self._stopped():
            report.ended = "stopped"
        elif report.judged == self._judged_before and len(report.without_room) >= MOST_WITHOUT_ROOM:
            report.ended = "room"
        elif self._seconds() > seconds:
            if self._long:
                return True  # the others come now
            # On a busy machine there are fewer problems, none of which is for this law either.
            nothing = report.judged == self._judged_before
            idle = self._idle - self._idle_before > MOST_IDLE
            report.ended = "idle" if nothing and idle else "time"
        return bool(report.ended)

    def _seconds(self) -> float:
        """Return the seconds since the first question, without those of starting processes."""
        if self._started is None:
            self._started = time.monotonic() - self._runner.starting_seconds
        return time.monotonic() - self._started - self._runner.starting_seconds

    def _draw_and_ask(self) -> bool:
        """Ask about the problems of a round; whether there were enough before its end."""
        drawers, axes, seed = self._options.drawers or Drawers(0), *self._source
        if not (drawers.apart or self._options.alike):
            return self._draw(self._ask, Phase.generate)
        if self._drawn is None or self._drawn[0] != seed:  # else only what is behind a suspect
            draw = partial(drawers.round, axes, self._options.profile, seed)
            self._drawn = seed, self._shared(draw) if self._options.alike else draw()
        # Another process has drawn the whole round ahead. After a suspect that was none, the same
        # problems are walked through again; those that were judged are skipped.
        look = _after_first(self._ask) if self._long else self._ask
        try:
            for problem in self._drawn[1]:
                look(problem)
        except Enough:
            return True
        return False

    def _shared(self, draw: Callable[[], list[Problem]]) -> list[Problem]:
        """Return the problems of a round that another law may have drawn, from another one on."""
        axes, seed = self._source
        drawn = self._runner.candidate.rounds.get(f"{seed} {axes.values}", draw)
        start = seed_of_round(self._round, self._runner.law.name) % max(len(drawn), 1)
        return [*drawn[start:], *drawn[:start]]

    def _show(self, look: Look, phase: Phase, most: int) -> bool:
        phases = (phase, Phase.shrink) if self._options.shrink else (phase,)
        try:
            return self._draw(look, *phases, most=most, keep=True)
        except hypothesis.errors.Flaky:
            # Verdicts are remembered, so only a search that has ended looks flaky to Hypothesis.
            return True

    def _draw(
        self, look: Look, *phases: Phase, most: int = EXAMPLES_A_ROUND, keep: bool = False
    ) -> bool:
        options, law, name = self._options, self._runner.law.name, self._runner.candidate.own_name
        database = options.examples.of(law, name) if keep and options.examples else None
        axes, seed = self._source
        return draw_round(
            axes,
            options.profile,
            seed,
            _after_first(look) if self._long else look,
            phases=phases,
            database=database,
            most=most,
        )

    @property
    def _source(self) -> tuple[Axes, int]:
        """What the problems of this round are drawn from, and its seed."""
        law = "" if self._options.alike else self._runner.law.name
        names = (law, self._runner.candidate.own_name, self._options.seed)
        axes = self._long_axes if self._long else self._axes
        assert axes is not None  # noqa: S101  else nobody draws
        return axes, seed_of_round(self._round, *(["long"] if self._long else []), *names)

    def _ask(self, problem: Problem) -> None:
        """Ask about a problem, so that the next is drawn while the worker judges."""
        # Called before the suspect is checked: ``enough`` may take the verdict that makes one.
        enough = self.enough()  # takes verdicts, too
        if enough or self._suspect is not None:
            raise Enough
        self._runner.ask(problem)
        while self._runner.full:
            self._take()

    def _take(self) -> None:
        # The first one stays: what was asked behind a failure is abandoned.
        self._suspect = self._runner.take() or self._suspect

    def _take_all(self) -> None:
        while self._runner.waiting:
            self._take()

    def _spent(self, more: int = 0) -> bool:
        """Whether the law has had its problems, if ``more`` were judged or had nothing to judge."""
        judged = self._runner.report.judged - self._judged_before - self._masked
        # Counted from when drawing began: stored and shared problems come on top of the plan.
        most = max(1.0, self._share * self._options.problems)
        # Nothing to judge, time and again: the law says nothing about this implementation.
        idle = self._idle - self._idle_before + more
        modules = len(self._axes.restrictions) if self._axes else 0
        if idle > max(MOST_IDLE, 4 * most, MOST_IDLE_OF_A_MODULE * modules) and not judged:
            if not more:  # else what waits may still have something to judge
                self._runner.report.ended = "" if self._long else "idle"
            return True
        return judged + more >= most

    @property
    def _share(self) -> float:
        return LONG_SHARE if self._long else 1.0

    @property
    def _known(self) -> int:
        return self._runner.report.known.total()

    @property
    def _masked(self) -> int:
        """Problems drawn here that end in known findings: another fault would not show there."""
        return min(self._known - self._known_before, MOST_MASKED * self._options.problems)

    @property
    def _idle(self) -> int:
        return self._runner.report.vacuous + self._runner.report.unsupported


def _after_first(look: Look) -> Look:
    """Leave out the first problem: of each round it is the simplest, and long ones cost much."""
    shown = itertools.count()

    def look_later(problem: Problem) -> None:
        if next(shown):
            look(problem)

    return look_later
