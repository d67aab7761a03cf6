"""The implementation that is hunted, and what all hunts for it share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...reference import Problem
from ..isolation.workers import Worker
from ..space.axes import Axes
from ..worker.requests import Address, probe_device
from .deadlines import Pace


@dataclass
class Quarry:
    """The implementation that is hunted, and what all hunts for it share."""

    name: str
    address: Address
    axes: Axes
    pace: Pace = field(default_factory=Pace)
    started: float | None = None
    """When the first law began: before that, other implementations may hold the workers."""
    hunted: float = 0.0
    """Seconds that the hunts which have ended took: laws take turns with those of others."""
    warm_up: Problem | None = None
    """Run first in each process, with time for lazy imports and caches; None: it does not end."""
    smallest: list[Problem] = field(default_factory=list)
    """Counterexamples to other laws: tried first, for they often break this one too."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Where a problem's HANG was found to be stuck, by its id: a look costs several seconds."""


def warm_up(worker: Worker, quarry: Quarry) -> None:
    """Let a process that is new to an implementation do what only its first call does.

    Whatever goes wrong is left for the law to find: the next call finds it again.

    Raises:
        DeviceLostError: it took the device with it.
    """
    if quarry.warm_up is not None:
        request = quarry.address.request("cost", problem=quarry.warm_up.to_json(), calls=1)
        outcome = worker.run(request, quarry.address.first_deadlines)
        if outcome.died:
            probe_device(worker, quarry.address.device)
