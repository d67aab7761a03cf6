"""Further conditions of a cause, where problems pass though they have what it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....reference import Problem
from ...findings.ledger import holds
from ...findings.relations import RELATIONS
from .ablation import conditions_of

MANY = 0.3
"""Share of problems with the values that pass, from which on a further condition is looked for."""
CHANCE = 0.01
"""Most probability that all failing problems have a condition by chance."""
MOST = 2
"""Most further conditions."""


def further_conditions(
    values: Mapping[str, Any],
    failing: Sequence[Problem],
    passing: Sequence[Problem],
    seen: Sequence[Problem],
) -> dict[str, Any]:
    """Return conditions that all failing problems meet and most of the passing ones do not.

    Args:
        values: what a problem needs as far as is known.
        failing: problems with these values that fail.
        passing: problems with these values that pass.
        seen: all problems, which tell how often a condition is met by chance.
    """
    more: dict[str, Any] = {}
    left = [*passing]
    while failing and len(more) < MOST and len(left) > MANY * (len(left) + len(failing)):
        best = max(
            (each for each in _common(failing) if each[0] not in values and each[0] not in more),
            # Relations of lengths follow from many sizes: a size comes first where both tell.
            key=lambda each: (
                sum(not holds(one, dict([each])) for one in left),
                each[0] not in RELATIONS,
            ),
            default=None,
        )
        if best is None:
            break
        kept = [each for each in left if holds(each, dict([best]))]
        often = sum(holds(each, dict([best])) for each in seen) / max(len(seen), 1)
        if len(kept) > len(left) / 2 or often ** len(failing) > CHANCE:
            break
        more[best[0]], left = best[1], kept
    return more


def _common(failing: Sequence[Problem]) -> list[tuple[str, Any]]:
    """Return the properties that all failing problems have, and the least of their sizes."""
    found: list[tuple[str, Any]] = []
    for name, wanted in conditions_of(min(failing, key=lambda each: each.work)):
        if isinstance(wanted, dict):
            least = min(getattr(each, name) for each in failing)
            if least > 1:
                found.append((name, {"min": least}))
        elif all(holds(each, {name: wanted}) for each in failing):
            found.append((name, wanted))
    return found
