"""Whether a call that found no memory asked for too much, or its worker has too little (a CPU)."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Code, Refusal
from .records import tensors_of

NO_ROOM: Code = "memory"
"""Code of the refusal of a problem for which there is no room."""
TIMES = 16
"""A call may need this many times the bytes of its inputs and outputs."""
LEAST_BYTES = 256 << 20
"""Bytes that any call may need: workspaces of a fixed size, and what a library sets aside."""
LIMIT_VARIABLE = "KERNELPROOF_WORKER_GIB"
"""Variable that sets the limit of a worker on a CPU, in GiB."""
_ASKED = re.compile(r"tried to allocate (\d+) bytes")


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts; 0 where nobody counts (Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def limit_bytes() -> int | None:
    """Return the limit of this process; None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def too_small(what: str) -> Refusal:
    """Return the refusal of a problem that does not fit into a worker of this size."""
    limit = limit_bytes()
    size = "the machine" if limit is None else f"a worker's {limit / 2**30:.3g} GiB"
    return Refusal(f"too large for {size}: {what}; {LIMIT_VARIABLE} raises the limit", NO_ROOM)


def refusal_of(error: BaseException, inputs: Any, before: int) -> Refusal | None:  # noqa: ANN401
    """Return why a call that found no memory is not to blame; None where it asked for too much.

    Args:
        error: that it raised.
        inputs: the record of the call.
        before: ``data_bytes`` when it began.
    """
    limit = limit_bytes()
    if limit is None:
        return None
    room = max(limit - before, 0)
    named = _ASKED.search(message_of(error))
    asked = max(room, int(named[1]) if named else 0)  # what failed did not fit into the room
    need = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(inputs).values())
    if asked > max(TIMES * need, LEAST_BYTES):
        return None
    return too_small(
        f"the call had {room / 2**20:,.0f} MiB beside the problem's {need / 2**20:,.0f} MiB"
    )


def worker_limit(usual: int) -> int:
    """Return the limit of a worker in bytes: the user's, else the usual one."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(given) * 2**30) if given else usual
    except ValueError:
        message = f"{LIMIT_VARIABLE} must be a number of GiB, not {given!r}"
        raise ValueError(message) from None
