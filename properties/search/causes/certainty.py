"""Whether a cause decides with other values of the tensors too.

An error near its bound comes and goes with the values, and what is taken away of a problem seems to
matter by chance. A fault of a kernel stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....reference import Problem
from .ablation import Fails, lacking
from .faults import Fault, undone

SEEDS = 4
"""Other values of the tensors that a cause is tried with."""
REPEATED = 3
"""Least number of them with which its problem fails."""


def is_certain(fault: Fault, fails: Fails) -> bool:
    """Whether a cause's problem fails with other values, and passes with them without a need.

    Args:
        fault: the cause.
        fails: whether a problem fails for this cause.
    """
    repeated = sum(fails(each) is True for each in _reseeded(fault.problem))
    return repeated >= REPEATED and not any(
        fails(each) for changed in _lacking(fault) for each in _reseeded(changed)
    )


def _reseeded(problem: Problem) -> list[Problem]:
    return [replace(problem, seed=problem.seed + 1 + number) for number in range(SEEDS)]


def _lacking(fault: Fault) -> Iterator[Problem]:
    """Yield a cause's problem without one of its needs at a time."""
    problem, needs = fault.problem, fault.needs
    for name in needs.fields:
        if (changed := lacking(problem, name, needs)) is not None:
            yield changed
    for name, wanted in needs.structure.items():
        if (batch := undone(problem, name, wanted)) is not None:
            yield batch
