"""Findings in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..verdicts.text import compact, count_of, defaults, one_line
from ..verdicts.verdict import Verdict
from .report import Finding

if TYPE_CHECKING:
    from ...reference import Problem

TRACE_LINES = 12
MOST_LAWS = 4
"""Most laws named in the title of one cause, and one more; ``-v`` and the JSON have them all."""
PRINTED_LINES = 12
"""Lines shown of what a process printed; JSON and ``replay`` have all that was kept."""
PACKAGE = Path(__file__).parents[2]
SUITE = (str(PACKAGE / "properties"), str(PACKAGE / "impl" / "protocol.py"))
"""Frames of these files say nothing of the code under test."""


def law_names(laws: Sequence[str], *, verbose: bool = False) -> str:
    """Return the first of the laws that one cause fails under, and how many there are besides."""
    if verbose or len(laws) <= MOST_LAWS + 1:
        return ", ".join(laws)
    return f"{', '.join(laws[:MOST_LAWS])} and {len(laws) - MOST_LAWS} more laws"


def finding_lines(finding: Finding) -> list[str]:
    """Return the lines on a finding: what broke, on which problem, and how to reproduce it."""
    verdict = finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    lines = [f"{title}  {finding.implementation}  {finding.law}"]
    lines += [f"  {line}" for line in verdict.message.strip().splitlines()]
    lines += [f"    {line}" for line in trace_lines(verdict)]
    lines += [f"  printed: {line}" for line in printed_lines(verdict)[-PRINTED_LINES:]]
    lines.append(f"  problem: {compact(finding.problem)}")
    if finding.deaths:
        tries = count_of(finding.attempts, "try").replace("trys", "tries")
        lines.append(f"  shrunk:  in {tries}, {finding.deaths} of which cost a process")
    if finding.replay:
        lines.append(f"  replay:  {finding.replay}")
    return [one_line(line) for line in lines]


def description(law: str, problem: Problem, verdict: Verdict) -> list[str]:
    """Return what a case file says to a person: the verdict, all of the problem, wrong elements."""
    title = f"{verdict.status} {verdict.kind}".strip()
    lines = [f"{title} under {law}", *verdict.message.strip().splitlines()]
    lines += [f"problem: {compact(problem)}", f"defaults: {defaults(problem)}"]
    return lines + [f"wrong: {line}" for line in element_lines(verdict)]


def element_lines(verdict: Verdict) -> list[str]:
    """Return a line for each of the worst elements, in columns."""
    rows = [
        (
            each["where"],
            ", ".join(f"{axis} {number}" for axis, number in each["at"].items()),
            *(f"{name} {each[name]}" for name in ("got", "expected", "bound")),
        )
        for each in verdict.worst
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width
        ).rstrip()
        for row in rows
    ]


def printed_lines(verdict: Verdict) -> list[str]:
    """Return the lines that were printed in the case, empty ones left out."""
    return [line for line in verdict.printed.splitlines() if line.strip()]


def trace_lines(verdict: Verdict) -> list[str]:
    """Return what a person needs of a trace: its innermost frames, without those of the suite."""
    if verdict.status not in ("HANG", "CRASH"):
        return []
    lines, skipping = [], False
    for line in verdict.trace.splitlines():
        if line.lstrip().startswith("File "):
            skipping = '"<string>"' in line or any(f'"{path}' in line for path in SUITE)
        elif not line.startswith("    "):  # else it is the source of the frame before
            skipping = line.startswith("Extension modules")
        if line.strip() and not skipping:
            lines.append(line)
    innermost_first = "most recent call first" in verdict.trace
    return lines[:TRACE_LINES] if innermost_first else lines[-TRACE_LINES:]
