"""Starts programs that cannot outlive this process, and of which nothing outlives their end.

Each has a process of its own above it (`supervisor.py`), which adopts whatever the program leaves
and ends it: when this process says so, or is gone, even by SIGKILL. Unlike a thread in the program,
it needs no interpreter lock that a stuck kernel may be holding.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import fork_server, supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A process inside the kernel (a device driver waiting for its hardware) dies only when it returns.
_REAP_SECONDS: Final = 10.0
_COUNT_SECONDS: Final = 1.0
# Younger folders may not be locked yet.
_STALE_SECONDS: Final = 60.0


@dataclass(frozen=True)
class LeftProcess:
    """A process that a program has left behind, and that was ended.

    Attributes:
        pid: its number.
        command: its command line.
        escaped: whether it is in another session than the program.
    """

    pid: int
    command: str
    escaped: bool


class ProcessGroup:
    """A program, and whatever it has started."""

    def __init__(self, above: subprocess.Popen[bytes] | _Fork, link: socket.socket) -> None:
        self.left: tuple[LeftProcess, ...] = ()
        """Processes that were there after the program's end; known after ``end``."""
        self._supervisor, self._link = above, link
        self._status: int | None = None
        self.maxrss = 0
        """The most memory of the program that was resident, as `getrusage` says; 0: not known."""
        self._alive = 0
        self._scratch, self._ended_well = "", False
        self._heard = b""
        self._deaf = self._over = False
        self._lock = threading.RLock()
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        _groups.add(self)

    @property
    def above(self) -> int:
        """The number of the process above the program; 0 for a fork that has not said it yet."""
        return self._supervisor.pid

    def exited(self) -> bool:
        """Return whether the program has ended."""
        with self._lock:
            self._hear(0.0)
            return self._deaf or self._status is not None

    def busy(self) -> bool:
        """Return whether something that the program has started is alive, as far as it says."""
        with self._lock:
            self._alive = -1
            self._say(supervisor.COUNT)
            until = time.monotonic() + _COUNT_SECONDS
            while self._alive < 0 and not self._deaf and (left := until - time.monotonic()) > 0:
                self._hear(left)
            return self._alive > 0

    def dump(self, process: int | None = None) -> None:
        """Send SIGUSR1 to the program, or to this process that it has started."""
        if process is None:
            self._say(supervisor.DUMP)
        elif not self._over:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)

    def kill(self) -> None:
        """End the program and all that it has started, and do not wait, from any thread."""
        self._say(supervisor.END)
        # A supervisor that was stopped hears nothing until it goes on.
        if self.above and self._supervisor.returncode is None:
            with contextlib.suppress(OSError):  # the program may have stopped it
                os.kill(self.above, signal.SIGCONT)

    def end(self) -> int | None:
        """End the program and all that it has started; return its status, negative for a signal.

        None: it has not died yet. That can only be helped by whoever holds its device.
        """
        with self._lock:
            if not self._over:
                self.kill()
                until = time.monotonic() + _REAP_SECONDS
                while not self._deaf and (left := until - time.monotonic()) > 0:
                    self._hear(left)
                self._over = True
                if self._deaf:
                    above = self._supervisor.wait()
                    # The program has ended the process above it, and dies with it.
                    self._status = above if self._status is None else self._status
                # Its supervisor was killed and named nothing as left: only the folder for temporary
                # files, which all descendants inherit as a variable, still tells whose they are.
                if not self._ended_well:
                    _end_by_folder(self._scratch)
                self._link.close()
                _groups.discard(self)
        return self._status

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._link.send(word)

    def _hear(self, seconds: float) -> None:
        """Take what the supervisor says within some seconds."""
        if self._over or self._deaf or not self._poll.poll(1000 * seconds):
            return
        try:
            said = self._link.recv(1 << 16)
        except OSError:
            said = b""
        self._deaf = not said
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._status = message.get("status", self._status)
            self.maxrss = message.get("maxrss", self.maxrss)
            self._alive = message.get("alive", self._alive)
            self._scratch = message.get("scratch", self._scratch)
            self._supervisor.pid = message.get("above", self._supervisor.pid)
            self._ended_well |= "left" in message
            self.left = tuple(LeftProcess(**each) for each in message.get("left", ()))


