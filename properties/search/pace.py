"""The time of a run with an end, shared out so that each law of each implementation has some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from .ending import Ending

HASTE: Final = 1.5
"""Multiplier on a law's share of the time that is left: many laws end before their share is over.

Were all to take theirs, the last tenth of the laws would have three hundredths of the time."""
LEAST_SECONDS: Final = 0.2
"""What a law may take that begins at all."""


class Pace:
    """What is left of a run's time for each law: by its weight among all that have not ended.

    ``seconds`` may be called from any thread, all else from the one that takes answers.

    Args:
        ending: the end of the run; without one a law may take what it takes.
        jobs: laws that run at a time.
        implementations: how many implementations are prepared.
    """

    def __init__(self, ending: Ending, jobs: int, implementations: int) -> None:
        self._ending, self._jobs, self._waiting = ending, jobs, implementations
        self._left: dict[tuple[str, str], float] = {}
        self._whole, self._planned, self._skipped = 0.0, 0, 0
        self._weight = 0.0

    def plan(self, name: str, weights: Mapping[str, float]) -> None:
        """Add the laws of an implementation that is prepared, each with its weight."""
        self._planned += 1
        self._whole += sum(weights.values())
        self._left.update({(name, law): weight for law, weight in weights.items()})
        self._settle()

    def skip(self) -> None:
        """Record that an implementation cannot be judged."""
        self._skipped += 1
        self._settle()

    def end(self, name: str, law: str) -> None:
        """Record that a law has ended."""
        if self._left.pop((name, law), None) is not None:
            self._settle()

    def seconds(self, weight: float) -> float:
        """Return the seconds that a law of this weight may take if it begins now."""
        if math.isinf(self._ending.seconds):
            return math.inf
        left = self._jobs * max(self._ending.seconds_until(1.0), 0.0)
        return max(LEAST_SECONDS, HASTE * left * weight / max(self._weight, weight))

    def _settle(self) -> None:
        settled = self._planned + self._skipped
        # Of those that are still prepared, as many are judged as of those that were.
        each = self._whole / settled if settled else 0.0
        self._weight = sum(self._left.values()) + each * (self._waiting - settled)
