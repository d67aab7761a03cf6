"""Whether a call that found no memory asked for too much, or its worker has too little (a CPU)."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Code, Refusal

if TYPE_CHECKING:
    import torch

NO_ROOM: Code = "memory"
"""Code of the refusal of a problem for which there is no room."""
TIMES = 16
"""A call may need this many times the bytes of its inputs and outputs."""
LEAST_BYTES = 256 << 20
"""Bytes that any call may need: workspaces of a fixed size, and what a library sets aside."""
LIMIT_VARIABLE = "KERNELPROOF_WORKER_GIB"
"""Variable that sets the limit of a worker on a CPU, in GiB."""
_ASKED = re.compile(r"tried to allocate (\d+) bytes")


class Note(Protocol):
    """Writes down the memory of this process, in bytes, for whoever learns of its death."""

    def __call__(self, *, limit: int, room: int, need: int, held: int, left: int) -> None:
        """Write down the process's limit (0: none), its room, a call's tensors, what is held.

        And what earlier requests have left in the process.
        """


class _Notes:
    note: Note | None = None
    requests = 0
    base = 0
    """Bytes of the process once its first request had ended, which loads what calls need."""
    left = 0
    """Bytes that have come to the base when the present request began."""


def note_calls(note: Note | None) -> None:
    """Have the memory of this process written down now, when a request begins, and at each call."""
    _Notes.note = note
    _, data = _resident_and_data()
    _Notes.requests += 1
    if _Notes.requests == 2:  # noqa: PLR2004  the first has ended
        _Notes.base = data
    _Notes.left = max(data - _Notes.base, 0) if _Notes.base else 0
    call_begins(())


def call_begins(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that RLIMIT_DATA counts, and write down what a call has; 0: nobody counts.

    Args:
        tensors: the tensors of the call; none before any.
    """
    held, data = _resident_and_data()
    if _Notes.note is not None:
        limit = limit_bytes() or 0
        room = max(limit - data, 0)
        need, left = _bytes_of(tensors), _Notes.left
        _Notes.note(limit=limit, room=room, need=need, held=held, left=left)
    return data


def _resident_and_data() -> tuple[int, int]:
    """Return two sizes of this process in bytes (Linux)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123  at each call
            words = file.read().split()
        return int(words[1]) * resource.getpagesize(), int(words[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0, 0


def limit_bytes() -> int | None:
    """Return the limit of this process; None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def too_small(what: str, limit: int | None = None) -> Refusal:
    """Return the refusal of a problem that does not fit into a worker of this size.

    Args:
        what: says what did not fit.
        limit: the limit of the worker in bytes, by default this process's.
    """
    limit = limit or limit_bytes()
    size = "the machine" if limit is None else f"a worker's {limit / 2**30:.3g} GiB"
    return Refusal(f"too large for {size}: {what}; {LIMIT_VARIABLE} raises the limit", NO_ROOM)


def too_much(asked: int, need: int) -> bool:
    """Whether a call is to blame for what it asks for: far more than its own tensors have."""
    return asked > max(TIMES * need, LEAST_BYTES)


def beside(had: int, need: int) -> str:
    """Return in words what memory a call had, or took, beside its tensors, both given in bytes."""
    return f"{had / 2**20:,.0f} MiB beside the problem's {need / 2**20:,.0f} MiB"


def refusal_of(
    error: BaseException, tensors: Iterable[torch.Tensor], before: int
) -> Refusal | None:
    """Return why a call that found no memory is not to blame; None where it asked for too much.

    Args:
        error: the error that it raised.
        tensors: the tensors of the call.
        before: ``call_begins`` of it.
    """
    limit = limit_bytes()
    if limit is None:
        return None
    room = max(limit - before, 0)
    named = _ASKED.search(message_of(error))
    asked = max(room, int(named[1]) if named else 0)  # what failed did not fit into the room
    need = _bytes_of(tensors)
    return None if too_much(asked, need) else too_small(f"the call had {beside(room, need)}")


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def worker_limit(usual: int) -> int:
    """Return the limit of a worker in bytes: the user's, else the usual one."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(given) * 2**30) if given else usual
    except ValueError:
        message = f"{LIMIT_VARIABLE} must be a number of GiB, not {given!r}"
        raise ValueError(message) from None
