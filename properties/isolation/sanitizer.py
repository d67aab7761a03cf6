"""Workers under NVIDIA's compute-sanitizer: how they are started, and what it says of a case."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

PROGRAM: Final = "compute-sanitizer"
TOOLS: Final = ("memcheck", "racecheck", "synccheck", "initcheck")
SLOWNESS: Final = 20.0
"""Factor of the deadlines of calls under compute-sanitizer, before any was measured."""
LESS_WORK: Final = 64
"""Divisor of the work of a GPU's problems under compute-sanitizer."""
ENVIRONMENT: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""What is just outside of a tensor is inside of what torch has allocated, unless it keeps none."""
PLACES: Final = ("/usr/local/cuda/bin",)
REPORT_LINES: Final = 8

_BEGINS = re.compile(r"^========= (?P<text>\S.*)$")
_GOES_ON = re.compile(r"^=========(?P<text>\s{2,}\S.*|)$")
_NO_ERROR = re.compile(
    r"COMPUTE-SANITIZER|.*SUMMARY|Warning|Target application|Target process|Process |No CUDA|"
    r"This tool|Saved host backtrace"
)


class SanitizerMissingError(Exception):
    """There is no such program here; the message is one sentence."""


def command(tool: str) -> tuple[str, ...]:
    """Return what a worker's command is to begin with, up to the name of the log file.

    Raises:
        SanitizerMissingError: the program is not installed.
    """
    found = shutil.which(PROGRAM)
    for place in PLACES:
        found = found or shutil.which(PROGRAM, path=place)
    if found is None:
        message = (
            f"{PROGRAM} is not installed: it comes with the CUDA toolkit (for example the package "
            f"cuda-sanitizer-13-0, or {PLACES[0]} on PATH)"
        )
        raise SanitizerMissingError(message)
    # The compilers that a kernel's first call starts are not checked, and neither are errors that
    # torch asks CUDA for on purpose.
    return (
        str(Path(found)), "--tool", tool, "--target-processes", "application-only",
        "--report-api-errors", "no", "--log-file",
    )  # fmt: skip


def errors(log: str) -> list[str]:
    """Return the errors in a log, each with its first lines."""
    found: list[list[str]] = []
    reading = False
    for line in log.splitlines():
        if begins := _BEGINS.match(line):
            reading = not _NO_ERROR.match(begins["text"])
            if reading:
                found.append([begins["text"]])
        elif reading and (goes_on := _GOES_ON.match(line)):
            found[-1].append(goes_on["text"].rstrip())
    return ["\n".join(filter(None, lines[:REPORT_LINES])) for lines in found]
