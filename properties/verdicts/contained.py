"""Calling the code under test: whatever it raises, of any kind, becomes a verdict."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ...impl.targets.exceptions import message_of, name_of, sentence_of
from .verdict import Verdict

OUT_OF_MEMORY = "out of memory"
"""The kind of a CRASH for which the machine was too small, or too full."""
NO_ALLOCATION = (
    "can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)
"""What torch says of an allocation that failed: on the host, on a GPU, of CUDA, of cuBLAS."""
BREAKPOINT = "a breakpoint has no terminal in a worker; use `kernelproof replay --in-process`"


class Stop(Exception):  # noqa: N818  not an error of ours: it carries a verdict out of a law
    """Ends a law early with a verdict on the implementation."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@contextmanager
def contained(where: str) -> Iterator[None]:
    """Turn what the implementation's code raises into a verdict.

    Args:
        where: the beginning of the message: which code of the implementation is run.

    Raises:
        Stop: it raised: CRASH, of any exception.
    """
    try:
        yield
    except Stop:
        raise
    # Not only Exception: nobody else raises KeyboardInterrupt or SystemExit in a worker.
    except BaseException as error:
        raise Stop(crash(error, where)) from error


def crash(error: BaseException, where: str = "") -> Verdict:
    """Return the CRASH of an implementation that raised an exception."""
    kind = OUT_OF_MEMORY if out_of_memory(error) else name_of(error)
    message = f"{where}{sentence_of(error)}"
    if kind == "BdbQuit":
        message += f": {BREAKPOINT}"
    return Verdict("CRASH", kind, message, trace=_trace_of(error))


def _trace_of(error: BaseException) -> str:
    """Return the end of an exception's traceback; empty where it cannot be written."""
    try:
        return "".join(traceback.format_exception(error)[-6:])[-4000:]
    except BaseException:  # noqa: BLE001  it asks the exception's methods, and the fields of some
        return ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a GPU."""
    message = message_of(error)
    return isinstance(error, MemoryError) or any(each in message for each in NO_ALLOCATION)
