"""What strategies of all operations share: choices that shrink to the simplest value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from .axis_values import Axes

LARGEST_SEED = 2**16


def one_of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of some values, simplest first.

    A single value is listed twice: Hypothesis records no choice where there is none, and takes a
    problem with fewer choices for simpler, be it as large as it likes.
    """
    return sampled(values if len(values) > 1 else (*values, *values))


def sampled(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Draw one of some values, simplest first; where there is a single one, without a choice."""
    return _sampled(tuple(values), tuple(map(type, values)))


@functools.lru_cache(maxsize=4096)
def _sampled(values: tuple[Any, ...], _types: tuple[type, ...]) -> st.SearchStrategy[Any]:
    """Make each strategy once: Hypothesis looks closely at each that it has not seen.

    The types tell (False, True) from (0, 1).
    """
    return st.sampled_from(values)


@st.composite
def features(
    draw: st.DrawFn,
    axes: Axes,
    names: tuple[str, ...],
    off: Any,  # noqa: ANN401  a problem
    most: int,
) -> dict[str, Any]:
    """Draw which features are on, few at a time, and their values.

    Args:
        draw: Hypothesis's.
        axes: what may be drawn.
        names: the names of the axes.
        off: a problem, or whatever has their values where they are off as attributes.
        most: how many are on at a time, besides those that are never off; half as many on average.
    """
    # A module that is built for windows, say, has problems with windows alone.
    always = [name for name in names if getattr(off, name) not in axes.allows(name)]
    found = {name: draw(sampled(axes.allows(name))) for name in always}
    possible = [name for name in names if len(axes.allows(name)) > 1 and name not in always]
    if not possible:
        return found
    return found | dict(
        draw(_feature_values(tuple((name, axes.allows(name)) for name in possible), most))
    )


@functools.lru_cache(maxsize=4096)
def _feature_values(
    possible: tuple[tuple[str, tuple[Any, ...]], ...], most: int
) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """Draw pairs of a feature and its value.

    Hypothesis checks each strategy that it has not seen: these are made once.
    """
    # A feature is drawn next to its value: both go at once where shrinking does without it.
    pairs = {
        name: st.tuples(st.just(name), st.sampled_from(values[1:])) for name, values in possible
    }
    choice = st.sampled_from(tuple(pairs)).flatmap(pairs.__getitem__)
    return st.lists(choice, max_size=most, unique_by=lambda pair: pair[0])
