"""Processes that are asked about one mutant after another: torch is imported once for all."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import IO, Any

from typing_extensions import Self

from .stand_ins import StandIn

COMMAND = (sys.executable, "-m", f"{__package__}.trial")
"""Starts a process."""
READY = {"ready": True}
"""What a process says once it has imported what every request needs."""
START_SECONDS = 120.0
"""Most seconds from the start of a process until it takes requests."""
EXIT_SECONDS = 5.0
"""Most seconds from the end of what a process writes to its own end."""
_READ_BYTES = 1 << 16


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Have a process end with this block."""
    try:
        yield
    finally:
        kill(process)


def kill(process: subprocess.Popen[Any]) -> None:
    """End a process and its group."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


Started = Callable[[subprocess.Popen[Any]], AbstractContextManager[object]]


class TrialError(Exception):
    """A process has given no answer; the message says why."""


class Trials:
    """Asks processes of ``trial``, one at a time: one that gives no answer is replaced.

    Args:
        stand_in: the copy from which they load the kernels; the kernels as they are if None.
        started: a context in which a process runs, and at whose end it is ended.
        preload: modules that their workers have at their start.
    """

    def __init__(
        self,
        stand_in: StandIn | None = None,
        started: Started = ended,
        preload: Sequence[str] = (),
    ) -> None:
        self._stand_in, self._started, self._preload = stand_in, started, preload
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._opened = ExitStack()
        self._read, self._ready = b"", False

    def __enter__(self) -> Self:
        """Return the trials themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, if there is one."""
        self.end()

    def begin(self) -> None:
        """Start a process unless there is one; its imports are not waited for."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self.end()
        self._errors = self._opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  it is closed with the process
        process = subprocess.Popen(
            [*COMMAND, *self._preload],
            cwd=self._stand_in.place if self._stand_in else None,
            env=self._stand_in.environment if self._stand_in else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        self._opened.enter_context(process)  # waits for its end
        self._opened.enter_context(self._started(process))
        self._process, self._read, self._ready = process, b"", False

    def wait(self) -> None:
        """Wait until a process takes requests, as no mutant's time goes by while it starts.

        Raises:
            TrialError: it does not.
        """
        self.begin()
        if not self._ready:
            self._ready = self._answer(START_SECONDS) == READY

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Return the answer to a request, or why there is none as ``error``.

        Args:
            request: see ``trial``.
            seconds: most seconds of the answer, those of starting a process left out.
        """
        request = {**request, "preload": self._preload}
        try:
            self.wait()
            assert self._process is not None  # noqa: S101  it was waited for
            assert self._process.stdin is not None  # noqa: S101  a pipe
            with suppress(OSError):  # a process that is gone gives no answer
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
            answer = self._answer(seconds)
        except TrialError as error:
            return {"error": str(error)}
        if answer.pop("last", False):
            self.end()
        return answer

    def _answer(self, seconds: float | None) -> dict[str, Any]:
        """Return the next line that the process writes.

        Raises:
            TrialError: there is none; the process has been ended.
        """
        assert self._process is not None  # noqa: S101  it was started
        assert self._process.stdout is not None  # noqa: S101  a pipe
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._read:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self.end()
                message = f"no answer within {seconds:.0f} s"
                raise TrialError(message)
            read = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not read:
                why = self._last_words()
                self.end()
                raise TrialError(why)
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Return the last line that a process which has ended wrote, or its exit code."""
        assert self._process is not None  # noqa: S101  it has ended
        assert self._errors is not None  # noqa: S101  opened with the process
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return said[-1] if said else f"exit code {self._process.returncode}"

    def end(self) -> None:
        """End the process; the next request has another."""
        self._process = None
        self._opened.close()
