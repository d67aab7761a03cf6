"""The process whose forks the workers of a pool are: what all of them import is imported once.

It is started as a worker is, with the modules to import. Each message brings file descriptors, of
which one is a file that says what to start: a fork that stands above a worker as `supervisor.py`
does, and whose own fork becomes the worker. At the end of its connection this process ends, after
the last of its forks (Linux). It never calls CUDA, which does not outlive a fork: workers do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, Final, NoReturn

from . import supervisor, worker_main

MESSAGE: Final = b"f"
DESCRIPTORS: Final = ("start", "link", "output", "connection", "board", "dumps")
"""What comes with a message, in this order."""
_PAUSE_SECONDS: Final = 0.1

# What an interpreter has of its own at its start.
_PYTHONS: Final[dict[signal.Signals, Any]] = {
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
}

_supervisors: Final[set[int]] = set()
"""The forks that stand above a worker."""


def main(options: str) -> NoReturn:
    """Fork for each message; `options` are JSON: the connection, and modules to import."""
    given = json.loads(options)
    connection = socket.socket(fileno=given["connection"])
    connection.set_inheritable(False)
    for number in supervisor.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # What a killed supervisor leaves is this process's.
    supervisor.ask_kernel(supervisor.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    gc.disable()  # as a worker that imports
    worker_main.import_all(given["preload"])
    gc.freeze()
    gc.enable()
    with contextlib.suppress(OSError):
        while True:
            message, fds, _, _ = socket.recv_fds(connection, len(MESSAGE), len(DESCRIPTORS))
            if not message:
                break
            _fork(dict(zip(DESCRIPTORS, fds, strict=True)), connection)
            for fd in fds:
                os.close(fd)
    connection.close()
    while _supervisors:
        time.sleep(_PAUSE_SECONDS)
    os._exit(0)


def _fork(fds: dict[str, int], connection: socket.socket) -> None:
    """Start a fork that stands above a worker."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until it is among them
    fork = os.fork()
    if fork:
        _supervisors.add(fork)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return
    try:
        connection.close()
        with open(fds["start"], "rb") as file:  # noqa: PTH123
            start = json.load(file)
        os.setsid()
        for fd, there in enumerate((fds["link"], fds["output"], fds["output"])):
            os.dup2(there, fd)
        with contextlib.suppress(OSError):  # it is gone
            os.chdir(start.get("folder", "."))
        command = supervisor.command_of(os.getpid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ.clear()
        os.environ.update(start["environment"])
        supervisor.supervise(
            start["scratch"], command, lambda variables: _become_worker(start, fds, variables)
        )
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this is the outermost frame of the process
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_worker(start: dict[str, Any], fds: dict[str, int], variables: dict[str, str]) -> None:
    """Be what a new interpreter with a worker would be."""
    mine = {name: fds[name] for name in ("connection", "board", "dumps")}
    supervisor.close_all_but({0, 1, 2, *mine.values()})
    for number, handler in _PYTHONS.items():
        signal.signal(number, handler)
    os.environ.update(variables)
    tempfile.tempdir = None
    importlib.invalidate_caches()
    sys.argv[1:] = []
    worker_main.main(json.dumps({**start["options"], **mine}))


def _reap() -> None:
    """Take note of forks that have ended, and end what those that were killed have left."""
    left = False
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            left |= process not in _supervisors or status != 0
            _supervisors.discard(process)
    for child in supervisor.children_of(os.getpid()) if left else ():
        if child not in _supervisors:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
