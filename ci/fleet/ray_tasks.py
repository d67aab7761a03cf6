"""What runs on a cluster's machines: a unit, and the actor through which it says what it does."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.search.building import COMPILERS
from ...properties.search.engine import Run
from ...properties.search.progress import Progress
from ...properties.verdicts.verdict import Verdict
from .shipping import unpack
from .units import Event, Job, Unit, UnitResult, run_unit

SEND_SECONDS = 0.5
"""Seconds between two messages of a unit."""
ANSWER_SECONDS = 30.0
"""Seconds that a unit waits for an answer of the bus before it goes on without one."""


class Bus:
    """An actor: keeps what units say until the driver takes it, and how they are to end.

    It also keeps which machine builds which libraries.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._builders: dict[tuple[str, str], str] = {}
        self._why = ""

    def tell(self, events: list[Event]) -> str:
        """Keep events, and return why units are to end; empty while they are not."""
        self._events += events
        return self._why

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def end(self, why: str) -> None:
        """Have units end."""
        self._why = why

    def claim(self, chip: str, libraries: Collection[str], node: str, *, stays: bool) -> str:
        """Return the machine of a chip that is to build libraries: one that builds most of them.

        Args:
            chip: the kind of machine.
            libraries: the libraries by their names.
            node: the machine that asks, which builds them where no other does.
            stays: whether it builds them even where another does.
        """
        keys = [(chip, each) for each in libraries]
        known = Counter(self._builders[key] for key in keys if key in self._builders)
        best = max(known, key=lambda each: (known[each], each == node), default=node)
        if stays or best == node:
            self._builders.update(dict.fromkeys(keys, node))
            return node
        return best


class Teller(Progress):
    """Sends what a unit does to the bus; without the bus the unit goes on all the same."""

    def __init__(self, unit: Unit, bus: Any) -> None:  # noqa: ANN401  Ray's handle
        self._unit, self._bus = unit, bus
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Begin to send; the run is ended when the bus says so."""
        self._run = run
        self._thread.start()

    def close(self) -> None:
        """Send the rest."""
        self._closed.set()
        if self._run is not None:
            self._thread.join()

    def _send_all(self) -> None:
        import ray

        while True:
            last = self._closed.wait(SEND_SECONDS)
            with self._lock:
                events, self._events = self._events, []
            with suppress(ray.exceptions.RayError):
                why = ray.get(self._bus.tell.remote(events), timeout=ANSWER_SECONDS)
                if why and self._run is not None:
                    self._run.ending.end(why)
            if last:
                return

    def _say(self, method: str, *arguments: object) -> None:
        with self._lock:
            self._events.append(Event(self._unit, method, arguments))

    def building(self, name: str, done: int, modules: int) -> None:
        """Pass on."""
        self._say("building", name, done, modules)

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        """Pass on."""
        self._say("prepared", _head(report), planned)

    def judged(self, name: str, count: int) -> None:
        """Pass on."""
        self._say("judged", name, count)

    def law_begun(self, name: str, law: str) -> None:
        """Pass on."""
        self._say("law_begun", name, law)

    def law_ended(self, name: str, law: str) -> None:
        """Pass on."""
        self._say("law_ended", name, law)

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Pass on, with the finding."""
        self._say("law_done", _head(report), law)

    def failing(self, name: str, law: str, verdict: Verdict) -> None:
        """Pass on."""
        self._say("failing", name, law, verdict)


def _head(report: ImplementationReport) -> ImplementationReport:
    """Return a report without laws and replayed cases, which are sent one by one."""
    return replace(report, laws=[], replayed=[])


def carry_out(job: Job, unit: Unit, bus: Any, compilers: int) -> UnitResult:  # noqa: ANN401  Ray's handle
    """Carry out a unit on this machine, with as many compilers at most."""
    import ray

    unpack()
    os.environ[COMPILERS] = str(compilers)
    node: str = ray.get_runtime_context().get_node_id()
    elsewhere = node

    def claimed(libraries: Collection[str]) -> bool:
        nonlocal elsewhere
        with suppress(ray.exceptions.RayError):  # without an answer they are built here
            # A unit moves once: the machine that it was sent to may be gone.
            asked = bus.claim.remote(unit.chip, libraries, node, stays=bool(unit.node))
            elsewhere = ray.get(asked, timeout=ANSWER_SECONDS)
        return elsewhere == node

    teller = Teller(unit, bus)
    try:
        result = run_unit(job, unit, teller, teller.begin, claimed)
    finally:
        teller.close()
    return replace(result, node=node, elsewhere="" if elsewhere == node else elsewhere)
