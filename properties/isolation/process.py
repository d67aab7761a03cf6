"""One process of an isolated worker as its parent sees it: start, ask, watch, bury.

The result of a request is an `Outcome`; nothing that the process does raises here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .kernel_kills import kills
from .leftovers import is_helper
from .memory_use import MemoryUse, left_of, peak_of
from .outcome import CLOSED, KILLED_FOR_MEMORY, Outcome, Status, describe_exit
from .reads import PROGRAM, Read, parsed
from .spawning import ForkServer, ProcessGroup, start_group
from .stage_clock import StageClock
from .stages import (
    BOARD_BYTES,
    LINK,
    VARIABLES,
    Board,
    Deadlines,
    FrameReader,
    GarbledError,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORKS = sys.platform == "linux"
"""Whether there are fork servers."""
# The code under test runs in these: overrunning one is its fault, any other the harness's.
_HANG_STAGES: Final = ("compile", "run", "specialise", "supports")
_COMPILING: Final = ("compile", "specialise")
_TICK_SECONDS: Final = 0.1  # between two checks of a silent process
_LEAST_TICK_SECONDS: Final = 0.01  # between two near a deadline
_DUMP_SECONDS: Final = 0.3  # what a stack dump may take before the process is killed without
_EXIT_SECONDS: Final = 1.0  # from the end of the connection to the end of the process
# A program that a process runs under writes of a case a little after it.
_SETTLING_SECONDS: Final = 0.05
_SETTLED_SECONDS: Final = 2.0
# How long the kernel's count of processes ended for lack of memory stays the one before a case.
_COUNT_SECONDS: Final = 1.0
_LOG_READ_BYTES: Final = 64 << 10
_STDERR_BYTES: Final = 4 << 10
_STACK_BYTES: Final = 16 << 10
# Printing without end must not fill the disk before the deadline comes.
_LOG_BYTES: Final = 16 << 20

_BOOTSTRAP: Final = """\
import importlib, json, sys
path, module, options = sys.argv[1:]
sys.path[:], sys.argv[1:] = json.loads(path), []
importlib.import_module(module).main(options)
"""


@dataclass(frozen=True)
class Recipe:
    """What all processes of one pool are started with."""

    handler: str
    preload: tuple[str, ...]
    memory_limit: int | None
    environment: Mapping[str, str]
    sys_path: tuple[str, ...]
    under: tuple[str, ...] = ()
    """A program and its options that the process runs under; the path of a log file follows."""
    executable: str = sys.executable
    """The interpreter."""
    forks: bool = False
    """Whether processes are forks of one that has imported ``preload`` (Linux)."""

    @property
    def are_forks(self) -> bool:
        """Whether processes are forks here: a program that they run under starts each anew."""
        return FORKS and self.forks and not self.under

    def command(self, module: str) -> tuple[str, ...]:
        """Return the command that runs a module's `main`; its argument follows."""
        path = json.dumps(self.sys_path)
        return (self.executable, "-c", _BOOTSTRAP, path, f"{__package__}.{module}")


