"""Compiling modules ahead, as many at a time as the machine has cores and memory for.

A FlashInfer module is several sources, each of which takes a compiler a minute and gigabytes. All
builds of a run share one allowance: a machine that swaps takes ten times as long.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager

from .isolation import Deadlines, WorkerPool
from .machine import cores
from .modules import Module
from .pools import open_pool
from .quarry import Address, probe_device
from .report import ImplementationReport
from .turns import Turns

MAX_JOBS = "MAX_JOBS"
"""FlashInfer's (and torch's) variable for the compilers that one build may start."""
COMPILERS_A_BUILD = 4
"""A module has two to eight sources: with more compilers each, the last of them work alone."""
COMPILER_BYTES = 3 << 30
"""What nvcc may need for a source of FA3; cutlass_fused_moe took 3.9 GiB each, measured."""
BUILD_DEADLINES = Deadlines(run=120.0, compile=1800.0)


def compilers() -> int:
    """Count the compilers that may run at a time on this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores(), memory // COMPILER_BYTES))


def share_of_compilers(builds: int) -> dict[str, str]:
    """Give the environment of a worker that builds beside others, ``builds`` of them in all.

    A number that the user has set stays.
    """
    if MAX_JOBS in os.environ:
        return {}
    return {MAX_JOBS: str(max(1, compilers() // builds))}


def builds_at_a_time() -> int:
    """Count the modules that are built at a time, each by several compilers."""
    each = os.environ.get(MAX_JOBS, "")
    return max(1, compilers() // (int(each) if each.isdigit() and int(each) else COMPILERS_A_BUILD))


class Builder:
    """Builds modules for any number of implementations at a time.

    Args:
        implementations: how many may build beside each other; as many as can if None.
    """

    def __init__(self, implementations: int | None = None) -> None:
        self._implementations = implementations or builds_at_a_time()
        self._turns = Turns(builds_at_a_time())
        self._pools: set[WorkerPool] = set()
        self._lock = threading.Lock()
        self._closed = False

    def build(
        self,
        address: Address,
        modules: Sequence[Module],
        report: ImplementationReport,
        built: Callable[[int, int], None] | None = None,
    ) -> None:
        """Build modules in parallel, each by its simplest call in a process of its own.

        One that cannot be built is left to the laws: their first call of it says what is wrong.

        Args:
            address: of the implementation.
            modules: of it.
            report: is told how many there are and how long they took.
            built: is told how many are built, of how many.

        Raises:
            CancelledError: the builder was closed meanwhile.
            DeviceLostError: a build's first call took the device with it.
        """
        start = time.monotonic()
        done = itertools.count(1)
        # Where nobody else builds, one module alone may have all compilers.
        alone = self._implementations == 1
        builds = min(builds_at_a_time(), len(modules)) if alone else builds_at_a_time()

        def one(module: Module) -> None:
            turn = self._turns.turn(report.name, report.declared["build_minutes"])
            with turn, self._pool(address, builds) as pool, pool.lease() as worker:
                request = address.request("cost", problem=module.first.to_json(), calls=1)
                try:
                    if worker.run(request, BUILD_DEADLINES).died:
                        probe_device(worker, address.device)
                except RuntimeError:
                    if self._closed:  # which has ended the worker
                        raise CancelledError from None
                    raise
            if built is not None:
                built(next(done), len(modules))

        with ThreadPoolExecutor(max(1, len(modules))) as threads:  # which wait for their turns
            list(threads.map(one, modules))
        report.modules, report.build_seconds = len(modules), time.monotonic() - start

    def close(self) -> None:
        """End what is being built; ``build`` in another thread raises CancelledError."""
        with self._lock:
            self._closed = True
            pools = list(self._pools)
        for pool in pools:
            pool.close()

    @contextmanager
    def _pool(self, address: Address, builds: int) -> Iterator[WorkerPool]:
        environment = {**share_of_compilers(builds), **address.environment}
        with self._lock:
            if self._closed:
                raise CancelledError
            pool = open_pool(address.device, standby=False, environment=environment)
            self._pools.add(pool)
        try:
            with pool:
                yield pool
        finally:
            with self._lock:
                self._pools.discard(pool)
