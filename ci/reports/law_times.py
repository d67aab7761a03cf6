"""Seconds of each law and implementation, beside what it found and what it could find."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from ...fixtures import EVIDENCE
from ...properties.findings.report import ImplementationReport, LawReport
from .outline import Line, Table
from .shape import LawTime
from .summary import Summary, known_entries, known_findings, new_findings, seconds

LARGE_SHARE, LONG_SECONDS = 0.25, 60.0
"""Share of the laws' time, and seconds of a run, above which a law that found nothing is named."""
HEADS = ("law", "seconds", "share", "judged", "new", "known", "kills", "first", "only")
LEGEND = (
    "seeded bugs of the judged operations that it finds, finds first, or that only it finds; "
    "those of Triton's source are not counted"
)


@cache
def killers_of(operation: str) -> tuple[tuple[str, ...], ...]:
    """Return of each seeded bug the laws that killed it in the kept score, the earliest first.

    Faults in the source of Triton kernels are not kept, so that a law that was written for these,
    such as ``algebra``, has few or none.
    """
    path = EVIDENCE / f"score-{operation}.json"
    if not path.exists():
        return ()
    kept = json.loads(path.read_text(encoding="utf-8"))["bugs"]
    return tuple(tuple(bug["laws"]) for bug in kept if bug["control"] == "bug")


def law_times(summary: Summary) -> list[LawTime]:
    """Return the laws that took time or judged problems, those that took most first."""
    reports = summary.report.implementations
    new = Counter(law for each in reports for cause in new_findings(each) for law in cause.laws)
    known = Counter(
        law for each in reports for one in known_findings(each, summary.ledger) for law in one.laws
    )
    whole = sum(map(seconds, reports))
    laws: dict[str, list[tuple[str, LawReport]]] = {}
    for report in reports:
        for law in report.laws:
            laws.setdefault(law.law, []).append((report.operation, law))
    made = []
    for name, parts in laws.items():
        spent = sum(law.seconds for _, law in parts)
        judged = sum(law.judged for _, law in parts)
        operations = {operation for operation, law in parts if law.judged}
        bugs = [killers for operation in operations for killers in killers_of(operation)]
        killed = [killers for killers in bugs if name in killers]
        first, only = sum(each[0] == name for each in killed), killed.count((name,))
        if judged or spent:
            made.append(
                LawTime(
                    law=name,
                    seconds=round(spent, 3),
                    share=round(spent / whole, 4) if whole else 0.0,
                    judged=judged,
                    new=new[name],
                    known=known[name],
                    kills=len(killed),
                    kills_first=first,
                    kills_only=only,
                    seeded_bugs=len(bugs),
                )
            )
    return sorted(made, key=lambda each: -each["seconds"])


def worth(report: ImplementationReport, whole: float) -> dict[str, Any]:
    """Return an implementation's share of the laws' seconds, what was found, and could be."""
    judged = {law.law for law in report.laws if law.judged}
    bugs = killers_of(report.operation)
    return {
        "share": round(seconds(report) / whole, 4) if whole else 0.0,
        "new": len(new_findings(report)),
        "known": len(known_entries(report)),
        "kills": sum(not judged.isdisjoint(laws) for laws in bugs),
        "seeded_bugs": len(bugs),
    }


def time_lines(summary: Summary) -> Iterator[Table | Line]:
    """Yield a table of the laws, and what its last columns count."""
    if times := law_times(summary):
        rows = [_row(each) for each in times]
        told = [
            ", ".join(f"{text} {head}" for head, text in zip(HEADS[1:], row[1:], strict=True))
            for row in rows
        ]
        cells = [[(text, "") for text in row] for row in rows]
        instead = [(row[0], "", text) for row, text in zip(rows, told, strict=True)]
        yield Table(HEADS, cells, instead)
        yield Line("kills, first, only", LEGEND, "dim")


def _row(time: LawTime) -> tuple[str, ...]:
    counts = (
        time["judged"],
        time["new"],
        time["known"],
        time["kills"],
        time["kills_first"],
        time["kills_only"],
    )
    return (
        time["law"],
        f"{time['seconds']:,.1f}",
        f"{time['share']:.0%}",
        *(f"{each:,}" for each in counts),
    )


def fruitless_text(summary: Summary) -> str:
    """Return which law took much of a long run and found nothing; empty if none did."""
    if summary.laws or summary.report.seconds <= LONG_SECONDS:
        return ""
    for each in law_times(summary):
        if each["share"] > LARGE_SHARE and not (each["new"] or each["known"]):
            return (
                f"{each['law']} took {each['share']:.0%} of the laws' time and found nothing; of "
                f"{each['seeded_bugs']} seeded bugs it finds {each['kills_first']} first, and "
                f"{each['kills_only']} that no other law finds"
            )
    return ""