class WorkerProcess:
    """A started process. It may still be importing; `start_up` waits for that."""

    def __init__(self, recipe: Recipe) -> None:
        self.ended = False
        self.variables: Mapping[str, str] = {}
        """Variables that it sets before it takes up its first request."""
        self.left: tuple[str, ...] = ()
        """Command lines of processes that the code under test has left; known after ``end``."""
        self.tenants: set[object] = set()
        """Owners of the code that has run in it, see ``workers.TENANT``."""
        self.answered: set[str] = set()
        """What it was asked once and for all, see ``Worker.run_once``."""
        self.read: set[Read] = set()
        """What it has read in requests that it has answered; programs in the last one only."""
        self._busy = self._cut_off = False
        self._ready = False
        self._requests = 0
        self._unanswered: deque[tuple[int, Deadlines]] = deque()
        self._began = 0.0
        self._clock = StageClock()
        self._errors, self._dumps = _Log(), _Log()
        self._log = _Log(named=True) if recipe.under else None
        self._process: int | None = None
        self._limit = recipe.memory_limit or 0
        self._kills, self._counted = kills(), time.monotonic()
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as board:
            board.truncate(BOARD_BYTES)
            self._board = Board(board.fileno())
            self._board.note("load", time.monotonic_ns())
            fds = {
                "connection": theirs.fileno(),
                "board": board.fileno(),
                "dumps": self._dumps.fileno(),
            }
            self._group = self._started(recipe, fds)
        self._frames = FrameReader(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _started(self, recipe: Recipe, fds: dict[str, int]) -> ProcessGroup:
        """Start it with these file descriptors."""
        # Whatever the code under test prints, it cannot get into a reply.
        output = self._errors.fileno()
        settings: dict[str, object] = {
            "handler": recipe.handler,
            "preload": recipe.preload,
            "memory_limit": recipe.memory_limit,
        }
        if recipe.are_forks:
            return _fork(recipe, settings, {**fds, "output": output})
        under = (*recipe.under, self._log.name) if self._log else ()
        return start_group(
            [*under, *recipe.command("worker_main"), json.dumps({**settings, **fds})],
            scratch=True,
            env=dict(recipe.environment),
            pass_fds=tuple(fds.values()),
            stdout=output,
            stderr=output,
        )

    def start_up(self, deadlines: Deadlines) -> Outcome | None:
        """Wait until the process takes requests; if it never will, end it and return why."""
        if self._ready:
            return None
        began = time.monotonic()
        try:
            message = self._receive(deadlines)
        except _OverrunError as overrun:
            outcome = self._overran(overrun, began)
        except (_GoneError, GarbledError) as error:
            outcome = self._died(error, began)
        else:
            if "ready" in message:
                self._ready, self._process = True, message["ready"]  # type: ignore[assignment]
                return None
            self._group.end()
            outcome = self._outcome("error", began, detail=str(message.get("unable", message)))
        self.end()
        why = f"the worker cannot start: {outcome.detail or outcome.kind}"
        return dataclasses.replace(outcome, status="error", kind="start", detail=why)

    def ask(self, payload: Mapping[str, object], deadlines: Deadlines) -> Outcome:
        """Send a request and wait for what comes of it. `ended` says whether that was the end."""
        self.send(payload, deadlines)
        return self.answer()

    @property
    def unused(self) -> bool:
        """Whether it was asked nothing yet."""
        return self._requests == 0

    @property
    def has_answered(self) -> bool:
        """Whether it has answered what it was asked, and was asked anything."""
        return self._requests > 0 and not self._unanswered

    @property
    def waiting(self) -> int:
        """How many requests have no answer yet."""
        return len(self._unanswered)

    def send(
        self,
        payload: Mapping[str, object],
        deadlines: Deadlines,
        link: socket.socket | None = None,
    ) -> None:
        """Send a request, which the process takes up after those before it.

        Args:
            payload: the payload of the request.
            deadlines: the deadlines of its stages.
            link: an end of a connection that the handler is given, as the payload's ``link``.
        """
        linked = {} if link is None else {LINK: True}
        late = {} if self._requests or not self.variables else {VARIABLES: dict(self.variables)}
        request = frame({"id": self._requests + 1, "payload": payload, **linked, **late})
        self._requests += 1
        if not self._unanswered:
            # Of requests that are sent ahead, the output begins where that of the one before ends.
            self._errors.mark()
            self._dumps.mark()
            if self._log is not None:
                self._log.mark()
            # Noted here too: until the child has read the request, the board shows its last one's
            # end.
            self._board.note("load", time.monotonic_ns())
            self._began = time.monotonic()
            if self._began - self._counted > _COUNT_SECONDS:
                self._kills, self._counted = kills(), self._began
        self._unanswered.append((self._requests, deadlines))
        self._busy = True
        self._socket.settimeout(deadlines.load)
        with contextlib.suppress(OSError):  # a process that does not take it is found out later
            if link is not None:
                sent = socket.send_fds(self._socket, [request], [link.fileno()])
                request = request[sent:]
            self._socket.sendall(request)

    def answer(self) -> Outcome:
        """Wait for what comes of the oldest request that has not been answered."""
        number, deadlines = self._unanswered.popleft()
        began = self._began
        self._clock.restart()
        try:
            reply = self._receive(deadlines)
            while reply.get("id") != number:  # a second answer to an earlier request
                reply = self._receive(deadlines)
        except _OverrunError as overrun:
            outcome = self._overran(overrun, began)
        except (_GoneError, GarbledError) as error:
            outcome = self._died(error, began)
        else:
            self._began = time.monotonic()  # one moment: this one's end and the next one's start
            seconds = self._began - began
            self._busy = bool(self._unanswered)
            result, end = reply.get("result"), reply.get("printed")
            if isinstance(result, dict):
                before = {each for each in self.read if each.kind != PROGRAM}
                self.read = before | parsed(reply.get("read"))
                left = left_of(reply.get("memory"), self._limit)
                return self._outcome("done", seconds, result=result, end=end, left=left)
            kind, detail = reply.get("raised", "TypeError"), reply.get("traceback", _NO_OBJECT)
            return self._outcome("error", seconds, kind=str(kind), detail=str(detail), end=end)
        self.end()
        return outcome

    def exited(self) -> bool:
        """Return whether the process has ended by itself."""
        return self._group.exited()

    def kill(self) -> None:
        """Kill the process and what it started, from any thread; who is asking it finds it dead."""
        self._cut_off |= self._busy
        self._group.kill()

    def has_children(self) -> bool:
        """Whether something that the process has started runs."""
        return self._requests > 0 and not self.ended and self._group.busy()

    def end(self) -> None:
        """Kill and reap the process and what it started, and give back what it took here."""
        if self.ended:
            return
        self.ended = True
        self._group.end()
        self.left = tuple(self._left_behind())
        self._socket.close()
        self._board.close()
        self._errors.close()
        self._dumps.close()
        if self._log is not None:
            self._log.close()

    def _left_behind(self) -> Iterator[str]:
        if self._log is not None:  # a program in between has helpers of its own
            return
        # What runs in the middle of a case may be a part of it, a compiler for example.
        amid = self._cut_off or self._unanswered or self._board.read()[0] in _COMPILING
        for each in self._group.left:
            if not is_helper(each.command) and (each.escaped or not amid):
                yield each.command

    def _receive(self, deadlines: Deadlines) -> dict[str, object]:
        """Return the next message; _OverrunError past a deadline, _GoneError at the process's end.

        What has been sent counts, even if this process was too busy, or stopped, to look in time.
        """
        while (message := self._frames.complete()) is None:
            stage, started = self._board.read()
            limit: float = getattr(deadlines, stage)
            left = started / 1e9 + limit - time.monotonic()
            if left > limit + _TICK_SECONDS:  # else such a deadline would never come
                msg = f"{stage} begins {left - limit:.3g} s from now: a stray write hit the board"
                raise GarbledError(msg)
            if limit - left > _TICK_SECONDS:  # most cases are over before
                left += self._clock.waited(self._process, stage, started, limit)
            tick = min(max(left, _LEAST_TICK_SECONDS), _TICK_SECONDS) if left > 0 else 0.0
            # Poll before the deadline is checked: an answer that is there counts, even if this
            # side reads it late. At the deadline the tick is 0, so that one last look is
            # free.
            if self._poll.poll(math.ceil(1000 * tick)):
                if not self._frames.receive():
                    raise _GoneError
            elif left <= 0:
                raise _OverrunError(stage, limit)
            # Not only the end of the connection tells: a child of the process may hold it open.
            elif self._group.exited() and not self._poll.poll(0):
                raise _GoneError
            else:
                self._errors.trim()
        return message

    def _overran(self, overrun: _OverrunError, began: float) -> Outcome:
        hang = overrun.stage in _HANG_STAGES
        seconds = time.monotonic() - began
        self._cut_off = True
        detail = f"{overrun.stage} took longer than {overrun.limit:g} s"
        # Before the kill: a dead process has no stacks.
        self._dump_stacks()
        if self._group.end() is None:
            detail += "; SIGKILL does not end it: its device may be lost"
        kind = overrun.stage if hang else "overrun"
        outcome = self._outcome("hang" if hang else "error", seconds, kind=kind, detail=detail)
        return dataclasses.replace(outcome, stage=overrun.stage, limit=overrun.limit)

    def _died(self, error: Exception, began: float) -> Outcome:
        if isinstance(error, GarbledError):
            self._group.end()
            seconds = time.monotonic() - began
            return self._outcome("crash", seconds, kind="garbled connection", detail=str(error))
        patience = time.monotonic() + _EXIT_SECONDS
        # The connection closes a moment before the process is dead, whose status says more.
        while not self._group.exited() and time.monotonic() < patience:
            time.sleep(0.002)
        by_itself = self._group.exited()
        status = self._group.end()
        # The kernel counts kills of a whole group, and says not of whom. One more since the case
        # began, together with a SIGKILL that we did not send, is taken to be this process's.
        for_memory = self._kills != kills()
        kind = describe_exit(status, for_memory=for_memory) if by_itself else CLOSED
        outcome = self._outcome("crash", time.monotonic() - began, kind=kind)
        return dataclasses.replace(outcome, starved=kind == KILLED_FOR_MEMORY)

    def _dump_stacks(self) -> None:
        """Have faulthandler write all stacks; its signal handler runs even inside a C call."""
        self._group.dump(self._process)
        until, before = time.monotonic() + _DUMP_SECONDS, 0
        while time.monotonic() < until:
            time.sleep(0.01)
            size = self._dumps.size()
            if size and size == before:  # it has begun, and no more comes
                return
            before = size

    def _outcome(
        self,
        status: Status,
        seconds: float,
        *,
        result: dict[str, object] | None = None,
        kind: str = "",
        detail: str = "",
        end: object = None,
        left: MemoryUse | None = None,
    ) -> Outcome:
        return Outcome(
            status=status,
            result=result,
            kind=kind,
            stage=self._board.read()[0],
            seconds=seconds,
            stderr=self._errors.cut(_STDERR_BYTES, end),
            stack=self._dumps.tail(_STACK_BYTES),
            detail=detail,
            log=self._log.settled() if self._log is not None else "",
            memory=left if status == "done" else self._memory(),
        )

    def _memory(self) -> MemoryUse:
        noted = self._board.memory()
        limit = noted.limit or self._limit
        return dataclasses.replace(noted, limit=limit, peak=peak_of(self._group.maxrss))


def begin_server(recipe: Recipe) -> None:
    """Start the server of a recipe unless it is there, for workers that are started later."""
    if recipe.are_forks:
        with _servers_lock:
            _server_of(recipe, subprocess.DEVNULL)


def _fork(recipe: Recipe, settings: dict[str, object], fds: dict[str, int]) -> ProcessGroup:
    """Start a worker as a fork of the recipe's server, which may have to be started first."""
    with _servers_lock:
        while True:
            server, is_new = _server_of(recipe, fds["output"])
            try:
                return server.start(settings, recipe.environment, fds)
            except OSError:  # somebody has killed it
                _servers.popitem()[1].end()
                if is_new:
                    raise


def _server_of(recipe: Recipe, output: int) -> tuple[ForkServer, bool]:
    """Return the server of a recipe, and whether it is new; the lock is held."""
    environment = {k: v for k, v in recipe.environment.items() if k not in _OF_ONE_TEST}
    key = (recipe.executable, recipe.sys_path, recipe.preload, frozenset(environment.items()))
    server = _servers.pop(key, None)
    is_new = server is None or server.owner != os.getpid()
    if server is None or is_new:
        server = ForkServer(
            recipe.command("fork_server"),
            recipe.preload,
            env=environment,
            stdout=output,
            stderr=output,
        )
    _servers[key] = server
    if len(_servers) > _MOST_SERVERS:
        _servers.pop(next(iter(_servers))).end()
    return server, is_new


def end_servers() -> None:
    """End the processes whose forks workers are; whoever starts a worker next starts one anew."""
    with _servers_lock:
        while _servers:
            _servers.popitem()[1].end()


_MOST_SERVERS: Final = 2  # a comparison has two sides
_OF_ONE_TEST: Final = frozenset({"PYTEST_CURRENT_TEST"})
_servers: Final[dict[object, ForkServer]] = {}  # the one that was used last is the last
_servers_lock: Final = threading.Lock()


class _OverrunError(Exception):
    """A stage took longer than its deadline."""

    def __init__(self, stage: str, limit: float) -> None:
        super().__init__(stage, limit)
        self.stage, self.limit = stage, limit


class _GoneError(Exception):
    """The process closed its connection, or is dead."""


_NO_OBJECT: Final = "the handler's result is no JSON object"


class _Log:
    """A file that the child appends to, read from where the current case began."""

    def __init__(self, *, named: bool = False) -> None:
        make = tempfile.NamedTemporaryFile if named else tempfile.TemporaryFile
        self._file = make(buffering=0)
        self.name = str(self._file.name)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        # Appending, the child goes on at the new end after a truncation here.
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)
        self.fileno = self._file.fileno
        self.close = self._file.close
        self._start = 0

    def size(self) -> int:
        """Return the bytes written in the current case."""
        return os.fstat(self.fileno()).st_size - self._start

    def mark(self) -> None:
        """Begin a case."""
        self.trim()
        self._start += self.size()

    def trim(self) -> None:
        """Forget everything where it has become too much."""
        if self._start + self.size() > _LOG_BYTES:
            self._file.truncate(0)
            self._start = 0

    def settled(self) -> str:
        """Return the beginning of what another process writes of this case, once it is silent."""
        until, size = time.monotonic() + _SETTLED_SECONDS, -1
        while self.size() != size and time.monotonic() < until:
            size = self.size()
            time.sleep(_SETTLING_SECONDS)
        length = min(self.size(), _LOG_READ_BYTES)
        return os.pread(self.fileno(), length, self._start).decode(errors="replace")

    def cut(self, limit: int, end: object) -> str:
        """Return at most the last `limit` bytes up to this one, at which the next case begins.

        Args:
            limit: bytes.
            end: what the process says; if it says none, the file's end.
        """
        written = self._start + self.size()
        end = min(max(end, self._start), written) if isinstance(end, int) else written
        begin, self._start = max(self._start, end - limit), end
        return os.pread(self.fileno(), end - begin, begin).decode(errors="replace")

    def tail(self, limit: int) -> str:
        """Return at most the last `limit` bytes of the current case."""
        size = self.size()
        length = min(size, limit)
        return os.pread(self.fileno(), length, self._start + size - length).decode(errors="replace")
