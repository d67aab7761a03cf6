"""Simpler counterexamples than Hypothesis ends at, by operation; see ``simplifying``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference import Problem
from .axes import Axes
from .operations import OPERATIONS
from .simplifying import Cheap, Fails


def simplify(problem: Problem, axes: Axes, fails: Fails, cheap: Cheap) -> Problem:
    """Return a simple problem that still fails, after few failures.

    Args:
        problem: that fails.
        axes: what may be asked for.
        fails: judges a problem.
        cheap: tells whether a problem that passes has cost little so far.

    Returns:
        The last problem that ``fails`` said True to; ``problem`` itself if there was none.
    """
    return OPERATIONS[problem.operation].simplify(problem, axes, fails, cheap)


def on_fewer_pages(problem: Problem, axes: Axes) -> Iterator[Any]:
    """Yield the same problem on larger pages, the smallest first, if it has more than a few.

    Pages are drawn before lengths, so Hypothesis ends at pages of one key and as many of them as
    there are keys. One page of 128 says more than 66 of one.
    """
    return OPERATIONS[problem.operation].on_fewer_pages(problem, axes)
