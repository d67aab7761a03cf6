"""What can become of a request to an isolated worker."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

Status = Literal["done", "hang", "crash", "error"]


KILLED = "killed (out of memory?)"
"""The kind of a crash by a SIGKILL that the suite did not send."""


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
    log: str = ""  # what the program that the process runs under has written in this case

    @property
    def died(self) -> bool:
        """Whether the code under test cost its process."""
        return self.status in ("hang", "crash")


def describe_exit(status: int | None) -> str:
    """Name the end of a process that died by itself; `status` is negative for a signal."""
    if status is None:
        return "does not die"
    if status >= 0:
        return f"exit {status}"
    if status == -signal.SIGKILL:  # not by us: we had not sent it yet
        return KILLED
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-status}"
