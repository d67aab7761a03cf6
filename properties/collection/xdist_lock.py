"""One answer for all processes of a run, under xdist: the first that needs it finds it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP, JUDGED, LEFT = "stop", "judged.jsonl", "left"
"""Names of files in the shared folder: mark of an interrupted run, outcomes of items (a line each),
and what implementations left behind."""
BUSY = "busy"
"""Prefix of the names of files there that exist while a process searches."""
PATIENCE_SECONDS, TICK_SECONDS = 10.0, 0.05
"""Most seconds that an interrupted run waits for its searches, and seconds between two checks."""
REFUSAL = "refusal"
"""File, in the folder that the processes share, with the reason why the suite cannot run."""


class SuiteRefusedError(Exception):
    """The suite cannot run as it was asked to; the message is one sentence."""


def once(folder: Path | None, name: str, do: Callable[[], None]) -> None:
    """Do something that all processes need done, in one of them while the others wait for it.

    One thing at a time: what is done here takes the whole machine. A process that dies over it
    leaves it to the next.

    Args:
        folder: the folder that the processes share; None if there is one process.
        name: the name of what is done.
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
        folder: the folder that the processes share; None if there is one process.
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


def keep(folder: Path | None, item: str, properties: dict[str, Any]) -> None:
    """Keep what became of an item: an interrupted run does not wait for the report of it."""
    if folder is not None and folder.is_dir():
        with (folder / JUDGED).open("a", encoding="utf-8") as file:  # whole lines, at the end
            file.write(json.dumps([item, properties]) + "\n")


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what became of items, by their ids."""
    path = folder / JUDGED
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {}
    for line in lines:
        with suppress(ValueError):  # a full disk, or the end of its process, may cut a line off
            item, properties = json.loads(line)
            found[item] = properties
    return found


def stop(folder: Path) -> None:
    """Have all processes end their searches after the case under way, and wait for that."""
    (folder / STOP).touch()
    until = time.monotonic() + PATIENCE_SECONDS
    while any(map(_is_alive, folder.glob(f"{BUSY}-*"))) and time.monotonic() < until:
        time.sleep(TICK_SECONDS)


def _is_alive(mark: Path) -> bool:
    """Whether the process that has left a mark runs: one that was killed cannot remove it."""
    try:
        os.kill(int(mark.name.removeprefix(f"{BUSY}-")), 0)
    except ProcessLookupError:
        return False
    return True
