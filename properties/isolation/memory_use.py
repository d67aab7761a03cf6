"""What is known of the memory of a process that has died, and of why it may have had too little."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Final

_NO_ALLOCATION: Final = re.compile(
    r"(?:terminate called after throwing an instance of '"  # libstdc++
    r"|terminating (?:due to|with) uncaught exception of type )"  # libc++
    r"(?:std::bad_alloc\b'?|c10::Error\b.{0,400}?"
    r"can't allocate memory(?:: you tried to allocate (?P<torch>\d{1,19}) bytes)?)"
    r"|memory allocation of (?P<rust>\d{1,19}) bytes failed$"
    r"|^LLVM ERROR: out of memory\b"
    r"|Fatal Python error:[^\n]{0,400}MemoryError\b"
    r"|^MemoryError[^\n]{0,400}\Z",
    re.MULTILINE | re.DOTALL,
)
"""What a process prints before it ends because an allocation on the host failed."""
KEPT_BYTES: Final = 256 << 20
"""Freed memory that malloc keeps in a worker at most, in bytes."""
LARGEST: Final = (1 << 63) - 1
"""The most bytes that a worker's board holds."""
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process, in bytes, as noted when its last call began; 0 where not known.

    Attributes:
        limit: the limit of the process; 0 where there is none.
        room: the room that the limit left to the call.
        need: the need of the call's own tensors.
        held: memory that was resident.
        left: memory that its earlier requests had kept when this one began, beside what the first
            one needs to start.
        peak: most memory that was resident, until the process's end.
    """

    limit: int = 0
    room: int = 0
    need: int = 0
    held: int = 0
    left: int = 0
    peak: int = 0

    @property
    def is_possible(self) -> bool:
        """Whether a worker's board could hold each size."""
        return all(0 <= each <= LARGEST for each in vars(self).values())

    @property
    def taken(self) -> int:
        """Bytes that became resident after the last call had begun, at most; 0 if not known."""
        return max(self.peak - self.held, 0) if self.peak and self.held else 0


@dataclass(frozen=True)
class FailedAllocation:
    """An allocation that a process could not make, and said so before it ended.

    Attributes:
        said: the allocator's message in its own words.
        size: size in bytes; 0 where the message names none.
    """

    said: str
    size: int = 0


def failed_allocation(printed: str) -> FailedAllocation | None:
    """Return the failed allocation that a process speaks of last; None where it speaks of none.

    CUDA's libraries throw a ``bad_alloc`` for any error of theirs, and name it behind.
    """
    every = list(_NO_ALLOCATION.finditer(printed.rstrip()))
    if not every or "cudaError" in printed[every[-1].start() :]:
        return None
    sizes = [int(size) for size in every[-1].groups() if size]
    return FailedAllocation(" ".join(every[-1][0].split()), *sizes)


def left_of(noted: object, limit: int) -> MemoryUse | None:
    """Return the memory of a process that goes on, as its reply tells it; None where it does not.

    Args:
        noted: a call's need and what earlier requests had left, in bytes.
        limit: the limit of the process, in bytes; 0 where there is none.
    """
    if not isinstance(noted, list) or [*map(type, noted)] != [int, int]:
        return None
    use = MemoryUse(limit=limit, need=noted[0], left=noted[1])
    return use if use.is_possible else None


def peak_of(maxrss: int) -> int:
    """Return the bytes that a process had resident at most, of what `getrusage` says."""
    return maxrss * _MAXRSS_UNIT
