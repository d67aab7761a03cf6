"""What shrinking a counterexample has cost so far, and when that is enough."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..space.profiles import Profile

MAX_DEATHS = 20
"""Most deaths of a process while one failure is shrunk."""
MAX_SECONDS_OF_DEATHS = 30.0
FACTOR_OF_DEATHS = 6.0
"""A HANG costs its deadline each time that it is tried again, on a GPU a process too, as a death
does: shrinking takes at most this many times the profile's seconds, and the maximum."""
LITTLE_SECONDS = 0.1
"""Most seconds of a problem that passes where many are tried to spare a failure."""


@dataclass
class ShrinkBudget:
    """What shrinking may cost, and what it has cost.

    Attributes:
        profile: whose seconds it may take.
        attempts: problems judged since shrinking began.
        deaths: how many of them ended a process.
        begun: when the first failure was confirmed.
    """

    profile: Profile
    attempts: int = 0
    deaths: int = 0
    begun: float | None = None
    _costly: bool = False
    _passed: list[float] = field(default_factory=list)

    def begin(self, *, costly: bool = False) -> None:
        """Start the clock: there is something to shrink, and each failure may be costly."""
        self.begun, self._costly = time.monotonic(), costly

    def note(self, seconds: float, *, died: bool, passed: bool) -> None:
        """Record a problem that was judged; those before the first failure do not count."""
        if self.begun is None:
            return
        self.attempts += 1
        self.deaths += died
        if passed:
            self._passed.append(seconds)

    def spent(self) -> bool:
        """Whether shrinking has taken its share."""
        elapsed = time.monotonic() - (self.begun or 0.0)
        limit = self.profile.shrink_seconds
        if self._costly or self.deaths:
            limit = min(FACTOR_OF_DEATHS * limit, MAX_SECONDS_OF_DEATHS)
        return elapsed > limit or self.deaths >= MAX_DEATHS

    def passing_is_cheap(self) -> bool:
        """Whether problems that pass have cost little so far."""
        return not self._passed or sum(self._passed) / len(self._passed) < LITTLE_SECONDS
