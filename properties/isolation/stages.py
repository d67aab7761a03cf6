"""What both sides of an isolated worker share: its stages and their board, options, frames.

The child notes its stage on a `Board`, a word of memory that the parent maps too: a note costs less
than a microsecond and no message, so a worker stuck inside a C call has already said where it is.
Requests and replies are JSON in `frame`s over a stream socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from json import dumps, loads
from typing import TYPE_CHECKING, Final

from .memory_use import LARGEST, MemoryUse

if TYPE_CHECKING:
    from collections.abc import Mapping

STAGES: Final = ("load", "materialise", "compile", "run", "judge", "supports", "specialise")
SPECIALISE: Final = "specialise"
BOARD_BYTES: Final = mmap.PAGESIZE
# The field of a request's payload that holds a connection to another process, if it came with one.
LINK: Final = "link"
# The field of a request, beside its payload, that holds variables of the environment.
VARIABLES: Final = "variables"

_NUMBERS: Final = {name: number for number, name in enumerate(STAGES)}
_STAGE_BITS: Final = 3
_HEADER: Final = struct.Struct("!4sI")
_MAGIC: Final = b"kpf1"
# Far above any verdict: a longer "length" is garbage that an implementation wrote into the socket.
_LONGEST: Final = 1 << 28
_FIRST_FREE: Final = 3  # file descriptors below are the standard streams


class GarbledError(Exception):
    """The other side sent bytes that are not a frame."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each stage may take, from its own start; a process's own start is "load" too.

    "run" is short because it holds nothing but the code under test; compiling is apart, and so is
    "supports", which may import what a release consists of. "compile" is a first call of a module,
    which may be built already; "specialise" is what any call compiles by itself.
    """

    load: float = 120.0
    materialise: float = 60.0
    compile: float = 900.0
    run: float = 5.0
    judge: float = 120.0
    supports: float = 60.0
    specialise: float = 900.0


@dataclass(frozen=True)
class WorkerOptions:
    """The settings of a worker, passed as JSON at its start."""

    handler: str  # "module:function"
    preload: tuple[str, ...]  # modules to import before the first request
    memory_limit: int | None  # bytes of private memory
    connection: int  # file descriptors: the socket,
    board: int  # the Board,
    dumps: int  # and where stack dumps go


class Board:
    """The stage that a worker is in and since when, in a file that parent and child both map.

    Both stand in one aligned 8-byte word, stored at once: a reader can never take a new stage for
    as old as the one before it, which would look like a deadline overrun. Times are nanoseconds of
    `time.monotonic_ns`, a clock that the processes of one machine share.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BOARD_BYTES)
        self._word = memoryview(self._memory).cast("Q")

    def note(self, stage: str, started: int) -> None:
        """Write down that `stage` began at `started` (ns); ValueError for an unknown stage."""
        number = _NUMBERS.get(stage)
        if number is None:
            msg = f"stage must be one of {', '.join(STAGES)}, not {stage!r}"
            raise ValueError(msg)
        self._word[0] = started << _STAGE_BITS | number

    def read(self) -> tuple[str, int]:
        """Return the stage and when it began, in ns."""
        word = self._word[0]
        # A stray write by a broken kernel may leave a number that names no stage.
        number = min(word & (1 << _STAGE_BITS) - 1, len(STAGES) - 1)
        return STAGES[number], word >> _STAGE_BITS

    def note_memory(self, *, limit: int, room: int, need: int, held: int, left: int) -> None:
        """Write down the memory of the process when a call begins, see ``MemoryUse``."""
        for place, size in enumerate((limit, room, need, held, left), 1):
            self._word[place] = min(max(size, 0), LARGEST)

    def memory(self) -> MemoryUse:
        """Return what was noted of the process's memory last."""
        return MemoryUse(*self._word[1:6])

    def close(self) -> None:
        """Unmap the memory (the file stays open)."""
        self._word.release()
        self._memory.close()


def frame(message: Mapping[str, object]) -> bytes:
    """Return `message` as bytes with its length in front; TypeError where JSON cannot hold it."""
    body = dumps(message).encode()
    return _HEADER.pack(_MAGIC, len(body)) + body


class FrameReader:
    """Takes frames off a socket, one `recv` at a time.

    links: whether sockets may come with frames; from code under test none is taken.
    """

    def __init__(self, connection: socket.socket, *, links: bool = False) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._takes_links = links
        self.links: deque[socket.socket] = deque()

    def read(self) -> dict[str, object] | None:
        """Wait for a whole frame and return its message, or None at the end of the stream."""
        while True:
            message = self.complete()
            if message is not None:
                return message
            if not self.receive():
                return None

    def receive(self) -> bool:
        """Take what has arrived, waiting if nothing has; False at the end of the stream."""
        found: list[int] = []
        try:
            if self._takes_links:
                data, found, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
            else:
                data = self._connection.recv(1 << 16)
        except ConnectionError:
            return False
        for each in found:
            # Not as a standard stream, where the code under test has closed one.
            moved = fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
            self.links.append(socket.socket(fileno=moved))
            os.close(each)
        self._buffer += data
        return bool(data)

    def complete(self) -> dict[str, object] | None:
        """Return the next message if all of it has been received; GarbledError for no frame."""
        if len(self._buffer) < _HEADER.size:
            return None
        magic, length = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or length > _LONGEST:
            msg = f"bytes that are not a message: {bytes(self._buffer[:32])!r}"
            raise GarbledError(msg)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        try:
            message = loads(self._buffer[_HEADER.size : end])
        except (ValueError, RecursionError) as error:
            msg = f"a message that is not JSON: {error}"
            raise GarbledError(msg) from error
        if not isinstance(message, dict):
            msg = f"a message that is not an object: {message!r}"
            raise GarbledError(msg)
        del self._buffer[:end]
        return message
