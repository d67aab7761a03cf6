"""Other people's programs: run to their end, to a deadline or to Ctrl-C, with what they say."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...properties.isolation.spawning import start_group

POLL_SECONDS = 0.05
OUTPUT_BYTES = 1 << 20
"""Most bytes of a program's output that are kept, from its start."""
STOPPED = "interrupted"


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: exit status, negative for a signal; None if even SIGKILL did not end it.
        seconds: the seconds that it took.
        told: all that it wrote to stdout and stderr.
        cut_short: why it was ended before its time, empty if it was not.
    """

    status: int | None
    seconds: float
    told: str
    cut_short: str = ""


def run_to_end(
    words: Sequence[str],
    *,
    folder: Path,
    deadline: float,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Ended:
    """Run a program in a process group of its own, of which nothing outlives the call.

    Args:
        words: the program and its arguments.
        folder: where it runs, and where it may leave temporary files.
        deadline: seconds that it may take.
        environment: instead of this process's.
        stop: ends it.
    """
    base = os.environ if environment is None else environment
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        group = start_group(
            list(words),
            cwd=folder,
            env={**base, "TMPDIR": str(folder), "LC_ALL": "C"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        cut_short = ""
        try:
            while not group.exited():
                if stop is not None and stop.is_set():
                    cut_short = STOPPED
                    break
                if time.monotonic() > began + deadline:
                    cut_short = f"it takes longer than {deadline:g} s"
                    break
                time.sleep(POLL_SECONDS)
        finally:
            status = group.end()
        seconds = time.monotonic() - began
        output.seek(0)
        told = output.read(OUTPUT_BYTES).decode(errors="replace")
    return Ended(status, seconds, told, cut_short)
