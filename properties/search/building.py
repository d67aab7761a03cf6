"""Compiling modules ahead, as many at a time as the machine has cores and memory for.

A FlashInfer module is several sources, each of which takes a compiler a minute and gigabytes. All
builds of a run share one allowance: a machine that swaps takes ten times as long.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from ..findings.report import ImplementationReport
from ..isolation.gpus import free_memory, visible_devices
from ..isolation.machine import cores
from ..isolation.workers import Deadlines, Outcome, Worker, WorkerPool
from ..space.module_selection import Module
from ..worker.pools import open_pool
from ..worker.requests import Address, probe_device
from .priority_executor import for_each

Claim = Callable[[Collection[str]], bool]
"""Whether libraries are to be built on this machine; not where another one builds them."""
MAX_JOBS = "MAX_JOBS"
"""FlashInfer's (and torch's) variable for the compilers that one build may start."""
COMPILERS = "KERNELPROOF_COMPILERS"
"""Variable for the compilers that one of several runs on this machine may start."""
COMPILER_BYTES = 3 << 30
"""Bytes that nvcc may need for a source of FA3; cutlass_fused_moe took 3.9 GiB each, measured."""
CONTEXT_MEBIBYTES = 2 << 10
"""MiB of the GPU that a process which builds may need: a context, a workspace, small tensors."""
BUILD_DEADLINES = Deadlines(run=120.0, compile=1800.0, specialise=1800.0)


def compilers() -> int:
    """Count the compilers that this run may start at a time on this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = int(os.environ.get(COMPILERS) or cores())
    return max(1, min(cores(), memory // COMPILER_BYTES, share))


def limited_to(share: int) -> dict[str, str]:
    """Return the environment of a worker whose builds start this many compilers each.

    A number that the user has set stays.
    """
    return {} if MAX_JOBS in os.environ else {MAX_JOBS: str(max(1, share))}


def compilers_of_a_build(wanted: int) -> int:
    """Count the compilers that a build starts which could keep ``wanted`` busy.

    A build that starts several follows ``MAX_JOBS``.
    """
    asked = os.environ.get(MAX_JOBS, "")
    if wanted > 1 and asked.isdigit() and int(asked):
        wanted = int(asked)
    return min(wanted, compilers())


def builds_at_a_time(each: int, device: str) -> int:
    """Count the modules that are built at a time, by ``each`` compilers a module.

    Each takes a process with a context of the GPU, on which there may be little room.
    """
    most = max(1, compilers() // each)
    free = free_memory(visible_devices()[:1]) if device == "cuda" else []
    return min([most, *(max(1, mebibytes // CONTEXT_MEBIBYTES) for mebibytes in free)])


def note_cost(minutes: dict[str, float], library: str, outcome: Outcome, compilers: int) -> None:
    """Note the minutes of a core that a library took; those of a failed build say nothing."""
    if library and outcome.status == "done" and "stopped" not in (outcome.result or {}):
        minutes[library] = compilers * outcome.seconds / 60


@dataclass(frozen=True)
class _Waiting:
    owner: str
    minutes: float
    share: int


class BuildScheduler:
    """Lets a few builds run at a time, each of which takes a share of what there is.

    What only has to be loaded goes first. Then owners take turns, so that each has its first
    module before any has its second. In a round the one whose builds take longest begins: begun
    last, they would keep everybody waiting.
    """

    def __init__(self, shares: int) -> None:
        self._free = shares
        self._waiting: list[_Waiting] = []
        self._begun: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, owner: str, minutes: float, share: int = 1) -> Iterator[None]:
        """Wait for a turn, and have it for the length of a with block.

        Args:
            owner: the owner whose build it is.
            minutes: the minutes that it takes, roughly; 0 if it only has to be loaded.
            share: number of shares that it takes, of which there must be as many.
        """
        mine = _Waiting(owner, minutes, share)
        with self._changed:
            self._waiting.append(mine)
            # Only the first in line may take shares, even if a later one would fit: else a build
            # that needs all compilers would never find them free.
            self._changed.wait_for(lambda: self._free >= share and mine is self._next())
            self._waiting.remove(mine)
            # Loading is no turn: it must not delay the owner's first build.
            self._begun[owner] += minutes > 0
            self._free -= share
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()

    def _next(self) -> _Waiting:
        """Return whose turn it is; of several alike, who came first."""
        # In the order of the tuple: loading before building; the owner with fewer begun builds; the
        # longer build, as a long one that begins last would end last by itself.
        return min(
            self._waiting,
            key=lambda each: (each.minutes > 0, self._begun[each.owner], -each.minutes),
        )


class Builder:
    """Builds modules for any number of implementations at a time.

    Args:
        implementations: how many may build beside each other; as many as can if None.
        claimed: asks the other machines of a run, where there are any.

    Attributes:
        minutes: the minutes of a core that each library took which did not exist before.
    """

    def __init__(self, implementations: int | None = None, claimed: Claim = lambda _: True) -> None:
        self._alone, self._claimed = implementations == 1, claimed
        self._scheduler = BuildScheduler(compilers())
        self._pools: set[WorkerPool] = set()
        self._free: dict[tuple[object, ...], list[WorkerPool]] = {}
        self._at_work = self._unbuilt = 0
        self._lock = threading.Lock()
        self._closed = False
        self._libraries: dict[str, threading.Lock] = {}
        self._built: set[str] = set()
        self.minutes: dict[str, float] = {}

    def claim(self, modules: Sequence[Module]) -> None:
        """Take over the building of modules from the other machines of a run.

        Raises:
            CancelledError: another machine builds them: the run is to go on there.
        """
        libraries = {each.library for each in modules if each.library}
        if libraries and not self._claimed(libraries):
            raise CancelledError

    def build(
        self,
        address: Address,
        modules: Sequence[Module],
        report: ImplementationReport,
        built: Callable[[int, int], None] | None = None,
    ) -> None:
        """Build modules in parallel, each by simple calls; a few processes do all of them.

        One that cannot be built is left to the laws: their first call of it says what is wrong.

        Args:
            address: the address of the implementation.
            modules: the modules of it.
            report: the report in which their number and the seconds are counted.
            built: function that is called with the modules that are built, and how many there are.

        Raises:
            CancelledError: the builder was closed meanwhile.
            DeviceLostError: a build's first call took the device with it.
        """
        if not modules:
            return
        start = time.monotonic()
        done = itertools.count(1)
        wanted = compilers_of_a_build(report.declared["build_compilers"])
        processes = min(builds_at_a_time(wanted, address.device), len(modules))
        # Where nobody else builds, few modules may have all compilers.
        share = max(wanted, compilers() // processes) if self._alone and wanted > 1 else wanted

        def build_one(module: Module) -> None:
            with self._turn(module, report, share) as there, self._worker(address, share) as worker:
                outcome = self._build(worker, address, module, report, share)
            if not there:
                note_cost(self.minutes, module.library, outcome, share)
            if built is not None:
                built(next(done), len(modules))

        with self._working(len(modules)):
            for_each(modules, processes, build_one)
        report.modules += len(modules)
        report.build_seconds += time.monotonic() - start

    @contextmanager
    def _turn(self, module: Module, report: ImplementationReport, share: int) -> Iterator[bool]:
        """Wait for a turn to build a module, and until nobody else builds its library.

        Yields:
            Whether the library was built already.
        """
        library = module.library
        with self._lock:
            building = self._libraries.setdefault(library, threading.Lock())
        # Who waits for another's build holds no compilers meanwhile.
        with building if library else nullcontext():
            there = module.exists or library in self._built
            minutes, share = (0.0, 1) if there else (report.declared["build_minutes"], share)
            with self._scheduler.turn(report.name, minutes, share):
                yield there
                if library:
                    self._built.add(library)

    def _build(
        self,
        worker: Worker,
        address: Address,
        module: Module,
        report: ImplementationReport,
        share: int,
    ) -> Outcome:
        request = address.request("build", problem=module.first.to_json())
        start = time.monotonic()
        try:
            outcome = worker.run(request, BUILD_DEADLINES)
            if outcome.died:
                probe_device(worker, address.device)
            elif outcome.status != "done":  # what went wrong is not to spoil the next module
                worker.renew()
        except RuntimeError:
            if self._closed:  # which has ended the worker
                # It takes longer than that: a later run of as many minutes need not begin it.
                minutes = share * (time.monotonic() - start) / 60
                if module.library and minutes > report.declared["build_minutes"]:
                    self.minutes[module.library] = minutes
                raise CancelledError from None
            raise
        return outcome

    def close(self) -> None:
        """End what is being built; ``build`` in another thread raises CancelledError."""
        with self._lock:
            self._closed = True
            pools = list(self._pools)
        for pool in pools:
            pool.close()

    @contextmanager
    def _working(self, modules: int) -> Iterator[None]:
        """Build this number of modules; whoever is last ends the processes that build."""
        with self._lock:
            self._at_work += 1
            self._unbuilt += modules
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                ended = [] if self._at_work else [*itertools.chain(*self._free.values())]
                if ended:
                    self._free.clear()
                    self._pools -= {*ended}
            for pool in ended:
                pool.close()

    @contextmanager
    def _worker(self, address: Address, share: int) -> Iterator[Worker]:
        """Have a process that builds: one that was given back, or else a new one.

        Implementations share them: each takes seconds of a core to import FlashInfer. It takes
        memory of the GPU too, so that it ends where the builds to come do not need it.
        """
        environment = {**limited_to(share), **address.environment}
        key = (address.device, *sorted(environment.items()))
        with self._lock:
            if self._closed:
                raise CancelledError
            self._unbuilt -= 1
            free = self._free.setdefault(key, [])
            pool = free.pop() if free else None
            if pool is None:
                pool = open_pool(address.device, standby=False, environment=environment)
                self._pools.add(pool)
        try:
            with pool.lease(address.reference) as worker:
                yield worker
        except BaseException:
            with self._lock:
                self._pools.discard(pool)
            pool.close()
            raise
        with self._lock:
            idle = sum(map(len, self._free.values()))
            spare = idle >= self._unbuilt or len(self._pools) > max(1, compilers() // share)
            if spare:
                self._pools.discard(pool)
            else:
                self._free.setdefault(key, []).append(pool)
        if spare:
            pool.close()
