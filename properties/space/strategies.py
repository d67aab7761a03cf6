"""Hypothesis strategies over the problems of every operation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from ...reference import Problem
from .axes import Axes, all_axes
from .given_lengths import given, with_lengths
from .operations import OPERATIONS
from .strategy_helpers import sampled


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
