"""Strategies over the problems of every operation, and a round of a search that draws from them."""

from __future__ import annotations

import hashlib
import unittest
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import hypothesis
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase

from ...reference import Problem
from .axes import Axes, all_axes
from .given_lengths import given, with_lengths
from .hypothesis_settings import settings_of, without_local_constants
from .operations import OPERATIONS
from .profiles import Profile
from .strategy_helpers import sampled

EXAMPLES_A_ROUND = 9
"""Examples in one round of Hypothesis. In a longer run it draws small examples for a tenth of it,
and after ten valid ones it copies parts of each new example over others of it, five times: few of
them would be unlike the rest. The first example of each round is the simplest one."""
MOST_KEPT = 1000
"""Examples of other runs that a search tries before it draws its own."""
PATIENCE = 10
"""Times the examples that a search would need, were each a single problem, before it gives up."""
VARIATIONS = 2
"""Most value regimes that one drawn structure is tried with, besides its own."""


class Counterexample(Exception):  # noqa: N818  the signal that Hypothesis shrinks on
    """A problem on which the law fails."""


class Enough(BaseException):
    """The law has seen its share of problems: drawing more would only cost time."""


def seed_of_round(number: int, *names: object) -> int:
    """Return the seed of a round of the search that these names tell from others."""
    text = "|".join(map(str, (*names, number)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def most_rounds(problems: int) -> int:
    """Count the rounds after which a search for this number of problems gives up."""
    # Many examples repeat a problem, more so where few values are allowed. Without a limit a search
    # in a small space would draw for ever.
    return -(-PATIENCE * problems // EXAMPLES_A_ROUND)


def draw_problems(axes: Axes, profile: Profile, seed: int, most: int) -> list[Problem]:
    """Draw problems as a search does, round after round, and none twice.

    Args:
        axes: what may be drawn.
        profile: the profile of the search.
        seed: the same one gives the same problems, and with fewer of them the first ones.
        most: how many; fewer come where there are no more.
    """
    drawn: dict[str, Problem] = {}

    def take(problem: Problem) -> None:
        if len(drawn) == most:
            raise Enough
        drawn.setdefault(problem.id, problem)

    # Rounds have seeds of their own, so that the first problems of a long search are those of a
    # short one, and a resumed search goes on where the other ended.
    for number in range(most_rounds(most)):
        if draw_round(axes, profile, seed_of_round(number, seed), take):
            break
    return list(drawn.values())


def draw_round(
    axes: Axes,
    profile: Profile,
    seed: int,
    look: Callable[[Problem], None],
    *,
    phases: Sequence[Phase] = (Phase.generate,),
    database: ExampleDatabase | None = None,
    most: int = EXAMPLES_A_ROUND,
) -> bool:
    """Have Hypothesis draw the examples of one round.

    Args:
        axes: what may be drawn.
        profile: the profile of the search.
        seed: the same one gives the same problems, as long as the same ones are counterexamples.
        look: function that is called with each problem; it may raise ``Counterexample`` or
            ``Enough``.
        phases: the phases of Hypothesis.
        database: the database of examples that failed before.
        most: examples of the round.

    Returns:
        Whether ``look`` has ended the round.

    Raises:
        RuntimeError: as ``look`` raised it: the suite's fault, and not for Hypothesis to shrink.
        hypothesis.errors.Flaky: a counterexample was none when it was shown again.
    """
    settings = hypothesis.settings(
        settings_of(profile), max_examples=most, database=database, phases=phases
    )
    broken: list[RuntimeError] = []

    @settings  # after the seed, which takes the database away from the settings before it
    @hypothesis.seed(seed)
    # Long problems are not varied: a second value regime costs as much as another structure.
    @hypothesis.given(variations(problems(axes), axes, 0 if axes.edges else VARIATIONS))
    def law_holds(drawn: list[Problem]) -> None:
        try:
            for problem in drawn:
                look(problem)
        except RuntimeError as error:
            broken.append(error)
            raise Enough from error

    try:
        with without_local_constants():
            law_holds()
    except (Counterexample, Enough):
        if broken:
            raise broken[0] from None
        return True
    except unittest.SkipTest:  # nothing was kept
        return False
    return False


def problems(
    axes: Axes | None = None, *, operation: str = "paged_attention", max_work: int = 400_000
) -> st.SearchStrategy[Problem]:
    """Draw problems.

    Args:
        axes: what may be drawn; everything of ``operation`` with at most ``max_work`` if None.
        operation: the operation of the problems, where no axes are given.
        max_work: see ``axes``.
    """
    if axes is None:
        axes = Axes(operation, all_axes(operation), max_work, {})
    if axes.restrictions:
        return st.sampled_from(axes.restricted()).flatmap(problems)
    strategy, lengths = OPERATIONS[axes.operation].strategy(axes), given(axes.values)
    if not lengths:
        return strategy
    phases = axes.values.get("phase", ("decode",))
    all_new = not {"decode", "chunk"} & set(phases)
    every = partial(with_lengths, lengths=lengths, max_work=axes.max_work, all_new=all_new)
    return strategy.map(every)


@st.composite
def variations(
    draw: st.DrawFn, base: st.SearchStrategy[Problem], axes: Axes, most: int
) -> list[Problem]:
    """Draw one structure with several value regimes: a draw costs more than a small run.

    The list shrinks to the single problem at its head.
    """
    problem = draw(base)
    found = [problem]
    regimes = OPERATIONS[problem.operation].regimes(problem, axes)
    if len(regimes) <= 1:
        return found
    more = draw(st.lists(sampled(regimes), max_size=most))
    found.extend(
        # Problems with a regime have a seed.
        replace(problem, regime=regime, seed=problem.seed + 1 + i)
        for i, regime in enumerate(more)
    )
    return found
