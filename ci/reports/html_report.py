"""The results of a run as one page that needs nothing else, and that no message can break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings.cases import versions
from ...properties.findings.causes import Cause
from ...properties.findings.coverage import EDGES, Coverage, gaps_text
from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.laws import LAWS
from ...properties.verdicts.text import compact, defaults, printable
from ..console.rendering import render
from .claims import claims_rows, lost_lines
from .figures import error_maps, heat, spreads
from .pictures import LEVEL_WORDS, meter
from .summary import (
    WORDS,
    Summary,
    in_order,
    known_causes,
    known_entries,
    missing_of,
    new_findings,
    not_run,
    not_run_text,
    reason_idle,
    rejected,
    replayed,
    seconds,
    state,
    unexplained_text,
)

ENDED = {
    "": "",
    "time": "out of time",
    "stopped": "the run ended",
    "idle": "nothing to judge",
    "rare": "too little to judge",
    "room": "no room on the GPU",
}
"""Why a law ended before it had its problems, in words."""
TONES = {"conforming": "good", "nonconforming": "bad", "incomplete": "warn", "error": "bad"}
MARKS = {"conforming": "✓", "nonconforming": "✗", "incomplete": "!", "error": "✗"}
WIDTH = 160
"""Characters of the line on a known cause."""
STATEMENTS = {law.name: f"{law.statement[0].upper()}{law.statement[1:]}." for law in LAWS}
"""What each law says, as a sentence, by its name."""


def to_html(summary: Summary) -> str:
    """Return a self-contained page: the verdict, what was found, and the coverage."""
    report = summary.report
    facts = [
        ("command", summary.command),
        ("date", summary.date),
        ("profile", report.profile),
        ("seed", report.seed),
        ("device", " ".join(str(report.target.get(n) or "") for n in ("device", "device_name"))),
        *([("corpus", replayed(report))] if replayed(report) else []),
        *((name, value) for name, value in versions(report.target).items() if value),
    ]
    idle = not_run(summary)
    unjudged = [each for each, _ in idle]
    run = [each for each in in_order(report.implementations) if each not in unjudged]
    return render(
        "check.html.jinja",
        verdict=WORDS[summary.verdict],
        mark=MARKS[summary.verdict],
        tone=TONES[summary.verdict],
        sentence=summary.sentence.removeprefix(f"{WORDS[summary.verdict]}: "),
        facts=facts,
        implementations=[_row(each, summary) for each in run],
        not_run=[(each.name, state(each), reason_idle(each, summary)) for each in unjudged],
        not_run_text=not_run_text([reason for _, reason in idle], len(report.implementations)),
        findings=[_finding(each, cause) for each in run for cause in new_findings(each)],
        known=[
            (
                cause.text(WIDTH),
                [
                    (k.implementation, k.entry, ", ".join(k.laws), k.count, k.reason, k.issue)
                    for k in cause.entries
                ],
            )
            for cause in known_causes(summary)
        ],
        heats=list(heat(run)),
        spreads=spreads(run),
        coverage=[_coverage(each.name, each.coverage) for each in run if each.laws],
        claims=[(each.name, claims_rows(each)) for each in run if each.claimed_space],
        lost=lost_lines(summary.lost),
        laws=[(each.name, [_law(law) for law in each.laws]) for each in run if each.laws],
        said=[(name, STATEMENTS.get(name, "")) for name in _laws_of(run)],
        levels=LEVEL_WORDS,
        interpreted=[each.name for each in run if each.interpreted],
        interpreted_note=f"{NOTE[0].upper()}{NOTE[1:]}.",
        caveats=CAVEATS,
    )


def _finding(report: ImplementationReport, cause: Cause) -> dict[str, Any]:
    """Return what the page says of the findings with one cause."""
    found = cause.finding
    laws = [found.law, *(name for name in cause.laws if name != found.law)]
    return {
        "verdict": found.verdict,
        "title": f"{found.verdict.status} {found.verdict.kind}".strip(),
        "name": report.name,
        "laws": [(name, STATEMENTS.get(name, "")) for name in laws],
        "cause": cause.sentence if cause.telling else "",
        "ignored": cause.ignored,
        "problem": compact(found.problem),
        "defaults": defaults(found.problem),
        "wrong": [
            (
                each["where"],
                ", ".join(f"{axis} {place}" for axis, place in each["at"].items()),
                *(each[name] for name in ("got", "expected", "bound")),
            )
            for each in found.verdict.worst
        ],
        "maps": error_maps(cause),
        "printed": printable(found.verdict.printed),
        "replay": found.replay,
    }


def _row(report: ImplementationReport, summary: Summary) -> tuple[object, ...]:
    note = reason_idle(report, summary) or gaps_text(missing_of(report))
    return (
        report.name,
        state(report),
        report.judged,
        report.unsupported,
        rejected(report),
        len(new_findings(report)),
        len(known_entries(report)),
        round(seconds(report), 1),
        "; ".join(
            filter(
                None,
                (
                    note,
                    "interpreted" if report.interpreted else "",
                    *report.claims,
                    unexplained_text(report),
                    *(f"left {each.text}" for each in report.left),
                ),
            )
        ),
    )


def _laws_of(reports: Sequence[ImplementationReport]) -> list[str]:
    return list(dict.fromkeys(law.law for each in reports for law in each.laws))


def _coverage(name: str, coverage: Coverage) -> dict[str, Any]:
    judged, (seen, of) = sum(map(bool, coverage.judged.values())), coverage.pairs
    lengths = [
        f"{what} {median:,} to {most:,}" for what, (_, median, _, most) in coverage.lengths.items()
    ]
    crossed = [f"{EDGES.get(what, what)} {count:,}" for what, count in coverage.edges.items()]
    return {
        "name": name,
        "laws": (judged, coverage.asked, meter(f"Laws of {name}", judged, coverage.asked)),
        "pairs": (seen, of, meter(f"Pairs of values of {name}", seen, of)),
        "lengths": "; ".join(lengths),
        "edges": "; ".join(crossed),
        "missing": gaps_text(coverage.gaps),
    }


def _law(law: LawReport) -> tuple[object, ...]:
    return (
        law.law,
        law.verdict,
        law.judged,
        law.unsupported,
        law.vacuous,
        law.rejected,
        law.worst_ratio,
        law.seconds,
        ENDED[law.ended],
    )
