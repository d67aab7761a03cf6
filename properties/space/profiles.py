"""How hard to look."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

CHEAP_MINUTES = 1.0
"""Minutes of one core: of modules that take less there may be many, and they come in pairs."""


@dataclass(frozen=True)
class Profile:
    """A depth of search.

    Attributes:
        name: the name of the profile.
        problems: problems judged for a law of weight 1 on a fast implementation.
        max_work: most work of one problem on a fast implementation, see ``AttentionProblem.work``.
        shrink_seconds: seconds after which the smallest counterexample so far is taken.
        seconds: seconds on one implementation after which laws end early, and report it.
        soak: launches of one problem under the law of that name.
        modules: most modules that are built of an implementation whose modules take long.
        build_minutes: most minutes of one processor core for them, but one module at least.
        little_minutes: minutes of one core in which more modules than these may be built, of those
            that take less than ``CHEAP_MINUTES``, as Triton's.
        explore: draw other problems in every run, and keep failures in an example database.
        thorough: whether half of the lines of each Triton kernel must run, and a problem take each
            feature that is declared.
        long: the laws that judge one request of many thousand keys: ``"none"``, the one that
            compares with the ``"oracle"``, or ``"all"``.
    """

    name: str
    problems: int
    max_work: int
    shrink_seconds: float
    seconds: float
    modules: int = 8
    build_minutes: float = math.inf
    little_minutes: float = 0.0
    soak: int = 50
    explore: bool = False
    thorough: bool = False
    long: Literal["none", "oracle", "all"] = "none"

    def modules_of(self, minutes: float, *, together: bool = False) -> int:
        """Count the modules to build of an implementation, at most.

        Args:
            minutes: the minutes of one core that one of them takes.
            together: all implementations share the time of a run, which limits them besides.
        """
        # One run's builders share the cores, so that the run's own deadline limits what is built.
        if together and minutes >= CHEAP_MINUTES:
            return self.modules
        most: float = self.modules
        if minutes < CHEAP_MINUTES:
            most = max(most, self.little_minutes / minutes)
        return max(1, int(min(most, self.build_minutes / minutes)))


PROFILES = {
    "quick": Profile("quick", 20, 200_000, 5.0, 20.0, 3, 20.0, 2.0, 50),
    "gate": Profile(
        "gate", 120, 400_000, 10.0, 50.0, 8, 45.0, 12.0, 200, thorough=True, long="oracle"
    ),
    "nightly": Profile(
        "nightly",
        3000,
        4_000_000,
        60.0,
        3 * 3600.0,
        64,
        little_minutes=60.0,
        soak=5000,
        explore=True,
        thorough=True,
        long="all",
    ),
}
MINUTES = {("quick", "cuda"): 5.0, ("gate", "cuda"): 15.0}
"""Minutes of a whole run by profile and device; other runs have no limit."""
GPU_WORK = 1024
"""Factor of the work that a problem may have on a GPU, where it takes no longer."""
GATE_SHARE = 0.25
"""Share of a check's problems that the command `gate` gives to each implementation."""
LIGHT_SHARE = 0.25
"""Share of these that builders of integers get, see ``operations.Space.light``."""


def on_device(profile: Profile, device: str) -> Profile:
    """Return a profile with problems of the size that a device is made for."""
    factor = GPU_WORK if device == "cuda" else 1
    return replace(profile, max_work=factor * profile.max_work)


def asked_for(profile: Profile, *, modules: int | None, soak: int | None) -> Profile:
    """Return a profile with other numbers; modules that are asked for may take what they take."""
    if modules is not None:
        profile = replace(profile, modules=modules, build_minutes=math.inf, little_minutes=0.0)
    return profile if soak is None else replace(profile, soak=soak)


@dataclass(frozen=True)
class Cost:
    """What an implementation's calls cost, in coarse classes, so that runs stay reproducible.

    Attributes:
        name: the name of the class.
        problems: share of the profile's problems that it gets.
        max_work: most work of one of them.
        max_heads: most query heads of one of them, each request's counted; 0 for any number.
    """

    name: str
    problems: float
    max_work: int
    max_heads: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds that a call took, its work, and the query heads of all its requests."""

    seconds: float
    work: int
    heads: int = 0


TARGET_SECONDS = 0.06
"""Most seconds that the work of one call may take: the interpreter takes 10 to 1,500 ms a problem,
torch microseconds."""
FAST_CALL = 0.01
"""Most seconds of a small call of a fast implementation."""
NO_COST = 0.002
"""Seconds within which a call is fast, whatever its work."""
LEAST_WORK = 256
HEADS_SECONDS = 0.25
"""Most seconds that the heads of one call may take: the interpreter takes some ms for each one of a
request, however few its keys are."""
MOST_HEADS, LEAST_HEADS = 1024, 4
"""Query heads of a batch, of which no problem has more, and fewest that a limit leaves."""
SLOW = "slow"
"""Name of the class of implementations that get few problems, some of them long."""
FAST, MEDIUM = 1.0, 0.06
"""Share of the profile's work from which an implementation counts as fast, as medium."""


def cost_of(small: Timing, large: Timing, profile: Profile) -> Cost:
    """Return the class of an implementation of which two calls were timed.

    The fixed cost of a call (the interpreter takes 0.1 s for one key) limits the number of
    problems, the cost of each key limits their work, and that of each head their heads. The work is
    cut to a power of four of the profile's, so that a noisy clock rarely changes what is drawn; the
    heads likewise.
    """
    max_work = profile.max_work
    if small.seconds < NO_COST:
        return Cost("fast", 1.0, max_work)
    slope = max(large.seconds - small.seconds, 0.0) / max(large.work - small.work, 1)
    while max_work > LEAST_WORK and max_work * slope > TARGET_SECONDS:
        max_work //= 4
    share = max_work / profile.max_work
    seconds = small.seconds + slope * max_work
    if share >= FAST and small.seconds <= FAST_CALL and seconds <= TARGET_SECONDS:
        return Cost("fast", 1.0, max_work)
    heads = _most_heads(small)
    if share >= MEDIUM and seconds <= 2 * TARGET_SECONDS:
        return Cost("medium", 0.5, max_work, heads)
    return Cost(SLOW, 0.2, max_work, heads)


def _most_heads(small: Timing) -> int:
    """Return the most query heads of a batch; 0 for any number."""
    if not small.heads:
        return 0
    heads, each = MOST_HEADS, small.seconds / small.heads
    while heads > LEAST_HEADS and heads * each > HEADS_SECONDS:
        heads //= 4
    return heads if heads < MOST_HEADS else 0
