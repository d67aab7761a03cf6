"""The budget of shrinking one counterexample: seconds, and processes that die."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..space.profiles import Profile
from .simplify import Limit

MAX_DEATHS = 20
"""Most processes that may die while one failure is shrunk."""
# Each attempt that hangs costs its deadline, and on a GPU a process, as each crash does.
FACTOR_OF_DEATHS = 6.0
"""Factor on the profile's seconds for shrinking a hang or a crash."""
MAX_SECONDS_OF_DEATHS = 30.0
"""Most seconds for shrinking a hang or a crash."""
SIMPLIFYING_SHARE = 0.5
"""Share of the profile's seconds for shrinking that simplifying may take after it."""
MOST_SIMPLIFYING = 400
"""Most problems that simplifying may judge."""
LITTLE_SECONDS = 0.1
"""Mean seconds of a passing problem below which shrinking tries many of them to avoid a failure."""


@dataclass
class ShrinkBudget:
    """What shrinking may cost, and what it has cost.

    Attributes:
        profile: the profile, which sets the seconds.
        attempts: number of problems judged since shrinking began.
        deaths: number of those that ended a process.
        begun: monotonic time at which the first failure was confirmed; None before that.
    """

    profile: Profile
    attempts: int = 0
    deaths: int = 0
    begun: float | None = None
    _costly: bool = False
    _until: float = 0.0
    _passed: list[float] = field(default_factory=list)

    def begin(self, *, costly: bool = False) -> None:
        """Start the clock; ``costly`` if each failing attempt hangs or ends a process."""
        self.begun, self._costly = time.monotonic(), costly

    def extend(self) -> Limit:
        """Return a budget of its own for simplifying, whatever shrinking has taken."""
        seconds = SIMPLIFYING_SHARE * self.profile.shrink_seconds
        self._until = time.monotonic() + seconds
        return Limit(seconds, MOST_SIMPLIFYING)

    def note(self, seconds: float, *, died: bool, passed: bool) -> None:
        """Record a problem that was judged; those before the first failure do not count."""
        if self.begun is None:
            return
        self.attempts += 1
        self.deaths += died
        if passed:
            self._passed.append(seconds)

    def spent(self) -> bool:
        """Whether the budget is used up."""
        elapsed = time.monotonic() - (self.begun or 0.0)
        limit = self.profile.shrink_seconds
        if self._costly or self.deaths:
            limit = min(FACTOR_OF_DEATHS * limit, MAX_SECONDS_OF_DEATHS)
        over = elapsed > limit and time.monotonic() > self._until
        return over or self.deaths >= MAX_DEATHS

    def passing_is_cheap(self) -> bool:
        """Whether problems that pass have cost little so far."""
        return not self._passed or sum(self._passed) / len(self._passed) < LITTLE_SECONDS
