"""``check --watch``: the same check again each time a file changes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...impl.targets.unpacked import folders
from ...properties.findings.report import INTERRUPTED, TERMINATED
from ..answers.identity import files_of
from ..console.errors import UsageRefusedError
from ..console.lines import note
from ..console.signals import ended_by_signals

TICK_SECONDS = 0.3
"""Seconds between two looks at the files."""
WATCH = "--watch"

Stamps = dict[Path, tuple[int, int]]
"""Time of the last change, in nanoseconds, and size of each file."""


def watch_files(implementations: Sequence[str], words: Sequence[str]) -> int:
    """Run the command, and again at each change, until Ctrl-C; return the exit code of the last.

    The Python files of each implementation's folder are watched, and those of the folders of
    ``--from``. Each check is a process of its own: nothing of the code of before is left in it.

    Args:
        implementations: the names that are checked.
        words: the words of the command behind ``kernelproof``.

    Raises:
        UsageRefusedError: the file of no implementation can be found.
    """
    watched = [*{file.parent for name in implementations for file in files_of(name)}]
    if not watched and not folders():
        message = f"{WATCH}: no file of {', '.join(implementations)} is found below this folder"
        raise UsageRefusedError(message)
    command = [sys.executable, "-m", __package__.split(".")[0], *without_watch(words)]
    names = ", ".join(str(each) for each in [*watched, *folders()])
    code, ending = 0, ""

    def end(why: str) -> None:
        nonlocal ending
        ending = why

    with ended_by_signals(end):
        while not ending:
            # Before the check: what changes while it runs begins another one.
            before = stamps(watched)
            with subprocess.Popen(command) as check:
                while (ended := check.poll()) is None:
                    # A terminal's Ctrl-C has reached the check too, a SIGTERM has not.
                    if ending == TERMINATED:
                        check.terminate()
                        ending = INTERRUPTED  # once: a second signal would cost its reports
                    time.sleep(TICK_SECONDS)
            code = ended
            if not ending:
                note(f"waiting for a change below {names} (Ctrl-C ends)")
            while not ending and stamps(watched) == before:
                time.sleep(TICK_SECONDS)
    return code


def without_watch(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the flag."""
    return [word for word in words if word != WATCH]


def stamps(watched: Iterable[Path]) -> Stamps:
    """Return the state of all Python files of these folders and of those of ``--from``."""
    files = [file for folder in watched for file in folder.glob("*.py")]
    files += [file for folder in folders() for file in folder.rglob("*.py")]
    found: Stamps = {}
    for file in files:
        try:
            state = file.stat()
        except OSError:  # an editor replaces it
            continue
        found[file] = (state.st_mtime_ns, state.st_size)
    return found
