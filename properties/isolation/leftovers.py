"""What code under test leaves behind: processes, and shared memory that appears while it runs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
SYSTEM_V: Final = Path("/proc/sysvipc/shm")
PROCESSES: Final = Path("/proc")
HELPERS: Final = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)
"""Parts of the command lines of helpers that a library keeps for later calls."""
OF_DRIVERS: Final = ("cuda.shm.", "nccl-")
"""Beginnings of the names of shared memory that NVIDIA's libraries keep, and remove themselves."""


@dataclass(frozen=True)
class Left:
    """What was left behind.

    Attributes:
        kind: a process was ended; shared memory stays.
        name: its command line, or where the memory is.
        count: how many there were.
    """

    kind: Literal["process", "shared memory"]
    name: str
    count: int = 1

    @property
    def text(self) -> str:
        """Return a part of a sentence."""
        if self.kind == "process":
            times = f" ({self.count} times)" if self.count > 1 else ""
            return f"a process, which was ended: {self.name}{times}"
        return f"shared memory: {self.name}"


class Leftovers:
    """Records what is left, by who ran then: the owners of workers."""

    def __init__(self) -> None:
        self._processes: dict[str, Counter[str]] = {}
        self._memory: dict[str, frozenset[str]] = {}  # and who ran when it appeared
        self._running: Counter[str] = Counter()
        self._known = shared_memory()
        self._lock = threading.Lock()

    def begin(self, owner: str) -> None:
        """Record that something of an owner runs."""
        with self._lock:
            self._look()
            self._running[owner] += 1

    def end(self, owner: str) -> None:
        """Record that it does not run any more."""
        with self._lock:
            self._look()
            self._running[owner] -= 1

    def note(self, owner: str, commands: Iterable[str]) -> None:
        """Record processes that an owner left."""
        with self._lock:
            self._processes.setdefault(owner, Counter()).update(
                " ".join(command.split()) for command in commands
            )

    def of(self, owner: str | None) -> list[Left]:
        """Return what an owner has left; shared memory if it is still there and nobody uses it.

        Args:
            owner: None for shared memory of which it is not known whose it is: several ran.
        """
        with self._lock:
            processes = self._processes.get(owner or "", Counter())
            mine = {name for name, ran in self._memory.items() if _whose(ran) == owner}
        memory = mine & shared_memory()
        return [
            *(Left("process", command, count) for command, count in sorted(processes.items())),
            *(Left("shared memory", name) for name in sorted(memory - _in_use(memory))),
        ]

    def _look(self) -> None:
        found = shared_memory()
        ran = frozenset(owner for owner, number in self._running.items() if number)
        if ran:  # else it is nobody's here
            self._memory.update(dict.fromkeys(found - self._known, ran))
        self._known |= found


def _whose(ran: frozenset[str]) -> str | None:
    return next(iter(ran)) if len(ran) == 1 else None


def is_helper(command: str) -> bool:
    """Whether a command line is that of a helper, which is no trace of the code under test."""
    return any(part in command for part in HELPERS)


def shared_memory() -> set[str]:
    """Return the shared memory of this user, of POSIX and of System V (Linux)."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):  # gone since
                if entry.stat().st_uid == os.getuid() and not entry.name.startswith(OF_DRIVERS):
                    found.add(entry.path)
    with contextlib.suppress(OSError):
        for line in SYSTEM_V.read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[7] == str(os.getuid()) and words[6] == "0":  # and nobody has it attached
                found.add(f"System V segment {words[1]}")
    return found


def _in_use(names: set[str]) -> set[str]:
    """Return those that some process has mapped."""
    used: set[str] = set()
    if not names:
        return used
    for maps in PROCESSES.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            used.update(name for name in names if name in text)
    return used