def _end_by_folder(scratch: str) -> None:
    """Kill the processes that have this folder for temporary files, and remove it (Linux).

    Their supervisor is dead, and nobody knows any more whose they are.
    """
    if not scratch:
        return
    variable = f"\0TMPDIR={scratch}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone since, or somebody else's
            if variable in b"\0" + path.read_bytes() + b"\0":
                os.kill(int(path.parent.name), signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


_groups: Final[set[ProcessGroup]] = set()
"""Those that have not ended."""


def kill_children() -> None:
    """Kill all that this process has started: whoever waits for one goes on (Linux).

    A handler of signals may ask for it.
    """
    groups = set(_groups)
    for each in groups:
        each.kill()
    own, above = os.getpgid(0), {each.above for each in groups}
    for child in supervisor.children_of(os.getpid()):
        if child not in above:
            with contextlib.suppress(OSError):  # gone since
                group = os.getpgid(child)
                if group == own:
                    os.kill(child, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)


class _Spawner:
    """The one thread that starts all processes.

    Linux kills a child with its parent when the *thread* that started it ends, not the process; so
    the threads of an engine, which come and go, must not start any.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="kernelproof-spawner", daemon=True).start()

    def start(self, start: Callable[[], ProcessGroup]) -> ProcessGroup:
        group: Future[ProcessGroup] = Future()
        self._requests.put((start, group))
        try:
            return group.result()
        except KeyboardInterrupt:
            group.add_done_callback(lambda started: started.result().end())
            raise

    def _work(self) -> None:
        while True:
            start, group = self._requests.get()
            try:
                group.set_result(start())
            except BaseException as error:  # noqa: BLE001 - it is raised where the start was asked for
                group.set_exception(error)


_Request = tuple[Callable[[], ProcessGroup], "Future[ProcessGroup]"]
_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def start_group(
    command: Sequence[str],
    *,
    scratch: bool = False,
    **options: Any,  # noqa: ANN401
) -> ProcessGroup:
    """Start `command` in a session of its own, without input.

    Args:
        command: a program and its arguments.
        scratch: whether it gets a folder for temporary files of its own, removed at its end.
        options: those of `subprocess.Popen`.

    Raises:
        FileNotFoundError: there is no such program.
    """
    if shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    folder = tempfile.gettempdir() if scratch else ""

    def start() -> ProcessGroup:
        ours, theirs = socket.socketpair()
        with theirs:
            above: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, folder, *command],
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C and a kill of this process's group are not for it
                **options,
            )
        return ProcessGroup(above, ours)

    return _the_spawner().start(start)


def _the_spawner() -> _Spawner:
    global _spawner  # noqa: PLW0603 - one for all pools: it is a thread
    with _spawner_lock:
        # A fork of this process has a copy of the object, but not its thread.
        if _spawner is None or _spawner.process != os.getpid():
            _remove_stale()
            _spawner = _Spawner()
        return _spawner


class _Fork:
    """The process above a fork of a server, which waits for it."""

    returncode = None

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self.pid = 0
        self._server = server

    def wait(self) -> int:
        """Return the status of one that is gone: the server's if that is, else it was killed."""
        status = self._server.poll()
        return -signal.SIGKILL if status is None else status


class ForkServer:
    """A process whose forks are programs: what they import has been imported there (Linux).

    Args:
        command: the command that runs `fork_server.main`; its options follow.
        preload: modules that it imports.
        options: those of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], preload: Sequence[str], **options: Any) -> None:  # noqa: ANN401
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            given = {"connection": theirs.fileno(), "preload": preload}
            self._process = subprocess.Popen(
                [*command, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                **options,
            )
        # At this process's end it would end anyway, if a little later.
        atexit.register(self._kill)

    def start(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        fds: Mapping[str, int],
    ) -> ProcessGroup:
        """Start a worker, with a folder for temporary files of its own.

        Args:
            options: the fields of `WorkerOptions`, apart from file descriptors.
            environment: its variables.
            fds: its file descriptors, those of `fork_server.DESCRIPTORS` that are not made here.

        Raises:
            OSError: the server is gone.
        """
        start = {"options": options, "environment": environment, "scratch": tempfile.gettempdir()}
        with contextlib.suppress(OSError):  # the folder has been removed
            start["folder"] = str(Path.cwd())

        def send() -> ProcessGroup:
            ours, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as file:
                file.write(json.dumps(start).encode())
                file.seek(0)
                every = {"start": file.fileno(), "link": theirs.fileno(), **fds}
                sent = [every[name] for name in fork_server.DESCRIPTORS]
                try:
                    socket.send_fds(self._socket, [fork_server.MESSAGE], sent)
                except OSError:
                    ours.close()
                    raise
            return ProcessGroup(_Fork(self._process), ours)

        return _the_spawner().start(send)

    def end(self) -> None:
        """Let it end once its forks have."""
        atexit.unregister(self._kill)
        self._socket.close()
        threading.Thread(target=self._process.wait, name="kernelproof-reaper", daemon=True).start()

    def _kill(self) -> None:
        if self.owner == os.getpid():
            self._socket.close()
            self._process.kill()
            self._process.wait()


def _remove_stale() -> None:
    """Remove the folders of programs whose supervisor was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{supervisor.SCRATCH}*"):
        with contextlib.suppress(OSError):  # somebody else's, or locked
            if time.time() - folder.stat().st_mtime < _STALE_SECONDS:
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
