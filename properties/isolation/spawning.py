"""Starts processes that cannot outlive this one, in groups that die as a whole.

Three things make sure of that. Who holds a `ProcessGroup` ends it. A guard, a tiny process of its
own, is told of every group and kills what is left when this process is gone, even by SIGKILL. And
a worker asks its kernel to be killed with its parent (`worker.py`). The last is fastest but knows
nothing of grandchildren; the guard, unlike a thread in the worker, needs no interpreter lock that a
stuck kernel may be holding.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# A process inside the kernel (a device driver waiting for its hardware) dies only when it returns.
_REAP_SECONDS: Final = 10.0

_GUARD: Final = """\
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class ProcessGroup:
    """A process that leads a group of its own, and whatever it has started in that group."""

    def __init__(self, leader: subprocess.Popen[bytes], guard: IO[bytes]) -> None:
        self._leader = leader
        self._guard = guard
        self._lock = threading.Lock()
        self._reaped = False
        self._tell_guard("+")

    def exited(self) -> bool:
        """Return whether the leader has ended. It is not reaped, so that its number stays taken."""
        if self._reaped:
            return True
        if not hasattr(os, "waitid"):
            return self._leader.poll() is not None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._leader.pid, options) is not None
        except ChildProcessError:  # somebody else has reaped it
            return True

    def signal(self, number: int, process: int | None = None) -> None:
        """Send a signal to the leader alone, or to this process that it has started."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._reaped:
                os.kill(process or self._leader.pid, number)

    def kill(self) -> None:
        """Kill the whole group at once."""
        with self._lock:
            if not self._reaped:
                self._kill()

    def end(self) -> int | None:
        """Kill the whole group and return the leader's exit status, negative for a signal.

        None: it has not died yet. That can only be helped by whoever holds its device.
        """
        with self._lock:
            if not self._reaped:
                self._kill()
                self._tell_guard("-")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._leader.wait(_REAP_SECONDS)
                self._reaped = True
        return self._leader.returncode

    def _kill(self) -> None:
        # PermissionError: some systems say so of a group in which all are dead but not yet reaped.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._leader.pid, signal.SIGKILL)

    def _tell_guard(self, sign: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the guard itself was killed, or closed
            self._guard.write(f"{sign}{self._leader.pid}\n".encode())


class _Spawner:
    """The one thread that starts all processes, and their guard.

    Linux kills a child with its parent when the *thread* that started it ends, not the process; so
    the threads of an engine, which come and go, must not start any.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C and a kill of this process's group are not for it
        )
        atexit.register(self._close)
        threading.Thread(target=self._work, name="kernelproof-spawner", daemon=True).start()

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> ProcessGroup:
        group: Future[ProcessGroup] = Future()
        self._requests.put((start, group))
        try:
            return group.result()
        except KeyboardInterrupt:
            group.add_done_callback(lambda started: started.result().end())
            raise

    def _work(self) -> None:
        lines = self._guard.stdin
        assert lines is not None  # noqa: S101 - it is a pipe
        while True:
            start, group = self._requests.get()
            try:
                group.set_result(ProcessGroup(start(), lines))
            except BaseException as error:  # noqa: BLE001 - it is raised where the start was asked for
                group.set_exception(error)

    def _close(self) -> None:
        if self.process == os.getpid() and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()


_Request = tuple[Callable[[], "subprocess.Popen[bytes]"], "Future[ProcessGroup]"]
_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def start_group(command: Sequence[str], **options: Any) -> ProcessGroup:  # noqa: ANN401
    """Start `command` in a session of its own; `options` are those of `subprocess.Popen`."""
    global _spawner  # noqa: PLW0603 - one for all pools: it is a thread and a process
    with _spawner_lock:
        # A fork of this process has a copy of the object, but neither its thread nor its children.
        if _spawner is None or _spawner.process != os.getpid():
            _spawner = _Spawner()
    return _spawner.start(lambda: subprocess.Popen(command, start_new_session=True, **options))
