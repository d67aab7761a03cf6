"""Plain text of problems and counts, safe for a terminal."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...reference import Problem

COMMANDS = re.compile(
    r"::(?=(?:error|warning|notice|debug|group|endgroup|echo|stop-commands|set-\w+|save-state|"
    r"add-\w+|remove-matcher)\b)|##(?=\[|vso\[|teamcity\[)",
    re.IGNORECASE,
)
"""Beginnings of what the logs of GitHub, Azure and TeamCity obey, wherever in a line they stand."""


def compact(problem: Problem) -> str:
    """Print a problem with only the fields that differ from the simplest one's."""
    changed = ", ".join(
        f"{field.name}={getattr(problem, field.name)!r}"
        for field in fields(problem)
        if getattr(problem, field.name) != field.default
    )
    return f"{type(problem).__name__}({changed})"


def defaults(problem: Problem) -> str:
    """Print the fields of a problem that ``compact`` leaves out."""
    return ", ".join(
        f"{field.name}={field.default!r}"
        for field in fields(problem)
        if getattr(problem, field.name) == field.default
    )


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun, in the singular where there is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Make control characters visible: a kernel's message must steer no terminal and no log."""
    plain = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.expandtabs(4)
    )
    return COMMANDS.sub(lambda found: f"\\x{ord(found[0][0]):x}{found[0][1:]}", plain)


def one_line(text: str) -> str:
    """Return text as ``printable`` does, on one line: what it says begins no line of a log."""
    return printable(text).replace("\n", "\\n")


def indented(text: str) -> str:
    """Return text as ``printable`` does, with further lines indented, for the same reason."""
    return printable(text).replace("\n", "\n  ")
