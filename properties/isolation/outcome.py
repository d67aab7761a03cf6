"""What can become of a request to an isolated worker."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from .memory_use import MemoryUse
from .sanitizer import TOOLS
from .stages import STAGES

Status = Literal["done", "hang", "crash", "error"]
DEVICE_FAULT = "AcceleratorError"
"""torch's exception once a kernel has faulted: the device has crashed, though Python goes on."""


KILLED, KILLED_FOR_MEMORY = "SIGKILL", "SIGKILL (out of memory)"
"""Kinds of a crash by a SIGKILL that the suite did not send: nothing says who sent it, or the
kernel counts one more process that it has ended for lack of memory."""
ABORTED_FOR_MEMORY = "SIGABRT (out of memory)"
"""Kind of a crash by an abort after an allocation that failed, in the process's own words."""
SENTENCES = {
    KILLED: "killed by SIGKILL, by whom is unknown",
    KILLED_FOR_MEMORY: "killed by the kernel, for lack of memory,",
    ABORTED_FOR_MEMORY: "SIGABRT, as an allocation failed,",
}
"""Kinds of a crash that need words of their own."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    # "error" is a fault of the harness: the handler raised, the process cannot start, or a stage
    # other than "compile" and "run" overran its deadline.
    status: Status
    result: dict[str, object] | None = None  # the handler's, if "done"
    # crash: "SIGSEGV", "exit 3", ...; hang: the stage; error: the exception, "overrun" or "start"
    kind: str = ""
    stage: str = "load"  # where it stood
    limit: float = 0.0  # hang, and "overrun": the deadline of that stage in seconds
    seconds: float = 0.0  # from sending the request to the reply, or to giving up
    stderr: str = ""  # the end of what was printed in this case, to standard output too
    stack: str = ""  # hang: the stacks of all threads; crash: faulthandler's report
    detail: str = ""  # one sentence, or the handler's traceback
    # Whether code of others than this request's ran in the process before, or ran on its GPU at
    # the same time: what went wrong may be their doing.
    shared: bool = False
    # Whether all processes that share the GPU have lost it, or may have: one of them is at fault.
    faulted: bool = False
    log: str = ""  # what the program that the process runs under has written in this case
    # Whether a process died in this case because the kernel ended it for lack of memory.
    starved: bool = False
    memory: MemoryUse | None = None  # if "done", only what earlier requests had left in the process

    @property
    def died(self) -> bool:
        """Whether the code under test cost its process."""
        return self.status in ("hang", "crash")


CLOSED = "closed its connection"
"""Kind of a process that lives on without a way to answer, as after ``exec``."""


def describe_exit(status: int | None, *, for_memory: bool = False) -> str:
    """Name the end of a process that died by itself; `status` is negative for a signal."""
    if status is None:
        return "does not die"
    if status >= 0:
        return f"exit {status}"
    if status == -signal.SIGKILL:  # not by us: we had not sent it yet
        return KILLED_FOR_MEMORY if for_memory else KILLED
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-status}"


def is_forceful(kind: str) -> bool:
    """Whether a verdict of this kind is a hang, or a crash that no code chose to raise.

    Args:
        kind: the stage of a HANG; the exception, signal, exit code or sanitizer's tool of a CRASH.
    """
    by_death = kind.startswith(("SIG", "signal ", "exit ")) or kind == CLOSED
    return by_death or kind in (DEVICE_FAULT, *STAGES, *TOOLS)
