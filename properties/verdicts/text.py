"""Plain text of problems and counts, safe for a terminal."""

from __future__ import annotations

from dataclasses import fields

from ...reference import Problem


def compact(problem: Problem) -> str:
    """Print a problem with only the fields that differ from the simplest one's."""
    told = ", ".join(
        f"{field.name}={getattr(problem, field.name)!r}"
        for field in fields(problem)
        if getattr(problem, field.name) != field.default
    )
    return f"{type(problem).__name__}({told})"


def count_of(count: int, noun: str) -> str:
    """Say how many, in the singular where there is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Make control characters visible: a kernel's message must not steer the terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.expandtabs(4)
    )
