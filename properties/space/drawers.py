"""Draws problems in other processes: threads of one process share its core for Python."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

from ...reference import Problem
from ..isolation.machine import cores
from .axis_values import Axes
from .profiles import Profile
from .rounds import draw_problems, draw_round

CORES_A_DRAWER, ASKERS_A_DRAWER = 8, 4
"""Cores of a machine, and threads that ask, for each process that draws; where there are fewer, the
threads draw."""


def drawers_for(askers: int) -> Drawers:
    """Return what draws problems for this number of threads, by the cores of this machine."""
    # Each process imports torch and Hypothesis first: on few cores that costs more than the threads
    # that wait for each other.
    return Drawers(min(cores() // CORES_A_DRAWER, askers // ASKERS_A_DRAWER))


class Drawers:
    """Draws problems in other processes.

    Args:
        processes: the processes that draw; with 0 of them the caller does.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def apart(self) -> bool:
        """Whether other processes draw."""
        return self.processes > 0

    def round(self, axes: Axes, profile: Profile, seed: int) -> list[Problem]:
        """Draw the problems of one round, see ``draw_round``."""
        return self._do(_round, axes, profile, seed)

    def problems(self, axes: Axes, profile: Profile, seed: int, most: int) -> list[Problem]:
        """Draw problems round after round, see ``draw_problems``."""
        return self._do(draw_problems, axes, profile, seed, most)

    def close(self) -> None:
        """End the processes; what is drawn after it, the caller draws."""
        with self._lock:
            self._closed, pool = True, self._pool
            self._pool = None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _do(self, draw: Callable[..., list[Problem]], axes: Axes, *more: Any) -> list[Problem]:  # noqa: ANN401
        pool = self._opened()
        if pool is not None:
            try:
                # Refusals are sentences of the report only, and most of what would be sent.
                return pool.submit(draw, replace(axes, refused={}), *more).result()
            except (CancelledError, RuntimeError):
                # A process was killed, or the pool closed: the problems are the same wherever.
                self.close()
        return draw(axes, *more)

    def _opened(self) -> ProcessPoolExecutor | None:
        with self._lock:
            if self._pool is None and self.apart and not self._closed:
                self._pool = ProcessPoolExecutor(self.processes, _Context(), _begin)
            return self._pool


class _Process(SpawnProcess):
    """A process that imports what it is asked for, and not the program that asks."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: ANN401, N802  multiprocessing's own
        # A script that calls `kernelproof.check` would do so again in each of them.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)  # noqa: SLF001
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _round(axes: Axes, profile: Profile, seed: int) -> list[Problem]:
    drawn: list[Problem] = []
    draw_round(axes, profile, seed, drawn.append)
    return drawn


def _begin() -> None:
    """Leave signals of the terminal to the parent, and end when it does, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101  this is a child

    def end() -> None:
        # SIGKILL of the parent runs no handler; its sentinel becomes ready all the same.
        wait([parent.sentinel])
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
