"""Stands between this package and a program that it starts: nothing of the program outlives it.

It is run by its path, without the package: ``python -I -S supervisor.py FOLDER COMMAND...``; or a
fork of `fork_server.py` calls `supervise`. On Linux it adopts whatever the program leaves, even in
a session of its own (a child subreaper), and ends when it has no descendants any more. Elsewhere it
ends the program's process group only.

Standard input is a socket. The other side sends `END`, `DUMP` or `COUNT`; its end, however that
comes, means `END`. Lines of JSON go back: ``{"scratch": "/tmp/...", "above": 7}`` at the start,
with this process's number, ``{"status": 0, "maxrss": 9}`` when the program has ended,
``{"alive": 0}`` after `COUNT`, ``{"left": [...]}`` at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

END, DUMP, COUNT = b"e", b"d", b"c"
SCRATCH = "kernelproof-worker-"
"""Beginning of the names of folders for temporary files."""
SHARED = frozenset(
    ("sccache", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-persistenced")
)
"""Programs that serve others too once they run: they are neither ended nor named."""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They go to all processes of a terminal or of a service: what becomes of them is the parent's."""
PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
# Helpers end by themselves after their process, as multiprocessing's do, and tidy up.
_GRACE_SECONDS = 0.3
_PATIENCE_SECONDS = 60.0  # for what even SIGKILL does not end
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_LOOKS = 3  # the kernel's list of children may miss one while another ends
_COMMAND_CHARACTERS = 300


def main() -> None:
    """Run the command of the arguments until it is to end, and end everything that it started."""
    folder, *command = sys.argv[1:]
    supervise(folder, command, lambda variables: os.execvpe(command[0], command, variables))  # noqa: S606


