"""One answer for all processes of a run, under xdist: the first that needs it finds it."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFUSAL = "refusal"
"""File, in the folder that the processes share, with the reason why the suite cannot run."""


class SuiteRefusedError(Exception):
    """The suite cannot run as it was asked to; the message is one sentence."""


def once(folder: Path | None, name: str, do: Callable[[], None]) -> None:
    """Do something that all processes need done, in one of them while the others wait for it.

    One thing at a time: what is done here takes the whole machine. A process that dies over it
    leaves it to the next.

    Args:
        folder: that the processes share; None if there is one process.
        name: of what is done.
        do: does it.
    """
    if folder is None or not folder.is_dir():  # or on another machine
        do()
        return
    done = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.done"
    with (folder / "once.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            do()
            done.touch()


def shared(folder: Path | None, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Find an answer, or read the one that another process has found.

    Args:
        folder: that the processes share; None if there is one process.
        find: gives what JSON can hold.

    Raises:
        SuiteRefusedError: there is none, here or in the process that looked first.
    """
    if folder is None or not folder.is_dir():  # or on another machine
        return find()
    answer, refusal = folder / "answer.json", folder / REFUSAL
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if refusal.exists():
            raise SuiteRefusedError(refusal.read_text(encoding="utf-8"))
        if not answer.exists():
            try:
                answer.write_text(json.dumps(find()), encoding="utf-8")
            except SuiteRefusedError as error:
                refusal.write_text(str(error), encoding="utf-8")
                raise
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