def supervise(folder: str, command: list[str], become: Callable[[dict[str, str]], object]) -> None:
    """Run a program until it is to end, and end everything that it started.

    Args:
        folder: where it gets one for temporary files; none if empty.
        command: what the program's forks are known by.
        become: makes a process the program, and is given its environment.
    """
    parent = os.getppid()
    wake, waker = os.pipe()
    for fd in (wake, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # SIGUSR2 comes at the parent's end.
    for number in (signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)
    ask_kernel(_PR_SET_PDEATHSIG, signal.SIGUSR2)
    link = socket.socket(fileno=os.dup(0))
    scratch = Scratch(folder)
    family = Family(command, become, scratch.environment(), link)
    family.tell({"scratch": scratch.path, "above": os.getpid()})
    close_all_but({0, 1, 2, wake, waker, link.fileno(), scratch.fd})
    while os.getppid() == parent and family.attend(wake):
        pass
    left = family.end()
    scratch.remove()
    family.tell({"left": left})


class Scratch:
    """A program's folder for temporary files; it is locked as long as somebody will remove it."""

    def __init__(self, folder: str) -> None:
        self.fd, self.path = -1, ""
        if folder:
            with contextlib.suppress(OSError):  # then the program has this process's
                path = os.path.join(folder, SCRATCH + os.urandom(6).hex())  # noqa: PTH118
                os.mkdir(path, 0o700)  # noqa: PTH102
                self.path = path
                self.fd = os.open(path, os.O_RDONLY)
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def environment(self) -> dict[str, str]:
        """Return the variables of the program."""
        return {**os.environ, **({"TMPDIR": self.path} if self.path else {})}

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        if not self.path:
            return
        try:
            os.rmdir(self.path)  # noqa: PTH106
        except OSError:
            import shutil

            shutil.rmtree(self.path, ignore_errors=True)


class Family:
    """The program and its descendants.

    Args:
        command, become: see `supervise`.
        environment: the program's variables.
        link: the socket to the other side.
    """

    def __init__(
        self,
        command: list[str],
        become: Callable[[dict[str, str]], object],
        environment: dict[str, str],
        link: socket.socket,
    ) -> None:
        self._command, self._become, self._link = command, become, link
        self._status: int | None = None
        here = os.getpid()
        self._program = os.fork()
        if self._program == 0:
            self._become_program(here, environment)

    def _become_program(self, supervisor: int, environment: dict[str, str]) -> None:
        try:
            ask_kernel(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            self._become(environment)
        except OSError as error:
            sys.stderr.write(f"{self._command[0]}: {error.strerror}\n")
        finally:
            sys.stderr.flush()
            os._exit(127)

    def attend(self, wake: int) -> bool:
        """Wait for the other side or a signal; return whether the program may go on."""
        link = self._link.fileno()
        readable, _, _ = select.select([link, wake], [], [])
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 1 << 10)
        said = self._hear() if link in readable else b" "
        self._reap()
        if DUMP in said and self._status is None:
            os.kill(self._program, signal.SIGUSR1)
        if COUNT in said:
            self.tell({"alive": len(self._others())})
        return said != b"" and END not in said

    def _hear(self) -> bytes:
        try:
            return self._link.recv(1 << 10)
        except OSError:
            return b""

    def tell(self, message: dict[str, object]) -> None:
        """Send a message to the other side."""
        with contextlib.suppress(OSError):  # it is gone
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> list[dict[str, object]]:
        """End the program and its descendants; return those that it left."""
        for _ in _pauses(_PATIENCE_SECONDS):
            self._reap()
            if self._status is not None:
                break
            if sys.platform == "linux":
                os.kill(self._program, signal.SIGKILL)
            else:
                with contextlib.suppress(OSError):  # it may have no group yet, or none any more
                    os.killpg(self._program, signal.SIGKILL)
        # What ends by itself within the grace was not left behind.
        for _ in _pauses(_GRACE_SECONDS):
            if not (self._reap() and self._others()):
                break
        left = [each for each in map(self._describe, self._others()) if each["command"]]
        unseen = 0
        for _ in _pauses(_PATIENCE_SECONDS):
            alive = self._others() if self._reap() else []
            # Seen empty several times in a row: between two looks a process may fork and die, so
            # that one look at the right moment sees nobody.
            unseen = 0 if alive else unseen + 1
            if unseen == _LOOKS or not self._reap():
                break
            for process in alive:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        return left

    def _reap(self) -> bool:
        """Collect the status of children that have ended; return whether there are others."""
        while True:
            try:
                process, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not process:
                return True
            if process == self._program:
                self._status = os.waitstatus_to_exitcode(status)
                self.tell({"status": self._status, "maxrss": usage.ru_maxrss})

    def _others(self) -> list[int]:
        """Return all descendants that are not the program, except those that serve others too."""
        found: list[int] = []
        at = [os.getpid()]
        while at:
            mine = [each for each in children_of(at.pop()) if not _serves_others(each)]
            found += [each for each in mine if each != self._program or self._status is not None]
            at += mine
        return found

    def _describe(self, process: int) -> dict[str, object]:
        command = command_of(process)
        said = "a fork of it" if command == self._command else " ".join(command)
        try:
            escaped = os.getsid(process) != self._program
        except OSError:
            escaped = False
        return {"pid": process, "command": said[:_COMMAND_CHARACTERS], "escaped": escaped}


def children_of(process: int) -> list[int]:
    """Return the children of a process, those of all its threads (Linux)."""
    if not _LISTS_CHILDREN:
        every = [int(name) for name in _names("/proc") if name.isdigit()]
        return [each for each in every if _parent_of(each) == process]
    return [
        int(child)
        for task in _names(f"/proc/{process}/task")
        for child in _read(f"/proc/{process}/task/{task}/children").split()
    ]


def command_of(process: int) -> list[str]:
    """Return the command line of a process, one empty word where it has none (Linux)."""
    words = _read(f"/proc/{process}/cmdline").rstrip(b"\0").split(b"\0")
    return [word.decode(errors="backslashreplace") for word in words]


def _parent_of(process: int) -> int:
    # The name of the program, which stands before in parentheses, may hold anything.
    words = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()
    return int(words[1]) if words else -1


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  pathlib takes as long as this process's start
    except OSError:
        return []


def _serves_others(process: int) -> bool:
    return _read(f"/proc/{process}/comm").decode(errors="replace").strip() in _SHARED_NAMES


_SHARED_NAMES = {name[:15] for name in SHARED}  # as long as the kernel keeps them


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def _pauses(seconds: float) -> Iterator[None]:
    """Yield, with longer and longer pauses in between, until these seconds have passed."""
    until, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    while True:
        yield
        if time.monotonic() > until:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def close_all_but(kept: set[int]) -> None:
    """Close other file descriptors: a connection that only the program inherits ends with it."""
    for name in _names("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _prctl() -> Callable[[int, int], object]:
    if sys.platform != "linux":
        return lambda *_: None
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda *_: None


ask_kernel = _prctl()
_LISTS_CHILDREN = os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)

if __name__ == "__main__":
    main()
